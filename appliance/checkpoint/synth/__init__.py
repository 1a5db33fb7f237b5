"""Checkpoints made here: small ones that serve, and headers of large ones that plan."""

from appliance.checkpoint.synth.headers import MODELS, headers_only
from appliance.checkpoint.synth.make import synthesize
from appliance.checkpoint.synth.spec import SynthSpec

__all__ = ["MODELS", "SynthSpec", "headers_only", "synthesize"]
