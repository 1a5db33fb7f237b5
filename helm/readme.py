"""README.md from the comments of values.yaml: `python helm/readme.py` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD = """\
# moe-appliance, the chart

One pod on one GPU node. What cannot work is refused with the value to set.

    helm install flash helm/ --namespace serving --create-namespace \\
        --set image.repository=REGISTRY/moe-appliance --set image.digest=sha256:... \\
        --set store.type=hostPath --set store.hostPath=/srv/models
    helm test flash --namespace serving

The install first checks the node and stops there if it is not good enough. What says why:

    kubectl -n serving logs job/flash-moe-appliance-preflight
    kubectl -n serving get events --field-selector type=Warning
    appliance status --at kubernetes:serving/flash

| value | default | meaning |
|---|---|---|
"""
TAIL = """
This table is written by `python helm/readme.py` from the comments of values.yaml.
"""


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """(path, default, meaning) of every value; a comment belongs to the line after it."""
    path: list[str] = []
    said: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            said.append(bare.lstrip("# "))
            continue
        if not bare or bare.startswith("- ") or ":" not in bare or len(line) - len(bare) > 4:
            said = []
            continue
        name, _, value = bare.partition(":")
        depth = (len(line) - len(bare)) // 2
        if path and depth > len(path):
            continue  # inside a list's entry
        path = [*path[:depth], name]
        if value.strip() or said:
            yield ".".join(path), value.strip(), " ".join(said)
        said = []


def readme() -> str:
    table = "".join(
        f"| `{path}` | {f'`{default}`' if default else ''} | {meaning} |\n"
        for path, default, meaning in rows((HERE / "values.yaml").read_text())
    )
    return HEAD + table + TAIL


def known(schema: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Every path that values.schema.json names."""
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    for name, inner in properties.items():
        yield prefix + name
        yield from known(inner, f"{prefix}{name}.")


def schema_paths() -> set[str]:
    return set(known(json.loads((HERE / "values.schema.json").read_text())))


if __name__ == "__main__":
    (HERE / "README.md").write_text(readme())
