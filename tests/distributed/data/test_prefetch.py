"""Batches are copied one ahead, on a stream of their own, in order, and nothing is lost, kept or changed on the way."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import namedtuple
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import camshaft.distributed as idist
from camshaft.distributed.data import prefetch
from camshaft.distributed.data.prefetch import Copies, Prefetching, StatefulPrefetching, prefetch_to_device
from camshaft.types import Stateful

GPU = torch.device("cuda", 0)
Pair = namedtuple("Pair", ["x", "y"])


class Cuda:
    """What torch.cuda has, writing down who does what."""

    def __init__(self):
        self.log = []
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
    """A tensor that can be pinned, and says that it is copied."""

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
        return traced(self.cuda, int(self[0]))

    def record_stream(self, stream):
        self.cuda.log.append(f"{int(self[0])} used on {stream.name}")


def traced(cuda, number, pinned=False):
    tensor = torch.tensor([number]).as_subclass(Traced)
    tensor.cuda, tensor.pinned = cuda, pinned
    return tensor


def batches(cuda, count, error=None, pinned=True):
    for number in range(count):
        cuda.log.append(f"load {number}")
        yield traced(cuda, number, pinned)
    if error:
        raise error


def test_one_batch_is_kept_ahead():
    cuda = Cuda()
    for batch in Prefetching(batches(cuda, 3), GPU, cuda):
        cuda.log.append(f"step {int(batch[0])}")
    assert cuda.log == [
        *("load 0", "copy 0 on side", "side event 1"),
        *("load 1", "copy 1 on side", "side event 2"),
        *("consumer waits for 1", "0 used on consumer", "step 0"),
        *("load 2", "copy 2 on side", "side event 3"),
        *("consumer waits for 2", "1 used on consumer", "step 1"),
        *("consumer waits for 3", "2 used on consumer", "step 2"),
    ]


def test_the_stream_that_waits_is_that_of_the_step():
    cuda = Cuda()
    steps = iter(Prefetching(batches(cuda, 2), GPU, cuda))
    next(steps)
    cuda.consumer = Stream(cuda, "other")
    next(steps)
    assert cuda.log[-2:] == ["other waits for 2", "1 used on other"]


def test_what_is_not_pinned_is_pinned_first():
    cuda = Cuda()
    list(Prefetching(batches(cuda, 1, pinned=False), GPU, cuda))
    assert cuda.log[:3] == ["load 0", "pin 0", "copy 0 on side"]


def test_tensors_are_found_in_containers_and_all_else_stays():
    cuda = Cuda()
    packed = pack_sequence([torch.ones(2)])
    elsewhere, sparse, thing = torch.ones(2, device="meta"), torch.eye(2).to_sparse(), object()
    x, y, z = (traced(cuda, number, pinned=True) for number in range(3))
    batch = {"pair": Pair(x, [y, "text", 3, None]), "rest": (z, thing, elsewhere, sparse, packed, {1}, b"bytes")}
    (moved,) = Prefetching([batch], GPU, cuda)
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


@pytest.mark.parametrize("good", [0, 1, 4])
def test_an_error_comes_at_its_batch(good):
    cuda, got = Cuda(), []
    loader = Prefetching(batches(cuda, good, ValueError("broken")), GPU, cuda)
    with pytest.raises(ValueError, match="broken"):
        read_into(got, loader)
    assert got == list(range(good))


def read_into(got, loader):
    for batch in loader:
        got.append(int(batch[0]))


def test_an_error_does_not_hold_the_loader():
    cuda = Cuda()
    loader = (traced(cuda, 1 // number, pinned=True) for number in (1, 0))
    gone = weakref.ref(loader)
    with no_collection():
        try:
            read_into([], Prefetching(loader, GPU, cuda))
        except ZeroDivisionError:
            del loader
        assert gone() is None


@contextlib.contextmanager
def no_collection():
    """Let what refers to itself live, so that a test sees it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("given", [0, 1, 2])
def test_nothing_is_kept_when_nobody_reads_on(given):
    cuda, alive = Cuda(), []

    class Watched(Copies):
        def begin(self, batch):
            alive.append(weakref.ref(batch))
            copy = super().begin(batch)
            alive.append(weakref.ref(copy._batch))
            return copy

    with no_collection(), mock.patch.object(prefetch, "Copies", Watched):
        steps = iter(Prefetching(batches(cuda, 5), GPU, cuda))
        for _ in range(given):
            next(steps)
        assert len(alive) == (2 * (given + 1) if given else 0)
        assert sum(one() is not None for one in alive) == (2 if given else 0), "the one ahead, here and there"
        steps.close()
        assert not any(one() is not None for one in alive)


class Remembering:
    """Knows where it is; behind its end it begins anew."""

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


def test_the_state_is_that_of_the_batches_given():
    cuda = Cuda()
    loader = StatefulPrefetching(Remembering(cuda), GPU, cuda)
    assert loader.state_dict() == {"now": 0}
    assert [loader.state_dict()["now"] for _ in loader] == [1, 2, 3, 4, 5]
    assert loader.state_dict() == {"now": 0}
    again = StatefulPrefetching(Remembering(cuda), GPU, cuda)
    again.load_state_dict({"now": 3})
    assert again.state_dict() == {"now": 3}
    assert [int(batch[0]) for batch in again] == [3, 4]


def test_a_loader_looks_the_same(monkeypatch):
    monkeypatch.setattr(prefetch, "current", lambda: type("Backend", (), {"device": GPU}))
    inner = DataLoader([1.0, 2.0, 3.0], batch_size=2)
    loader = prefetch_to_device(inner)
    assert isinstance(loader, Prefetching)
    assert not isinstance(loader, Stateful)
    assert isinstance(prefetch_to_device(Remembering()), Stateful)
    assert len(loader) == 2
    assert loader.dataset is inner.dataset
    assert loader.batch_size == 2
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch_to_device(iter([])))


@pytest.mark.parametrize("device", ["cpu", torch.device("meta"), "xla:0", "mps"])
def test_elsewhere_nothing_happens(device):
    loader = DataLoader([1.0])
    assert prefetch_to_device(loader, device) is loader


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPU then, as tests/gpu sees")
def test_the_device_is_that_of_the_run():
    assert idist.device().type == "cpu"
    loader = [torch.ones(1)]
    assert prefetch_to_device(loader) is loader
