"""Which vLLM this release works with: asked before any name of it is imported, because another
version may have moved it."""

from __future__ import annotations

SUPPORTED_VERSIONS = ("0.32.0", "0.33.0")


def require_supported() -> None:
    """Raises RuntimeError on a vLLM nobody tried: its internals are what the engine builds on."""
    import vllm

    version = vllm.__version__.partition("+")[0]
    if version not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"vLLM {version} is not supported; this release works with "
            f"{' and '.join(SUPPORTED_VERSIONS)}"
        )
