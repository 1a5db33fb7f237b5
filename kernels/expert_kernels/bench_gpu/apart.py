"""Work in processes of its own: a crash or a hang costs one item, the rest goes on in the next."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from expert_kernels.bench_gpu.timing import Facts

Item = TypeVar("Item")
# torch is imported once, before any of them has a GPU: the caller must never ask for one.
_FORK = multiprocessing.get_context("fork")


def answer(serve: Callable[[Item], Facts], item: Item) -> Facts:
    """Of one item, whose own process may take as long as it likes."""
    pipe, process = _started(lambda items: map(serve, items), [item])
    facts = _answer(pipe, process, None)
    process.join()
    return facts


def answers(
    serve: Callable[[Sequence[Item]], Iterator[Facts]], work: Sequence[Item], limit_s: float
) -> Iterator[tuple[Item, Facts]]:
    """`serve`, which runs in a process, yields one answer an item.

    An item that raises, ends its process or takes longer than `limit_s` has the answer
    {"exception": lines}; the items behind it are served by a new process.
    """
    left = list(work)
    while left:
        pipe, process = _started(serve, left)
        failed = False
        while left and not failed:
            facts = _answer(pipe, process, limit_s)
            failed = "exception" in facts
            yield left.pop(0), facts
        process.kill()
        process.join()
        pipe.close()


def _run(
    pipe: Connection, serve: Callable[[Sequence[Item]], Iterator[Facts]], work: Sequence[Item]
) -> None:
    try:
        for facts in serve(work):
            pipe.send(facts)
    except Exception:  # noqa: BLE001 (sent, and this process is not used any more)
        pipe.send({"exception": traceback.format_exc().splitlines()[-4:]})


def _started(
    serve: Callable[[Sequence[Item]], Iterator[Facts]], work: Sequence[Item]
) -> tuple[Connection, BaseProcess]:
    here, there = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(there, serve, work), daemon=True)
    process.start()
    there.close()
    return here, process


def _answer(pipe: Connection, process: BaseProcess, limit_s: float | None) -> Facts:
    if not pipe.poll(limit_s):
        return {"exception": [f"no answer within {limit_s:g} s"]}
    try:
        facts: Facts = pipe.recv()
        return facts
    except EOFError:
        process.join()
        return {"exception": [f"its process ended with {process.exitcode}"]}
