"""The deterministic engine: order of the data, and resuming."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import random
import warnings
import weakref
from functools import partial
from io import BytesIO

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from camshaft.data import ExactBatchSampler
from camshaft.distributed import auto_dataloader, get_rank
from camshaft.engine import DeterministicEngine, Engine, Events
from camshaft.engine.deterministic import ReproducibleBatchSampler, keep_random_state, update_dataloader
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
from tests.engine.traces import Sizeless, Trace, at, at_position, echo, unsized
from tests.threads import on_threads

# === Samplers, seeds and random states ===


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
@pytest.mark.parametrize("resumed_at", [0, 3, 7])
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


def test_a_state_without_random_states_is_rejected_and_changes_nothing():
    engine = DeterministicEngine(echo)
    before = dict(vars(engine.state))
    with pytest.raises(ValueError, match="rng_states"):
        engine.load_state_dict({"iteration": 3, "epoch_length": 3, "max_epochs": 2})
    assert vars(engine.state) == before


@pytest.mark.parametrize("broken", [7, "states", [1], [1, 2, 3], {"python": 1}], ids=repr)
def test_random_states_of_another_kind_are_rejected_when_they_are_loaded(broken):
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


# === Runs, warnings and global settings ===


DATA_RUN = (1, 2, 3)


def compare(make_data, prepare=lambda engine: None, runs=1, **arguments):
    """Check that events, counters and batches are those of Engine."""
    traces = []
    for kind in (Engine, DeterministicEngine):
        engine = kind(echo)
        trace = Trace(engine, counters=True)
        prepare(engine)
        for _ in range(runs):
            engine.run(make_data(), **arguments)
        traces.append((trace.words, trace.batches, engine.should_terminate))
    assert traces[0] == traces[1]
    assert traces[0][0]


def request(name, **options):
    return lambda engine: getattr(engine, name)(**options)


@pytest.mark.filterwarnings("ignore:the data ran out:UserWarning")
def test_events_come_in_the_same_order_whatever_is_requested():
    for make_data in (
        lambda: list(DATA_RUN),
        lambda: Sizeless(*DATA_RUN),
        lambda: DataLoader(DATA_RUN),
        lambda: unsized(DATA_RUN),
    ):
        for target in ({"max_epochs": 2}, {"max_epochs": 2, "epoch_length": 2}, {"max_iters": 5}):
            compare(make_data, **target)
    for position in range(1, 24):
        for wish in (request("terminate"), request("terminate_epoch"), request("interrupt")):
            compare(lambda: list(DATA_RUN), partial(at_position, position=position, action=wish), runs=2, max_epochs=2)


@pytest.mark.parametrize("pause_at", range(1, 8))
def test_a_pause_changes_no_batch(pause_at):
    engine = DeterministicEngine(lambda engine, batch: seen.append(batch))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=pause_at), lambda engine: engine.interrupt())
    seen = []
    manual_seed(SEED)
    engine.run(loader_of(8), max_epochs=2)
    assert len(seen) == pause_at
    engine.run(loader_of(8), max_epochs=2)
    assert seen == batches_of(loader_of(8))


def test_an_error_leaves_the_engine_usable():
    def fail_once(engine, batch):
        seen.append(batch)
        if engine.state.iteration == 2 and not failed:
            failed.append(batch)
            raise KeyError("no")

    seen, failed = [], []
    engine = DeterministicEngine(fail_once)
    manual_seed(SEED)
    with pytest.raises(KeyError):
        engine.run(loader_of(8), max_epochs=2)
    manual_seed(SEED)
    engine.run(loader_of(8), max_epochs=2)
    whole = batches_of(loader_of(8))
    assert seen == [*whole[:2], *whole[1:]]  # the second batch, with which the step failed, comes again


def test_data_over_a_stream_of_unknown_length_run():
    assert [len(batch) for batch in batches_of(DataLoader(Stream(3), batch_size=2, collate_fn=list), 2)] == [2, 1] * 2


# --- drift, freedom, settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "warnings"), [(None, 0), (2, 0), (1, 1), (3, 1)])
def test_epochs_that_drift_from_those_of_the_sampler_are_warned_about(recwarn, length, warnings):
    DeterministicEngine(echo).run(loader_of(8, sampler="distributed"), max_epochs=2, epoch_length=length)
    messages = [str(one.message) for one in recwarn.list]
    assert len(messages) == warnings
    assert all(f"of 2 batches, but epoch_length is {length}" in message for message in messages)


@pytest.mark.parametrize("sampler", ["random", "weighted", "backwards"])
def test_samplers_without_epochs_do_not_drift(recwarn, sampler):
    DeterministicEngine(echo).run(loader_of(8, sampler=sampler), epoch_length=3)
    assert [str(one.message) for one in recwarn.list] == []


@pytest.mark.parametrize("make_data", [lambda: DATA_RUN, lambda: loader_of(4), lambda: SizedNoisy(3)])
def test_it_is_freed_by_reference_counting(make_data):
    engine = DeterministicEngine(echo)
    engine.logger = logging.Logger("silent", logging.CRITICAL)  # noqa: LOG001 - pytest keeps the records of others
    engine.run(make_data(), max_epochs=2)
    gc.collect()
    gc.disable()
    try:
        watched = weakref.ref(engine)
        del engine
        assert watched() is None
    finally:
        gc.enable()


def torch_settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture(params=[(False, False, True), (True, False, False), (True, True, True)], ids=str)
def settings_of_the_user(request):
    enabled, warn_only, benchmark = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark
    yield request.param
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("ending", ["end", "pause", "error"])
@pytest.mark.parametrize("with_cuda", [None, True, False], ids=["this machine", "CUDA", "no CUDA"])
def test_torch_is_deterministic_on_cuda_during_the_run_alone(monkeypatch, settings_of_the_user, with_cuda, ending):
    if with_cuda is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: with_cuda)
    during = []
    engine = DeterministicEngine(lambda engine, batch: 1 / 0 if ending == "error" else None)
    engine.add_event_handler(Events.STARTED | Events.ITERATION_STARTED, lambda engine: during.append(torch_settings()))
    if ending == "pause":
        at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt())
    if ending == "error":
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    engine.run([1])
    assert during == [(True, True, False) if torch.cuda.is_available() else settings_of_the_user] * 2
    assert torch_settings() == settings_of_the_user


def test_an_error_that_leaves_the_run_leaves_the_settings_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch_settings()
    with pytest.raises(ZeroDivisionError):
        DeterministicEngine(lambda engine, batch: 1 / 0).run([1])
    assert torch_settings() == before


# === Resuming ===


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
@pytest.mark.parametrize("length", [4, 6], ids="epoch_length={}".format)
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


@pytest.mark.parametrize(("sampler", "size", "length"), [("random", 5, 4), ("distributed", 7, 2)])
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


@settings(deadline=None, max_examples=40)
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
@pytest.mark.parametrize("length", [3, 7])
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


def test_a_generator_that_ends_before_the_place_is_warned_about():
    with pytest.warns(UserWarning, match="the data ran out in epoch 2"):
        assert batches_of(iter([1, 2]), 2, 3, progress(4, 3, 2)) == []


@pytest.mark.parametrize("kind", ["iterable", "stream"])
@pytest.mark.parametrize("iteration", [1, 2])
def test_an_unfinished_first_pass_over_data_of_unknown_length_continues(kind, iteration):
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
def test_augmentation_continues_in_the_middle_of_a_pass_with_the_random_states_saved_there(stored):
    whole, saved = saved_at_every_iteration(loader_of(8, augmented=True), 2)
    for iteration in range(8):
        state_dict = {**saved[iteration], "rng_states": stored(saved[iteration]["rng_states"])}
        assert batches_of(loader_of(8, augmented=True), 2, None, state_dict) == whole[iteration:]


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
