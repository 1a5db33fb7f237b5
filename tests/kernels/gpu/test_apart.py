"""A bench's items in processes of their own: what goes wrong costs one item, and is said."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
# In an interpreter of its own: it forks, which one with threads should not.
SCRIPT = """
import json, os, signal, time
from expert_kernels.bench_gpu.apart import answer, answers

def serve(items):
    for item in items:
        if item == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if item == "hang":
            time.sleep(60)
        if item == "raise":
            raise ValueError("no such format")
        yield {"item": item}

work = ["one", "crash", "two", "hang", "raise", "three"]
print(json.dumps([*answers(serve, work, 1.0), ("alone", answer(lambda i: {"item": i}, 4))]))
"""


def test_a_crash_a_hang_and_an_error_cost_one_item_each() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True,
        env={"PYTHONPATH": str(REPOSITORY / "kernels"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert [item for item, _ in found] == ["one", "crash", "two", "hang", "raise", "three", "alone"]
    said = dict(found)
    assert [said[name] for name in ("one", "two", "three", "alone")] == [
        {"item": "one"}, {"item": "two"}, {"item": "three"}, {"item": 4},
    ]  # fmt: skip
    assert said["crash"] == {"exception": ["its process ended with -11"]}
    assert said["hang"] == {"exception": ["no answer within 1 s"]}
    assert said["raise"]["exception"][-1] == "ValueError: no such format"
