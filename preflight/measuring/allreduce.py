"""A two-rank all-reduce in children of the engine's Python: a hang is an answer, never our hang."""

from __future__ import annotations

from preflight.answers import Unreadable
from preflight.source import run_for

SECONDS = 25.0
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def rank(number):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=2)
    for size in (1 << 10, 1 << 22):
        data = torch.full((size,), float(number + 1), device="cuda")
        dist.all_reduce(data)
        assert bool((data == 3.0).all()), "the sum is wrong"
    torch.cuda.synchronize()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
    print("all-reduce ok")
"""


def all_reduce(python: str, port: int, folder: str, seconds: float = SECONDS) -> str:
    """`ok`, or what went wrong in one line. `folder` takes the program: spawn needs a file.

    Raises Unreadable where the engine's Python or its torch is not there.
    """
    path = f"{folder}/two_ranks.py"
    with open(path, "w", encoding="utf-8") as file:
        file.write(PROGRAM)
    try:
        ran = run_for([python, path, str(port)], seconds)
    except TimeoutError:
        return f"no answer within {seconds:.0f} s"
    if ran.code == 0 and "all-reduce ok" in ran.out:
        return "ok"
    if "No module named 'torch'" in ran.out:
        raise Unreadable(f"{python} has no torch")
    last = [line for line in ran.out.splitlines() if line.strip()]
    return last[-1][:200] if last else f"exit code {ran.code}"
