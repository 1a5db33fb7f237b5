"""preflight from its options: root, measuring, recording, replaying, planning, drawing."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from appliance.plan.model import load_plan
from preflight import plan_needs

MACHINES = Path(__file__).resolve().parents[2] / "machines"
TWO = MACHINES / "two-rtx-pro-6000-healthy"
GIB = 1 << 30


def link(gpu: int, node: int, copy: float, read: float | None) -> dict:
    return {"gpu": gpu, "numa_node": node, "copy_bytes_per_second": copy,
            "zero_copy_bytes_per_second": read}  # fmt: skip


@pytest.fixture
def measured_machine(tmp_path):
    """The two-card machine with rates: card 1 is slower, and both lose when they copy at once."""
    folder = Path(shutil.copytree(TWO, tmp_path / "measured"))
    recording = json.loads((folder / "recording.json").read_text())
    recording["measured"] = {
        "links": [link(0, 0, 55e9, 51e9), link(1, 0, 40e9, 36e9)],
        "links_all_at_once": [link(0, 0, 44e9, None), link(1, 0, 40e9, None)],
    }
    (folder / "recording.json").write_text(json.dumps(recording))
    return folder


@pytest.mark.parametrize("form", [(), ("--json",), ("--prometheus",)])
def test_a_recorded_machine_is_judged_the_same_each_time_and_as_its_golden_report(appliance, form):
    first = appliance("preflight", "--host", TWO, "--gpus", 2, *form)
    again = appliance("preflight", "--host", TWO, "--gpus", 2, *form)
    assert first.code == again.code == 0 and first.out == again.out
    if not form:
        assert first.out == (TWO / "report.txt").read_text()
    if form == ("--prometheus",):
        assert "moe_appliance_preflight_exit_code 0\n" in first.out


def test_measuring_without_a_gpu_says_so_and_the_recording_replays_it(appliance, model, tmp_path):
    with (model / "padding.txt").open("wb") as file:
        file.truncate(80 << 20)  # a shard of the small model is too small to tell
    words = ["preflight", "--gpus", 0, "--model", model]
    here = appliance(*words, "--measure", "--record", tmp_path / "machine")
    assert "links and pins: not measured, there is no GPU to measure" in here.out
    # A file system without O_DIRECT says so instead.
    assert ("the model's disk reads " in here.out) != ("disk: not measured, " in here.out)
    there = appliance(*words, "--host", tmp_path / "machine")
    assert (here.code, here.out) == (there.code, there.out)
    kept = json.loads((tmp_path / "machine" / "recording.json").read_text())
    assert kept["measured"]["unmeasured"][0]["what"] == "links and pins"
    assert kept["folders"]["model"] == str(model)


def test_a_recording_cannot_be_measured(appliance):
    said = appliance("preflight", "--host", TWO, "--measure")
    assert said.code == 2 and "--host is a recording" in said.err


def test_measured_rates_reach_the_plan_instead_of_the_data_sheet(appliance, model, tmp_path,
                                                                 measured_machine):  # fmt: skip
    rates = {}
    for name, machine in (("sheet", TWO), ("measured", measured_machine)):
        out = tmp_path / f"{name}.json"
        made = appliance("plan", "make", "--model", model, "--host", machine, "-o", out)
        assert made.code == 0, made.err
        rates[name] = [rank.link_bytes_per_second for rank in load_plan(out).ranks]
    assert rates["sheet"][0] == rates["sheet"][1]
    # Card 0 reads 51 GB/s alone and keeps 44 of 55 while both copy; card 1 loses nothing.
    assert rates["measured"] == [pytest.approx(51e9 * 44 / 55), 36e9]
    assert rates["sheet"][0] not in rates["measured"]


def test_measured_rates_are_in_report_textfile_and_picture(appliance, tmp_path, measured_machine):
    words = ["preflight", "--host", measured_machine, "--gpus", 2]
    assert "GPU 1 from node 0: copies 40.0 GB/s, reads in place 36.0 GB/s" in appliance(*words).out
    found = json.loads(appliance(*words, "--json").out)["measured"]
    assert found["links"][0]["zero_copy_bytes_per_second"] == 51e9
    assert (
        'moe_appliance_link_bytes_per_second{gpu="1",node="0",kind="zero_copy"} 36000000000\n'
        in appliance(*words, "--prometheus").out
    )
    drawn = tmp_path / "machine.svg"
    said = appliance("preflight", "picture", drawn, "--host", measured_machine)
    assert (said.code, said.out) == (0, f"{drawn}\n")
    text = "".join(ET.fromstring(drawn.read_text()).itertext())
    assert "40.0 GB/s measured" in text and "55.0 GB/s measured" in text


def test_an_option_before_a_subcommand_is_refused_not_dropped(appliance, tmp_path):
    said = appliance("preflight", "--host", TWO, "picture", tmp_path / "machine.svg")
    assert said.code == 2 and "--host belongs to preflight itself" in said.err
    assert not (tmp_path / "machine.svg").exists()


def test_two_forms_of_output_are_refused(appliance):
    assert appliance("preflight", "--json", "--prometheus").code == 2


def test_a_root_is_where_the_machines_facts_come_from(appliance, tmp_path):
    files = {"proc/meminfo": "MemTotal: 1048576 kB\nMemFree: 1024 kB\nMemAvailable: 1024 kB\n",
             "sys/devices/system/cpu/online": "0-3\n"}  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "host" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    said = appliance("preflight", "--gpus", 0, "--root", tmp_path / "host", "--json")
    found = {f["check"]: f["saw"] for f in json.loads(said.out)["findings"]}
    assert said.code == 3 and "0.0 GiB are available" in found["load-peak-short"]


def test_a_root_without_proc_and_a_root_with_a_recording_are_wrong_usage(appliance, tmp_path):
    said = appliance("preflight", "--root", tmp_path)
    assert said.code == 2 and "holds no proc and sys" in said.err
    said = appliance("preflight", "--root", "/", "--host", TWO)
    assert said.code == 2 and "give one of them" in said.err


def test_the_disks_of_model_and_cache_are_looked_at(appliance, model, tmp_path):
    appliance("preflight", "--gpus", 0, "--model", model, "--record", tmp_path / "machine")
    folders = json.loads((tmp_path / "machine" / "recording.json").read_text())["folders"]
    assert folders == {"temporary": "/tmp", "cache": str(tmp_path), "model": str(model)}


def test_a_plan_is_written_with_its_pinning_where_nothing_fails(appliance, model, own_state):
    said = appliance("preflight", "--plan", "--model", model)
    assert said.code in (0, 4) and f"plan written to {own_state / 'plan.json'}" in said.err
    assert "rank 0: no GPU, any CPU, any memory node" in said.err
    assert load_plan(own_state / "plan.json").ranks[0].device == "cpu"
    # The same plan again, judged from its file, and the model known from the setting.
    judged = appliance("preflight", "--plan", own_state / "plan.json")
    assert judged.code == said.code and "plan written" not in judged.err


def test_the_plan_of_preflight_is_the_one_that_a_container_makes(appliance, model, own_state,
                                                                 monkeypatch):  # fmt: skip
    settings = {"MODEL": model, "DEVICE": "cpu", "STREAMS": 3, "CONTEXT_TOKENS": 4096,
                "HOST_SHARE": 0.25, "AGENT_PORT": 18431}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(f"APPLIANCE_{name}", str(value))
    assert appliance("preflight", "--plan").code in (0, 4)
    ours = load_plan(own_state / "plan.json")
    (own_state / "plan.json").unlink()
    made = appliance("container", "--until", "plan")
    assert made.code == 0, made.err
    theirs = load_plan(own_state / "plan.json")
    assert ours.made_from.policy == theirs.made_from.policy
    assert (ours.ranks[0].layers, ours.serving) == (theirs.ranks[0].layers, theirs.serving)
    assert ours.serving.streams == 3


def test_pinning_names_cpus_memory_node_and_bytes_of_each_card(appliance, model, tmp_path):
    out = tmp_path / "two.json"
    said = appliance("preflight", "--host", TWO, "--model", model, "--plan", out)
    assert said.code == 0, said.out
    for rank in load_plan(out).ranks:
        bound = f"rank {rank.rank}: {rank.gpu}, CPUs {rank.cpus}, memory node {rank.numa_node}, "
        assert bound in said.err


def test_a_plan_needs_exactly_what_its_ledger_pins_and_holds(appliance, model, tmp_path):
    out = tmp_path / "two.json"
    appliance("plan", "make", "--model", model, "--host", TWO, "--host-share", 0.5, "-o", out)
    plan = load_plan(out)
    needs = plan_needs(plan.model_dump(mode="json"))
    lines = [line for rank in plan.ranks for line in rank.ledger if line.home == "host"]
    experts = sum(line.size_bytes for line in lines if line.part.startswith("routed experts"))
    assert needs.pinned_bytes == needs.pinned_bytes_by_node[0] == experts > 0
    assert needs.load_peak_bytes == sum(line.size_bytes for line in lines) > experts


def test_no_plan_is_written_where_a_check_fails(appliance, model, tmp_path):
    broken = Path(shutil.copytree(TWO, tmp_path / "broken"))
    recording = json.loads((broken / "recording.json").read_text())
    recording["answers"]["read"]["/proc/sys/vm/max_map_count"] = "100\n"
    (broken / "recording.json").write_text(json.dumps(recording))
    out = tmp_path / "plan.json"
    words = ["preflight", "--host", broken, "--model", model, "--plan", out]
    said = appliance(*words)
    assert said.code == 3 and not out.exists()
    assert f"no plan was written to {out}: a check failed" in said.err
    allowed = appliance(*words, "--ignore", "max-map-count-low")
    assert allowed.code == 4 and out.exists()


def test_a_plan_written_while_recording_names_this_machines_cards(appliance, model, tmp_path):
    out = tmp_path / "plan.json"
    said = appliance("preflight", "--plan", out, "--model", model, "--record", tmp_path / "machine")
    assert said.code in (0, 4), said.err
    assert load_plan(out).ranks[0].device == "cpu"


def test_the_plan_of_another_machine_does_not_go_where_up_looks(appliance, model):
    said = appliance("preflight", "--host", TWO, "--model", model, "--plan")
    assert said.code == 2 and "--host is another machine" in said.err


def test_a_plan_of_no_model_is_wrong_usage(appliance):
    said = appliance("preflight", "--plan")
    assert said.code == 2 and "--model DIR" in said.err


def test_a_model_that_cannot_be_planned_still_gets_a_report(appliance, model):
    said = appliance("preflight", "--host", TWO, "--model", model, "--gpus", 3)
    assert said.code == 3 and "gpus-too-few" in said.out
    assert said.out.startswith("Not ready: 2 checks failed")
    assert "3 GPUs asked for and the host has 2" in said.out and "error" not in said.err


def test_a_model_that_does_not_fit_is_a_failed_check_and_nothing_says_ready(
    appliance, model, tmp_path, monkeypatch
):
    """The machine itself fails nothing: with the model, it is not ready in any form."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 1 << 40}))
    out = tmp_path / "plan.json"
    words = ["preflight", "--host", TWO, "--model", model, "--gpus", 2]
    said = appliance(*words, "--plan", out)
    assert said.code == 3 and said.out.startswith("Not ready: 1 check failed")
    assert "FAIL  plan     model-cannot-be-planned" in said.out
    assert "before its first expert" in said.out
    assert not out.exists() and f"no plan was written to {out}: a check failed" in said.err
    found = json.loads(appliance(*words, "--json").out)["findings"][0]
    assert (found["check"], found["severity"]) == ("model-cannot-be-planned", "fail")
    assert "ask for a shorter --context" in found["fix"]
    assert "moe_appliance_preflight_exit_code 3\n" in appliance(*words, "--prometheus").out


def test_a_number_of_cards_beside_a_plan_that_has_one_is_refused(appliance, model, tmp_path):
    made = tmp_path / "made.json"
    appliance("plan", "make", "--model", model, "-o", made)
    said = appliance("preflight", "--plan", made, "--gpus", 3)
    assert said.code == 2 and f"--plan {made} says how many cards it takes" in said.err
