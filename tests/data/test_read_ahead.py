"""Batches are read ahead: passes end on all ranks at the same step, and batches are copied to the GPU in time."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import time
import warnings
import weakref
from collections import namedtuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import camshaft.distributed as idist
from camshaft.data import read_ahead
from camshaft.data.read_ahead import end_together, prefetch_to_device
from camshaft.distributed.agreement import ends
from camshaft.distributed.agreement.ends import BatchCounts
from camshaft.distributed.backends.torch_distributed import NativeBackend
from camshaft.distributed.job import current
from camshaft.errors import RankDivergenceError
from camshaft.types import Stateful
from tests.limits import HANG, TIMEOUT
from tests.ranks import await_watchers, hurried, on_ranks
from tests.threads import on_threads

# --- ending together ---------------------------------------------------------------------------------------------


class Loader:
    """Yields numbers, and may fail at its end."""

    title = "numbers"

    def __init__(self, length, error=None):
        self.length, self.error, self.read = length, error, 0

    def __iter__(self):
        for batch in range(self.length):
            self.read += 1
            yield batch
        if self.error:
            raise self.error


class Samples(IterableDataset):
    """Split among the workers, one of which may fail."""

    def __init__(self, length, bad=None):
        self.length, self.bad = length, bad

    def __iter__(self):
        info = get_worker_info()
        for sample in range(0 if info is None else info.id, self.length, 1 if info is None else info.num_workers):
            if sample == self.bad:
                raise ValueError("broken")
            yield sample


def ending(loader, window=8):
    warnings.filterwarnings("ignore", "a pass over the stream ended")
    return end_together(iter(loader), window)


@contextlib.contextmanager
def store_is_left_clean():
    """Check that all keys that were written are deleted again."""
    store = dist.distributed_c10d._get_default_store()
    await_watchers()
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
        mock.patch.object(BatchCounts, "collect", autospec=True, side_effect=BatchCounts.collect) as collect,
        mock.patch("camshaft.distributed.agreement.ends.all_gather", side_effect=AssertionError),
        mock.patch.object(dist, "all_reduce", side_effect=AssertionError),
        mock.patch.object(dist, "broadcast", side_effect=AssertionError),
    ):
        yield collect


@on_ranks(3)
def test_all_ranks_end_with_the_first_that_runs_out():
    rank = idist.get_rank()
    for lengths, window in itertools.product([(5, 7, 20), (16, 8, 9), (3, 0, 4), (8, 8, 8)], [1, 3, 8]):
        with store_is_left_clean():
            for _ in range(2):
                assert list(ending(Loader(lengths[rank]), window)) == list(range(min(lengths))), (lengths, window)


@on_ranks(2)
def test_batches_that_are_left_are_reported_on_one_rank():
    for lengths, given, left in [((100, 1), 1, 7), ((0, 100), 0, 8), ((20, 24), 20, 4), ((20, 23), 20, None)]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(list(end_together(iter(Loader(lengths[idist.get_rank()]))))) == given
        found = [message for part in idist.all_gather([str(one.message) for one in caught]) for message in part]
        longer = lengths.index(max(lengths))
        assert len(found) == (left is not None)
        for message in found:
            assert f"ended after {given} batch" in message
            assert f"rank {longer} has at least {left} left, which are dropped; distribute the data evenly" in message


@on_ranks(2)
def test_the_ranks_agree_once_per_window():
    for length, window, agreements in [(100, 8, 13), (96, 8, 13), (7, 8, 1), (6, 1, 7), (0, 8, 1)]:
        loader = Loader(length + 50 * idist.get_rank())
        with counted() as collect:
            assert len(list(ending(loader, window))) == length
        assert collect.call_count == agreements
        assert loader.read <= length + window, "no more is looked ahead than the window"


def loader_of(dataset, workers):
    """Create a loader on a rank: a daemon, which otherwise may not have workers."""
    multiprocessing.process.current_process()._config["daemon"] = False
    context = "fork" if workers else None
    return DataLoader(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context)


@on_ranks(3)
def test_an_error_of_one_rank_is_raised_on_all_at_its_step():
    rank = idist.get_rank()
    for window in (1, 2, 5, 8):
        got = []
        with store_is_left_clean(), pytest.raises((RuntimeError, KeyError)) as caught:
            got.extend(read_into(got, ending(Loader(5, KeyError("broken")) if rank == 1 else Loader(9), window)))
        assert got == [0, 1, 2, 3, 4]
        assert caught.type is (KeyError if rank == 1 else RuntimeError)
        assert rank == 1 or str(caught.value) == "rank 1 failed to load batch 6: KeyError: 'broken'"
    assert list(ending(Loader(4))) == [0, 1, 2, 3], "and the next pass knows nothing of it"
    late = Loader(5, ValueError("never reached")) if rank == 0 else Loader(4)
    assert list(ending(late)) == [0, 1, 2, 3], "it is after the common end"


def read_into(got, loader):
    for batch in loader:
        got.append(int(batch))


@on_ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_errors_of_workers_end_together(workers):
    rank = idist.get_rank()
    loader = loader_of(Samples(20 + 10 * rank), workers)
    for _ in range(2):
        assert len(list(ending(loader, 3))) == 10
    dataset = Samples(20, bad=8 if rank == 0 else None)
    error, text = (
        (ValueError, "broken") if rank == 0 else (RuntimeError, "rank 0 failed to load batch [1-9]: ValueError")
    )
    soon = mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # workers that failed end so
    with soon, pytest.raises(error, match=text):
        list(ending(loader_of(dataset, workers)))


@on_ranks(2)
def test_ranks_that_stop_leave_no_keys():
    rank = idist.get_rank()
    for together, window in itertools.product([1, 4, 7], [1, 3]):
        with store_is_left_clean() as keys:
            batches = iter(ending(Loader(6 + rank), window))
            assert list(itertools.islice(batches, together)) == list(range(min(together, 6)))
            assert keys() <= 2 + 2 * 3 + 1, "what each has said, two windows, and how many have left"
            del batches
    for steps in [(1, 2), (3, 2)]:
        with store_is_left_clean():
            batches = iter(ending(Loader(9), 2))
            assert len(list(itertools.islice(batches, steps[rank]))) == steps[rank]
            del batches


@on_ranks(3)
def test_ranks_do_not_wait_for_one_that_stopped_or_was_interrupted():
    rank = idist.get_rank()
    message = rf"rank {rank} is in a .*pass .* but ranks \[2\] failed or stopped"
    for steps in (1, 2, 3):
        with store_is_left_clean():
            batches = iter(ending(Loader(9), 2))
            if rank == 2:
                assert len(list(itertools.islice(batches, steps))) == steps
            else:
                with pytest.raises(RankDivergenceError, match=message):
                    list(batches)
            del batches
    loader = Loader(3, KeyboardInterrupt()) if rank == 0 else Loader(5)
    with pytest.raises(KeyboardInterrupt if rank == 0 else RankDivergenceError):
        list(ending(loader, 2))


@on_ranks(2)
def test_a_missing_rank_is_named_after_the_timeout():
    if idist.get_rank() == 0:
        match = r"timed out after \d+ s waiting for ranks \[1\] in a synchronized pass"
        with hurried(), pytest.raises(RankDivergenceError, match=match):
            list(ending(Loader(3)))


@on_ranks(2)
def test_a_pass_within_one_rank_only_raises():
    @idist.one_rank_only()
    def read():
        list(ending(Loader(3)))

    expected = pytest.raises(RankDivergenceError, match="a synchronized pass over the data on rank 0 waits for ranks")
    with expected if idist.get_rank() == 0 else contextlib.nullcontext():
        read()


def test_without_a_store_the_ranks_agree_by_one_collective_per_window():
    calls = []

    @on_threads(3)
    def read():
        rank = idist.get_rank()
        loader = Loader((20, 17, 30)[rank])
        assert current().store() is None
        for _ in range(2):
            assert list(ending(loader, 4)) == list(range(17))
        failing = Loader(5, ValueError("broken" * 1000)) if rank == 1 else Loader(9)
        with pytest.raises(ValueError if rank == 1 else RuntimeError, match="broken"):
            list(ending(failing, 4))

    with mock.patch(
        "camshaft.distributed.agreement.ends.all_gather",
        side_effect=lambda said: calls.append(said) or idist.all_gather(said),
    ):
        read()
    assert len(calls) == 3 * (5 + 5 + 2)


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
    stays = mock.patch.object(ends, "_FAREWELL", HANG)  # however late the other one is
    with stays, mock.patch.object(NativeBackend, "store", side_effect=lambda: stores[0]):
        for batch in ending(Loader(2), 2):
            if rank == 1 and batch == 1:
                time.sleep(0.3)  # it has reported its end, and not read those of the others
    stores.clear()  # and with it on rank 0 the server


@on_ranks(2)
def test_the_end_is_known_before_the_last_step_of_the_others():
    store = dist.distributed_c10d._get_default_store()
    batches = iter(ending(Loader(1), 8))
    assert next(batches) == 0
    if idist.get_rank() == 0:
        assert list(batches) == []
        store.set("through", "")
    store.wait(["through"], TIMEOUT)
    assert list(batches) == []


# --- copying to the GPU ------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)
Pair = namedtuple("Pair", ["x", "y"])


class Cuda:
    """Stands in for torch.cuda, and logs what is done on which stream."""

    def __init__(self):
        self.log = []
        self.tensors = []  # weak references to the copies
        self.inside = None  # the stream that work is given to
        self.consumer = Stream(self, "consumer")

    def Stream(self, device):
        assert device == GPU
        return Stream(self, "side")

    def current_stream(self, device):
        assert device == GPU
        return self.inside or self.consumer

    @contextlib.contextmanager
    def stream(self, stream):
        self.inside = stream
        yield
        self.inside = None


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


class Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.events = cuda, name, 0

    def record_event(self):
        self.events += 1
        self.cuda.log.append(f"{self.name} event {self.events}")
        return self.events

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for {event}")


class Traced(torch.Tensor):
    """A tensor that can be pinned, and logs that it is copied."""

    cuda: Cuda
    pinned = False

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        self.cuda.log.append(f"pin {int(self[0])}")
        copy = traced(self.cuda, int(self[0]))
        copy.pinned = True
        return copy

    def to(self, device, non_blocking):
        assert device == GPU
        assert non_blocking
        assert self.pinned, "a copy from pageable memory holds up the host"
        self.cuda.log.append(f"copy {int(self[0])} on {self.cuda.inside.name}")
        copy = traced(self.cuda, int(self[0]))
        self.cuda.tensors.append(weakref.ref(copy))
        return copy

    def record_stream(self, stream):
        self.cuda.log.append(f"{int(self[0])} used on {stream.name}")


def traced(cuda, number, pinned=False):
    tensor = torch.tensor([number]).as_subclass(Traced)
    tensor.cuda, tensor.pinned = cuda, pinned
    return tensor


def numbered(cuda, count, error=None, pinned=True):
    for number in range(count):
        cuda.log.append(f"load {number}")
        yield traced(cuda, number, pinned)
    if error:
        raise error


@pytest.mark.parametrize("pinned", [True, False])
def test_one_batch_is_kept_ahead_and_the_current_stream_waits_for_its_copy(cuda, pinned):
    for batch in prefetch_to_device(numbered(cuda, 3, pinned=pinned), GPU):
        cuda.log.append(f"step {int(batch[0])}")
        cuda.consumer = Stream(cuda, "other")
    pin = [[] if pinned else [f"pin {number}"] for number in range(3)]
    assert cuda.log == [
        *("load 0", *pin[0], "copy 0 on side", "side event 1"),
        *("load 1", *pin[1], "copy 1 on side", "side event 2"),
        *("consumer waits for 1", "0 used on consumer", "step 0"),
        *("load 2", *pin[2], "copy 2 on side", "side event 3"),
        *("other waits for 2", "1 used on other", "step 1"),
        *("other waits for 3", "2 used on other", "step 2"),
    ]


def test_tensors_in_containers_are_copied_and_nothing_else(cuda):
    packed = pack_sequence([torch.ones(2)])
    elsewhere, sparse, thing = torch.ones(2, device="meta"), torch.eye(2).to_sparse(), object()
    x, y, z = (traced(cuda, number, pinned=True) for number in range(3))
    batch = {"pair": Pair(x, [y, "text", 3, None]), "rest": (z, thing, elsewhere, sparse, packed, {1}, b"bytes")}
    (moved,) = prefetch_to_device([batch], GPU)
    pair, rest = moved["pair"], moved["rest"]
    assert type(pair) is Pair
    assert [int(tensor[0]) for tensor in (pair.x, pair.y[0], rest[0])] == [0, 1, 2]
    assert not {id(x), id(y), id(z)} & {id(pair.x), id(pair.y[0]), id(rest[0])}
    assert pair.y[1:] == ["text", 3, None]
    assert type(rest) is tuple
    for kept, given in zip(rest[1:6], batch["rest"][1:6], strict=True):
        assert kept is given
    assert rest[6] == b"bytes"
    assert sum(line.endswith("used on consumer") for line in cuda.log) == 3


def test_an_error_is_raised_when_its_batch_is_read_ahead(cuda):
    got = []
    loader = prefetch_to_device(numbered(cuda, 4, ValueError("broken")), GPU)
    with pytest.raises(ValueError, match="broken"):
        read_into(got, loader)
    assert got == [0, 1, 2]


@pytest.mark.parametrize("given", [1, 2])
def test_nothing_is_kept_alive_after_the_consumer_stops(cuda, given, request):
    def noted(batch):
        cuda.tensors.append(weakref.ref(batch))
        return batch

    gc.disable()  # so that reference cycles are found
    request.addfinalizer(gc.enable)
    steps = iter(prefetch_to_device(map(noted, numbered(cuda, 5)), GPU))
    for _ in range(given):
        next(steps)
    assert len(cuda.tensors) == 2 * (given + 1)
    assert sum(one() is not None for one in cuda.tensors) == 2, "the one ahead, here and there"
    steps.close()
    assert not any(one() is not None for one in cuda.tensors)


class Remembering:
    """Has a state; after its end it restarts."""

    def __init__(self, cuda=None):
        self.cuda, self.state = cuda, {"now": 0}

    def __iter__(self):
        for number in range(self.state["now"], 5):
            self.state["now"] = number + 1
            yield traced(self.cuda, number, pinned=True)
        self.state["now"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = dict(state_dict)


def test_the_state_does_not_count_batches_read_ahead(cuda):
    loader = prefetch_to_device(Remembering(cuda), GPU)
    assert loader.state_dict() == {"now": 0}
    assert [loader.state_dict()["now"] for _ in loader] == [1, 2, 3, 4, 5]
    assert loader.state_dict() == {"now": 0}
    again = prefetch_to_device(Remembering(cuda), GPU)
    again.load_state_dict({"now": 3})
    assert again.state_dict() == {"now": 3}
    assert [int(batch[0]) for batch in again] == [3, 4]


def test_a_prefetching_loader_has_the_attributes_of_the_loader(cuda, monkeypatch):
    monkeypatch.setattr(read_ahead, "current", lambda: type("Backend", (), {"device": GPU}))
    inner = DataLoader([1.0, 2.0, 3.0], batch_size=2)
    loader = prefetch_to_device(inner)
    assert loader is not inner
    assert not isinstance(loader, Stateful)
    assert isinstance(prefetch_to_device(Remembering()), Stateful)
    assert len(loader) == 2
    assert loader.dataset is inner.dataset
    assert loader.batch_size == 2
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch_to_device(iter([])))


def test_on_other_devices_the_loader_is_returned():
    loader = DataLoader([1.0])
    for device in ("cpu", torch.device("meta"), "xla:0", "mps"):
        assert prefetch_to_device(loader, device) is loader
    if not torch.cuda.is_available():  # tests/gpu sees the default otherwise
        assert prefetch_to_device(loader) is loader
