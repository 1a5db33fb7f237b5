"""The one line of a long log that says what went wrong."""

import pytest

from appliance.serve.local import log_lines
from appliance.serve.log import cause, exit_words, tail

WORKER = "(Worker pid=14058) ERROR 11-29 16:59:53 [multiproc_executor.py:953] "


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["INFO 11-29 16:43:35 [core.py:1] ready", "plain words"], None),
        ([WORKER + "ValueError: a: b", "  File x"], "ValueError: a: b"),
        (
            [
                WORKER + "torch.OutOfMemoryError: tried to allocate 2 GiB",
                "(EngineCore pid=1) ERROR 11-29 16:59:54 [core.py:2] Exception: WorkerProc "
                "initialization failed due to an exception in a background process.",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "OutOfMemoryError: tried to allocate 2 GiB",
        ),
        (["appliance.errors.PlanError: layer 3 is twice. Try: again"],
         "PlanError: layer 3 is twice. Try: again"),
        (["appliance.errors.DoesNotFit: 102.1 GiB"], "DoesNotFit: 102.1 GiB"),
        (["KeyError"], "KeyError"),
        (["see the Error: not an exception line"], None),
        (["vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
          "KeyError: '/psm_01d28d50'", "KeyError: '/mp-rh63uqcm'"],
         "EngineDeadError: EngineCore encountered an issue."),
        (["KeyError: 'gate'"], "KeyError: 'gate'"),
        (["ValueError: first", "ValueError: second"], "ValueError: second"),
        # A killed rank of two, as vLLM 0.33 told it on two H200s.
        (["(Worker_TP1 pid=1759) WARNING 11-29 21:29:26 [import_utils.py:417] AssertionError: "
          "Expected one _C_extension*.so file, found 0: []",
          "(EngineCore pid=1744) ERROR 11-29 21:29:45 [multiproc_executor.py:380] Worker proc "
          "VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.",
          "(EngineCore pid=1744) ERROR 11-29 21:29:46 [core.py:15] RuntimeError: Executor failed.",
          "(APIServer pid=1663) ERROR 11-29 21:29:46 [async_llm.py:943] "
          "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."],
         "VllmWorker-1 died without a word: it was killed, or crashed"),
    ],
)  # fmt: skip
def test_the_cause_is_the_last_exception_that_is_no_consequence(tmp_path, lines, found):
    log = tmp_path / "log"
    log.write_text("\n".join(lines) + "\n")
    assert cause(log) == found


def test_a_missing_log_has_no_cause_and_no_lines(tmp_path):
    assert cause(tmp_path / "none") is None
    assert tail(tmp_path / "none", 5) == []


def test_a_log_of_bytes_that_are_no_text_is_read_all_the_same(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe\x00\nValueError: \xff\n")
    assert cause(log).startswith("ValueError: ")
    assert len(tail(log, 1)) == 1


def test_the_tail_of_a_long_log_is_its_last_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(200_000)))
    assert tail(log, 2) == ["line 199998", "line 199999"]


def test_an_end_by_signal_is_named_with_what_usually_sends_it():
    assert exit_words(1) == "exited with status 1"
    assert exit_words(-9).startswith("was ended by SIGKILL; the kernel does that when memory")
    assert exit_words(-11) == "was ended by SIGSEGV"


def test_a_followed_log_goes_on_in_the_new_file_when_the_engine_is_started_again(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("old 1\nold 2\n")
    asked = 0

    def follow() -> bool:
        nonlocal asked
        asked += 1
        return asked < 40

    lines = log_lines(log, 1, follow=follow)
    assert next(lines) == "old 2"
    with log.open("a") as file:
        file.write("old 3\n")
    assert next(lines) == "old 3"
    log.replace(tmp_path / "engine.previous.log")
    log.write_text("new 1\nnew 2\n")
    assert [next(lines), next(lines)] == ["new 1", "new 2"]
    assert list(log_lines(log, 1, follow=lambda: False)) == ["new 2"]
