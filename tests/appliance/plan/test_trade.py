"""plan trade: the same card, split otherwise."""

from machines import machine
from plan_builders import deepseek_v41_flash

from appliance.plan.planner import Policy
from appliance.plan.trade import trade_lines


def rows(policy: Policy) -> dict[str, list[str]]:
    lines = list(
        trade_lines(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), None, policy)
    )
    return {line[:34].strip(): line[34:].split() for line in lines[1:]}


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


def test_more_context_costs_experts_and_slots_cost_host_memory() -> None:
    found = rows(Policy(cache_slots=96))
    kv, held = ([number(found[f"{n} contexts of 262,144"][at]) for n in (6, 12, 24)]
                for at in (0, 2))  # fmt: skip
    assert kv == sorted(kv) and held == sorted(held, reverse=True)
    host = [number(found[name][4]) for name in
            ("0 slots a layer", "48 slots a layer", "as planned")]  # fmt: skip
    assert host == sorted(host) and host[0] < host[-1]
    # Both cards are on one node of 252 GiB: copies of 192 slots pass it beside 103 GiB of tables.
    assert found["192 slots a layer"][:6] == ["does", "not", "fit:", "memory", "node", "0"]
    assert found["as planned"][2] == found["0 slots a layer"][2], "the device holds as many"


def test_a_split_that_does_not_fit_is_a_row_that_says_so() -> None:
    found = rows(Policy(streams=70, context_tokens=262_144))
    assert found["560 contexts of 262,144"][:3] == ["does", "not", "fit:"]
