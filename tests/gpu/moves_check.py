"""Tables are rewritten in stream order on a GPU: nothing waits, and no step sees half of a change.

    python3 tests/gpu/moves_check.py

3,000 steps without a wait: some numbers change, a captured graph adds all of them up, and the sums
of LAG steps ago are asked for. Every sum is compared with Python's. Exit code 1 on a difference.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels")]

STEPS, NUMBERS, LAG = 3000, 9 * 12288, 2


def main() -> int:
    import torch

    from appliance.engine.moves import CudaMoves

    device, rng = torch.device("cuda"), random.Random(3)
    numbers = torch.zeros(NUMBERS, dtype=torch.int64, device=device)
    total = torch.zeros(2, dtype=torch.int64, device=device)
    moves = CudaMoves(device, 2, NUMBERS)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        total[0] = numbers.sum()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            total[0] = numbers.sum()
        now, expected, wrong, waiting = [0] * NUMBERS, [], 0, []
        sum_now, changed, began = 0, 0, time.perf_counter()
        for step in range(STEPS):
            size = NUMBERS if step % 500 == 7 else rng.choice([1, 3, 30, 96, 192])
            changes = {at: rng.getrandbits(40) for at in rng.sample(range(NUMBERS), size)}
            for at, value in changes.items():
                sum_now += value - now[at]
                now[at] = value
            moves.point(numbers, changes)
            graph.replay()
            waiting.append(moves.snapshot(total))
            expected.append(sum_now)
            changed += size
            if step >= LAG:
                seen = int(waiting[step - LAG].read()[0])
                wrong += seen != expected[step - LAG]
        wrong += numbers.tolist() != now
        seconds = time.perf_counter() - began
    said = {"steps": STEPS, "changed": changed, "wrong": wrong, "seconds": round(seconds, 1)}
    print(json.dumps(said), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
