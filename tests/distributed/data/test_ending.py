"""Loaders end on all ranks at the same step, off the device and without waiting for ever, whatever one rank does."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import camshaft.distributed as idist
from camshaft.distributed.backends.native.backend import NativeBackend
from camshaft.distributed.context import current
from camshaft.distributed.data import counting, ending
from camshaft.distributed.data.counting import ByCollectives, InStore, Said
from camshaft.distributed.data.ending import ending_together
from camshaft.errors import RankDivergenceError
from camshaft.types import Stateful
from tests.ranks import on_ranks
from tests.threads import on_threads


class Loader:
    """Gives numbers, and fails in the end if it is told to."""

    title = "numbers"

    def __init__(self, length, error=None):
        self.length, self.error, self.read = length, error, 0

    def __iter__(self):
        for batch in range(self.length):
            self.read += 1
            yield batch
        if self.error:
            raise self.error


class Remembering(Loader):
    """Knows where it is, in a dict that it goes on to change; behind its end it begins anew."""

    def __init__(self, length):
        super().__init__(length)
        self.state = {"next": 0}

    def __iter__(self):
        for batch in range(self.state["next"], self.length):
            self.state["next"] = batch + 1
            yield batch
        self.state["next"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = dict(state_dict)


class Samples(IterableDataset):
    """Shared by the workers, one of which may fail."""

    def __init__(self, length, bad=None):
        self.length, self.bad = length, bad

    def __iter__(self):
        info = get_worker_info()
        for sample in range(0 if info is None else info.id, self.length, 1 if info is None else info.num_workers):
            if sample == self.bad:
                raise ValueError("broken")
            yield sample


@contextlib.contextmanager
def store_is_left_clean():
    """See that what was written is deleted again."""
    store = dist.distributed_c10d._get_default_store()
    idist.barrier()
    before = store.num_keys()
    idist.barrier()
    yield lambda: store.num_keys() - before
    idist.barrier()
    left = store.num_keys() - before
    idist.barrier()
    assert left == 0


@contextlib.contextmanager
def counted():
    """Count agreements, and allow no collective."""
    with (
        mock.patch.object(InStore, "hear", autospec=True, side_effect=InStore.hear) as hear,
        mock.patch.object(counting, "all_gather", side_effect=AssertionError),
        mock.patch.object(dist, "all_reduce", side_effect=AssertionError),
        mock.patch.object(dist, "broadcast", side_effect=AssertionError),
    ):
        yield hear


@on_ranks(3)
def test_all_ranks_end_with_the_first():
    rank = idist.get_rank()
    for lengths, window in itertools.product([(5, 7, 20), (16, 8, 9), (3, 0, 4), (8, 8, 8)], [1, 3, 8]):
        with store_is_left_clean():
            loader = ending_together(Loader(lengths[rank]), window)
            for _ in range(2):
                assert list(loader) == list(range(min(lengths))), (lengths, window)


@on_ranks(2)
def test_the_ranks_agree_once_for_each_window():
    for length, window, agreements in [(100, 8, 13), (96, 8, 13), (7, 8, 1), (6, 1, 7), (0, 8, 1)]:
        loader = Loader(length + 50 * idist.get_rank())
        with counted() as hear:
            assert len(list(ending_together(loader, window))) == length
        assert hear.call_count == agreements
        assert loader.read <= length + window, "no more is looked ahead than the window"


@on_ranks(2)
def test_the_store_does_not_grow():
    with store_is_left_clean() as keys:
        most = max(keys() for _ in ending_together(Loader(50), 1))
    assert most <= 2 + 2 * 3 + 1, "what each has said, two windows, and how many have left"


def loader_of(dataset, workers):
    """Make a loader on a rank, which is a daemon and otherwise may have no workers, and not soon."""
    multiprocessing.process.current_process()._config["daemon"] = False
    context = "fork" if workers else None
    return DataLoader(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context)


@on_ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_of_workers_end_together(workers):
    dataset = Samples(20 + 10 * idist.get_rank())
    loader = ending_together(loader_of(dataset, workers), 3)
    for _ in range(2):
        assert len(list(loader)) == 10
    assert loader.dataset is dataset
    assert loader.num_workers == workers


@on_ranks(3)
def test_an_error_of_one_rank_is_raised_on_all_at_its_step():
    rank = idist.get_rank()
    for window in (1, 2, 5, 8):
        got = []
        with store_is_left_clean(), pytest.raises((RuntimeError, KeyError)) as caught:
            got.extend(
                read_into(got, ending_together(Loader(5, KeyError("broken")) if rank == 1 else Loader(9), window))
            )
        assert got == [0, 1, 2, 3, 4]
        assert caught.type is (KeyError if rank == 1 else RuntimeError)
        assert rank == 1 or str(caught.value) == "rank 1 failed to load batch 6: KeyError: 'broken'"
    assert list(ending_together(Loader(4))) == [0, 1, 2, 3], "and the next pass knows nothing of it"


def read_into(got, loader):
    for batch in loader:
        got.append(batch)


@on_ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_is_raised_on_all(workers):
    rank = idist.get_rank()
    dataset = Samples(20, bad=8 if rank == 0 else None)
    error, text = (
        (ValueError, "broken") if rank == 0 else (RuntimeError, "rank 0 failed to load batch [1-9]: ValueError")
    )
    soon = mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # workers that failed end so
    with soon, pytest.raises(error, match=text):
        list(ending_together(loader_of(dataset, workers)))


@on_ranks(2)
def test_an_error_behind_the_end_is_nobodys():
    loader = Loader(5, ValueError("never reached")) if idist.get_rank() == 0 else Loader(4)
    assert list(ending_together(loader)) == [0, 1, 2, 3]


@on_ranks(2)
def test_who_stops_with_all_others_leaves_nothing_behind():
    for steps, window in itertools.product([1, 2, 3, 4, 7], [1, 3]):
        with store_is_left_clean():
            batches = iter(ending_together(Loader(6 + idist.get_rank()), window))
            assert list(itertools.islice(batches, steps)) == list(range(min(steps, 6)))
            del batches
    assert list(ending_together(Loader(2))) == [0, 1]


@on_ranks(2)
def test_who_stops_at_different_steps_leaves_nothing_behind():
    rank = idist.get_rank()
    for last, steps in itertools.product(range(2), [(1, 2), (2, 1), (3, 2), (2, 3)]):
        with store_is_left_clean():
            batches = iter(ending_together(Loader(9), 2))
            assert len(list(itertools.islice(batches, steps[rank]))) == steps[rank]
            if rank == last:
                idist.barrier()
                del batches
            else:
                del batches
                idist.barrier()


@on_ranks(3)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_stops_alone_is_not_waited_for(steps):
    rank = idist.get_rank()
    with store_is_left_clean():
        batches = iter(ending_together(Loader(9), 2))
        if rank == 2:
            assert len(list(itertools.islice(batches, steps))) == steps
        else:
            with pytest.raises(
                RankDivergenceError, match=rf"rank {rank} goes on .* but ranks \[2\] have failed or stop"
            ):
                list(batches)
        del batches


@on_ranks(2)
def test_an_interrupt_ends_the_others_too():
    rank = idist.get_rank()
    loader = Loader(3, KeyboardInterrupt()) if rank == 0 else Loader(5)
    with pytest.raises(KeyboardInterrupt if rank == 0 else RankDivergenceError):
        list(ending_together(loader, 2))


@on_ranks(2)
def test_who_does_not_come_is_named():
    if idist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=0.2))
        with pytest.raises(RankDivergenceError, match=r"ranks \[1\] have not come within 0.2 s: they still load"):
            list(ending_together(Loader(3)))


def test_who_waits_for_long_says_once_for_whom(caplog):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    first, second = (InStore(store, rank, 2, 8) for rank in range(2))
    first.say(Said(8))
    with mock.patch.object(counting, "_SILENCE", 0.0), pytest.raises(RankDivergenceError):
        first.hear()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 waits for ranks [1] in a pass over data that ends on all ranks together, and will for 0.3 s: they "
        "still load a batch, do something else, or have ended"
    ]
    second.say(Said(8))
    assert first.hear() == second.hear() == [Said(8), Said(8)]
    assert len(caplog.records) == 1


@on_ranks(2)
def test_a_part_of_the_program_that_one_rank_runs_cannot_wait_for_the_others():
    @idist.one_rank_only()
    def read():
        list(ending_together(Loader(3)))

    expected = pytest.raises(RankDivergenceError, match="ends on all ranks together on rank 0 waits for ranks")
    with expected if idist.get_rank() == 0 else contextlib.nullcontext():
        read()


@on_ranks(2)
def test_the_state_is_that_of_the_batches_given():
    rank = idist.get_rank()
    for steps in range(1, 7):
        loader = ending_together(Remembering(7 + rank), 3)
        assert isinstance(loader, Stateful)
        batches = iter(loader)
        assert list(itertools.islice(batches, steps)) == list(range(steps))
        assert loader.state_dict() == {"next": steps}
        again = ending_together(Remembering(7 + rank), 3)
        again.load_state_dict(loader.state_dict())
        assert again.state_dict() == {"next": steps}
        assert list(again) == list(range(steps, 7))
        del batches


@on_ranks(2)
def test_behind_the_end_the_state_is_that_of_a_new_pass():
    for lengths in [(4, 5), (4, 6), (4, 40), (6, 6)]:
        loader = ending_together(Remembering(lengths[idist.get_rank()]), 3)
        assert len(list(loader)) == min(lengths)
        again = ending_together(Remembering(lengths[idist.get_rank()]), 3)
        again.load_state_dict(loader.state_dict())
        is_cut = lengths[idist.get_rank()] > min(lengths) + 1  # behind the window there may be more
        assert again.state_dict() == loader.state_dict() == ({} if is_cut else {"next": 0})
        assert len(list(again)) == min(lengths)


@on_threads(3)
def test_without_a_store_a_collective_for_each_window_is_enough():
    rank = idist.get_rank()
    loader = Loader((20, 17, 30)[rank])
    assert isinstance(counting.counting(current(), 8), ByCollectives)
    for _ in range(2):
        assert list(ending_together(loader, 4)) == list(range(17))
    failing = Loader(5, ValueError("broken" * 1000)) if rank == 1 else Loader(9)
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="broken"):
        list(ending_together(failing, 4))


def test_the_collectives_are_counted():
    calls = []

    @on_threads(2)
    def read():
        list(ending_together(Loader(100), 8))

    with mock.patch.object(
        counting, "all_gather", side_effect=lambda said: calls.append(said) or idist.all_gather(said)
    ):
        read()
    assert len(calls) == 2 * 13


def test_one_process_asks_nobody():
    with mock.patch.object(ending, "counting", side_effect=AssertionError):
        loader = ending_together(Remembering(9))
        assert list(loader) == list(range(9))
        assert list(itertools.islice(loader, 4)) == [0, 1, 2, 3]
    assert loader.state_dict() == {"next": 4}
    assert loader.title == "numbers"
    assert not isinstance(ending_together(Loader(9)), Stateful)
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("window", [0, -1, 2.0, None])
def test_a_window_holds_something(window):
    with pytest.raises(ValueError, match=f"window must be a positive integer, got {window}"):
        ending_together([], window)


def test_the_process_with_the_store_stays_until_all_have_read():
    store = dist.HashStore()
    first, second = (InStore(store, rank, 2, 8) for rank in range(2))
    for rank in (first, second):
        rank.say(Said(0))
    first.hear()
    first.leave()
    staying = threading.Thread(target=first.see_off)
    staying.start()
    staying.join(0.1)
    assert staying.is_alive()
    second.see_off()  # which holds nobody up
    assert second.hear() == [Said(0), Said(0)]
    second.leave()
    staying.join(10)
    assert not staying.is_alive()
    assert store.num_keys() == 0


@on_ranks(2)
def test_the_process_with_the_store_may_end_before_the_others():
    rank = idist.get_rank()
    port = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port = store.port
    port = idist.broadcast(port, safe_mode=True)
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    stores = [store]
    del store
    with mock.patch.object(NativeBackend, "store", side_effect=lambda: stores[0]):
        for batch in ending_together(Loader(2), 2):
            if rank == 1 and batch == 1:
                time.sleep(0.3)  # it has said that it has no more, and not heard that nobody has
    stores.clear()  # and with it on rank 0 the server


@on_ranks(2)
def test_nobody_waits_for_the_last_step_of_the_others():
    store = dist.distributed_c10d._get_default_store()
    batches = iter(ending_together(Loader(1), 8))
    assert next(batches) == 0
    if idist.get_rank() == 0:
        assert list(batches) == []
        store.set("through", "")
    store.wait(["through"], timedelta(seconds=5))
    assert list(batches) == []


def test_it_does_not_stay_for_ever():
    first = InStore(dist.HashStore(), 0, 2, 8)
    with mock.patch.object(counting, "_FAREWELL", 0.05):
        first.leave()
        first.see_off()


def test_a_store_that_is_gone_is_said():
    first = InStore(mock.Mock(spec=dist.HashStore, **{"check.side_effect": dist.DistNetworkError("gone")}), 0, 2, 8)
    first._store.timeout = timedelta(seconds=1)
    first.say(Said(1))
    with pytest.raises(RankDivergenceError, match="the process that holds the store of this run has ended"):
        first.hear()
    first._store.add.side_effect = dist.DistNetworkError("gone")
    first.leave()
    first.see_off()
