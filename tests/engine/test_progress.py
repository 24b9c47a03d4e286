"""Progress: what is saved and loaded, and where runs start and resume."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict, UserDict, defaultdict
from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, get_worker_info

import camshaft.distributed as idist
from camshaft.engine import DeterministicEngine, Engine, Events, State, create_supervised_trainer
from camshaft.utils import manual_seed
from tests.engine.traces import IT, IT_AGAIN, Sizeless, at, at_position, echo, flat, traced, unsized
from tests.ranks import context
from tests.threads import run_on_threads

DATA = [1, 2]
FULL = {"epoch_length": 4, "iteration": 6, "max_epochs": 3}


def without(*names, **more):
    return {**{name: value for name, value in FULL.items() if name not in names}, **more}


def progress(engine):
    state = engine.state
    return state.epoch, state.iteration, state.max_epochs, state.max_iters


# === Saving and loading ===


def test_the_state_of_a_new_engine():
    found = Engine(echo).state_dict()
    assert type(found) is OrderedDict
    assert list(found.items()) == [("epoch_length", None), ("iteration", 0), ("max_epochs", None)]


@pytest.mark.parametrize(
    ("arguments", "saved"),
    [
        ({"max_epochs": 2}, {"epoch_length": 3, "iteration": 6, "max_epochs": 2}),
        ({"max_iters": 4}, {"epoch_length": 3, "iteration": 4, "max_iters": 4}),
    ],
)
def test_the_target_that_is_set_is_saved(arguments, saved):
    engine = Engine(echo)
    engine.run([1, 2, 3], **arguments)
    epoch, done = divmod(saved["iteration"], 3)
    assert engine.state_dict() == {**saved, "epochs_completed": epoch, "iterations_in_epoch": done, "data_length": 3}


def test_a_state_can_be_saved_at_any_event():
    engine, saved = Engine(echo), []
    engine.add_event_handler(
        Events.GET_BATCH_STARTED | Events.EPOCH_COMPLETED, lambda: saved.append(engine.state_dict())
    )
    engine.run(unsized("ab"))
    assert [(one["epoch_length"], one["iteration"]) for one in saved] == [(None, 0), (None, 1), (None, 2), (2, 2)]


def test_keys_of_the_user_are_saved_behind_the_others_and_loaded_if_they_are_there():
    engine, other = Engine(echo), Engine(echo)
    for one in (engine, other):
        one.state_dict_user_keys += ["alpha", "beta"]
    with pytest.raises(AttributeError, match="alpha"):
        engine.state_dict()
    engine.state.alpha, engine.state.beta = 0.1, [1, 2]
    assert list(engine.state_dict()) == ["epoch_length", "iteration", "max_epochs", "alpha", "beta"]
    other.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match="beta"):
        other.load_state_dict({**FULL, "alpha": 2})
    assert (other.state.alpha, other.state.beta) == (0.1, [1, 2])
    assert progress(other) == (0, 0, None, None)


@pytest.mark.parametrize(
    ("state_dict", "length", "expected"),
    [
        (FULL, 4, (1, 6, 3, None)),
        (UserDict(without(more=1)), 4, (1, 6, 3, None)),
        (without("iteration", epoch=2), 4, (2, 8, 3, None)),
        (without("max_epochs", max_iters=9), 4, (1, 6, None, 9)),
        (without("iteration", "max_epochs", epoch=1, max_iters=4), 4, (1, 4, None, 4)),
        (without(max_epochs=1, iteration=4), 4, (1, 4, 1, None)),
        (without(max_epochs=None), 4, (1, 6, None, None)),
        (without("max_epochs", max_iters=None), 4, (1, 6, None, None)),
        (without(iteration=0, epoch_length=None), None, (0, 0, 3, None)),
        (without("iteration", epoch=0, epoch_length=None), None, (0, 0, 3, None)),
        (without(epoch_length=None), None, (0, 6, 3, None)),  # from the first pass over data of unknown length
        (Engine(echo).state_dict(), None, (0, 0, None, None)),
    ],
    ids=str,
)
def test_counts_of_completed_work_are_loaded(state_dict, length, expected):
    engine = Engine(echo)
    engine.run([1, 2], max_iters=3)
    engine.state.alpha = 0.1
    engine.load_state_dict(state_dict)
    assert (engine.state.epoch_length, progress(engine)) == (length, expected)
    assert engine.state.alpha == 0.1
    assert not hasattr(engine.state, "more")


@pytest.mark.parametrize(
    ("state_dict", "error", "named"),
    [
        (3, TypeError, "state_dict"),
        ([("iteration", 6)], TypeError, "state_dict"),
        (without("epoch_length"), ValueError, "epoch_length"),
        (without("iteration"), ValueError, "iteration.*epoch"),
        (without(epoch=1), ValueError, "iteration.*epoch"),
        (without("max_epochs"), ValueError, "max_epochs.*max_iters"),
        (without(max_iters=9), ValueError, "max_epochs.*max_iters"),
        (without("iteration", epoch=1, epoch_length=None), ValueError, "epoch_length"),
        *[(without(epoch_length=bad), ValueError, "epoch_length") for bad in (0, -4)],
        (without("iteration", epoch=1, epoch_length=0), ValueError, "epoch_length"),
        (without(iteration=-1), ValueError, "iteration"),
        (without("iteration", epoch=-1), ValueError, "epoch"),
        *[(without(max_epochs=bad), ValueError, "max_epochs") for bad in (0, -3)],
        *[(without("max_epochs", max_iters=bad), ValueError, "max_iters") for bad in (0, 5)],
        (without(iteration=8, max_epochs=1), ValueError, "max_epochs"),
        *[({**FULL, name: bad}, TypeError, name) for name in FULL for bad in ("6", True, 6.0)],
        ({**FULL, "epochs_completed": 1, "iterations_in_epoch": 4}, ValueError, "iterations_in_epoch"),
        ({**FULL, "epochs_completed": 1, "iterations_in_epoch": True}, TypeError, "iterations_in_epoch"),
        ({**FULL, "position": 3}, TypeError, "position"),
        ({**FULL, "position": {"batches": -1}}, ValueError, "position.'batches'"),
        ({**FULL, "position": {"steps": "x"}}, TypeError, "position.'steps'"),
        ({**FULL, "position": {"consumed": True}}, TypeError, "position.'consumed'"),
    ],
    ids=str,
)
def test_a_wrong_state_is_rejected_and_changes_nothing(state_dict, error, named):
    engine = Engine(echo)
    engine.run([1, 2, 3], max_epochs=2)
    before = copy.copy(vars(engine.state))
    with pytest.raises(error, match=named):
        engine.load_state_dict(state_dict)
    assert vars(engine.state) == before
    assert engine.run([1, 2, 3], max_epochs=4).iteration == 12


sizes = st.integers(1, 5)


@settings(deadline=None)
@given(st.data(), sizes, sizes, st.sampled_from(["max_epochs", "max_iters"]), st.integers(1, 12))
def test_a_run_stopped_anywhere_continues_in_another_engine_from_its_saved_state(data, size, length, name, target):
    total = target * length if name == "max_epochs" else target
    stop = data.draw(st.integers(1, total))
    first = Engine(echo)
    at(first, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), firing=stop)
    first.run(range(size), epoch_length=length, **{name: target})
    saved = first.state_dict()
    second, trace = traced()
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    if stop < total:
        second.run(range(size))
        assert len(trace.batches) == total - stop
        assert first.run().iteration == second.state.iteration == total
        assert first.state_dict() == second.state_dict()


@settings(deadline=None)
@given(
    st.integers(0, 30), st.one_of(st.none(), st.integers(1, 6)), st.one_of(st.none(), st.integers(0, 5)), st.booleans()
)
def test_what_was_loaded_is_saved_again(iteration, length, more, by_epochs):
    reached = (iteration // length if length else 0) if by_epochs else iteration
    target = None if more is None else max(1, reached + more)
    name = "max_epochs" if by_epochs or target is None else "max_iters"
    saved = {"epoch_length": length, "iteration": iteration, name: target}
    engine = Engine(echo)
    engine.load_state_dict(saved)
    again = engine.state_dict()
    assert saved.items() <= again.items()
    assert again["epochs_completed"] == (iteration // length if length else 0)


def test_a_state_is_not_loaded_into_the_middle_of_an_epoch():
    engine = Engine(echo)
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=1),
        lambda: engine.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 4}),
    )
    with pytest.raises(RuntimeError, match="own run"):
        engine.run([1, 2], max_epochs=3)
    assert engine.state.iteration == 1


# === New and resumed runs ===


def fresh(engine):
    pass


def done(engine, **arguments):
    engine.run(DATA, **(arguments or {"max_epochs": 5}))


def loaded(engine, iteration=5, max_epochs=4):
    engine.load_state_dict({"iteration": iteration, "epoch_length": 2, "max_epochs": max_epochs})


def loaded_at_end(engine):
    loaded(engine, iteration=8)


def terminated(engine):
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate(), firing=3)
    engine.run(DATA, max_epochs=5)


def suspended(engine):
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), firing=3)
    engine.run(DATA, max_epochs=5)


def failed(engine):
    at(engine, Events.ITERATION_COMPLETED, lambda engine: {}["no"], firing=3)
    with pytest.raises(KeyError):
        engine.run(DATA, max_epochs=5)


def done_with_iterations(engine):
    engine.run(DATA, max_iters=5)  # in the middle of epoch 3


def cut(engine):
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), firing=3)
    engine.run(DATA, max_epochs=2)


BEFORE = [fresh, done, loaded, terminated, suspended, failed]


def after(before):
    """Make an engine that went through something, and a trace of what comes next."""
    engine, trace = traced(counters=True)
    before(engine)
    trace.take()
    trace.batches.clear()
    return engine, trace


@pytest.mark.parametrize(
    ("before", "data", "arguments", "first", "batches", "end"),
    [
        (fresh, DATA, {}, "S 0/0 ES 1/0", [1, 2], (1, 2, 1, None)),
        (done, DATA, {}, "S 0/0 ES 1/0", [1, 2], (1, 2, 1, None)),
        (done, DATA, {"max_epochs": 5}, "S 0/0 ES 1/0", [1, 2] * 5, (5, 10, 5, None)),
        (done, DATA, {"max_epochs": 7}, "S 5/10 ES 6/10", [1, 2] * 2, (7, 14, 7, None)),
        (done_with_iterations, DATA, {"max_iters": 6}, "S 3/5 ES 4/5", [1], (4, 6, None, 6)),
        (done_with_iterations, DATA, {"max_iters": 7}, "S 3/5 ES 4/5", [1, 2], (4, 7, None, 7)),
        # a loaded state, with data that start from the beginning
        (loaded, DATA, {}, "S 2/5 ES 3/5", [1, 2, 1], (4, 8, 4, None)),
        (loaded, [1, 2, 3, 4, 5], {}, "S 2/5 ES 3/5", [1, 2, 3], (4, 8, 4, None)),  # which keeps its length
        (loaded_at_end, DATA, {"max_epochs": 5}, "S 4/8 ES 5/8", [1, 2], (5, 10, 5, None)),
        # a whole epoch follows one that ended early
        (terminated, DATA, {}, "S 2/3 ES 3/3", [1, 2] * 3, (5, 9, 5, None)),
        (cut, DATA, {"max_epochs": 3}, "S 2/3 ES 3/3", [1, 2], (3, 5, 3, None)),
        (suspended, [7, 8, 9], {}, "GS 2/3 GC 2/3", [2, *[1, 2] * 3], (5, 10, 5, None)),
        (failed, [7, 8], {}, "S 1/3 ES 2/3", [*[7, 8] * 3, 7], (5, 10, 5, None)),
    ],
)
def test_where_the_next_run_starts(before, data, arguments, first, batches, end):
    engine, trace = after(before)
    assert engine.run(data, **arguments) is engine.state
    assert trace.take().startswith(first)
    assert trace.batches == batches
    assert progress(engine) == end


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("target", [{}, {"max_epochs": 2}, {"max_iters": 4}], ids=str)
def test_without_a_target_in_the_state_any_run_is_new(before, target):
    engine, trace = after(before)
    engine.state.max_epochs = engine.state.max_iters = None
    engine.run([7, 8, 9], **target)
    expected = {"max_epochs": (2, 6, 2, None), "max_iters": (2, 4, None, 4)}
    assert progress(engine) == expected.get(next(iter(target), ""), (1, 3, 1, None))
    assert trace.words[:2] == ["S 0/0", "ES 1/0"]
    assert trace.batches[:3] == [7, 8, 9]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 14), st.integers(1, 3))
def test_a_state_is_resumed_in_the_epoch_of_its_next_iteration(length, iteration, more):
    epochs = iteration // length + more
    engine, trace = traced(counters=True)
    engine.load_state_dict({"iteration": iteration, "epoch_length": length, "max_epochs": epochs})
    engine.run(epoch_length=length)
    first = [word for word in trace.words if word.startswith(("IC", "ES", "EC"))]
    epoch = iteration // length + 1
    assert first[0] == f"ES {epoch}/{iteration}"
    assert first[length - iteration % length + 1] == f"EC {epoch}/{epoch * length}"
    assert progress(engine) == (epochs, epochs * length, epochs, None)


def test_a_loaded_state_that_is_done_runs_nothing_and_warns_until_it_is_told_to_start_from_the_beginning():
    engine, trace = after(loaded_at_end)
    with pytest.raises(ValueError, match="epoch_length"):
        engine.run(DATA, epoch_length=0)
    for target in ({}, {"max_epochs": 4}):
        with pytest.warns(UserWarning, match="nothing was run: the loaded state has reached its target of 4 epochs"):
            assert engine.run(DATA, **target) is engine.state
    assert progress(engine) == (4, 8, 4, None)
    assert not trace.words
    engine.load_state_dict({"iteration": 7, "epoch_length": 5, "max_iters": 7})
    with pytest.warns(UserWarning, match="target of 7 iterations"):
        engine.run(DATA, max_iters=7)
    engine.state.max_epochs = engine.state.max_iters = None  # as the warning says
    for _ in range(2):
        engine.run(DATA, max_epochs=4)
        assert trace.take().startswith("S 0/0")
        assert progress(engine) == (4, 8, 4, None)


def test_a_loaded_evaluator_runs_again_and_again():
    evaluator, trainer = Engine(lambda engine, batch: batch), Engine(lambda engine, batch: None)
    evaluator.load_state_dict({"iteration": 3, "epoch_length": 3, "max_epochs": 1})
    outputs = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.run(range(3))
        outputs.append(evaluator.state.output)

    trainer.run(range(2), max_epochs=2)
    assert outputs == [2, 2]


def test_a_new_run_takes_the_length_of_its_own_data():
    engine, _ = after(done)
    for data, arguments, length in (([1, 2, 3], {}, 3), (range(4), {"epoch_length": 2}, 2), (range(4), {}, 4)):
        engine.run(data, **arguments)
        assert progress(engine) == (1, length, 1, None)
        assert engine.state.epoch_length == length


@pytest.mark.filterwarnings("ignore:the run resumes after 2 iterations of an epoch, but its data")
@pytest.mark.parametrize("iteration", [0, 6])
def test_a_state_that_does_not_know_its_length_learns_it_when_resumed(iteration):
    def engine():
        engine = Engine(echo)
        engine.load_state_dict({"iteration": iteration, "epoch_length": None, "max_epochs": 3})
        return engine

    for arguments in ({"data": range(4)}, {"data": unsized(range(12)), "epoch_length": 4}, {"epoch_length": 4}):
        state = engine().run(**arguments)
        assert (state.epoch, state.iteration, state.epoch_length) == (3, 12, 4)
    with pytest.raises(ValueError, match="epoch_length"):
        engine().run()
    with pytest.raises(ValueError, match="at least one batch"):
        engine().run([])


@pytest.mark.parametrize("before", BEFORE)
def test_a_state_given_by_hand_is_resumed_in_the_middle_of_its_epoch(before):
    if before is not suspended:
        engine, trace = after(before)
        engine.state = State(iteration=3, epoch=1, epoch_length=2, max_epochs=3)
        engine.run(DATA)
        assert trace.words[6] == "EC 2/4"
        assert progress(engine) == (3, 6, 3, None)


def test_a_state_loaded_when_the_run_has_started_is_where_it_continues():
    engine, trace = traced(counters=True)
    at(engine, Events.STARTED, loaded)
    engine.run(DATA, max_epochs=4)
    assert trace.words[:2] == ["S 0/0", "ES 3/5"]
    assert progress(engine) == (4, 8, 4, None)


def test_counting_epochs_can_be_changed_to_counting_iterations_and_back():
    engine, _ = after(done)
    engine.state.max_epochs = None
    engine.run(DATA, max_iters=3)
    assert progress(engine) == (2, 3, None, 3)
    engine.state.max_iters = None
    engine.run(DATA, max_epochs=2)
    assert progress(engine) == (2, 4, 2, None)


# === Arguments of `run` ===

ALWAYS_WRONG = [
    ({"data": 3}, TypeError, "data"),
    ({"max_epochs": 2, "max_iters": 2}, ValueError, "max_epochs or max_iters"),
    *[({name: 0}, ValueError, name) for name in ("max_epochs", "max_iters", "epoch_length")],
    *[({name: 1.5}, TypeError, name) for name in ("max_epochs", "max_iters", "epoch_length")],
]


def snapshot(engine):
    flags = engine.should_terminate, engine.should_terminate_single_epoch, engine.should_interrupt
    return copy.copy(vars(engine.state)), copy.copy(engine.state.times), flags, engine.last_event_name


def refused(engine, arguments, error, named):
    before = snapshot(engine)
    with pytest.raises(error, match=named):
        engine.run(**{"data": DATA, **arguments})
    assert snapshot(engine) == before


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        *[(before, ALWAYS_WRONG) for before in BEFORE],
        *[(before, [({"max_iters": 20}, ValueError, "max_iters=20.*max_epochs")]) for before in BEFORE[1:]],
        *[(before, [({"max_epochs": 9, "epoch_length": 3}, ValueError, "epoch_length")]) for before in BEFORE[1:]],
        (done, [({"max_epochs": 4}, ValueError, "max_epochs"), ({"data": []}, ValueError, "data")]),
        *[(before, [({"max_epochs": 1}, ValueError, "max_epochs")]) for before in (suspended, terminated, loaded)],
        (fresh, [({"data": []}, ValueError, "data"), ({"data": None, "max_epochs": 3}, ValueError, "epoch_length")]),
    ],
)
def test_wrong_arguments_are_rejected_and_change_nothing(before, wrong):
    def outcome(wrong):
        engine, trace = after(before)
        for arguments, error, named in wrong:
            refused(engine, arguments, error, named)
        engine.run(DATA, max_epochs=6)
        return trace.take(), trace.batches, progress(engine)

    assert outcome(wrong) == outcome([])


@pytest.mark.parametrize("arguments", [{"max_epochs": 2}, {"max_iters": 4}], ids=str)
def test_a_number_of_iterations_is_not_changed_to_epochs_nor_made_smaller(arguments):
    engine, _ = after(done_with_iterations)
    refused(engine, arguments, ValueError, next(iter(arguments)))


def test_a_run_inside_its_own_run_is_rejected_and_the_outer_continues():
    def again(engine):
        refused(engine, {}, RuntimeError, "running")

    for position in range(13):
        engine, trace = traced()
        at_position(engine, position, again)
        engine.run(DATA)
        assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert Engine(lambda engine, batch: again(engine)).run(DATA).iteration == 2


def test_another_engine_may_run_inside_a_run():
    trainer, evaluator = Engine(echo), Engine(echo)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1, 2, 3]))
    trainer.run(DATA, max_epochs=3)
    assert (trainer.state.iteration, evaluator.state.iteration) == (6, 3)


def test_a_loader_without_length_that_raises_type_error_is_data_of_unknown_length():
    class Odd(Sizeless):
        def __len__(self):
            raise TypeError("no length")

    engine, trace = traced()
    engine.run(Odd(1, 2), max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} GS EC · ES {IT_AGAIN} {IT} EC · C")


# === Positions in the data ===


SIZE = 11


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


def loader(batch_size=3, workers=0, seed=0, size=SIZE, **options):
    return idist.auto_dataloader(
        range(size), batch_size=batch_size, num_workers=workers, seed=seed, **{"shuffle": True, **options}
    )


class Recorder:
    """An engine that notes its batches, and its state after each."""

    def __init__(self, kind=Engine):
        self.seen, self.states = [], {}
        self.engine = kind(lambda engine, batch: self.seen.append(batch.tolist()))
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, self.keep)

    def keep(self, engine):
        self.states[engine.state.iteration] = copy.deepcopy(engine.state_dict())

    def resumed(self, state_dict, data, **arguments):
        self.engine.load_state_dict(state_dict)
        self.engine.run(data, **arguments)
        return self.seen


class Stream(IterableDataset):
    reads = 0

    def __init__(self, begin=0):
        self.begin = begin

    def __iter__(self):
        Stream.reads += 1
        return iter(range(self.begin, 10))


def stream():
    return idist.auto_dataloader(Stream(), batch_size=3)


class Stateful(list):
    """Data that know where they are, as the loader of torchdata does."""

    def __init__(self, values):
        super().__init__(values)
        self.given = self.begin = 0

    def __iter__(self):
        self.given, self.begin = self.begin, 0
        for value in list.__getitem__(self, slice(self.given, None)):
            self.given += 1
            yield value

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state_dict):
        self.begin = state_dict["given"]


class EpochStream:
    """Data that resume in the epoch in which they were saved and start others anew, as streams of Hugging Face do."""

    epoch = given = 0
    saved = None

    @property
    def dataset(self):
        return self

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        resumes = self.saved is not None and self.saved["epoch"] == self.epoch
        self.given = self.saved["given"] if resumes else 0
        for number in range(self.given, 5):
            self.given += 1
            yield torch.tensor(10 * self.epoch + number)

    def state_dict(self):
        return {"given": self.given, "epoch": self.epoch}

    def load_state_dict(self, state_dict):
        self.saved = state_dict


@pytest.fixture(scope="module")
def whole():
    recorder = Recorder()
    recorder.engine.run(loader(), max_epochs=7)
    return recorder


def test_an_uninterrupted_run_has_every_sample_once_an_epoch_and_another_order_in_each(whole):
    epochs = [joined(whole.seen[begin : begin + 4]) for begin in range(0, 28, 4)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_every_iteration_can_be_resumed_from(whole, workers, persistent):
    for iteration in range(1, 28, 1 if not workers else 13):
        data = loader(workers=workers, persistent_workers=persistent)
        assert Recorder().resumed(whole.states[iteration], data) == whole.seen[iteration:], iteration
        if persistent:
            data._iterator._shutdown_workers()


def test_an_epoch_that_was_cut_short_is_followed_by_a_new_one(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), recorder.engine.terminate_epoch)
    recorder.engine.add_event_handler(
        Events.EPOCH_COMPLETED(once=1), lambda engine: recorder.states.update(cut=engine.state_dict())
    )
    recorder.engine.run(loader(), max_epochs=2)
    assert recorder.seen == [*whole.seen[:2], *whole.seen[4:8]]
    assert (recorder.states["cut"]["position"]["epoch"], recorder.states["cut"]["position"]["consumed"]) == (1, 0)


def test_with_another_batch_size_the_rest_of_the_epoch_is_seen_once_and_iterations_count_from_where_they_were(whole):
    recorder = Recorder()
    seen = recorder.resumed(whole.states[6], loader(batch_size=2))
    assert sorted(joined(whole.seen[4:6]) + joined(seen[:3])) == list(range(SIZE))
    assert [len(batch) for batch in seen[:3]] == [2, 2, 1]
    assert recorder.engine.state.epoch_length == 6
    assert (recorder.engine.state.iteration, recorder.engine.state.epoch) == (6 + 3 + 5 * 6, 7)
    assert [sorted(joined(seen[begin : begin + 6])) for begin in range(3, len(seen), 6)] == [list(range(SIZE))] * 5


def test_so_does_a_state_loaded_in_started(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.STARTED, lambda: recorder.engine.load_state_dict(whole.states[6]))
    recorder.engine.run(loader(batch_size=2), max_epochs=1)
    assert sorted(joined(whole.seen[4:6]) + joined(recorder.seen[:3])) == list(range(SIZE))
    assert (recorder.engine.state.iteration, recorder.engine.state.epoch) == (6 + 3 + 5 * 6, 7)


PLAIN_LOADERS = {
    "list": lambda size, batch_size: list(torch.arange(size).split(batch_size)),
    "loader": lambda size, batch_size: DataLoader(range(size), batch_size=batch_size),
}


@pytest.mark.filterwarnings("ignore:the run resumes after:UserWarning")
@pytest.mark.parametrize(
    ("done", "size", "batch_size", "rest"),
    [
        (3, 12, 2, 2 * 6),  # at the end of an epoch of three: two epochs are left
        (3, 12, 6, 2 * 2),
        (3, 20, 4, 2 * 5),  # the data have grown
        (4, 12, 2, 4 + 6),  # a third of the epoch is done
        (5, 12, 6, 1 + 2),
        (5, 24, 4, 2 + 6),
    ],
)
@pytest.mark.parametrize("make", PLAIN_LOADERS.values(), ids=PLAIN_LOADERS)
@pytest.mark.parametrize("process", ["same", "other"])
def test_a_length_that_comes_from_the_data_follows_the_data(make, process, done, size, batch_size, rest):
    first = Recorder()
    if process == "same":  # fails after an iteration
        handle = first.engine.add_event_handler(Events.ITERATION_COMPLETED(once=done), lambda: 1 / 0, order=1)
        with pytest.raises(ZeroDivisionError):
            first.engine.run(make(12, 4), max_epochs=3)
        handle.remove()
        again, begun = first, len(first.seen)
        again.engine.run(make(size, batch_size), max_epochs=3)
    else:
        first.engine.run(make(12, 4), max_epochs=3)
        again, begun = Recorder(), 0
        again.resumed(first.states[done], make(size, batch_size))
    state = again.engine.state
    assert len(again.seen) - begun == rest
    assert (state.iteration, state.epoch, state.epoch_length) == (done + rest, 3, -(-size // batch_size))


def test_a_deterministic_engine_resumes_with_the_same_sample_in_batches_of_another_size():
    def data(batch_size):
        manual_seed(2)
        return DataLoader(range(12), batch_size=batch_size, shuffle=True)

    first = Recorder(DeterministicEngine)
    first.engine.run(data(4), max_epochs=2)
    seen = Recorder(DeterministicEngine).resumed(first.states[4], data(2))
    assert joined(seen) == joined(first.seen[4:])


@pytest.mark.parametrize("length", [2, 5])
def test_a_length_that_was_given_stays(length):
    first, again = Recorder(), Recorder()
    first.engine.run(make_list(3), max_epochs=2, epoch_length=length)
    again.resumed(first.states[length], make_list(4))
    assert again.engine.state.epoch_length == length
    first.engine.run(make_list(6), max_epochs=3)  # another run of the same engine
    assert first.engine.state.epoch_length == length


def test_the_rest_of_an_epoch_may_be_passed():
    whole, rest = Recorder(), Recorder()
    whole.engine.run(make_list(5))
    assert len(rest.resumed(whole.states[2], make_list(3))) == 3


def make_list(length):
    return list(torch.arange(length))


def test_a_length_of_the_data_may_be_passed_again():
    first = Recorder()
    first.engine.run(make_list(3), max_epochs=2, epoch_length=3)
    again = Recorder()
    again.resumed(first.states[3], make_list(6), epoch_length=6)
    assert (again.engine.state.epoch_length, again.engine.state.iteration) == (6, 3 + 6)
    with pytest.raises(ValueError, match="epoch_length must stay 3"):
        Recorder().resumed(first.states[3], make_list(6), epoch_length=4)


@pytest.mark.parametrize("epoch_length", [3, 6])
def test_epochs_that_are_not_passes_can_be_continued(epoch_length):
    first = Recorder()
    first.engine.run(loader(), max_epochs=4, epoch_length=epoch_length)
    for iteration in range(1, 4 * epoch_length):
        seen = Recorder().resumed(first.states[iteration], loader())
        assert seen == first.seen[iteration:], iteration


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED(once=5), Events.ITERATION_STARTED(once=6)])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("saved", [False, True])
def test_an_iteration_that_did_not_complete_is_repeated(whole, event, error, saved):
    def fail():
        raise error

    recorder = Recorder()
    failing = recorder.engine.add_event_handler(event, fail)
    with pytest.raises(error):
        recorder.engine.run(loader(), max_epochs=7)
    assert recorder.engine.state_dict()["iteration"] == 5
    failing.remove()
    if saved:
        recorder.engine.load_state_dict(recorder.engine.state_dict())
    recorder.engine.run(loader(), max_epochs=7)
    assert recorder.seen == whole.seen
    assert recorder.engine.state.iteration == 28


@pytest.mark.filterwarnings("ignore:the state is saved while a step is open:UserWarning")
@pytest.mark.parametrize("event", [Events.ITERATION_STARTED(once=6), Events.EXCEPTION_RAISED])
def test_a_state_saved_before_the_step_returned_repeats_the_iteration(whole, event):
    states = []

    def step(engine, batch):
        if event is Events.EXCEPTION_RAISED and engine.state.iteration == 6:
            raise ValueError("no")

    engine = Engine(step)
    engine.add_event_handler(event, lambda engine, *error: states.append(engine.state_dict()))
    engine.add_event_handler(event, lambda engine, *error: engine.terminate())
    engine.run(loader(), max_epochs=7)
    assert states[0]["iteration"] == 5
    assert Recorder().resumed(states[0], loader()) == whole.seen[5:]


def test_an_iteration_that_an_error_handler_abandoned_is_not_repeated(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: 1 / 0)
    recorder.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    recorder.engine.run(loader(), max_epochs=7)
    resumed = Recorder().resumed(recorder.states[10], loader())
    assert recorder.seen == [*recorder.seen[: -len(resumed)], *resumed]
    assert recorder.states[10]["epochs_completed"] == 3


def test_a_batch_that_an_error_handler_abandoned_is_not_read_again(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.GET_BATCH_COMPLETED(once=5), lambda: 1 / 0)
    recorder.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    recorder.engine.run(loader(), max_epochs=7)
    resumed = Recorder().resumed(recorder.states[6], loader())
    assert recorder.seen == [*recorder.seen[:6], *resumed]


def test_a_pass_that_outlives_its_epoch_is_continued_with_batches_of_another_size():
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: 1 / 0)
    recorder.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    ends = []
    recorder.engine.add_event_handler(
        Events.EPOCH_COMPLETED, lambda engine: ends.append((copy.deepcopy(engine.state_dict()), joined(recorder.seen)))
    )
    recorder.engine.run(loader(), max_epochs=3)
    state, read = ends[1]  # the pass of the second epoch began in the first one, whose second batch was lost
    assert state["iterations_in_epoch"] == 0
    assert state["position"]["consumed"] > 0
    resumed = joined(Recorder().resumed(state, loader(batch_size=2)))
    rest = joined(recorder.seen)[len(read) :]
    assert resumed[: SIZE - state["position"]["consumed"]] == rest[: SIZE - state["position"]["consumed"]]


def test_a_resumed_epoch_that_is_ended_before_its_first_batch_is_followed_by_a_whole_one(whole):
    engine, seen = Engine(lambda engine, batch: seen[-1].append(batch.tolist())), []
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: seen.append([]))
    engine.add_event_handler(Events.EPOCH_STARTED, lambda engine: engine.terminate_epoch() if len(seen) == 1 else None)
    engine.load_state_dict(whole.states[6])
    engine.run(loader(), max_epochs=4)
    assert [sorted(joined(batches)) for batches in seen] == [[], list(range(SIZE)), list(range(SIZE))]


class InterruptedState(State):
    """A state in which Ctrl-C arrives just before the third iteration is counted."""

    armed = True

    def __setattr__(self, name, value):
        if name == "iteration" and value == 3 and self.armed:
            type(self).armed = False
            raise KeyboardInterrupt
        super().__setattr__(name, value)


@pytest.mark.parametrize("make", [iter, Stateful], ids=["iterator", "data with a state"])
@pytest.mark.parametrize(
    ("event", "lost"),
    [
        (Events.GET_BATCH_COMPLETED(once=2), [2]),
        (Events.ITERATION_STARTED(once=3), [2]),
        (Events.ITERATION_STARTED(once=1), [0]),
        ("Ctrl-C", [2]),
        (Events.GET_BATCH_STARTED(once=2), []),
        (Events.ITERATION_COMPLETED(once=2), []),
    ],
    ids=str,
)
def test_a_batch_that_the_data_cannot_return_again_is_lost_with_a_warning(make, event, lost, monkeypatch):
    engine, data = Engine(lambda engine, batch: seen.append(batch)), make(list(range(5)))
    seen = []
    if event == "Ctrl-C":
        monkeypatch.setattr(InterruptedState, "armed", True)
        engine.state = InterruptedState()
        with pytest.raises(KeyboardInterrupt):
            engine.run(data, epoch_length=5)
    else:
        failing = engine.add_event_handler(event, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.run(data, epoch_length=5)
        failing.remove()
    with pytest.warns(UserWarning, match="after an error, which has lost a batch") if lost else nullcontext():
        engine.run(data)
    assert seen == [number for number in range(5) if number not in lost]
    assert (engine.state.iteration, engine.state.epoch) == (5, 1)


@pytest.mark.parametrize("epoch_length", [None, 3, 5, 7])
def test_data_with_a_state_resume_in_the_pass_in_which_they_were_saved(epoch_length):
    recorder = Recorder()
    recorder.engine.run(EpochStream(), max_epochs=4, epoch_length=epoch_length)
    assert recorder.seen[:10] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    for iteration in range(1, len(recorder.seen)):
        seen = Recorder().resumed(recorder.states[iteration], EpochStream())
        assert seen == recorder.seen[iteration:], iteration


@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED(every=2)])
@pytest.mark.parametrize("kind", [Engine, DeterministicEngine])
def test_the_place_stays_when_an_evaluator_reads_the_same_loader(kind, event):
    def run(state=None):
        recorder, data = Recorder(kind), loader()
        evaluator = Engine(lambda engine, batch: None)
        recorder.engine.add_event_handler(event, lambda: evaluator.run(data), order=-1)
        manual_seed(17)
        if state is None:
            recorder.engine.run(data, max_epochs=4)
        else:
            recorder.resumed(state, data)
        return recorder

    whole = run()
    assert sorted(joined(whole.seen[8:12])) == list(range(SIZE))
    for iteration in (3, 4, 10, 12):
        assert run(whole.states[iteration]).seen == whole.seen[iteration:], iteration


def test_a_deterministic_engine_that_runs_again_over_the_same_loader_has_another_epoch():
    recorder, data = Recorder(DeterministicEngine), loader()
    recorder.engine.run(data, max_epochs=1)
    recorder.engine.run(data, max_epochs=2)
    assert recorder.seen[:4] != recorder.seen[4:]
    assert sorted(joined(recorder.seen[4:])) == list(range(SIZE))


def test_a_state_without_a_position_warns_on_a_loader_that_could_start_anywhere():
    engine = Engine(lambda engine, batch: None)
    engine.load_state_dict({"iteration": 5, "epoch_length": 4, "max_epochs": 2})
    with pytest.warns(UserWarning, match="the loaded state has no position in the data"):
        engine.run(loader())


def test_a_state_saved_when_an_epoch_was_ended_resumes_with_the_next():
    recorder, states = Recorder(), []
    recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), recorder.engine.terminate_epoch)
    recorder.engine.add_event_handler(
        Events.TERMINATE_SINGLE_EPOCH, lambda engine: states.append(copy.deepcopy(engine.state_dict()))
    )
    recorder.engine.run(loader(), max_epochs=2)
    assert Recorder().resumed(states[0], loader()) == recorder.seen[2:]


def test_a_loader_with_a_sampler_of_torch_resumes_in_the_pass_that_it_was_in():
    def make():
        data = range(8)
        return idist.auto_dataloader(data, sampler=DistributedSampler(data, 1, 0), batch_size=2)

    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), recorder.engine.terminate_epoch)
    recorder.engine.run(make(), max_epochs=3, epoch_length=6)
    with pytest.warns(UserWarning, match="skipping . batches to resume"):
        assert Recorder().resumed(recorder.states[8], make()) == recorder.seen[8:]


def test_a_loader_that_starts_from_the_beginning_after_an_error_warns():
    engine = Engine(lambda engine, batch: None)
    failing = engine.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: 1 / 0)
    data = DataLoader(range(12), batch_size=2)
    with pytest.raises(ZeroDivisionError):
        engine.run(data)
    failing.remove()
    with pytest.warns(UserWarning, match="after 2 iterations of .* its data are read from the beginning"):
        engine.run(data)


@settings(max_examples=20, deadline=None)
@given(iteration=st.integers(1, 11), stop=st.one_of(st.none(), st.integers(1, 18)))
def test_epochs_after_one_that_was_resumed_without_a_position_have_each_sample_once(iteration, stop):
    def loader():
        if stop is None:
            return DataLoader(range(12), batch_size=2, shuffle=True)
        return idist.auto_dataloader(range(12), batch_size=2, shuffle=True, seed=0)

    def save(engine):
        states.append(engine.state_dict())
        engine.terminate()

    epochs, states = defaultdict(list), [{"iteration": iteration, "epoch_length": 6, "max_epochs": 5}]
    for when in [None] if stop is None else [iteration + stop, None]:
        engine = Engine(lambda engine, batch: epochs[engine.state.epoch].extend(batch.tolist()))
        if when is not None:
            engine.add_event_handler(Events.ITERATION_COMPLETED(once=when), save)
        engine.load_state_dict(states[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.run(loader())
    whole = range(iteration // 6 + 1 + (iteration % 6 > 0), 6)
    assert [sorted(epochs[epoch]) for epoch in whole] == [list(range(12))] * len(whole)


# --- epochs that end early ---------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 20), max_size=4),
    length=st.sampled_from([None, 3, 6]),
    kind=st.sampled_from(["Engine", "DeterministicEngine", "of torch"]),
    data=st.data(),
)
def test_a_run_whose_epochs_end_early_resumes_exactly_from_every_iteration(cuts, length, kind, data):
    def loader():
        if kind == "of torch":
            return DataLoader(range(SIZE), batch_size=3, shuffle=True)
        return idist.auto_dataloader(range(SIZE), batch_size=3, shuffle=True, seed=0)

    def run(state=None):
        manual_seed(17)
        recorder = Recorder(Engine if kind == "Engine" else DeterministicEngine)
        at_once = Events.ITERATION_COMPLETED(event_filter=lambda engine, count: count in cuts)
        recorder.engine.add_event_handler(at_once, recorder.engine.terminate_epoch)
        if state is None:
            recorder.engine.run(loader(), max_epochs=5, epoch_length=length)
        else:
            recorder.resumed(state, loader())
        return recorder

    whole = run()
    iteration = data.draw(st.integers(1, len(whole.seen) - 1))
    assume(iteration not in cuts)  # that state was saved before the epoch was ended
    state = whole.states[iteration]
    again = run(state)
    assert again.seen == whole.seen[iteration:]
    assert (again.engine.state.epoch, again.engine.state.iteration) == (5, len(whole.seen))


def test_a_state_saved_at_the_end_of_an_epoch_after_one_that_ended_early_resumes_with_the_next(whole):
    recorder, states = Recorder(), []
    recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), recorder.engine.terminate_epoch)
    recorder.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: states.append(engine.state_dict()))
    recorder.engine.run(loader(), max_epochs=4)
    assert [(one["epochs_completed"], one["iterations_in_epoch"]) for one in states] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    again = Recorder()
    assert again.resumed(states[1], loader()) == whole.seen[8:16]
    assert again.engine.state.epoch == 4


def test_an_epoch_number_that_a_handler_chooses_is_kept():
    def numbered():
        recorder, data = Recorder(), loader()
        recorder.engine.add_event_handler(
            Events.EPOCH_STARTED, lambda engine: data.sampler.set_epoch(100 + engine.state.epoch)
        )
        return recorder, data

    first, data = numbered()
    first.engine.run(data, max_epochs=3)
    again, data = numbered()
    assert again.resumed(first.states[5], data) == first.seen[5:]
    assert first.states[5]["position"]["epoch"] == 102


# --- wrong data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: loader(seed=1), "saved with seed 0, the loader has seed 1"),
        (lambda: loader(size=12), "length=11.*length=12"),
        (lambda: loader(shuffle=False), "Shuffled.*Sequential"),
        (lambda: DataLoader(range(SIZE), batch_size=3), "starts at any sample.*got DataLoader"),
    ],
)
def test_other_data_are_rejected_and_nothing_has_changed(whole, data, message):
    engine = Engine(lambda engine, batch: None)
    engine.load_state_dict(whole.states[6])
    with pytest.raises(ValueError, match=message):
        engine.run(data())
    assert engine.state_dict() == whole.states[6]
    assert Recorder().resumed(engine.state_dict(), loader()) == whole.seen[6:]


def test_a_state_of_other_data_is_rejected_in_started_and_changes_nothing(whole):
    engine = Engine(echo)

    def load(engine):
        before = {**vars(engine.state)}
        with pytest.raises(ValueError, match="saved with seed 0, the loader has seed 1"):
            engine.load_state_dict({**whole.states[6], "max_epochs": 9})
        assert vars(engine.state) == before

    engine.add_event_handler(Events.STARTED, load)
    assert engine.run(loader(seed=1), max_epochs=2).epoch == 2


# --- other data --------------------------------------------------------------------------------------------------


def test_data_with_a_state_of_their_own_are_exact():
    def data():
        return Stateful([torch.tensor(number) for number in range(5)])

    first = Recorder()
    first.engine.run(data(), max_epochs=3)
    for iteration in range(1, 15):
        assert Recorder().resumed(first.states[iteration], data()) == first.seen[iteration:]


@pytest.mark.parametrize("make", [EpochStream, lambda: Stateful([torch.tensor(number) for number in range(5)])])
def test_data_with_a_state_of_their_own_start_a_pass_that_was_saved_before_its_first_batch(make):
    first, states = Recorder(), []
    first.engine.add_event_handler(
        Events.GET_BATCH_STARTED(every=5), lambda engine: states.append(copy.deepcopy(engine.state_dict()))
    )
    first.engine.run(make(), max_epochs=3)
    assert [one["iteration"] for one in states] == [0, 5, 10]
    for state in states[1:]:
        assert Recorder().resumed(state, make()) == first.seen[state["iteration"] :]


def test_streams_of_auto_dataloader_are_skipped_forward_with_a_warning_of_what_it_costs():
    first = Recorder()
    first.engine.run(stream(), max_epochs=1)
    with pytest.warns(UserWarning, match="skipping 2 batches to resume"):
        seen = Recorder().resumed({**first.states[2], "max_epochs": 1}, stream())
    assert seen == first.seen[2:]


PLAIN = {
    "loader": lambda begin=0: DataLoader(Stream(begin), batch_size=3),
    "iterator": lambda begin=0: iter(DataLoader(Stream(begin), batch_size=3)),
    "generator": lambda begin=0: (batch for batch in DataLoader(Stream(begin), batch_size=3)),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_stream_that_the_user_moved_forward_is_not_skipped_again(make):
    first = Recorder()
    first.engine.run(make(), max_epochs=1)
    with pytest.warns(UserWarning, match="unless you have moved them forward"):
        seen = Recorder().resumed({**first.states[2], "max_epochs": 1}, make(begin=6))
    assert seen == first.seen[2:]


@pytest.mark.parametrize("make", [*PLAIN.values(), lambda: stream()], ids=[*PLAIN, "auto_dataloader"])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_at_the_end_of_an_epoch_over_data_of_unknown_length_nothing_is_skipped(make, epochs):
    state, seen = None, []
    for epoch in range(1, epochs + 2):
        recorder, reads, ends = Recorder(), Stream.reads, []
        if state is not None:
            recorder.engine.load_state_dict({**state, "max_epochs": epoch})
        recorder.engine.add_event_handler(
            Events.EPOCH_COMPLETED, lambda engine, ends: ends.append(engine.state_dict()), ends
        )
        recorder.engine.run(make(), max_epochs=epoch)
        assert Stream.reads == reads + 1
        seen.append(recorder.seen)
        (state,) = ends
    assert seen == [[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]] * (epochs + 1)


class StatefulStream(Stateful):
    """The same without a length."""

    __len__ = None


@pytest.mark.filterwarnings("ignore:the data cannot seek")
@pytest.mark.parametrize("target", [{"max_epochs": 3}, {"max_iters": 11}])
@pytest.mark.parametrize("data", [lambda: stream(), lambda: StatefulStream(map(torch.tensor, range(4)))])
def test_the_length_of_an_epoch_is_inferred_correctly_in_a_pass_that_was_resumed(data, target):
    first = Recorder()
    first.engine.run(data(), **target)
    for iteration in range(1, len(first.seen)):
        later = Recorder()
        assert later.resumed(first.states[iteration], data()) == first.seen[iteration:]
        assert later.engine.state.epoch_length == 4


class Numbers(IterableDataset):
    """A stream, which workers share; with `begin` the rest of it."""

    def __init__(self, begin=0, size=4):
        self.begin, self.size = begin, size

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(self.begin + first, self.size, step))


def of_stream(workers=0, kind=DataLoader, batch_size=1):
    options = {"multiprocessing_context": context} if workers else {}
    return kind(Numbers(), batch_size=batch_size, num_workers=workers, **options)


REREAD = {  # data that a run that resumes in the middle of an epoch reads from their beginning
    "list": lambda: make_list(4),
    "generator function": lambda: Sizeless(*make_list(4)),
    "stream": of_stream,
    "loader": lambda: DataLoader(range(4)),
}
RETURNING = {  # data that return to where the run was
    "stream of auto_dataloader": lambda: of_stream(kind=idist.auto_dataloader),
    "auto_dataloader": lambda: loader(batch_size=1, size=4),
    "with a state": lambda: Stateful(make_list(4)),
    "with a state, without a length": lambda: StatefulStream(make_list(4)),
}


def killed_at(stops, make, **target):
    """Run until each of these iterations in a process of its own, and at last to the end.

    Returns:
        The batches, the iterations of each epoch that ended in the last process, and its engine.
    """
    seen, state, lengths = [], None, []
    for stop in (*stops, None):
        recorder = Recorder()
        if state is not None:
            recorder.engine.load_state_dict(state)
        if stop is not None:
            recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop), recorder.engine.terminate)
        else:
            recorder.engine.add_event_handler(
                Events.EPOCH_COMPLETED, lambda engine: lengths.append(engine.iteration_in_epoch)
            )
        recorder.engine.run(make(), **target)
        state = recorder.states[recorder.engine.state.iteration]
        seen += recorder.seen
    return seen, lengths, recorder.engine


@pytest.mark.filterwarnings("ignore:the data cannot seek", "ignore:the run resumes after")
@pytest.mark.parametrize("target", [{"max_epochs": 3}, {"max_iters": 11}], ids=str)
@pytest.mark.parametrize("make", [*REREAD.values(), *RETURNING.values()], ids=[*REREAD, *RETURNING])
def test_a_run_that_was_killed_twice_anywhere_has_the_epochs_of_one_that_was_not(make, target):
    whole = killed_at([], make, **target)[0]
    for stops in itertools.combinations(range(1, 11), 2):
        seen, lengths, engine = killed_at(stops, make, **target)
        assert engine.state.epoch_length in (4, None)  # none if no whole pass was read
        assert all(length == 4 for length in lengths[1:-1])
        if make in RETURNING.values():
            assert seen == whole
            assert (engine.state.iteration, engine.state.epoch_length) == (len(whole), 4)


@pytest.mark.filterwarnings("ignore:the data cannot seek", "ignore:the run resumes after")
@pytest.mark.parametrize("stops", [[3, 5]], ids=str)
def test_streams_of_workers_do_too(stops):
    def make():
        return of_stream(workers=2, kind=idist.auto_dataloader)

    assert killed_at(stops, make, max_epochs=3)[0] == killed_at([], make, max_epochs=3)[0]


@pytest.mark.filterwarnings("ignore:the run resumes after")
@pytest.mark.parametrize("stop", range(1, 8))
def test_an_iterator_goes_on_with_what_it_has_left(stop):
    numbers = iter(make_list(8))
    engine = killed_at([stop], lambda: numbers, max_epochs=1)[2]
    assert (engine.state.iteration, engine.state.epoch_length) == (8, 8)


@pytest.mark.filterwarnings("ignore:the data cannot seek", "ignore:the run resumes after")
@pytest.mark.parametrize("started", [False, True], ids=["before the run", "in STARTED"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 4), (2, 2)])
def test_the_length_of_a_stream_follows_its_batch_size(before, after, started):
    first, length = Recorder(), -(-12 // after)
    first.engine.run(idist.auto_dataloader(Numbers(size=12), batch_size=before), max_epochs=3)
    for stop in range(1, len(first.seen)):
        again, lengths = Recorder(), []
        again.engine.add_event_handler(
            Events.EPOCH_COMPLETED, lambda engine, lengths: lengths.append(engine.iteration_in_epoch), lengths
        )
        data = idist.auto_dataloader(Numbers(size=12), batch_size=after)
        if started:
            again.engine.add_event_handler(
                Events.STARTED, lambda engine, stop: engine.load_state_dict(first.states[stop]), stop
            )
            again.engine.run(data, max_epochs=3)
        else:
            again.resumed(first.states[stop], data)
        assert (again.engine.state.epoch, again.engine.state.iteration) == (3, stop + len(again.seen))
        assert lengths[1:] == [length] * len(lengths[1:])
        done = stop % -(-12 // before) * before // after * after  # samples of the epoch, rounded to whole batches
        assert joined(again.seen)[: 12 - done] == list(range(done, 12))
        assert lengths[0] == length


class Shards(Numbers):
    def shard(self, num_shards, index):
        return IterableWrapper(range(index, self.size, num_shards))


class IterableWrapper(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


@pytest.mark.filterwarnings("ignore:the data cannot seek")
@pytest.mark.parametrize("stop", [2, 4])
def test_a_stream_on_another_number_of_ranks_has_the_same_length(stop):
    def run(state):
        recorder = Recorder()
        data = idist.auto_dataloader(Shards(size=12), batch_size=4)
        if state is None:
            recorder.engine.run(data, max_epochs=2)
            return recorder.states[stop]
        return recorder.resumed(state, data)

    state = run_on_threads(2, run, None)[0]
    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2
    assert state["position"]["size"] == 4
    assert run(state) == whole[stop:]
    assert run({**state, "position": {**state["position"], "size": 2}}) == whole[stop // 3 * 3 + stop % 3 // 2 :]


def test_a_given_length_of_a_stream_stays_with_another_batch_size():
    first, again = Recorder(), Recorder()
    first.engine.run(idist.auto_dataloader(Numbers(size=12), batch_size=1), max_epochs=3, epoch_length=4)
    with pytest.warns(UserWarning, match="skipping 3 batches"):
        again.resumed(first.states[6], idist.auto_dataloader(Numbers(size=12), batch_size=2))
    assert again.seen[:2] == [[6, 7], [8, 9]]
    assert (again.engine.state.iteration, again.engine.state.epoch_length) == (12, 4)


def test_sequences_and_loaders_of_torch_are_read_from_their_beginning_and_their_state_is_that_of_the_api():
    for data in ([torch.tensor(1), torch.tensor(2)], DataLoader(range(4), batch_size=2)):
        first = Recorder()
        first.engine.run(data, max_epochs=2)
        assert "position" not in first.states[3]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert Recorder().resumed(first.states[3], data) == first.seen[:1]


def test_a_loader_of_torch_that_restarts_an_epoch_warns():
    data = DataLoader(range(4), batch_size=2)
    first = Recorder()
    first.engine.run(data, max_epochs=2)
    with pytest.warns(UserWarning, match=r"after 1 iteration of an epoch.*or a DeterministicEngine"):
        Recorder().resumed(first.states[3], data)
    assert len(Recorder().resumed(first.states[2], data)) == 2  # at the end of an epoch nothing is lost


class CustomSampler(Sampler):
    """A sampler of the user's, which may go on by itself."""

    def __iter__(self):
        return iter(range(6))

    def __len__(self):
        return 6


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        (DataLoader(range(4), batch_size=2), 4),  # at the end of a pass
        (DataLoader(range(6), batch_size=2, sampler=RandomSampler(range(6), replacement=True)), 3),
        (DataLoader(range(6), batch_size=2, sampler=CustomSampler()), 3),
        (DataLoader(range(6), batch_sampler=[[0, 1], [2, 3], [4, 5]]), 3),
    ],
)
def test_where_nothing_is_lost_or_it_is_unknown_there_is_no_warning(loader, length):
    engine = Engine(lambda engine, batch: None)
    engine.load_state_dict({"iteration": 2, "epoch_length": length, "max_epochs": 1})
    assert engine.run(loader).iteration == length


# --- the share of a batch ----------------------------------------------------------------------------------------


def test_a_single_process_has_all_of_each_batch():
    shares = []
    Engine(lambda engine, batch: shares.append(engine.batch_share)).run(loader())
    assert shares == [1.0] * 4
    assert Engine(lambda engine, batch: None).batch_share == 1.0


def test_the_loss_of_the_trainer_is_scaled_by_the_share(monkeypatch):
    monkeypatch.setattr(Engine, "batch_share", 2.0)
    gradients, losses = [], []
    model = torch.nn.Linear(1, 1, bias=False)
    for steps in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = create_supervised_trainer(
            model, optimizer, lambda y_pred, y: y_pred.mean(), gradient_accumulation_steps=steps
        )
        trainer.run([(torch.ones(2, 1), torch.ones(2, 1))] * steps)
        gradients.append(model.weight.grad.item())
        losses.append(trainer.state.output)
    assert gradients == [2.0, 2.0]
    assert losses[0] == pytest.approx(model.weight.item())
