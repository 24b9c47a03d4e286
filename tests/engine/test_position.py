"""A saved engine goes on with the very next sample, whatever the data offer for it."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

import camshaft.distributed as idist
from camshaft.engine import DeterministicEngine, Engine, Events, State, create_supervised_trainer
from camshaft.utils import manual_seed

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
def test_every_iteration_can_be_gone_on_from(whole, workers, persistent):
    for iteration in range(1, 28, 1 if not workers else 13):
        data = loader(workers=workers, persistent_workers=persistent)
        assert Recorder().resumed(whole.states[iteration], data) == whole.seen[iteration:], iteration
        if persistent:
            data._iterator._shutdown_workers()


@settings(max_examples=8)
@given(st.lists(st.integers(1, 27), min_size=2, max_size=5))
def test_a_run_can_be_stopped_any_number_of_times(whole, stops):
    seen, state = [], None
    for stop in [*sorted(stops), None]:
        recorder = Recorder()
        if state is not None:
            recorder.engine.load_state_dict(state)
        if stop is not None:
            event = Events.ITERATION_COMPLETED(event_filter=lambda engine, event, stop=stop: event >= stop)
            recorder.engine.add_event_handler(event, recorder.engine.terminate)
        recorder.engine.run(loader(), max_epochs=7)
        seen, state = seen + recorder.seen, recorder.engine.state_dict()
        if state["iteration"] == 28:
            break
    assert seen[: len(whole.seen)] == whole.seen


def test_the_state_after_a_run_was_stopped_tells_where(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=6), recorder.engine.terminate)
    recorder.engine.run(loader(), max_epochs=7)
    assert recorder.engine.state_dict() == recorder.states[6]
    assert Recorder().resumed(recorder.engine.state_dict(), loader()) == whole.seen[6:]


def test_a_loaded_state_that_nobody_ran_is_the_same_when_saved_again(whole):
    engine = Engine(lambda engine, batch: None)
    engine.load_state_dict(whole.states[6])
    assert engine.state_dict() == whole.states[6]


def test_an_epoch_that_was_cut_short_is_followed_by_a_new_one(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), recorder.engine.terminate_epoch)
    recorder.engine.add_event_handler(
        Events.EPOCH_COMPLETED(once=1), lambda engine: recorder.states.update(cut=engine.state_dict())
    )
    recorder.engine.run(loader(), max_epochs=2)
    assert recorder.seen == [*whole.seen[:2], *whole.seen[4:8]]
    assert (recorder.states["cut"]["position"]["epoch"], recorder.states["cut"]["position"]["consumed"]) == (1, 0)


def test_with_another_batch_size_the_rest_of_the_epoch_is_seen_once_and_iterations_are_counted_anew(whole):
    recorder = Recorder()
    seen = recorder.resumed(whole.states[6], loader(batch_size=2))
    assert sorted(joined(whole.seen[4:6]) + joined(seen[:3])) == list(range(SIZE))
    assert [len(batch) for batch in seen[:3]] == [2, 2, 1]
    assert recorder.engine.state.epoch_length == 6
    assert (recorder.engine.state.iteration, recorder.engine.state.epoch) == (42, 7)
    assert [sorted(joined(seen[begin : begin + 6])) for begin in range(3, len(seen), 6)] == [list(range(SIZE))] * 5


def test_a_state_loaded_in_started_is_recounted_for_another_batch_size_too(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.STARTED, lambda: recorder.engine.load_state_dict(whole.states[6]))
    recorder.engine.run(loader(batch_size=2), max_epochs=1)
    assert sorted(joined(whole.seen[4:6]) + joined(recorder.seen[:3])) == list(range(SIZE))
    assert (recorder.engine.state.iteration, recorder.engine.state.epoch) == (42, 7)


def test_a_target_in_iterations_that_a_smaller_batch_size_reaches_at_once_warns():
    first = Recorder()
    first.engine.run(loader(batch_size=4), max_iters=8)
    with pytest.warns(UserWarning, match="reaches the target of 8: pass a larger max_iters"):
        assert Recorder().resumed(first.states[7], loader(batch_size=2)) == []


@pytest.mark.parametrize("epoch_length", [3, 6])
def test_epochs_that_are_no_passes_can_be_gone_on_with(epoch_length):
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


def test_an_iteration_that_an_error_handler_gave_up_is_not_repeated(whole):
    recorder = Recorder()
    recorder.engine.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: 1 / 0)
    recorder.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    recorder.engine.run(loader(), max_epochs=7)
    resumed = Recorder().resumed(recorder.states[10], loader())
    assert recorder.seen == [*recorder.seen[: -len(resumed)], *resumed]
    assert recorder.states[10]["epochs_completed"] == 3


@pytest.mark.parametrize("make", [iter, Stateful], ids=["iterator", "data with a state"])
@pytest.mark.parametrize(
    "event",
    [
        Events.GET_BATCH_COMPLETED(once=2),
        Events.ITERATION_STARTED(once=3),
        Events.ITERATION_STARTED(once=1),
        Events.GET_BATCH_STARTED(once=2),
    ],
)
def test_a_batch_that_the_data_cannot_return_again_is_kept_for_the_next_run(make, event):
    engine, data = Engine(lambda engine, batch: seen.append(batch)), make(list(range(5)))
    seen = []
    failing = engine.add_event_handler(event, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run(data, epoch_length=5)
    failing.remove()
    engine.run(data)
    assert seen == [0, 1, 2, 3, 4]
    assert (engine.state.iteration, engine.state.epoch) == (5, 1)


class InterruptedState(State):
    """A state in which Ctrl-C arrives just before the third iteration is counted."""

    armed = True

    def __setattr__(self, name, value):
        if name == "iteration" and value == 3 and self.armed:
            type(self).armed = False
            raise KeyboardInterrupt
        super().__setattr__(name, value)


@pytest.mark.parametrize("make", [iter, Stateful], ids=["iterator", "data with a state"])
def test_a_batch_that_was_fetched_when_ctrl_c_came_is_kept_for_the_next_run(make, monkeypatch):
    monkeypatch.setattr(InterruptedState, "armed", True)
    seen, data = [], make(list(range(5)))
    engine = Engine(lambda engine, batch: seen.append(batch))
    engine.state = InterruptedState()
    with pytest.raises(KeyboardInterrupt):
        engine.run(data, epoch_length=5)
    engine.run(data)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED(once=2), Events.ITERATION_STARTED(once=3)])
@pytest.mark.parametrize("failed", [False, True])
def test_data_that_cannot_return_the_batch_of_an_unfinished_iteration_say_what_is_lost(event, failed):
    engine = Engine(lambda engine, batch: None)
    states = []
    engine.add_event_handler(event, lambda engine: states.append(engine.state_dict()))
    if failed:
        engine.add_event_handler(event, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.run(Stateful(map(torch.tensor, range(5))))
        states = [engine.state_dict()]
    else:
        engine.run(Stateful(map(torch.tensor, range(5))))
    with pytest.warns(UserWarning, match="1 batch is lost"):
        seen = Recorder().resumed(states[0], Stateful(map(torch.tensor, range(5))))
    assert seen == [3, 4]


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
    with pytest.warns(UserWarning, match="load a state with its position"):
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


def test_a_loader_that_starts_from_the_beginning_after_an_error_says_so():
    engine = Engine(lambda engine, batch: None)
    failing = engine.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: 1 / 0)
    data = DataLoader(range(12), batch_size=2)
    with pytest.raises(ZeroDivisionError):
        engine.run(data)
    failing.remove()
    with pytest.warns(UserWarning, match="after 2 iterations of an epoch, but its loader starts from the beginning"):
        engine.run(data)


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
        (lambda: loader(size=12), "11 samples.*12 samples"),
        (lambda: loader(shuffle=False), "shuffled.*sequential"),
        (lambda: DataLoader(range(SIZE), batch_size=3), "starts at any sample.*got DataLoader"),
    ],
)
def test_other_data_are_refused_and_nothing_has_changed(whole, data, message):
    engine = Engine(lambda engine, batch: None)
    engine.load_state_dict(whole.states[6])
    with pytest.raises(ValueError, match=message):
        engine.run(data())
    assert engine.state_dict() == whole.states[6]
    assert Recorder().resumed(engine.state_dict(), loader()) == whole.seen[6:]


def test_a_position_that_is_none_is_refused(whole):
    engine = Engine(lambda engine, batch: None)
    with pytest.raises(TypeError, match="position must be a mapping, got 3"):
        engine.load_state_dict({**whole.states[6], "position": 3})
    assert engine.state.iteration == 0


@pytest.mark.parametrize(("name", "value"), [("consumed", True), ("consumed", -1), ("epoch", 1.5), ("lost", "2")])
def test_a_position_with_a_malformed_number_is_rejected(whole, name, value):
    state = {**whole.states[6], "position": {**whole.states[6]["position"], name: value}}
    with pytest.raises((TypeError, ValueError), match=rf"position\['{name}'\] must"):
        Engine(lambda engine, batch: None).load_state_dict(state)


# --- other data --------------------------------------------------------------------------------------------------


def test_data_with_a_state_of_their_own_are_exact():
    def data():
        return Stateful([torch.tensor(number) for number in range(5)])

    first = Recorder()
    first.engine.run(data(), max_epochs=3)
    for iteration in range(1, 15):
        assert Recorder().resumed(first.states[iteration], data()) == first.seen[iteration:]


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
    with pytest.warns(UserWarning, match="unless you have moved it forward"):
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
def test_the_length_of_an_epoch_is_learned_right_in_a_pass_that_was_taken_up(data, target):
    first = Recorder()
    first.engine.run(data(), **target)
    for iteration in range(1, len(first.seen)):
        later = Recorder()
        assert later.resumed(first.states[iteration], data()) == first.seen[iteration:]
        assert later.engine.state.epoch_length == 4


def test_sequences_and_loaders_of_torch_are_read_from_their_beginning_and_their_state_is_that_of_the_api():
    for data in ([torch.tensor(1), torch.tensor(2)], DataLoader(range(4), batch_size=2)):
        first = Recorder()
        first.engine.run(data, max_epochs=2)
        assert "position" not in first.states[3]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert Recorder().resumed(first.states[3], data) == first.seen[:1]


def test_a_loader_of_torch_that_begins_an_epoch_anew_says_so():
    data = DataLoader(range(4), batch_size=2)
    first = Recorder()
    first.engine.run(data, max_epochs=2)
    with pytest.warns(UserWarning, match=r"after 1 iterations of an epoch.*use a DeterministicEngine"):
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
def test_where_nothing_is_lost_or_nobody_knows_there_is_no_warning(loader, length):
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
