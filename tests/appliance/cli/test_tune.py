"""tune: host changes shown, made below a root of our own, and undone."""

import json

import pytest

THP = "sys/kernel/mm/transparent_hugepage/enabled"
MAPS = "proc/sys/vm/max_map_count"
SWAPPINESS = "proc/sys/vm/swappiness"


@pytest.fixture
def root(tmp_path):
    """A host whose kernel files need three changes."""
    files = {
        "proc/meminfo": "MemTotal: 64 kB\nSwapTotal: 8 kB\nSwapFree: 8 kB\n",
        SWAPPINESS: "60\n",
        MAPS: "100\n",
        THP: "always madvise [never]\n",
    }
    for name, text in files.items():
        path = tmp_path / "host" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "host"


def contents(root) -> dict[str, str]:
    return {name: (root / name).read_text() for name in (SWAPPINESS, MAPS, THP)}


def test_without_apply_the_changes_are_shown_and_nothing_is_touched(appliance, root):
    before = contents(root)
    said = appliance("tune", "--root", root)
    assert said.code == 0 and contents(root) == before
    assert "/proc/sys/vm/swappiness: 60 would become 1\n" in said.out
    assert "nothing was changed" in said.err
    steps = json.loads(appliance("tune", "--root", root, "--json").out)["steps"]
    assert [step["path"].lstrip("/") for step in steps] == [SWAPPINESS, MAPS, THP]


def test_what_is_applied_is_recorded_and_undone(appliance, root, own_state):
    applied = appliance("tune", "--root", root, "--apply", "--for-good")
    assert applied.code == 0, applied.err
    assert contents(root) == {SWAPPINESS: "1\n", MAPS: "1048576\n", THP: "madvise\n"}
    lasting = root / "etc/sysctl.d/90-moe-appliance.conf"
    assert "vm.swappiness = 1\n" in lasting.read_text()
    assert len(json.loads((own_state / "tune.json").read_text())["steps"]) == 3

    undone = appliance("tune", "--root", root, "--undo")
    assert undone.code == 0 and "/proc/sys/vm/swappiness: 1 is 60 again\n" in undone.out
    assert contents(root) == {SWAPPINESS: "60\n", MAPS: "100\n", THP: "never\n"}
    assert not lasting.exists() and not (own_state / "tune.json").exists()
    again = appliance("tune", "--root", root, "--undo")
    assert again.code == 2 and "nothing to undo" in again.err


def test_a_second_apply_does_not_lose_what_was_there_before_the_first(appliance, root):
    assert appliance("tune", "--root", root, "--apply").code == 0
    (root / MAPS).write_text("100\n")
    said = appliance("tune", "--root", root, "--apply")
    assert said.code == 1 and "tune --undo" in said.err
    assert (root / MAPS).read_text() == "100\n"


def test_a_file_that_cannot_be_written_names_itself_and_leaves_what_was_done_undoable(
    appliance, root
):
    # A number that the kernel lets nobody write, not even root.
    (root / MAPS).unlink()
    (root / MAPS).symlink_to("/proc/sys/kernel/random/entropy_avail")
    said = appliance("tune", "--root", root, "--apply")
    assert said.code == 1 and said.err.count("error: ") == 1
    assert "error: /proc/sys/vm/max_map_count: permission denied (run as root)" in said.err
    assert "tune --undo" in said.err and (root / SWAPPINESS).read_text() == "1\n"


def test_huge_pages_need_a_plan_that_says_how_many(appliance, root):
    said = appliance("tune", "--root", root, "--huge-pages")
    assert said.code == 2 and "preflight --plan" in said.err


def test_huge_pages_of_a_plan_are_advised_on_the_cards_node(appliance, model, tmp_path, request):
    two = request.path.parents[2] / "machines" / "two-rtx-pro-6000-healthy"
    plan = tmp_path / "plan.json"
    made = appliance(
        "plan", "make", "--model", model, "--host", two, "--host-share", 0.5, "-o", plan
    )
    assert made.code == 0, made.err
    words = ["tune", "--host", two, "--plan", plan, "--json"]
    assert json.loads(appliance(*words).out)["steps"] == []
    steps = json.loads(appliance(*words, "--huge-pages").out)["steps"]
    assert [step["path"] for step in steps] == [
        "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
    ]


@pytest.mark.parametrize("words", [("--apply", "--undo"), ("--for-good",), ("--json", "--apply")])
def test_options_that_contradict_each_other_are_wrong_usage(appliance, words):
    assert appliance("tune", *words).code == 2
