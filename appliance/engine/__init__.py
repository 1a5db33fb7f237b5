"""The vLLM plugin: EXL3 experts that live where plan.json says. Only vLLM loads this package.

vLLM calls `register` in every process it starts (API server, engine core, each worker).
"""


def register() -> None:
    """Make `exl3` a quantisation method of vLLM. May be called any number of times."""
    from appliance.engine import compat
    from appliance.engine.config import METHOD, Exl3Config

    compat.claim_method(METHOD, Exl3Config)
