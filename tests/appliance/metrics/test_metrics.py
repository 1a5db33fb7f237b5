"""The text of /metrics: valid, bounded, and silent about what is unknown."""

import pytest
from machines import machine
from prometheus_client.parser import text_string_to_metric_families

from appliance.metrics import COLLECTORS, PREFIX, Facts, groups, page
from appliance.plan.model import (
    LayerPlacement,
    LedgerLine,
    MadeFrom,
    ModelFacts,
    Plan,
    RankPlan,
    Serving,
    StreamPrediction,
)
from preflight import check

ENGINE = {
    "ranks": [
        {
            "rank": 0,
            "homes": {"device": {"experts": 5, "bytes": 50}, "host": {"experts": 3, "bytes": 30}},
            "picks": {"device": 90, "host": 10},
            "host_bytes_read": 4096,
            "promotions": 7,
            "layers": {
                str(n): {"device": 80 + n, "slot": 6, "host": 4, "host_bytes_read": 1000}
                for n in range(40)
            },
        }
    ]
}
VLLM = """\
# HELP vllm:time_to_first_token_seconds x
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 3.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4.0
vllm:time_to_first_token_seconds_sum 0.4
vllm:time_to_first_token_seconds_count 4.0
# HELP http_requests_total by handler
# TYPE http_requests_total counter
http_requests_total{handler="/v1/chat/completions?user=alice"} 4.0
"""


def plan() -> Plan:
    rank = RankPlan(rank=0, device="cpu", link="memory", device_capacity_bytes=100,
                    ledger=(LedgerLine(part="p", home="host", size_bytes=30, source="header"),),
                    layers=(LayerPlacement(layer=0, device="0-4", host="5-7", cache_slots=2),),
                    )  # fmt: skip
    return Plan(
        made_from=MadeFrom(host="h", checkpoint="c", policy="p"),
        model=ModelFacts(family="f", hidden_size=1, intermediate_size=1, layers=1, experts=8,
                         top_k=2, expert_bytes=10, size_bytes=80),
        tensor_parallel=1,
        serving=Serving(streams=1, context_tokens=1, prefill_chunk_tokens=1, kv_cache_bytes=1),
        ranks=(rank,),
        predictions=(StreamPrediction(streams=4, link_bytes_per_step=1, link_ms_per_step=None,
                                      cold_share=0.25),),
    )  # fmt: skip


def samples(facts: Facts) -> dict:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page(facts))
        for sample in family.samples
    }


def test_plan_and_engine_are_told_per_rank_and_home():
    found = samples(Facts(plan=plan(), engine=ENGINE))
    assert found[PREFIX + "plan_experts", "0", "device"] == 5
    assert found[PREFIX + "plan_experts", "0", "host"] == 3
    assert found[PREFIX + "plan_bytes", "0", "host"] == 30
    assert found[PREFIX + "plan_cache_slots", "0"] == 2
    assert found[PREFIX + "plan_cold_share", "4"] == 0.25
    assert found[PREFIX + "picks_total", "0", "host"] == 10
    assert found[PREFIX + "host_read_bytes_total", "0"] == 4096


def test_what_is_unknown_is_left_out_and_not_zero():
    names = {name for name, *_ in samples(Facts())}
    assert names == {
        PREFIX + "engine_hung", PREFIX + "engine_restarts_total", PREFIX + "info",
        PREFIX + "collector_seconds", PREFIX + "collector_success",
    }  # fmt: skip


def test_findings_of_a_recorded_machine_are_counted_by_severity():
    host = machine("two-rtx-pro-6000")
    report = check(host)
    found = samples(Facts(host=host, report=report))
    assert found[PREFIX + "preflight_findings", "fail"] == len(report.failures)
    assert found[PREFIX + "host_gpus",] == 2
    for finding in report.failures:
        assert found[PREFIX + "preflight_finding", *sorted((finding.check, "fail"))] == 1


def test_vllms_histograms_pass_and_families_with_unbounded_labels_do_not():
    text = page(Facts(exposition=VLLM))
    assert 'vllm:time_to_first_token_seconds_bucket{le="0.1"} 3.0' in text
    assert "alice" not in text


def test_a_collector_that_fails_hides_itself_alone_and_says_so():
    found = samples(Facts(plan=plan(), engine={"ranks": [{"rank": 0}]}))
    assert found[PREFIX + "collector_success", "engine"] == 0
    assert found[PREFIX + "collector_success", "plan"] == 1
    assert (PREFIX + "picks_total", "0", "host") not in found
    assert found[PREFIX + "plan_experts", "0", "host"] == 3


@pytest.mark.parametrize("name", COLLECTORS)
def test_every_collector_says_how_long_it_took_and_whether_it_worked(name):
    found = samples(Facts())
    assert found[PREFIX + "collector_success", name] == 1
    assert found[PREFIX + "collector_seconds", name] >= 0


def test_quotes_and_line_breaks_in_labels_do_not_break_the_text():
    found = samples(Facts(release='1 "two"\nthree\\'))
    assert found[PREFIX + "info", "", '1 "two"\nthree\\'] == 1


def test_layers_are_counted_in_at_most_eight_groups_and_nothing_is_lost():
    found = samples(Facts(engine=ENGINE))
    picks = {key[1:]: n for key, n in found.items() if key[0] == PREFIX + "layer_picks_total"}
    cold = {layers: n for (rank, layers, place), n in picks.items() if place == "host"}
    assert len(cold) == 8 and sum(cold.values()) == 40 * 4 and {"0-4", "35-39"} <= set(cold)
    assert sum(n for (_, _, place), n in picks.items() if place == "slot") == 40 * 6
    read = [n for key, n in found.items() if key[0] == PREFIX + "layer_host_read_bytes_total"]
    assert sum(read) == 40_000 and found[PREFIX + "promotions_total", "0"] == 7


@pytest.mark.parametrize(
    ("count", "names"), [(1, ["0-0"]), (9, ["0-1", "2-3", "4-5", "6-7", "8-8"])]
)
def test_few_layers_make_few_groups(count, names):
    assert [name for name, _ in groups({str(n): {} for n in range(count)})] == names
