"""The vLLM plugin: EXL3 experts that live where plan.json says. Only vLLM loads this package.

vLLM calls `register` in every process it starts (API server, engine core, each worker).
"""


def register() -> None:
    """Make `exl3` a quantisation method of vLLM. May be called any number of times.

    Raises RuntimeError on a vLLM that this release was not tried with, before anything else.
    """
    from appliance.engine.versions import require_supported

    require_supported()
    from appliance.engine import compat
    from appliance.engine.config import METHOD, Exl3Config

    compat.claim_method(METHOD, Exl3Config)
