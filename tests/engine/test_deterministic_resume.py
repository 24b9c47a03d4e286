"""A resumed run gets the batches of the uninterrupted one, from wherever it goes on."""

from __future__ import annotations

import itertools
import warnings
from io import BytesIO

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from camshaft.distributed import auto_dataloader, get_rank
from camshaft.distributed.data import ExactBatchSampler
from camshaft.engine import DeterministicEngine, Events
from camshaft.engine.deterministic import ReproducibleBatchSampler
from camshaft.utils import manual_seed
from tests.engine.loaders import (
    SAMPLERS,
    SEED,
    Noisy,
    Numbers,
    SizedNoisy,
    SizedStream,
    Stream,
    batches_of,
    loader_of,
    noise,
    progress,
    saved_at_every_iteration,
)
from tests.threads import on_threads

ALL_SAMPLERS = (*SAMPLERS, "backwards")
DRIFT = "ignore:the sampler of the data has epochs of its own:UserWarning"
ITERABLES = {
    "list": lambda: list(range(5)),
    "iterable": lambda: Noisy(5),
    "sized iterable": lambda: SizedNoisy(5),
    "stream": lambda: DataLoader(Stream(5), batch_size=2, collate_fn=list),
    "sized stream": lambda: DataLoader(SizedStream(5), batch_size=2, collate_fn=list),
    "samples without batches": lambda: DataLoader(Numbers(5, augmented=True), batch_size=None, shuffle=True),
}


# --- which samples are in which batch ------------------------------------------------------------------------------


@pytest.mark.filterwarnings(DRIFT)
@pytest.mark.parametrize("length", [4, 3, 6], ids="epoch_length={}".format)
@pytest.mark.parametrize("sampler", ALL_SAMPLERS)
def test_every_iteration_and_epoch_can_be_resumed_from(sampler, length):
    def loader():
        return loader_of(15 if sampler == "distributed" else 8, sampler=sampler)

    whole = batches_of(loader(), 3, length)
    assert len(loader()) == 4
    for iteration in range(3 * length):
        assert batches_of(loader(), 3, length, progress(iteration, length, 3)) == whole[iteration:]
    for epoch in range(3):
        by_epoch = {"epoch": epoch, "epoch_length": length, "max_epochs": 3, "rng_states": None}
        assert batches_of(loader(), 3, length, by_epoch) == whole[epoch * length :]


@pytest.mark.parametrize(
    ("sampler", "size", "length"),
    [("random", 5, 3), ("random", 5, 2), ("random", 5, 4), ("weighted", 4, 2), ("distributed", 7, 2)],
)
def test_every_iteration_can_be_resumed_from_with_workers(sampler, size, length):
    def loader():
        return loader_of(size, sampler=sampler, num_workers=2)

    whole = batches_of(loader(), 2, length)
    for iteration in range(2 * length):
        resumed = batches_of(loader(), 2, length, progress(iteration, length, 2))
        assert (iteration, resumed) == (iteration, whole[iteration:])


def test_the_number_of_workers_does_not_change_the_order():
    assert batches_of(loader_of(8, num_workers=2)) == batches_of(loader_of(8))


def test_workers_that_stay_can_be_resumed_from_too():
    def loader():
        return loader_of(6, num_workers=1, persistent_workers=True)

    whole = batches_of(loader(), 3)
    for iteration in (0, 1, 3, 5):
        assert batches_of(loader(), 3, resumed_from=progress(iteration, 3, 3)) == whole[iteration:]


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    length=st.integers(1, 9),
    epochs=st.integers(1, 4),
    sampler=st.sampled_from(ALL_SAMPLERS),
    data=st.data(),
)
def test_any_shape_of_data_and_epochs_can_be_resumed(size, batch_size, length, epochs, sampler, data):
    iteration = data.draw(st.integers(0, epochs * length - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of drifting epochs
        whole = batches_of(loader_of(size, batch_size, sampler), epochs, length)
        resumed = batches_of(loader_of(size, batch_size, sampler), epochs, length, progress(iteration, length, epochs))
    assert len(whole) == epochs * length
    assert resumed == whole[iteration:]


def test_the_passes_differ_and_the_seed_of_the_user_decides():
    whole = batches_of(loader_of(20, 20), 3)
    assert len({tuple(batch) for batch in whole}) == 3
    engine = DeterministicEngine(lambda engine, batch: batch)
    manual_seed(SEED + 1)
    assert engine.run(loader_of(20, 20)).output not in whole


def test_no_sample_is_loaded_in_vain():
    loader = loader_of(8)
    resumed = batches_of(loader, 3, resumed_from=progress(6, 4, 3))
    assert loader.dataset.loaded == [index for batch in resumed for index in batch]


def test_a_loader_that_can_begin_anywhere_already_is_taken_as_it_is():
    def loader():
        plain = loader_of(8)
        return DataLoader(plain.dataset, batch_sampler=ReproducibleBatchSampler(plain.batch_sampler), collate_fn=list)

    assert batches_of(loader(), resumed_from=progress(3, 4, 2)) == batches_of(loader())[3:]
    engine = DeterministicEngine(lambda engine, batch: None)
    given = loader()
    assert engine.run(given).dataloader is given


def test_the_loader_of_the_user_stays_as_it_is():
    loader = loader_of(8)
    before = dict(vars(loader))
    engine = DeterministicEngine(lambda engine, batch: None)
    engine.run(loader)
    assert vars(loader) == before
    assert engine.state.dataloader is not loader


@pytest.mark.parametrize("iteration", range(12))
def test_samplers_know_the_epoch_when_it_starts(iteration):
    loader, seen = loader_of(15, sampler="distributed"), []
    engine = DeterministicEngine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda engine: seen.append(loader.sampler.epoch))
    engine.load_state_dict(progress(iteration, 4, 3))
    engine.run(loader)
    assert seen == [0, 1, 2][iteration // 4 :]


def test_a_loader_that_replaces_another_can_begin_anywhere_too():
    def replace(engine):
        engine.state.dataloader = loader_of(6)

    engine = DeterministicEngine(lambda engine, batch: None)
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, replace)
    engine.run(loader_of(8), max_epochs=2)
    assert isinstance(engine.state.dataloader.batch_sampler, ReproducibleBatchSampler)
    assert len(engine.state.dataloader) == 3


# --- other iterables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ITERABLES)
@pytest.mark.parametrize("length", [3, 5, 7])
def test_data_without_a_sampler_are_read_up_to_the_place(kind, length):
    """So the random states come to be what they were, even if they were not saved."""
    make = ITERABLES[kind]
    whole, saved = saved_at_every_iteration(make(), 3, length)
    for iteration in range(3 * length):
        assert batches_of(make(), 3, length, saved[iteration]) == whole[iteration:]
        assert batches_of(make(), 3, length, progress(iteration, length, 3)) == whole[iteration:]


def test_sized_data_are_read_from_the_beginning_of_the_pass():
    data = SizedNoisy(5)
    batches_of(data, 3, resumed_from=progress(12, 5, 3))
    assert data.fetched == 5


def test_generators_are_read_up_to_the_place():
    def batches():
        return ((index, noise()) for index in range(6))

    whole, saved = saved_at_every_iteration(batches(), 2, 3)
    for iteration in range(6):
        assert batches_of(batches(), 2, 3, saved[iteration]) == whole[iteration:]


def test_a_generator_that_ends_before_the_place_is_told_of():
    with pytest.warns(UserWarning, match="the data ran out in epoch 2"):
        assert batches_of(iter([1, 2]), 2, 3, progress(4, 3, 2)) == []


@pytest.mark.parametrize("kind", ["iterable", "stream"])
@pytest.mark.parametrize("iteration", [1, 2])
def test_an_unfinished_first_pass_over_data_of_unknown_length_goes_on(kind, iteration):
    whole, saved = saved_at_every_iteration(ITERABLES[kind](), 2)
    assert saved[iteration]["epoch_length"] is None
    assert batches_of(ITERABLES[kind](), 2, None, saved[iteration]) == whole[iteration:]


# --- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_repeats_from_the_beginning_of_each_pass(workers):
    def loader():
        return loader_of(6, num_workers=workers, augmented=True)

    whole = batches_of(loader(), 3)
    for iteration in (0, 3, 6):
        assert batches_of(loader(), 3, None, progress(iteration, 3, 3)) == whole[iteration:]


def raw(states):
    """Write random states in the layout of old checkpoints."""
    numpy.random.set_state(states[2])
    return [states[0], states[1], numpy.random.get_state()]


def through_a_file(states):
    file = BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stored", [list, raw, through_a_file], ids=["as it is", "old layout", "from a safe file"])
def test_augmentation_goes_on_in_the_middle_of_a_pass_with_the_random_states_saved_there(stored):
    whole, saved = saved_at_every_iteration(loader_of(8, augmented=True), 2)
    for iteration in range(8):
        state_dict = {**saved[iteration], "rng_states": stored(saved[iteration]["rng_states"])}
        assert batches_of(loader_of(8, augmented=True), 2, None, state_dict) == whole[iteration:]


def test_a_saved_state_comes_back_from_a_safe_file_whole():
    saved = saved_at_every_iteration(loader_of(8), 2)[1][5]
    restored = through_a_file(dict(saved))
    assert {**restored, "rng_states": None} == {**saved, "rng_states": None}
    python, on_cpu, of_numpy = restored["rng_states"]
    assert (python, of_numpy) == (saved["rng_states"][0], saved["rng_states"][2])
    assert on_cpu.equal(saved["rng_states"][1])


def test_random_states_of_the_beginning_of_a_pass_are_not_needed():
    whole, saved = saved_at_every_iteration(loader_of(8, augmented=True), 2)
    saved[4]["rng_states"] = saved[1]["rng_states"]
    assert batches_of(loader_of(8, augmented=True), 2, None, saved[4]) == whole[4:]


def test_random_states_are_forgotten_once_they_were_restored():
    saved = saved_at_every_iteration(loader_of(8), 2)[1]
    engine = DeterministicEngine(lambda engine, batch: engine.terminate())
    engine.load_state_dict(saved[1])
    assert engine.state.rng_states is not None
    engine.run(loader_of(8), max_epochs=3)
    assert engine.state.rng_states is None


# --- loaders that can start at any sample ----------------------------------------------------------------------------


def exact(size=11, **options):
    return auto_dataloader(range(size), **{"batch_size": 3, "shuffle": True, "seed": 3, **options})


@pytest.mark.parametrize("length", [None, 3, 6])
@pytest.mark.parametrize("with_position", [True, False])
def test_a_loader_of_auto_dataloader_is_resumed_without_a_list_of_its_indices(length, with_position):
    def batches(state_dict=None):
        data = exact(collate_fn=list)
        seen = batches_of(data, 3, length, state_dict)
        assert isinstance(data.batch_sampler, ExactBatchSampler)
        return seen

    whole, saved = saved_at_every_iteration(exact(collate_fn=list), 3, length)
    assert [sorted(itertools.chain(*whole[begin : begin + 4])) for begin in (0, 4)] == [list(range(11))] * 2
    for iteration in range(1, 3 * (length or 4)):
        state_dict = dict(saved[iteration])
        assert state_dict["position"]["consumed"] in (0, 3, 6, 9)
        if not with_position:
            del state_dict["position"]
        assert batches(state_dict) == whole[iteration:], iteration


def test_its_batch_sampler_is_used_as_it_is():
    loader = exact()
    engine = DeterministicEngine(lambda engine, batch: None)
    assert engine.run(loader).dataloader is loader


@on_threads(2)
def test_a_rank_knows_the_share_of_its_batches():
    shares = []
    DeterministicEngine(lambda engine, batch: shares.append(engine.batch_share)).run(exact(7, batch_size=4))
    assert shares == ([1.0, 2 / 3] if get_rank() == 0 else [1.0, 4 / 3])


def test_a_loader_without_a_dataset_is_taken():
    class Bare(DataLoader):
        def __init__(self):
            self.batch_sampler = BatchSampler(range(4), 2, False)

        def __iter__(self):
            return iter(self.batch_sampler)

        def __len__(self):
            return 2

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    engine = DeterministicEngine(lambda engine, batch: batch)
    assert engine.run(Bare(), max_epochs=2).iteration == 4
