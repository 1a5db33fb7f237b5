"""Faults on a GPU: each ends with a sentence that says what and why, and everything is given back.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/faults.py --work /tmp/faults

First in one process, without an engine: a chunk that cannot be pinned, a card that another process
has filled up to some slot, huge pages that are gone when they are touched. Then the appliance
itself, `appliance up` with a fault in the engine (`fault_plugin.py`), all at once: a refused chunk,
no huge pages, a shard that ends early, a GPU that is lost while it answers, one that is not there.
Last a full card. Each must end with another exit code than 0, its sentence, and the memory of card
and host as before. One JSON line a fault, then the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import descendants, engine_environment, say, write_plugin_metadata  # noqa: E402
from fault_plugin import NOBODYS  # noqa: E402
from made import make_model  # noqa: E402

MIB = 1 << 20
# Fault -> what the appliance must say.
SENTENCES = {
    "chunk": r"refused to pin chunk 3 of \d+ \([\d,]+ bytes\)",
    "huge-pages": r"refused to give [\d,]+ bytes of pages.*reserve more huge pages",
    "shard": r"safetensors.*(ends|bytes|end)",
    "lost-gpu": r"CUDA error|device-side assert|AcceleratorError",
    "no-gpu": r"GPU|CUDA|device",
    "full-card": r"memory",
}
FIRST_PORT = 8201
HOG = """
import torch
torch.cuda.init()
held = []
free, _ = torch.cuda.mem_get_info()
held.append(torch.empty(free - {leave}, dtype=torch.uint8, device="cuda"))
print("held", flush=True)
input()
"""


@contextlib.contextmanager
def full_card(leave: int) -> Any:
    """Another process holds all of the card but so many bytes."""
    command = [sys.executable, "-c", HOG.format(leave=leave)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the process that was to fill the card ended")
        yield
    finally:
        process.kill()
        process.wait()


def used() -> dict[str, float]:
    """MiB in use on the card that is ours, and MiB of host memory that are available."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = ["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    cards = ""
    if shutil.which(words[0]):
        cards = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    host = Path("/proc/meminfo").read_text()
    available = re.search(r"MemAvailable:\s+(\d+)", host)
    assert available is not None
    return {"card": float(sum(map(int, cards.split()))), "available": int(available[1]) / 1024}


# Without an engine ----------------------------------------------------------------------------


def refused(act: Callable[[], Any]) -> str | None:
    from appliance.engine.hostmem import HostMemoryError
    from appliance.engine.pools import DeviceMemoryError

    try:
        act()
    except (HostMemoryError, DeviceMemoryError) as error:
        return str(error)
    return None


def pin_with_a_hole() -> bool:
    """Chunk 4 of 8 is nobody's: refused, and those before it can be pinned again."""
    from appliance.engine.hostmem import HostMapping, libc
    from appliance.engine.pinning import Driver, Pinned

    mapping = HostMapping(64 * MIB)
    pieces = [range(at, at + 8 * MIB) for at in range(0, 64 * MIB, 8 * MIB)]
    libc.mmap(mapping.address + 32 * MIB, 8 * MIB, 0, NOBODYS, -1, 0)
    said = refused(lambda: Pinned(mapping.address, pieces))
    code = Driver().register(mapping.address, 32 * MIB)
    Driver().unregister(mapping.address)
    mapping.close()
    ok = said is not None and "chunk 4 of 8" in said and code == 0
    say(fault="chunk, without an engine", ok=ok, said=said, pinned_again=code == 0)
    return ok


def pin_beyond_the_limit() -> bool:
    """What RLIMIT_MEMLOCK does to the driver here; either is right, and is said."""
    import resource

    from appliance.engine.hostmem import HostMapping
    from appliance.engine.pinning import Pinned

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, before[1]))
    with HostMapping(64 * MIB) as mapping:
        pins: list[Pinned] = []
        said = refused(lambda: pins.append(Pinned(mapping.address, [range(64 * MIB)])))
        for pin in pins:
            pin.close()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    say(fault="memlock of 1 MiB", ok=True, refused=said is not None, said=said)
    return True


def fill_up_to_a_slot(a: Any) -> bool:
    """1.7 GB of residents and 1.1 of slots, where another process leaves 2.4: then once more."""
    import torch

    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.engine.arena import Arena

    checkpoint = read_checkpoint(a.work / "holes")
    made = make_tiny_plan(a, "holes", host_share=0.5, cache_slots=40)
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    before = torch.cuda.memory_allocated()
    with full_card(2300 * MIB):
        said = refused(lambda: Arena(made, 0, checkpoint, device))
        kept = torch.cuda.memory_allocated() - before
    arena = Arena(made, 0, checkpoint, device)
    held = arena.pools["device"].size_bytes
    for pool in arena.pools.values():
        pool.close()
    ok = said is not None and re.search(r"slot \d+ of 80 would not fit", said) is not None
    say(fault="full card, without an engine", ok=ok and kept == 0, said=said, kept_bytes=kept,
        fits_afterwards_bytes=held)  # fmt: skip
    return ok and kept == 0


def touch_pages_that_are_gone() -> bool:
    from appliance.engine import hostmem

    kind, flags = hostmem._page_kind, hostmem._MAP_HUGETLB_2MB
    hostmem._page_kind = lambda size, node: "hugetlb"  # type: ignore[assignment]
    hostmem._MAP_HUGETLB_2MB |= 0x4000
    said = refused(lambda: hostmem.HostMapping(16 << 30))
    hostmem._page_kind, hostmem._MAP_HUGETLB_2MB = kind, flags
    ok = said is not None and "huge pages" in said
    say(fault="huge pages, without an engine", ok=ok, said=said)
    return ok


def without_an_engine(a: Any) -> int:
    from appliance.engine.arena import Arena  # noqa: F401  # torch before the first look at memory

    good = [touch_pages_that_are_gone()]
    if a.device == "cuda":
        import torch

        torch.zeros(1, device="cuda")
        good += [pin_with_a_hole(), pin_beyond_the_limit(), fill_up_to_a_slot(a)]
    return 0 if all(good) else 1


# The appliance --------------------------------------------------------------------------------


def make_tiny_plan(a: Any, model: str, **wishes: Any) -> Any:
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.plan.planner import plan
    from appliance.plan.request import Policy
    from preflight import inspect
    from preflight.source import Live

    policy = Policy(device=a.device, tensor_parallel=1, streams=2, context_tokens=512, **wishes)
    made = plan(inspect(Live()), read_checkpoint(a.work / model), None, policy)
    ranks = tuple(rank.model_copy(update={"numa_node": None}) for rank in made.ranks)
    return made.model_copy(update={"ranks": ranks})


class Up:
    """`appliance up` in the foreground, with one fault."""

    def __init__(self, a: Any, fault: str, number: int) -> None:
        self.fault, self.folder = fault, a.work / fault
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        model = a.work / "tiny"
        if fault == "shard":
            model = self.folder / "model"
            shutil.copytree(a.work / "tiny", model)
        made = make_tiny_plan(a, "tiny", host_share=0.6, cache_slots=4)
        if fault == "no-gpu":
            lost = {"gpu": "GPU-00000000-1111-2222-3333-444444444444"}
            made = made.model_copy(
                update={"ranks": tuple(rank.model_copy(update=lost) for rank in made.ranks)}
            )
        made.write(self.folder / "plan.json")
        in_engine = fault if fault not in ("no-gpu", "full-card") else "none"
        shard = max(model.glob("*.safetensors"))
        self.port = FIRST_PORT + number
        environment = engine_environment(a.work / "plugin") | {
            "APPLIANCE_STATE_DIR": str(self.folder / "state"),
            "APPLIANCE_ENGINE_PYTHON": sys.executable,
            "FAULT": in_engine,
            "FAULT_FILE": str(shard),
            "FAULT_BYTES": str(shard.stat().st_size // 2),
        }
        words = ("up", "--model", str(model), "--name", "model", "--port", str(self.port),
                 "--plan", str(self.folder / "plan.json"))  # fmt: skip
        command = [sys.executable, "-m", "appliance.cli", *words]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.began, self.asked, self.seen = time.monotonic(), False, set[int]()

    def state(self) -> dict[str, Any]:
        file = self.folder / "state" / "state.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def look(self) -> bool:
        """Whether it has ended. Once it serves, it is asked for an answer."""
        self.seen.update(descendants(self.process.pid))
        if self.state().get("phase") in ("ready", "unproved") and not self.asked:
            self.asked = True
            self.ask()
        return self.process.poll() is not None

    def ask(self) -> None:
        key = (self.folder / "state" / "keys").read_text().split()[0]
        asked = {"model": "model", "prompt": "A question", "max_tokens": 64, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                self.answer = f"{answer.status}"
        except (OSError, urllib.error.URLError) as error:
            self.answer = str(error)

    def verdict(self) -> bool:
        code = self.process.poll()
        for pid in [*self.seen, self.process.pid] if code is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = time.monotonic()  # Python's resource trackers end a moment after who they serve
        left = list(self.seen)
        while left and time.monotonic() - ended < 8:
            time.sleep(0.2)
            left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        log = (self.folder / "log").read_text(errors="replace")
        message = self.state().get("message") or ""
        words = "\n".join([message, *(x for x in log.splitlines() if x.startswith("error"))])
        found = re.search(SENTENCES[self.fault], words) is not None
        ok = code not in (None, 0) and found and not left
        say(fault=self.fault, ok=ok, code=code, said=words[:900], left=left,
            answer=getattr(self, "answer", None), seconds=round(time.monotonic() - self.began, 1),
            **({} if ok else {"log": log[-1500:]}))  # fmt: skip
        return ok


def run_up(a: Any, faults: list[str]) -> bool:
    runs = [Up(a, fault, number) for number, fault in enumerate(faults)]
    deadline, left, good = time.monotonic() + a.limit, list(runs), True
    while left and time.monotonic() < deadline:
        for run in [run for run in left if run.look()]:
            left.remove(run)
            good = run.verdict() and good
        time.sleep(0.3)
    for run in left:
        good = run.verdict() and good
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(SENTENCES), default=list(SENTENCES))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for a group")
    parser.add_argument("--shared-host", action="store_true", help="others use its memory, too")
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.direct:
        return without_an_engine(a)
    from appliance.checkpoint.synth import SynthSpec, synthesize

    a.work.mkdir(parents=True, exist_ok=True)
    if not (a.work / "tiny").exists():
        synthesize(a.work / "tiny", SynthSpec())
    make_model(a.work / "holes", SynthSpec(layers=2, dense_layers=0, hidden_size=5120,
                                           intermediate_size=2304, experts=128))  # fmt: skip
    write_plugin_metadata(a.work / "plugin", appliance="fault_plugin:register")
    before = used()
    command = [sys.executable, *sys.argv, "--direct"]
    direct = subprocess.run(command, env=engine_environment(a.work / "plugin"), timeout=a.limit)
    good = direct.returncode == 0
    together = [fault for fault in a.only if fault != "full-card"]
    if a.device == "cpu":
        together = [fault for fault in together if fault not in ("chunk", "no-gpu")]
    good = run_up(a, together) and good
    if a.device == "cuda" and "full-card" in a.only:
        with full_card(700 * MIB):
            good = run_up(a, ["full-card"]) and good
    time.sleep(1.0)
    after = used()
    back = abs(after["card"] - before["card"]) < 64
    if not a.shared_host:
        back = back and before["available"] - after["available"] < 768
    say(verdict=good and back, before_mib=before, after_mib=after, given_back=back)
    return 0 if good and back else 1


if __name__ == "__main__":
    sys.exit(main())
