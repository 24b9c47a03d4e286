"""The parts of DeterministicEngine: samplers, seeds, random states; test_deterministic_resume.py puts them together."""

from __future__ import annotations

import importlib
import random
import warnings

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from camshaft.engine import DeterministicEngine, Events
from camshaft.engine.deterministic import ReproducibleBatchSampler, keep_random_state, update_dataloader
from camshaft.utils import manual_seed
from tests.engine.loaders import SEED, loader_of, noise, progress
from tests.engine.traces import Sizeless, at, echo

DATA = (1, 2, 3)
KEPT = (
    "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip


class Loader(DataLoader):
    """A loader with a constructor of its own."""

    def __init__(self, size, *, name):
        super().__init__(range(size), batch_size=2, drop_last=True, collate_fn=list)
        self.name = name


# --- update_dataloader ---------------------------------------------------------------------------------------------


def sampler_of(*batches):
    return BatchSampler([index for batch in batches for index in batch], len(batches[0]), drop_last=False)


def test_an_updated_loader_takes_its_batches_from_the_new_sampler_and_keeps_the_rest():
    loader = loader_of(5, num_workers=1, prefetch_factor=3, timeout=7, generator=torch.Generator())
    new = sampler_of([4, 0, 2])
    updated = update_dataloader(loader, new)
    assert type(updated) is DataLoader
    assert [getattr(updated, name) for name in KEPT] == [getattr(loader, name) for name in KEPT]
    assert (updated.batch_sampler, updated.batch_size, updated.drop_last, len(updated)) == (new, None, False, 1)
    assert list(updated) == [[4, 0, 2]]


def test_the_loader_that_was_updated_stays_as_it_was():
    loader = loader_of(4, sampler="distributed")
    before = dict(vars(loader))
    list(update_dataloader(loader, sampler_of([0])))
    assert vars(loader) == before


def test_loaders_of_every_class_and_with_attributes_of_their_own_can_be_updated():
    loader = Loader(5, name="digits")
    loader.note = "added later"
    updated = update_dataloader(loader, sampler_of([3], [1]))
    assert (type(updated), updated.name, updated.note) == (Loader, "digits", "added later")
    assert list(updated) == [[3], [1]]


def test_an_updated_loader_does_not_share_workers_that_stay():
    loader = loader_of(4, num_workers=1, persistent_workers=True)
    seen = sorted(index for batch in loader for index in batch)
    updated = update_dataloader(loader, sampler_of([3], [1]))
    assert list(updated) == list(updated) == [[3], [1]]
    assert sorted(index for batch in loader for index in batch) == seen == [0, 1, 2, 3]


# --- ReproducibleBatchSampler --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [RandomSampler(range(3)), [[0, 1], [2]], None], ids=["sampler", "list", "None"])
def test_only_batch_samplers_can_be_made_reproducible(sampler):
    with pytest.raises(TypeError, match=r"batch_sampler must be a torch.utils.data.BatchSampler, got"):
        ReproducibleBatchSampler(sampler)


def test_a_start_holds_for_one_pass_and_does_not_change_the_length():
    wrapped = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    sampler = ReproducibleBatchSampler(wrapped, start_iteration=2)
    assert (sampler.batch_sampler, sampler.sampler) == (wrapped, wrapped.sampler)
    assert (sampler.start_iteration, len(sampler)) == (2, 3)
    assert list(sampler) == [[4]]
    assert (sampler.start_iteration, len(sampler)) == (None, 3)
    assert list(sampler) == sampler.batch_indices == [[0, 1], [2, 3], [4]]


def test_all_batches_of_a_pass_are_drawn_with_the_first_or_on_request():
    sampler = ReproducibleBatchSampler(BatchSampler(RandomSampler(range(50)), 5, drop_last=False))
    manual_seed(SEED)
    expected = list(sampler)
    manual_seed(SEED)
    batches = iter(sampler)
    first = next(batches)
    manual_seed(SEED + 1)
    assert [first, *batches] == expected == sampler.batch_indices
    assert list(sampler) != expected
    batches = iter(sampler)
    manual_seed(SEED)
    sampler.setup_batch_indices()
    manual_seed(SEED + 1)
    assert list(batches) == expected == sampler.batch_indices


@pytest.fixture(scope="module")
def ignite():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports parts of torch that are deprecated
        return importlib.import_module("ignite.engine.deterministic")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("resumed_at", [0, 1, 3, 7])
def test_the_order_for_a_seed_is_that_of_pytorch_ignite(workers, resumed_at, ignite):
    def drawn_by(kind):
        seen = []
        engine = kind(lambda engine, batch: seen.append(batch.tolist()))
        state = {"iteration": resumed_at, "epoch_length": 3, "max_epochs": 3, "rng_states": None}
        if resumed_at:
            engine.load_state_dict(state)
        manual_seed(SEED)
        engine.run(DataLoader(range(6), batch_size=2, shuffle=True, num_workers=workers), max_epochs=3)
        return seen

    theirs = drawn_by(ignite.DeterministicEngine)
    assert len(theirs) == 9 - resumed_at
    assert drawn_by(DeterministicEngine) == theirs


def test_the_order_of_a_reproducible_batch_sampler_in_a_loader_is_that_of_pytorch_ignite(ignite):
    passes = []
    for kind in (ignite.ReproducibleBatchSampler, ReproducibleBatchSampler):
        manual_seed(SEED)
        loader = DataLoader(range(9), batch_sampler=kind(BatchSampler(RandomSampler(range(9)), 2, drop_last=False)))
        passes.append([batch.tolist() for _ in range(2) for batch in loader])
    assert passes[0] == passes[1]


# --- keep_random_state ---------------------------------------------------------------------------------------------


def test_a_function_that_keeps_the_random_state_is_as_it_was_and_changes_no_draw_after_it():
    @keep_random_state
    def draw(factor, *, shift):
        """Draw."""
        return factor * numpy.array(noise()) + shift

    manual_seed(SEED)
    expected = numpy.array(noise())
    manual_seed(SEED)
    assert (draw(2, shift=1) == 2 * expected + 1).all()
    assert (numpy.array(noise()) == expected).all()
    assert (draw.__name__, draw.__doc__) == ("draw", "Draw.")


def test_the_random_state_is_kept_by_functions_that_raise_too():
    @keep_random_state
    def fail():
        manual_seed(SEED + 1)
        raise KeyError("no")

    manual_seed(SEED)
    expected = noise()
    manual_seed(SEED)
    with pytest.raises(KeyError):
        fail()
    assert noise() == expected


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_the_seed_is_drawn_from_torch_when_a_run_starts():
    engine = DeterministicEngine(echo)
    seen = []
    engine.add_event_handler(Events.STARTED, lambda engine: seen.append(engine.state.seed), order=-1)
    assert engine.state.seed is None
    for seed in (SEED, SEED, SEED + 1):
        manual_seed(seed)
        engine.run(DATA)
        manual_seed(seed)
        assert seen[-1] == engine.state.seed == int(torch.randint(0, 10**9, (1,)))
    assert seen[0] == seen[1] != seen[2]
    engine.run(DATA)
    assert seen[3] != seen[2]


def offsets(data, *, start=None, action=None, **arguments):
    """Give, for each iteration, the seed that is in force, counted from that of the run."""
    found = []
    engine = DeterministicEngine(lambda engine, batch: found.append(torch.initial_seed() - engine.state.seed))
    if start is not None:
        engine.load_state_dict({**start, "rng_states": None})
    if action is not None:
        action(engine)
    engine.run(data, **arguments)
    return found


def end_epoch(event, firing=1):
    return lambda engine: at(engine, event, lambda engine: engine.terminate_epoch(), firing)


SHORTENED = {"max_epochs": 3, "epoch_length": 3}


@pytest.mark.parametrize(
    ("data", "arguments", "expected"),
    [
        (DATA, {"max_epochs": 3}, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (DATA, {"max_epochs": 2, "epoch_length": 2}, [0, 0, 0, 1]),
        (DATA, {"max_epochs": 2, "epoch_length": 4}, [0, 0, 0, 1, 1, 1, 2, 2]),
        (loader_of(6), {"max_epochs": 2, "epoch_length": 4}, [0, 0, 0, 1, 1, 1, 2, 2]),
        (Sizeless(*DATA), {"max_epochs": 2}, [0, 0, 0, 3, 3, 3]),
        (DATA, {"start": progress(7, 3, 3)}, [2, 2]),
        (DATA, {"start": progress(7, 4, 3)}, [2, 2, 3, 3, 3]),
        (Sizeless(*DATA), {"start": progress(7, 4, 2)}, [6]),
        # also after an epoch that ended early, however many iterations it had
        (DATA, {"action": end_epoch(Events.ITERATION_COMPLETED), **SHORTENED}, [0, 1, 1, 1, 2, 2, 2]),
        (DATA, {"action": end_epoch(Events.ITERATION_COMPLETED, 2), **SHORTENED}, [0, 0, 1, 1, 1, 2, 2, 2]),
        (DATA, {"action": end_epoch(Events.ITERATION_COMPLETED, 5), **SHORTENED}, [0, 0, 0, 1, 1, 2, 2, 2]),
        (DATA, {"action": end_epoch(Events.GET_BATCH_STARTED), **SHORTENED}, [1, 1, 1, 2, 2, 2]),
        (DATA, {"action": end_epoch(Events.GET_BATCH_STARTED, 4), **SHORTENED}, [0, 0, 0, 2, 2, 2]),
        (DATA, {"action": end_epoch(Events.DATALOADER_STOP_ITERATION), **SHORTENED}, [0, 0, 0, 2, 2, 2]),
    ],
)
def test_each_pass_is_seeded_by_its_number(data, arguments, expected):
    assert offsets(data, **arguments) == expected


def test_python_torch_and_numpy_are_seeded_alike():
    engine = DeterministicEngine(lambda engine, batch: noise())
    output = engine.run([1]).output
    manual_seed(engine.state.seed)
    assert noise() == output


# --- the state -----------------------------------------------------------------------------------------------------


def test_the_random_states_of_the_moment_are_saved():
    engine = DeterministicEngine(echo)
    assert (engine.state.rng_states, engine.state_dict_user_keys) == (None, ["rng_states"])
    for _ in range(2):
        saved = engine.state_dict()
        assert list(saved) == ["epoch_length", "iteration", "max_epochs", "rng_states"]
        assert saved["rng_states"][0] == random.getstate()
        assert saved["rng_states"][1].equal(torch.get_rng_state())
        assert saved["rng_states"][2]["state"]["key"] == numpy.random.get_state()[1].tolist()
        noise()
    assert engine.state.rng_states is None


def test_a_state_without_random_states_is_refused_and_changes_nothing():
    engine = DeterministicEngine(echo)
    before = dict(vars(engine.state))
    with pytest.raises(ValueError, match="rng_states"):
        engine.load_state_dict({"iteration": 3, "epoch_length": 3, "max_epochs": 2})
    assert vars(engine.state) == before


@pytest.mark.parametrize("broken", [7, "states", [1], [1, 2, 3], {"python": 1}], ids=repr)
def test_random_states_of_another_kind_are_refused_when_they_are_loaded(broken):
    engine = DeterministicEngine(echo)
    before = dict(vars(engine.state))
    with pytest.raises((TypeError, ValueError), match="state"):
        engine.load_state_dict({**progress(1, 3, 2), "rng_states": broken})
    assert vars(engine.state) == before


@pytest.mark.parametrize("arguments", [{}, {"max_epochs": 5}, {"epoch_length": 3}])
@pytest.mark.parametrize("has_run", [False, True])
def test_data_must_be_given_and_else_nothing_changes(has_run, arguments):
    engine = DeterministicEngine(echo)
    if has_run:
        engine.run(DATA, max_epochs=2)
    before = dict(vars(engine.state))
    with pytest.raises(ValueError, match="data must be given to DeterministicEngine, got None"):
        engine.run(**arguments)
    assert vars(engine.state) == before
    assert engine.run(DATA, max_epochs=3).epoch == 3
