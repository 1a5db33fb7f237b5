#!/opt/appliance/bin/python3
"""In place of vLLM where there are only fake cards: writes down what it was started as, then waits.

Mounted into the gpu flavour's container as APPLIANCE_ENGINE_PYTHON.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path


def status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(name + ":"))


def main() -> None:
    seen = {
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "uid": os.getuid(),
        "cpus": status("Cpus_allowed_list"),
        "seccomp": status("Seccomp"),
        "shm_bytes": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    }
    Path(os.environ["HOME"], "launched.json").write_text(json.dumps(seen))
    time.sleep(3600)


if __name__ == "__main__":
    main()
