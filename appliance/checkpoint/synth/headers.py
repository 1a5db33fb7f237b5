"""A large model as headers alone: files of the true size, without their bytes.

Planning reads nothing but headers, so a 309 GiB model can be planned on a laptop: every shard is
sparse, with a whole header and a hole as long as its tensors. Such a folder cannot be served: its
weights read as zeros, and the header's metadata says `content: headers only`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance.checkpoint.collector import collector_paused
from appliance.checkpoint.synth import stand_ins, v41
from appliance.checkpoint.synth.write import Progress, new_folder, write_json, write_shards
from appliance.errors import UsageError

MODELS: dict[str, Callable[[], v41.Model]] = {
    "deepseek-v4.1-flash": v41.package,
    "deepseek-v4.1-flash-official": v41.official,
    "deepseek-v4-flash": stand_ins.v4_flash,
    "glm-5.3-flash": stand_ins.glm,
    "qwen3.8-flash-next": stand_ins.qwen,
}
SHARD_BYTES = 8 << 30
NOTE = {"content": "headers only"}


def headers_only(out: Path, model: str, *, progress: Progress | None = None) -> None:
    """Write config.json, index and sparse shards of one of MODELS into the new folder `out`.

    About 8 GiB a shard, as real packages have them; a lookup table is one tensor, so its shard is
    larger. `progress` gets (what, done, total) in bytes. A run that is killed leaves no `out`.
    Raises UsageError for an unknown model, and if `out` exists and is not empty.
    """
    if model not in MODELS:
        raise UsageError(f"model {model!r} is unknown", fix=f"one of {', '.join(MODELS)}")
    with collector_paused():
        config, drawn = MODELS[model]()
        parts = list(drawn)
        shards = -(-sum(part.size_bytes for part in parts) // SHARD_BYTES)
        with new_folder(out) as folder:
            write_json(folder / "config.json", config)
            write_shards(folder, parts, shards=shards, hollow=True, note=NOTE, progress=progress)
