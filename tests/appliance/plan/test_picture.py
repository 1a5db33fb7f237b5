"""The page: well formed, self-contained, and true to the plan."""

import re
from xml.etree import ElementTree

from machines import machine
from plan_builders import checkpoint, deepseek_v41_flash, host

from appliance.plan.picture import HOMES, page
from appliance.plan.planner import Policy, plan
from appliance.plan.routing import Heat

HEAT = Heat({i: tuple(1000.0 / (1 + (e * 37 + i) % 384) for e in range(384)) for i in range(40)})


def cells(html: str, colour: str) -> float:
    """Experts drawn in one colour on the map."""
    svg = html[html.index("Homes of the experts") :]
    drawn = re.findall(rf'<rect x="\d+" y="\d+" width="(\d+)" height="4" fill="{colour}"', svg)
    return sum(int(width) for width in drawn) / 3


def test_the_map_draws_every_expert_once_in_the_colour_of_its_home() -> None:
    made = plan(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), HEAT,
                Policy(cache_slots=24))  # fmt: skip
    html = page(made, HEAT)
    layers = made.ranks[0].layers
    slots = sum(len(place.slot_experts) for place in layers)
    assert cells(html, HOMES["device"]) == sum(len(place.device_experts) for place in layers)
    assert cells(html, HOMES["slot"]) == slots > 0
    assert cells(html, HOMES["host"]) == sum(len(place.host_experts) for place in layers) - slots


def test_the_page_is_well_formed_and_asks_nothing_of_the_network() -> None:
    html = page(plan(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), HEAT, Policy()))
    ElementTree.fromstring(html.removeprefix("<!doctype html>").replace(
        '<meta charset="utf-8">', '<meta charset="utf-8"/>'))  # fmt: skip
    assert not re.search(r"https?:|<script|src=|@import|url\(", html)
    assert len(html) < 2_000_000
    assert "Tokens a second of each stream" in html


def test_a_plan_without_a_gpu_has_a_map_and_no_curve() -> None:
    html = page(plan(host(), checkpoint(), None, Policy()))
    assert "Where the experts live" in html and "Tokens a second of each stream" not in html
    assert cells(html, HOMES["device"]) == cells(html, HOMES["host"]) == 8


def test_ranks_with_the_same_homes_share_one_map_and_others_do_not() -> None:
    both = plan(host(), checkpoint(), None, Policy(tensor_parallel=2, host_share=0.5))
    assert page(both).count("Homes of the experts") == 1
    whole = Policy(tensor_parallel=2, expert_parallel=True, host_share=0.5)
    assert page(plan(host(), checkpoint(), None, whole)).count("Homes of the experts") == 2
