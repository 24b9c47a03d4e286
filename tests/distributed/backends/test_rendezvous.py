"""How ranks meet at a store that may hold what earlier processes have left: here they are threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore

from camshaft.distributed.backends.native import rendezvous
from camshaft.distributed.backends.native.rendezvous import meet

PATIENCE, IMPATIENCE = 20.0, 0.3


def come(store: Any, ranks: Sequence[int], size: int, seconds: float = PATIENCE) -> list[Future[str]]:
    """Let these ranks come in this order, and wait until each is through."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        coming = []
        for rank in ranks:
            coming.append(threads.submit(meet, store, rank, size, time.monotonic() + seconds, "to the test"))
            time.sleep(0.02)
    return coming


def names(coming: Sequence[Future[str]]) -> set[str]:
    return {future.result() for future in coming}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_meeting_has_a_name_of_its_own(order: tuple[int, ...]) -> None:
    store = HashStore()
    every = [names(come(store, order, 3)) for _ in range(3)]
    assert [len(each) for each in every] == [1, 1, 1]
    assert len(set.union(*every)) == 3


def opened_and_left(store: HashStore) -> None:
    store.set("camshaft/meeting", "dead")


def died_before_it_called(store: HashStore) -> None:
    opened_and_left(store)
    store.set("camshaft/dead/1", "mark of the dead")
    store.set("camshaft/dead/2", "mark of the dead")


def had_called(store: HashStore) -> None:
    died_before_it_called(store)
    store.set("camshaft/dead/called", '{"marks": ["mark of the dead"], "absent": []}')


def had_called_in_vain(store: HashStore) -> None:
    opened_and_left(store)
    store.set("camshaft/dead/called", '{"marks": [], "absent": [1, 2]}')


@pytest.mark.parametrize("leave", [opened_and_left, died_before_it_called, had_called, had_called_in_vain])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_what_the_dead_have_left_does_not_mislead(leave: Callable[[HashStore], None], order: tuple[int, ...]) -> None:
    store = HashStore()
    leave(store)
    found = names(come(store, order, 3))
    assert len(found) == 1
    assert found != {"dead"}


def test_the_others_may_be_of_another_number_than_the_dead() -> None:
    store = HashStore()
    assert len({*names(come(store, (0, 1, 2), 3)), *names(come(store, (1, 0), 2)), *names(come(store, (0,), 1))}) == 3


def test_all_are_told_who_is_missing() -> None:
    errors = [future.exception() for future in come(HashStore(), (0, 2), 4, IMPATIENCE)]
    assert [type(error) for error in errors] == [DistStoreError, DistStoreError]
    assert {str(error) for error in errors} == {"2 of 4 ranks came to the test; missing: 1, 3"}


def test_rank_0_is_missed() -> None:
    (error,) = (future.exception() for future in come(HashStore(), (1,), 2, IMPATIENCE))
    assert isinstance(error, DistStoreError)
    assert "rank 0 did not come to the test" in str(error)


@pytest.mark.parametrize(
    ("came", "reported"),
    [
        ((0, 2), ["rank 0 has waited 0.05 s for ranks that have not reached initialize: 1, 3"]),
        ((1,), ["rank 1 has waited 0.05 s for rank 0, which has not reached initialize"]),
    ],
)
def test_the_log_names_who_is_missing_long_before_the_timeout(
    came: tuple[int, ...], reported: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "REPORT_AFTER", 0.05)
    come(HashStore(), came, 4, IMPATIENCE)
    assert caplog.messages == reported


def test_rank_0_is_missed_also_where_the_dead_have_met(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    come(store, (0, 1, 2), 3)
    monkeypatch.setattr(rendezvous, "REPORT_AFTER", 0.05)
    come(store, (1, 2), 3, IMPATIENCE)
    assert sorted(caplog.messages) == [
        f"rank {rank} has waited 0.05 s for rank 0, which has not reached initialize" for rank in (1, 2)
    ]


def test_who_has_left_and_how_is_published_in_the_order_in_which_they_left() -> None:
    store = HashStore()
    ranks = [rendezvous.Departures(store, rank) for rank in range(4)]
    assert ranks[0].left(range(4)) == {}
    ranks[3].leave(SystemExit(3))
    ranks[1].leave(None)
    ranks[2].leave(SystemExit())
    well = "has left the run without an error"
    assert list(ranks[0].left(range(4)).items()) == [(3, "has failed with SystemExit: 3"), (1, well), (2, well)]
    assert list(ranks[2].left([3, 2, 0])) == [3]
    ranks[0].leave(None)


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = Event(), []

    class Silent(HashStore):
        """A store whose server has gone with its machine."""

        def add(self, key: str, value: int) -> int:
            asked.append(key)
            answers.wait(PATIENCE)
            return super().add(key, value)

        def check(self, keys: list[str]) -> bool:
            asked.append(*keys)
            answers.wait(PATIENCE)
            return super().check(keys)

    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.1)
    departures = rendezvous.Departures(Silent(), 1)
    assert departures.left([0]) == {}
    departures.leave(None)
    assert asked == ["left/0", "left"]
    answers.set()


def test_a_rank_leaves_also_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = HashStore()
    departures, other = rendezvous.Departures(store, 1), rendezvous.Departures(store, 0)
    monkeypatch.setattr(Thread, "start", refuse)
    departures.leave(None)
    assert other.left([1]) == {1: "has left the run without an error"}
    other.leave(None)


def test_two_processes_with_the_same_rank_do_not_both_get_in() -> None:
    coming = come(HashStore(), (1, 1, 0), 2, IMPATIENCE)
    (error,) = (future.exception() for future in coming if future.exception())
    assert "it met another process as rank 1" in str(error)
    assert len(names([future for future in coming if not future.exception()])) == 1
