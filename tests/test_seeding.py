from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.seeding import capture_random_state, manual_seed, preserved_random_state, restore_random_state


def draw():
    return random.random(), random.gauss(0, 1), torch.rand(1).item(), numpy.random.rand(), numpy.random.randn()


# 4.4 and U2


@given(st.integers() | st.sampled_from([-1, 2**32, 2**63, 2**64, -(2**80), 10**30]))
def test_any_integer_seeds_all_generators(seed):
    manual_seed(seed)
    first = draw()
    manual_seed(seed)
    assert draw() == first


@pytest.mark.parametrize("seed", [0, 2**32 - 1, -1, -(2**63), 2**32 + 5, 2**64 - 1, numpy.int64(5)])
def test_a_seed_is_used_unchanged_and_reduced_only_to_the_range_of_numpy(seed):
    manual_seed(seed)
    ours = random.random(), torch.initial_seed(), numpy.random.rand()
    random.seed(int(seed)), torch.manual_seed(int(seed)), numpy.random.seed(int(seed) % 2**32)
    assert ours == (random.random(), torch.initial_seed(), numpy.random.rand())


def test_torch_seeds_its_devices_too(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    manual_seed(5)
    assert seeds == [5]


@pytest.mark.parametrize("seed", [1.0, "1", None])
def test_a_seed_must_be_an_integer_and_is_checked_first(seed):
    manual_seed(1)
    expected = draw()
    manual_seed(1)
    with pytest.raises(TypeError, match="seed must be an integer, got"):
        manual_seed(seed)
    assert draw() == expected


def test_numpy_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    manual_seed(1)
    state = capture_random_state()
    assert set(state) == {"python", "torch"}
    drawn = random.random(), torch.rand(1)
    restore_random_state({**state, "numpy": "of another machine"})
    assert drawn == (random.random(), torch.rand(1))


@pytest.mark.parametrize("runs", [True, False])
def test_xla_is_seeded_if_it_is_running_and_is_not_started(monkeypatch, runs):
    seeds = []
    library = SimpleNamespace(_XLAC=SimpleNamespace(_xla_runtime_is_initialized=lambda: runs))
    monkeypatch.setitem(sys.modules, "torch_xla", library)
    monkeypatch.setitem(
        sys.modules, "torch_xla.core.xla_model", SimpleNamespace(set_rng_state=lambda seed: seeds.append(seed))
    )
    manual_seed(7)
    manual_seed(-1)
    assert seeds == ([7, 2**64 - 1] if runs else [])


# Capture and restore


def saved_and_loaded(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("bit_generator", [numpy.random.MT19937, numpy.random.PCG64, numpy.random.Philox])
def test_a_state_survives_a_checkpoint_that_cannot_run_code(tmp_path, bit_generator):
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(bit_generator(3))
    try:
        draw()  # Python and NumPy store the second number of a Gaussian pair in their states
        state = saved_and_loaded(capture_random_state(), tmp_path)
        first = draw()
        restore_random_state(state)
        assert draw() == first
    finally:
        numpy.random.set_bit_generator(before)


def test_capturing_draws_nothing_and_copies_the_states():
    manual_seed(3)
    expected = draw()
    manual_seed(3)
    state = capture_random_state()
    assert draw() == expected
    restore_random_state(state)
    assert draw() == expected


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_old_layout_is_restored(kind):
    state = kind([random.getstate(), torch.get_rng_state(), numpy.random.get_state()])
    first = draw()
    restore_random_state(state)
    assert draw() == first


def test_the_old_layout_without_numpy_leaves_numpy_alone():
    state = [random.getstate(), torch.get_rng_state()]
    first = random.random(), torch.rand(1)
    numpy_state = capture_random_state()["numpy"]
    restore_random_state(state)
    assert capture_random_state()["numpy"] == numpy_state
    assert first == (random.random(), torch.rand(1))


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (17, TypeError),
        (None, TypeError),
        ({}, ValueError),
        ({"python": random.getstate()}, ValueError),
        ([random.getstate()], ValueError),
        ([random.getstate(), torch.get_rng_state(), numpy.random.get_state(), None], ValueError),
        ({"python": (9, (), None), "torch": torch.get_rng_state()}, ValueError),
        ({"python": random.Random(1).getstate(), "torch": torch.zeros(3, dtype=torch.uint8)}, ValueError),
        ({"python": random.Random(1).getstate(), "torch": None}, ValueError),
        ([random.Random(1).getstate(), torch.get_rng_state(), ("MT19937", [1])], ValueError),
    ],
)
def test_a_broken_state_changes_no_generator(broken, error):
    state = capture_random_state()
    first = draw()
    restore_random_state(state)
    with pytest.raises(error, match="state must"):
        restore_random_state(broken)
    assert draw() == first


# preserved_random_state, E26


def test_a_block_restores_the_generators_also_after_an_error():
    manual_seed(3)
    first = draw()
    for error in (None, KeyError, KeyboardInterrupt):
        manual_seed(3)
        try:
            with preserved_random_state():
                draw()
                manual_seed(4)
                if error:
                    raise error
        except (KeyError, KeyboardInterrupt):
            pass
        assert draw() == first


# Devices, with a fake device module


class Device:
    """Two devices whose generator states are tensors with a number."""

    def __init__(self, *, initialized=True, available=True):
        self.initialized, self.available = initialized, available
        self.states = [torch.tensor([1]), torch.tensor([2])]

    def is_available(self):
        return self.available

    def is_initialized(self):
        return self.initialized

    def get_rng_state(self):
        return self.states[0]

    def set_rng_state(self, state):
        self.states[0] = state

    def get_rng_state_all(self):
        return list(self.states)

    def set_rng_state_all(self, states):
        self.states = states


@pytest.fixture(params=["cuda", "xpu", "mps"])
def kind(request):
    return request.param


@pytest.fixture
def use(monkeypatch, kind):
    def use(device):
        monkeypatch.setattr(torch, kind, device)
        if kind == "mps":
            monkeypatch.setattr(torch.backends.mps, "is_available", device.is_available)
            device.states = device.states[:1]
        return device

    return use


def test_a_block_preserves_device_generators_unless_disabled(use):
    device = use(Device())
    with preserved_random_state():
        device.states[0] = torch.tensor([9])
    assert device.states[0].item() == 1
    with preserved_random_state(devices=False):
        device.states[0] = torch.tensor([9])
    assert device.states[0].item() == 9


def test_an_uninitialized_device_is_not_captured_or_initialized(use, kind):
    device = use(Device(initialized=False, available=kind != "mps"))
    with preserved_random_state():
        device.states[0] = torch.tensor([9])
    assert device.states[0].item() == 9
    assert not device.initialized
