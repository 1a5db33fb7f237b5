"""Speed on the real engine: agent turns over two streams, with the engine's own counters."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.bench.record import Record
from appliance.bench.report import report

SHAPE = {
    "system_tokens": 40,
    "turns": {"median": 3, "p95": 5, "least": 2, "most": 6},
    "input_tokens": {"median": 20, "p95": 50, "least": 8, "most": 60},
    "short_output_tokens": {"median": 20, "p95": 32, "least": 17, "most": 40},
    "long_share": 0,
    "most_context_tokens": 500,
}


def appliance(state: Path, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", *map(str, words)],
        env={**os.environ, "APPLIANCE_STATE_DIR": str(state), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Path]:
    state = tmp_path / "state"
    try:
        appliance(state, "demo", "--port", 8461)
        yield state
    finally:
        appliance(state, "down")


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_turns_on_the_real_engine_are_measured_and_reported_again(
    serving: Path, tmp_path: Path
) -> None:
    shape, out = tmp_path / "shape.json", tmp_path / "record"
    shape.write_text(json.dumps(SHAPE))
    words = ("--streams", 2, "--turns", 12, "--shape", shape, "--out", out)
    said = appliance(serving, "bench", "turns", *words)
    again = appliance(serving, "bench", "report", out)
    assert again.startswith(said)

    record = Record(out)
    (line,) = report(record).lines
    assert line.turns == 12 and line.median > 0
    assert not {name for name in report(record).problems if name not in ("stall",)}
    # Half of the demo's experts are on the host, and every session shares its system prompt.
    assert line.cold is not None and 0.2 < line.cold < 0.8
    assert line.cache_hits is not None and line.cache_hits > 0.05
    assert line.host_bytes_per_token is not None and line.host_bytes_per_token > 0
    counted = [s for block in record.samples.values() for s in block if s.role == "counted"]
    assert all(s.output_tokens == s.asked_tokens for s in counted)
    assert record.stamp.plan_digest and record.stamp.host_digest and record.blocks[0].engine

    # The same prompt sent twice moves the engine's own counters.
    words = ("--from", 512, "--to", 1024, "--repeats", 1, "--out", tmp_path / "context")
    said = appliance(serving, "bench", "context", *words)
    assert "prefix caching works" in said and "by the engine's counters" in said
    assert appliance(serving, "bench", "report", tmp_path / "context") == said
