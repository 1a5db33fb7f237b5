"""Compile every kernel that the appliance loads, so that nothing compiles at start.

`python compile.py OUT` with TORCH_CUDA_ARCH_LIST set. Writes OUT/exllamav3_ext.so, OUT/triton and
OUT/build.json: what compiled them, for which cards, how long it took.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Triton compiles its driver binding with a C compiler at first use and keeps it under a key made of
# the source and of where libcuda is: so that place is fixed (TRITON_LIBCUDA_PATH, here and in the
# image), and what is compiled here is put into the cache of each start (appliance/container.py).
DRIVER = """
from triton.backends.nvidia import driver
from triton.runtime.build import compile_so_from_file
compile_so_from_file(
    src_path=driver.dirname + "/driver.c", name="cuda_utils", library_dirs=driver.library_dirs(),
    include_dirs=driver.include_dirs, libraries=driver.libraries,
)
"""
STUB = Path("/usr/local/cuda/lib64/stubs/libcuda.so")


def triton_driver(out: Path) -> None:
    here = Path(os.environ["TRITON_LIBCUDA_PATH"])
    for name in ("libcuda.so", "libcuda.so.1"):
        if not (here / name).exists():
            (here / name).symlink_to(STUB)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(out / "triton")}
    subprocess.run([sys.executable, "-c", DRIVER], check=True, env=environment)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "work")
    started = time.monotonic()
    # Importing exllamav3 compiles its extension where there is none.
    subprocess.run([sys.executable, "-c", "import exllamav3.ext"], check=True)
    found = sorted((out / "work").rglob("exllamav3_ext.so"))
    if len(found) != 1:
        sys.exit(f"expected one exllamav3_ext.so, found {found}")
    library = out / "exllamav3_ext.so"
    shutil.copyfile(found[0], library)
    shutil.rmtree(out / "work")
    triton_driver(out)
    nvcc = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    facts = {
        "architectures": os.environ["TORCH_CUDA_ARCH_LIST"].split(),
        "nvcc": nvcc.stdout.strip().splitlines()[-1],
        "seconds": round(time.monotonic() - started),
        "bytes": library.stat().st_size,
    }
    (out / "build.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
