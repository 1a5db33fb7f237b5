"""Write plans for the guest: two cards, each with its experts on its own node. plan.py FOLDER

plan.json is small enough for the guest's pools, huge.json far too large. The cards are made up: no
engine starts there, only the experts' pages are reserved.
"""

import sys
import tempfile
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.synth import SynthSpec, headers_only, synthesize
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.plan.sizing import Ask, made_up_host

out = Path(sys.argv[1])
machine = made_up_host(Ask("rtx-pro-6000", 2, 512 << 30, users=2, host="epyc-2p"))
wishes = Policy(device="cuda", host_share=1.0, streams=2, context_tokens=256)
with tempfile.TemporaryDirectory() as folder:
    small, large = Path(folder) / "small", Path(folder) / "large"
    synthesize(small, SynthSpec(layers=4, experts=32, hidden_size=512, intermediate_size=512))
    headers_only(large, "glm-5.3-flash")
    for name, model in (("plan.json", small), ("huge.json", large)):
        plan(machine, read_checkpoint(model), None, wishes).write(out / name)
