"""Loading routed experts into host memory: arena file against plain shards, cold page cache.

    python tests/soak/weights_load.py [--layers 8] [--experts 64] [--folder DIR]

All ways end with the same bytes at 4 KiB-aligned blocks, as the engine lays them out. Shards are
read tensor by tensor with safetensors into one anonymous mapping, as vLLM does, and the arena file
by threads with O_DIRECT straight into it, and through the page cache. Mapped, as the engine does it
with APPLIANCE_WEIGHTS_ARENA, nothing is copied: once cold, once as an engine that starts again.
"""

import argparse
import itertools
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "tests")]

from safetensors import safe_open  # noqa: E402
from tiny_checkpoint import expert, qwen  # noqa: E402

from appliance.checkpoint.exl3 import read_checkpoint  # noqa: E402
from appliance.engine.stored import FileMapping  # noqa: E402
from appliance.weights.repack import repack  # noqa: E402

HIDDEN, INNER, SHARDS, READERS, STEP = 2048, 768, 4, 4, 8 << 20
WORDS = ("gate_proj", "up_proj", "down_proj")


def make(folder, layers, experts):
    model = qwen(layers, experts)
    model.config |= {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    for layer, e in itertools.product(range(layers), range(experts)):
        model.tensors |= expert(f"model.layers.{layer}.mlp.experts.{e}", HIDDEN, INNER, WORDS)
    model.write(folder, shards=SHARDS)
    for shard in folder.glob("*.safetensors"):
        with shard.open("r+b") as stream:
            header = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(header)
            draw, left = random.Random(1), shard.stat().st_size - header
            while left:
                left -= stream.write(draw.randbytes(min(left, 16 << 20)))
    return folder


def forget(paths):
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached(paths):
    """Share of these files in the page cache, by mincore through fincore(1)."""
    total = resident = 0
    for path in paths:
        with os.popen(f"fincore --json --bytes {path}") as stream:
            found = json.load(stream)["fincore"][0]
        resident += int(found["res"])
        total += int(found["size"])
    return resident / total


def from_shards(model, checkpoint, arena, target):
    places = {}
    for layer in checkpoint.target_layers:
        for e in range(len(layer.experts)):
            at = arena.block(layer.index, e)[0] - arena.data_start
            for word in WORDS:
                name = f"{layer.prefix}.{e}.{word}.trellis"
                places[name] = at
                at += checkpoint.tensors[name].size_bytes
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "np") as stream:
            for name in stream.keys():  # noqa: SIM118  its own method, not a dict's
                if name in places:
                    data = stream.get_tensor(name).tobytes()
                    target[places[name] : places[name] + len(data)] = data


def from_arena(arena, target, flags):
    """Blocks of STEP bytes, taken by READERS threads, read straight to their place."""
    size = arena.header.data_bytes
    jobs = iter(range(0, size, STEP))
    lock = threading.Lock()
    descriptor = os.open(arena.path, os.O_RDONLY | flags)

    def work():
        while True:
            with lock:
                at = next(jobs, None)
            if at is None:
                return
            stop = min(at + STEP, size)
            while at < stop:
                at += os.preadv(descriptor, [target[at:stop]], arena.data_start + at)

    threads = [threading.Thread(target=work) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)


def mapped(arena):
    """Seconds and a hash: the engine's own mapping of every block."""
    pieces = [range(arena.data_start, arena.data_start + arena.header.data_bytes)]
    started = time.monotonic()
    mapping = FileMapping(arena.path, pieces)
    seconds = time.monotonic() - started
    content = hash(bytes(mapping.view(arena.data_start, arena.header.data_bytes)))
    mapping.close()
    return seconds, content


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        model = make(Path(name) / "m", asked.layers, asked.experts)
        checkpoint = read_checkpoint(model)
        started = time.monotonic()
        (arena,) = repack(checkpoint, Path(name) / "arena", 1, lambda done, total: None)
        gib = arena.header.data_bytes / 2**30
        print(
            f"{gib:.2f} GiB of experts; repacked at {gib / (time.monotonic() - started):.2f} GiB/s"
        )
        shards = list(model.glob("*.safetensors"))
        ways = {
            "plain shards": (lambda to: from_shards(model, checkpoint, arena, to), shards),
            "arena, O_DIRECT": (lambda to: from_arena(arena, to, os.O_DIRECT), [arena.path]),
            "arena, page cache": (lambda to: from_arena(arena, to, 0), [arena.path]),
        }
        compare(ways, arena, asked.rounds)


def compare(ways, arena, rounds):
    size = arena.header.data_bytes
    contents = {}
    rates = {name: [] for name in ways}
    shares = {}
    for _ in range(rounds):
        for name, (load, files) in ways.items():
            with mmap.mmap(-1, size) as memory:
                target = memoryview(memory)
                for page in range(0, size, 4096):  # touched before, as the engine's arena is
                    target[page] = 0
                forget(files)
                started = time.monotonic()
                load(target)
                rates[name].append(size / 2**30 / (time.monotonic() - started))
                shares[name] = cached(files)
                contents[name] = hash(bytes(target))
                target.release()
        for name in ("mapped, cold", "mapped again"):
            if name == "mapped, cold":
                forget([arena.path])
            seconds, contents[name] = mapped(arena)
            rates.setdefault(name, []).append(size / 2**30 / seconds)
            shares[name] = cached([arena.path])
    assert len(set(contents.values())) == 1, "every way ends with the same bytes"
    for name, found in rates.items():
        print(
            f"{name:18} median {statistics.median(found):.2f} GiB/s, best {max(found):.2f}; "
            f"{shares[name]:.0%} of the files in the page cache after"
        )
    print(f"{rounds} rounds; {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
