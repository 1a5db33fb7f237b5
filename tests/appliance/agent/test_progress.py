"""When is an engine hung? Only when work is queued, or nobody answers, for too long."""

import pytest

from appliance.progress import Hang, Sample, Watch, read_sample


def verdicts(samples, hang_seconds=45.0):
    watch = Watch(hang_seconds)
    return [watch.see(Sample(*sample)) for sample in samples]


def test_no_step_with_a_request_queued_is_a_hang_after_the_limit_and_not_before():
    found = verdicts([(0, 10, 1), (40, 10, 1), (45, 10, 1)])
    assert found == [None, None, Hang(45, 1)]


def test_an_idle_engine_makes_no_steps_and_is_fine():
    assert verdicts([(t, 10, 0) for t in range(0, 600, 5)]) == [None] * 120


def test_a_prefill_of_20_seconds_in_one_step_is_no_hang():
    samples = [(0, 10, 0), *((t, 10, 1) for t in range(5, 25, 5)), (25, 11, 1), (30, 12, 1)]
    assert verdicts(samples) == [None] * 7


def test_a_prefill_of_minutes_in_chunks_is_no_hang():
    samples = [(t, t // 40, 3) for t in range(0, 1200, 5)]
    assert not any(verdicts(samples))


def test_no_answer_at_all_is_a_hang_whether_or_not_work_was_queued():
    found = verdicts([(0, 10, 0), (10, None, None), (44, None, None), (50, None, None)])
    assert found == [None, None, None, Hang(50, None)]


def test_one_missed_answer_is_forgiven_by_the_next_step():
    samples = [(0, 10, 1), (40, None, None), (44, 11, 1), (60, None, None), (85, 12, 2)]
    assert not any(verdicts(samples))


def test_a_hang_is_found_within_60_seconds_when_polled_every_5_with_answers_that_time_out():
    # Frozen right after the sample at 0: a poll waits 5 s, its answer is late by another 5.
    samples = [(0, 10, 1), *((t, None, None) for t in range(10, 70, 10))]
    found = verdicts(samples)
    first = next(at for (at, *_), hang in zip(samples, found, strict=True) if hang)
    assert first <= 60


def test_forgetting_starts_the_clock_again():
    watch = Watch(45)
    watch.see(Sample(0, 10, 1))
    watch.forget()
    assert watch.see(Sample(100, 10, 1)) is None
    assert watch.see(Sample(144, 10, 1)) is None
    assert watch.see(Sample(146, 10, 1)) == Hang(46, 1)


def test_a_machine_that_was_paused_for_an_hour_is_no_hang():
    found = verdicts([(0, 10, 1), (5, 10, 1), (3605, 10, 1), (3610, 11, 1)])
    assert found == [None] * 4
    found = verdicts([(0, 10, 1), (3600, None, None), *((t, 10, 1) for t in (3620, 3645, 3666))])
    assert found == [None, None, None, None, Hang(46, 1)]


def test_a_short_limit_is_kept_although_each_look_takes_longer_than_it():
    assert verdicts([(0, 10, 1), (18, None, None)], 8.0) == [None, Hang(18, None)]


def test_the_words_say_how_long_and_how_many_wait():
    assert Hang(47.4, 3).words == (
        "the engine has finished no step for 47 s with 3 requests queued: it hangs"
    )
    assert "has not answered for 50 s" in Hang(50, None).words


METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 100.0
vllm:iteration_tokens_total_bucket{le="1.0"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 57.0
"""


def test_a_sample_is_read_from_the_engines_own_metrics():
    assert read_sample(METRICS, 7.0) == Sample(7.0, 57.0, 7.0)


def test_before_the_first_step_the_counter_is_absent_and_counts_as_none_yet():
    text = "\n".join(line for line in METRICS.splitlines() if "iteration" not in line)
    assert read_sample(text, 7.0) == Sample(7.0, 0.0, 7.0)


@pytest.mark.parametrize("text", ["", "vllm:iteration_tokens_total_count 5\n"])
def test_metrics_without_the_queue_are_no_answer(text):
    assert read_sample(text, 7.0) == Sample(7.0, None, None)
