"""Ranks, here threads, meet at a store that may hold leftovers of earlier processes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore

from camshaft.distributed.backends import rendezvous
from camshaft.distributed.backends.rendezvous import join_meeting, open_meeting
from tests.limits import HANG

PATIENCE = 20.0  # on the clock of the test


def meet(store: Any, rank: int, size: int, deadline: float) -> str:
    where = "to the test"
    return open_meeting(store, size, deadline, where) if rank == 0 else join_meeting(store, rank, size, deadline, where)


def come(store: Any, ranks: Sequence[int], size: int, seconds: float = HANG) -> list[Future[str]]:
    """Let these ranks come in this order, and wait until each has returned."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        coming = []
        for rank in ranks:
            coming.append(threads.submit(meet, store, rank, size, time.monotonic() + seconds))
            time.sleep(0.02)
    return coming


class Clock(threading.local):
    """A clock of each rank: it stands still until a store has some keys; then its rank's sleeps advance it at once."""

    def __init__(self, store: HashStore, num_keys: int) -> None:
        self.now = 0.0
        self._store, self._num_keys = store, num_keys

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)
        if self._store.num_keys() >= self._num_keys:
            self.now += seconds


def wait_for_missing(
    monkeypatch: pytest.MonkeyPatch, store: HashStore, came: Sequence[int], size: int
) -> list[BaseException | None]:
    """Return the errors of these ranks, after their time has passed."""
    monkeypatch.setattr(
        rendezvous, "time", Clock(store, len(came) if 0 in came else 0)
    )  # the meeting, and who is there
    with ThreadPoolExecutor(len(came)) as threads:
        coming = [threads.submit(meet, store, rank, size, PATIENCE) for rank in came]
    errors = [future.exception() for future in coming]
    assert [type(error) for error in errors] == [DistStoreError] * len(came)
    return errors


def names(coming: Sequence[Future[str]]) -> set[str]:
    return {future.result() for future in coming}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_meeting_has_a_unique_name_whatever_the_number_of_ranks(order: tuple[int, ...]) -> None:
    store = HashStore()
    meetings = [names(come(store, ranks, len(ranks))) for ranks in (order, order, (1, 0), (0,))]
    assert [len(each) for each in meetings] == [1] * 4
    assert len(set.union(*meetings)) == 4


CAME = {"camshaft/dead/1": "here", "camshaft/dead/2": "here"}
CONFIRMED = {"camshaft/dead/confirmed": rendezvous._COMPLETE}
MISSED = {"camshaft/dead/confirmed": "1 of 3 ranks connected; missing: 1, 2"}


@pytest.mark.parametrize("left", [{}, CAME, CAME | CONFIRMED, MISSED], ids=["host", "came", "confirmed", "missed"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_leftovers_of_dead_processes_are_ignored(left: dict[str, str], order: tuple[int, ...]) -> None:
    store = HashStore()
    for key, value in {"camshaft/meeting": "dead 3", **left}.items():
        store.set(key, value)
    found = names(come(store, order, 3))
    assert len(found) == 1
    assert found != {"dead"}


LATE = "rank {} has waited 10 s for rank 0, which has not reached initialize"
MISSING = "rank 0 has waited 10 s for ranks that have not reached initialize: 1, 3"
ANOTHER = "rank 0 did not connect to the test, or another process has joined as rank 2"


@pytest.mark.parametrize(
    ("came", "have_met", "error", "logged"),
    [
        ((0, 2), False, "2 of 4 ranks connected to the test; missing: 1, 3", MISSING),
        ((1,), False, "rank 0 did not connect to the test", LATE.format(1)),
        ((2,), True, ANOTHER, LATE.format(2)),  # the meeting that it finds may be of an earlier run
    ],
)
def test_missing_ranks_are_named_on_every_rank_and_logged_long_before_the_timeout(
    came: tuple[int, ...], have_met: bool, error: str, logged: str, monkeypatch: Any, caplog: Any
) -> None:
    store = HashStore()
    if have_met:
        come(store, range(4), 4)
    errors = wait_for_missing(monkeypatch, store, came, 4)
    assert all(error in str(one) for one in errors)
    assert caplog.messages == [logged]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 2, 3), (4, 3, 4, 2)])
def test_ranks_that_were_told_different_sizes_learn_what_each_believes(
    sizes: tuple[int, ...], order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER", HANG if len(sizes) > 2 else 0.1)  # nobody else comes
    store, deadline = HashStore(), time.monotonic() + HANG
    with ThreadPoolExecutor(len(sizes)) as threads:
        coming = [threads.submit(meet, store, rank, size, deadline) for rank, size in list(enumerate(sizes))[::order]]
    texts = {str(one.exception()) for one in coming}
    beginning = f"the ranks were told different numbers of processes (world_size): rank 0 {sizes[0]}, rank "
    assert all(text.startswith(beginning) for text in texts), texts


def test_a_rank_that_rank_0_does_not_wait_for_learns_that_it_was_told_another_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    come(store, (0, 1), 2)
    monkeypatch.setattr(rendezvous, "time", Clock(store, 0))
    with pytest.raises(DistStoreError, match="told that there are 3 processes .* ranks that were told 2") as caught:
        meet(store, 2, 3, PATIENCE)
    assert caplog.messages == [str(caught.value)]


def test_a_process_takes_the_place_of_one_that_was_killed_while_rank_0_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store, attempts, has_joined = HashStore(), rendezvous._attempts, Event()
    joining_threads: list[int] = []

    def observed(*args: Any) -> Iterator[None]:
        for number, _ in enumerate(attempts(*args)):
            if number and get_ident() in joining_threads:  # it has looked once, and found the meeting
                has_joined.set()
            yield

    def join() -> str:
        joining_threads.append(get_ident())
        return meet(store, 1, 3, time.monotonic() + HANG)

    monkeypatch.setattr(rendezvous, "_attempts", observed)
    with ThreadPoolExecutor(2) as threads:
        hosting = threads.submit(meet, store, 0, 3, time.monotonic() + HANG)
        with pytest.raises(DistStoreError):
            meet(store, 1, 3, time.monotonic() + 0.1)
        joining = threads.submit(join)
        assert has_joined.wait(HANG)
        assert meet(store, 2, 3, time.monotonic() + HANG) == hosting.result() == joining.result()


@pytest.mark.jobs
def test_no_file_is_left_however_close_to_each_other_the_last_two_ranks_end(tmp_path: Path) -> None:
    turns = multiprocessing.RawArray("i", 2)
    ranks = [
        multiprocessing.get_context("fork").Process(target=open_and_close, args=(tmp_path, r, turns)) for r in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert list(tmp_path.iterdir()) == []


def open_and_close(folder: Path, rank: int, turns: Any) -> None:
    for turn in range(1, 1001):
        store = rendezvous._new_file(folder / "meeting", str(turn), rank, 2, time.monotonic() + HANG)
        turns[rank] = turn
        while turns[1 - rank] < turn:
            pass
        for _ in range(turn % 50 if rank else 25):  # microseconds
            pass
        del store
