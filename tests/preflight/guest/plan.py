"""Write plans for the guest: two cards, each with its experts on its own node. plan.py FOLDER

plan.json is small enough for the guest's pools; huge.json says that its experts are a hundred times
their size, more than a node has. The cards are made up: no engine starts there, only pages are
reserved.
"""

import sys
import tempfile
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.plan.sizing import Ask, made_up_host

out = Path(sys.argv[1])
machine = made_up_host(Ask("rtx-pro-6000", 2, 512 << 30, users=2, host="epyc-2p"))
wishes = Policy(device="cuda", host_share=1.0, streams=2, context_tokens=256)
with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "model"
    synthesize(model, SynthSpec(layers=4, experts=32, hidden_size=512, intermediate_size=512))
    made = plan(machine, read_checkpoint(model), None, wishes)
made.write(out / "plan.json")
grown = [
    rank.model_copy(update={"ledger": tuple(
        line.model_copy(update={"size_bytes": 100 * line.size_bytes}) if line.pinned else line
        for line in rank.ledger
    )})
    for rank in made.ranks
]  # fmt: skip
made.model_copy(update={"ranks": tuple(grown)}).write(out / "huge.json")
