"""Jobs that do nothing wrong, in unusual ways: none of them is ended, disturbed, or reported."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed import job
from camshaft.distributed.failures import status, verdicts, watcher
from camshaft.engine import Engine, Events
from tests.limits import HANG
from tests.ranks import await_watchers, run_on_ranks

ROUNDS = 12  # in which the watchers look while a job is doing something unusual
PATIENCE = 0.1


def rest() -> None:
    """Wait until the watcher has looked again and again."""
    own = job.current().job.find(watcher.Watcher)
    assert own is not None
    looked, look = threading.Semaphore(0), own.look

    def counted(now: float) -> None:
        look(now)
        looked.release()

    own.look = counted  # type: ignore[method-assign]
    for _ in range(ROUNDS):
        assert looked.acquire(timeout=HANG)
    own.look = look  # type: ignore[method-assign]


def by_rank(*calls: Callable[[], Any]) -> Any:
    return calls[idist.get_rank()]()


def threads_with_groups_of_their_own() -> None:
    """Each thread has a group of all ranks, and each rank is late in another one."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def work(number: int) -> None:
        for _ in range(3):
            if number == idist.get_rank():
                rest()
            dist.all_reduce(torch.ones(1 + number), group=groups[number])

    thread = threading.Thread(target=work, args=(1,))
    thread.start()
    work(0)
    thread.join()


def a_thread_that_has_sent_nothing_yet() -> None:
    """The main threads wait for each other, until another thread makes its first call."""
    group = dist.new_group([0, 1])

    def work() -> None:
        rest()
        dist.all_reduce(torch.ones(1), group=group)

    if idist.get_rank() == 0:
        thread = threading.Thread(target=work)
        thread.start()
        dist.all_reduce(torch.ones(2))
        thread.join()
    else:
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(2))


def an_early_end_on_one_rank_that_comes_back() -> None:
    """A rank terminates its run, does something else, and only then makes the calls of the others."""
    engine = Engine(lambda engine, batch: idist.all_reduce(1))
    if idist.get_rank() == 1:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), engine.terminate)
    engine.run(range(5))
    if idist.get_rank() == 1:
        rest()
        for _ in range(2):
            idist.all_reduce(1)


def errors_that_are_handled() -> None:
    """One rank makes calls that fail in the check of their arguments, and then those of the others."""
    for _ in range(3):
        if idist.get_rank() == 0:
            for wrong in (
                lambda: dist.broadcast(torch.ones(1), 7),
                lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
                lambda: idist.broadcast(torch.ones(1), src=5),
            ):
                with pytest.raises((RuntimeError, ValueError, TypeError)):
                    wrong()
        dist.all_reduce(torch.ones(3))
        idist.barrier()
    by_rank(rest, lambda: None)
    idist.barrier()


def the_same_calls_through_torch_and_through_camshaft() -> None:
    by_rank(dist.barrier, idist.barrier)
    by_rank(lambda: dist.all_reduce(torch.ones(2)), lambda: idist.all_reduce(torch.ones(2)))
    by_rank(rest, lambda: None)
    by_rank(idist.barrier, dist.barrier)


def a_rank_that_leaves_while_the_other_one_needs_nobody() -> None:
    """The other rank handles errors of its own that look like lost connections."""
    if idist.get_rank() == 1:
        job.finalize()
        return
    rest()
    for text in ("label server: connection timed out", "DataLoader timed out after 5 seconds", "Event loop is closed"):

        def fail(engine: Engine, batch: int, text: str = text) -> None:
            raise RuntimeError(text)

        with pytest.raises(RuntimeError, match=text):
            Engine(fail).run([0])
    rest()


def forked_children() -> None:
    """Children end in several ways, and one asks for its rank, while the other rank waits."""
    if idist.get_rank() == 0:
        for end in (lambda: None, lambda: 1 / 0, idist.get_rank):
            pid = os.fork()
            if pid == 0:
                try:
                    end()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
        rest()
    idist.barrier()


def asynchronous_calls_that_nobody_waits_for_yet() -> None:
    """And calls of a group of one rank, while the other one works."""
    if idist.get_rank() == 0:
        dist.barrier(dist.new_group([0], use_local_synchronization=True))
        work = dist.all_reduce(torch.ones(2), async_op=True)
        rest()
    else:
        rest()
        work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()


JOBS = [
    threads_with_groups_of_their_own,
    a_thread_that_has_sent_nothing_yet,
    an_early_end_on_one_rank_that_comes_back,
    errors_that_are_handled,
    the_same_calls_through_torch_and_through_camshaft,
    a_rank_that_leaves_while_the_other_one_needs_nobody,
    forked_children,
    asynchronous_calls_that_nobody_waits_for_yet,
]


def watched(task: Callable[[], None]) -> tuple[list[str], bool]:
    """Run a job with watchers that look often and are not patient; return what was logged, and whether it went on."""
    for module, name, value in (
        *((watcher, "PERIOD", 0.02), (watcher, "PATIENCE", PATIENCE), (status, "PATIENCE", PATIENCE)),
        *((verdicts, "PATIENCE", PATIENCE), (status, "EARLY", 0.0)),
    ):
        setattr(module, name, value)
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: texts.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("camshaft.distributed").addHandler(handler)
    await_watchers()
    backend = job.current()
    task()
    return texts, backend.job.verdict is None


@pytest.mark.parametrize("task", JOBS, ids=lambda task: task.__name__)
def test_healthy_jobs_are_left_alone(task: Callable[[], None]) -> None:
    assert run_on_ranks(2, watched, task) == [([], True)] * 2
