"""Combined schedulers: one after another, together, and after a warm-up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as native

from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from tests.handlers.schedules import NATIVE, calls, entries, natively, reread, run_with, sgd


def lr(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def both(optimizer):
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def saw(optimizer, name="lr", **options):
    return LinearCyclicalScheduler(
        optimizer, name, 1.0, 0.5, 4, monotonic=True, warmup_duration=2, end_value_mult=0.5, **options
    )


def ramp(optimizer, name="lr", **options):
    return PiecewiseLinear(optimizer, name, [(0, 0.0), (6, 1.0)], **options)


def wave(optimizer, name="lr", **options):
    return CosineAnnealingScheduler(optimizer, name, 0.3, 0.1, 5, cycle_mult=1.5, **options)


def decay(optimizer):
    return LRScheduler(native.ExponentialLR(optimizer, 0.9))


PARTS = [saw, ramp, wave, decay]


def alone(make, count):
    optimizer = sgd()
    return calls(make(optimizer), count, lambda: lr(optimizer))


# --- one after another ---------------------------------------------------------------------------------------------

chains = st.lists(st.tuples(st.sampled_from(PARTS), st.integers(1, 8)), min_size=2, max_size=4)


def chain(parts, optimizer, **options):
    return ConcatScheduler([make(optimizer) for make, _ in parts], [count for _, count in parts[:-1]], **options)


@given(chains)
def test_a_chain_equals_its_schedulers_one_after_another(parts):
    expected = [row for make, count in parts[:-1] for row in alone(make, count)]
    expected += alone(parts[-1][0], 40 - len(expected))
    optimizer = sgd()
    scheduler = chain(parts, optimizer)
    assert run_with(scheduler, optimizer, 40, read=lr) == expected
    assert scheduler.event_index == 40


@given(parts=chains, before=st.integers(0, 30), after=st.integers(1, 20))
def test_the_state_of_a_chain_continues(parts, before, after):
    optimizer, other = sgd(), sgd()
    scheduler, fresh = chain(parts, optimizer), chain(parts, other)
    calls(scheduler, before, lambda: None)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert calls(fresh, after, lambda: lr(other)) == calls(scheduler, after, lambda: lr(optimizer))


@given(parts=chains, before=st.integers(0, 10))
def test_simulating_a_chain_changes_nothing(parts, before):
    optimizer = sgd(0.5, 0.2)
    schedulers = [make(optimizer) for make, _ in parts]
    schedulers[0].save_history = True
    calls(schedulers[0], before, lambda: None)
    durations = [count for _, count in parts[:-1]]
    states, groups = [one.state_dict() for one in schedulers], entries(optimizer)
    rows = ConcatScheduler.simulate_values(20, schedulers, durations)
    assert ([one.state_dict() for one in schedulers], entries(optimizer)) == (states, groups)
    assert schedulers[0].save_history
    run = calls(ConcatScheduler(schedulers, durations), 20, lambda: lr(optimizer))
    assert rows == [[index, *row] for index, row in enumerate(run)]


def test_a_chain_within_a_chain():
    optimizer = sgd()
    inner = ConcatScheduler([ramp(optimizer), saw(optimizer)], [3])
    scheduler = ConcatScheduler([inner, wave(optimizer)], [5])
    assert run_with(scheduler, optimizer, 8, read=lr) == alone(ramp, 3) + alone(saw, 2) + alone(wave, 3)


def test_simulating_a_chain_of_groups_lists_the_requested_parameters():
    optimizer = sgd(0.1, 0.1)

    def part(first, second):
        return ParamGroupScheduler([first(optimizer), second(optimizer, "momentum", param_group_index=0)])

    parts = [part(ramp, saw), part(wave, ramp)]
    rows = ConcatScheduler.simulate_values(5, parts, [3], param_names=["lr", "momentum"])
    assert [row[3] for row in rows] == [1.0, 0.875, 0.75, 0.0, 1 / 6]
    scheduler = ConcatScheduler(parts, [3])
    assert [[index, *lr(optimizer)] for index in range(5) if not scheduler(None)] == [row[:3] for row in rows]
    assert [group["momentum"] for group in optimizer.param_groups] == [1 / 6, 0.9]


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("abc", TypeError, "param_names must be a list or a tuple, got 'abc' of type str"),
        (3, TypeError, "param_names must be a list or a tuple, got 3"),
        ([1], ValueError, r"param_names must hold strings, got \[1\]"),
        (["rl"], ValueError, "must be a parameter of all groups of the optimizer, got 'rl'"),
    ],
)
def test_invalid_param_names_are_rejected(names, error, message):
    optimizer = sgd()
    with pytest.raises(error, match=message):
        ConcatScheduler.simulate_values(2, [ramp(optimizer), saw(optimizer)], [1], param_names=names)


def test_param_names_may_be_a_tuple():
    optimizer = sgd()
    parts = [ramp(optimizer), saw(optimizer)]
    rows = ConcatScheduler.simulate_values(2, parts, [3], param_names=["lr"])
    assert ConcatScheduler.simulate_values(2, parts, [3], param_names=("lr",)) == rows


def test_a_group_scheduler_has_the_parameter_groups_of_all():
    one, other = sgd(0.1, 0.2), sgd(0.3)
    scheduler = ParamGroupScheduler([ramp(one, param_group_index=1), saw(other)])
    groups = scheduler.optimizer_param_groups
    assert all(group is own for group, own in zip(groups, [one.param_groups[1], *other.param_groups], strict=True))


def test_a_chain_for_one_group_does_not_change_the_others():
    optimizer = sgd(0.1, 0.2)
    parts = [ramp(optimizer, param_group_index=1), saw(optimizer, param_group_index=1)]
    assert ConcatScheduler.simulate_values(2, parts, [3]) == [[0, 0.0], [1, 1 / 6]]
    ConcatScheduler(parts, [3])(None)
    assert lr(optimizer) == [0.1, 0.0]


def test_history_of_a_chain():
    optimizer = sgd()
    trainer = Engine(lambda engine, batch: None)
    scheduler = ConcatScheduler([ramp(optimizer), saw(optimizer)], [2], save_history=True)
    scheduler.attach(trainer)
    trainer.run(range(4))
    assert trainer.state.param_history == {"lr": [[0.0], [1 / 6], [1.0], [0.875]]}
    scheduler.save_history = False
    trainer.run(range(4))
    assert len(trainer.state.param_history["lr"]) == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda one, two: (None, [1]), TypeError, "schedulers must be a list"),
        (lambda one, two: ([ramp(one), None], [1]), TypeError, "ParamScheduler and ParamGroupScheduler"),
        (lambda one, two: ([native.StepLR(one, 1)] * 2, [1]), TypeError, "of type StepLR; wrap it in LRScheduler"),
        (lambda one, two: ([ramp(one)], []), ValueError, "at least two schedulers, got 1"),
        (lambda one, two: ([], []), ValueError, "at least one, got none"),
        (lambda one, two: ([ramp(one), saw(one)], 1), TypeError, "durations must be a list or a tuple"),
        (lambda one, two: ([ramp(one), saw(one)], {1}), TypeError, "durations must be a list or a tuple"),
        (lambda one, two: ([ramp(one), saw(one)], [1, 2]), ValueError, "but the last, got"),
        (lambda one, two: ([ramp(one), saw(one)], [1.5]), ValueError, "integers of at least 1"),
        (lambda one, two: ([ramp(one), saw(one)], [0]), ValueError, "integers of at least 1"),
        (lambda one, two: ([ramp(one), saw(two)], [1]), ValueError, "one optimizer in common"),
        (lambda one, two: ([ramp(one), saw(one, "momentum")], [1]), ValueError, "one param_name in common"),
        (lambda one, two: ([ParamGroupScheduler([ramp(one), ramp(two)]), saw(one)], [1]), ValueError, "one optimizer"),
    ],
)
def test_invalid_chains_are_rejected(make, error, message):
    schedulers, durations = make(sgd(), sgd())
    with pytest.raises(error, match=message):
        ConcatScheduler(schedulers, durations)
    with pytest.raises(error, match=message):
        ConcatScheduler.simulate_values(3, schedulers, durations)


def test_a_state_of_another_chain_changes_nothing():
    optimizer = sgd()
    scheduler = ConcatScheduler([ramp(optimizer), saw(optimizer)], [2])
    calls(scheduler, 3, lambda: None)
    before = scheduler.state_dict()
    longer = ConcatScheduler([ramp(optimizer), saw(optimizer), wave(optimizer)], [2, 2]).state_dict()
    turned = ConcatScheduler([saw(optimizer), ramp(optimizer)], [2]).state_dict()
    half = ConcatScheduler([ramp(optimizer), wave(optimizer)], [2]).state_dict()
    del half["schedulers"][1]["cycle"]
    for wrong in (longer, turned, half):
        with pytest.raises(ValueError, match="must be that of a ConcatScheduler with the same arguments"):
            scheduler.load_state_dict(wrong)
        assert scheduler.state_dict() == before


def by_epoch(make, stop_at=None, states=None):
    """Run five epochs with a scheduler on EPOCH_STARTED; return the rates, and the states at an iteration."""
    optimizer = sgd()
    scheduler = make(optimizer)
    rates, saved = [], []

    def step(engine, batch):
        rates.append(lr(optimizer))
        optimizer.step()

    trainer = Engine(step)
    scheduler.attach(trainer, Events.EPOCH_STARTED)

    @trainer.on(Events.ITERATION_COMPLETED)
    def save():
        if trainer.state.iteration == stop_at:
            saved.extend(reread([trainer.state_dict(), scheduler.state_dict(), optimizer.state_dict()]))
            trainer.terminate()

    for one, state in zip((trainer, scheduler, optimizer), states or (), strict=False):
        one.load_state_dict(state)
    trainer.run(range(4), max_epochs=5)
    return rates, saved


@pytest.mark.parametrize("make", [decay, ramp, lambda one: ConcatScheduler([ramp(one), decay(one)], [2])])
@given(stop_at=st.integers(1, 19))
def test_a_resumed_epoch_is_not_counted_twice(make, stop_at):
    expected, _ = by_epoch(make)
    before, states = by_epoch(make, stop_at)
    after, _ = by_epoch(make, states=states)
    assert before + after == expected


def by_iteration(make, fail_at=None, order=0, save=False, target=9):
    """Run with a scheduler on ITERATION_STARTED, resume after an error; return the rates and the index of the next."""
    rates, states = [], []

    def create():
        optimizer = sgd()
        scheduler = make(optimizer)

        def step(engine, batch):
            rates.append(lr(optimizer))
            optimizer.step()

        trainer = Engine(step)
        scheduler.attach(trainer)
        return trainer, scheduler, optimizer

    parts = create()
    if fail_at is not None:
        handle = parts[0].add_event_handler(Events.ITERATION_STARTED(once=fail_at), lambda: 1 / 0, order=order)
        with pytest.raises(ZeroDivisionError):
            parts[0].run(range(4), max_iters=target)
        handle.remove()
    if save:
        states = reread([one.state_dict() for one in parts])
        parts = create()
        for one, state in zip(parts, states, strict=True):
            one.load_state_dict(state)
    parts[0].run(range(4), max_iters=target)
    return rates, parts[1].event_index


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("order", [-1, 1])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("make", [decay, saw, lambda one: ConcatScheduler([ramp(one), decay(one)], [2])])
def test_a_repeated_iteration_is_not_counted_twice(make, fail_at, order, save):
    assert by_iteration(make, fail_at, order, save) == by_iteration(make)


@pytest.mark.parametrize(
    "event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.ITERATION_STARTED(every=2)], ids=str
)
@pytest.mark.parametrize("make", [decay, saw, lambda one: ConcatScheduler([ramp(one), decay(one)], [2])])
def test_a_schedule_saved_at_the_end_of_a_window_resumes_exactly(make, event):
    def run(save_at=None, states=()):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = make(optimizer)
        rates, saved = [], []
        trainer = create_supervised_trainer(
            model, optimizer, torch.nn.functional.mse_loss, gradient_accumulation_steps=3
        )
        parts = [trainer, scheduler, optimizer]
        optimizer.register_step_pre_hook(lambda *_: rates.append((trainer.state.iteration, lr(optimizer))))
        scheduler.attach(trainer, event)

        @trainer.on(Events.ITERATION_COMPLETED)
        def save():
            if trainer.state.iteration == save_at:
                trainer.defer(lambda _: saved.extend(reread([one.state_dict() for one in parts])))

        for one, state in zip(parts, states, strict=False):
            one.load_state_dict(state)
        trainer.run([(torch.ones(1, 1), torch.ones(1, 1))] * 7, max_epochs=2)
        return rates, saved

    expected, _ = run()
    for save_at in range(1, 14):
        _, states = run(save_at)
        done = [row for row in expected if row[0] <= states[0]["iteration"]]
        assert done + run(states=states)[0] == expected, save_at


def test_each_iteration_of_a_new_run_is_counted():
    scheduler = ramp(sgd())
    trainer = Engine(lambda engine, batch: None)
    scheduler.attach(trainer)
    for count in (1, 2, 3):
        trainer.run([0])
        assert scheduler.event_index == count


def test_an_iteration_in_which_the_scheduler_failed_is_counted_when_it_is_repeated():
    class Failing(PiecewiseLinear):
        fails = True

        def get_param(self):
            if self.event_index == 1 and self.fails:
                raise ValueError("no")
            return super().get_param()

    scheduler = Failing(sgd(), "lr", [(0, 0.0), (6, 1.0)])
    trainer = Engine(lambda engine, batch: None)
    scheduler.attach(trainer)
    with pytest.raises(ValueError, match="no"):
        trainer.run(range(4))
    scheduler.fails = False
    trainer.run(range(4))
    assert scheduler.event_index == 4


def test_a_state_without_an_iteration_is_loaded():
    trainer, scheduler = Engine(lambda engine, batch: None), ramp(sgd())
    scheduler.attach(trainer)
    trainer.run([0, 0])
    scheduler.load_state_dict({"event_index": 5, "param_name": "lr", "milestones": [0, 6], "values": [0.0, 1.0]})
    trainer.load_state_dict({"iteration": 1, "epoch_length": 2, "max_epochs": 1})
    trainer.run([0, 0])
    assert scheduler.event_index == 6


# --- together --------------------------------------------------------------------------------------------------


def together(optimizer, **options):
    return ParamGroupScheduler(
        [ramp(optimizer, param_group_index=0), wave(optimizer, param_group_index=1), saw(optimizer, "momentum")],
        **options,
    )


def test_a_group_scheduler_equals_its_schedulers_alone():
    optimizer = sgd(0.1, 0.2)
    rows = run_with(together(optimizer), optimizer, 12, read=both)
    expected = zip(alone(ramp, 12), alone(wave, 12), alone(saw, 12), strict=True)
    assert rows == [[(one, momentum), (two, momentum)] for (one,), (two,), (momentum,) in expected]


def test_several_optimizers():
    one, two = sgd(), sgd()
    scheduler = ParamGroupScheduler([ramp(one), saw(two)])
    assert (scheduler.optimizer, scheduler.param_name) == ([one, two], ["lr", "lr"])
    scheduler(None)
    assert (lr(one), lr(two)) == ([0.0], [1.0])
    assert scheduler.get_param() == [1 / 6, 0.875]


def test_history_with_given_names():
    optimizer = sgd(0.1, 0.2)
    trainer = Engine(lambda engine, batch: None)
    scheduler = together(optimizer, names=["backbone", "head", "inertia"], save_history=True)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    trainer.run([0])
    assert trainer.state.param_history == {"backbone": [[0.0]], "head": [[0.3]], "inertia": [[1.0, 1.0]]}
    assert scheduler.save_history


def test_history_with_one_name():
    optimizer = sgd(0.1, 0.2)
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.ITERATION_STARTED, together(optimizer, save_history=True), "all")
    trainer.run([0])
    assert trainer.state.param_history == {"all": [[0.0], [0.3], [1.0, 1.0]]}


def test_names_default_to_parameter_names():
    optimizer = sgd(0.1, 0.2)
    assert together(optimizer).names == ["lr", "lr", "momentum"]


@given(before=st.integers(0, 20), after=st.integers(1, 20))
def test_the_state_of_a_group_continues(before, after):
    optimizer, other = sgd(0.1, 0.2), sgd(0.1, 0.2)
    scheduler, fresh = together(optimizer), together(other)
    calls(scheduler, before, lambda: None)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert calls(fresh, after, lambda: both(other)) == calls(scheduler, after, lambda: both(optimizer))


def test_simulating_a_group_changes_nothing():
    optimizer = sgd(0.1, 0.2)
    group = together(optimizer, save_history=True)
    schedulers = [*group.schedulers, decay(optimizer)]
    before, groups = [one.state_dict() for one in schedulers], entries(optimizer)
    rows = ParamGroupScheduler.simulate_values(3, schedulers[:3])
    assert ([one.state_dict() for one in schedulers], entries(optimizer)) == (before, groups)
    assert group.save_history
    expected = zip(alone(ramp, 3), alone(wave, 3), alone(saw, 3), strict=True)
    assert rows == [[index, one, two, three] for index, ((one,), (two,), (three,)) in enumerate(expected)]
    assert ParamGroupScheduler.simulate_values(1, schedulers[3:], names=["a"]) == [[0, 0.1, 0.2]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda one: (None, None), TypeError, "schedulers must be a list"),
        (lambda one: ([], None), ValueError, "at least one"),
        (lambda one: ([ramp(one), 1], None), ValueError, "instances of ParamScheduler, got 1"),
        (lambda one: ([native.StepLR(one, 1)], None), ValueError, "of type StepLR; wrap it in LRScheduler"),
        (lambda one: ([ramp(one)], "a"), TypeError, "names must be a list or a tuple"),
        (lambda one: ([ramp(one)], [1]), ValueError, "names must hold strings"),
        (lambda one: ([ramp(one)], ["a", "b"]), ValueError, r"one for each of 1 schedulers, got \['a', 'b'\]"),
    ],
)
def test_invalid_groups_are_rejected(make, error, message):
    schedulers, names = make(sgd())
    with pytest.raises(error, match=message):
        ParamGroupScheduler(schedulers, names)


def test_a_state_of_another_group_changes_nothing():
    optimizer = sgd(0.1, 0.2)
    scheduler = together(optimizer)
    calls(scheduler, 3, lambda: None)
    before = scheduler.state_dict()
    with pytest.raises(TypeError, match="must be a mapping"):
        scheduler.load_state_dict([])
    with pytest.raises(ValueError, match="must hold 'schedulers'"):
        scheduler.load_state_dict({})
    with pytest.raises(ValueError, match="with the names"):
        scheduler.load_state_dict(together(optimizer, names=["a", "b", "c"]).state_dict())
    half = together(optimizer).state_dict()
    del half["schedulers"][2][1]["cycle"]
    with pytest.raises(ValueError, match="must hold 'cycle'"):
        scheduler.load_state_dict(half)
    assert scheduler.state_dict() == before


# --- warm-up -------------------------------------------------------------------------------------------------------


def warm(main, rates=(0.5,), duration=4, end=None, start=0.0, **options):
    optimizer = sgd(*rates)
    return optimizer, create_lr_scheduler_with_warmup(main(optimizer), start, duration, end, **options)


@pytest.mark.parametrize("make", NATIVE.values(), ids=NATIVE)
@pytest.mark.parametrize("rates", [(0.5,), (0.5, 0.2)], ids=["one group", "two groups"])
def test_a_warm_up_ends_at_the_first_rate_of_the_torch_scheduler(make, rates):
    """[H23] The rates in the optimizer are the first of the scheduler, so none is repeated in any group."""
    optimizer, scheduler = warm(make, rates)
    rows = run_with(scheduler, optimizer, 20, read=lr)
    expected = [[rate for rate, _ in row] for row in natively(make, sgd(*rates), 17)]
    assert [pytest.approx(row) for row in rows[3:]] == expected
    assert rows[:3] == [pytest.approx([end * index / 3 for end in expected[0]]) for index in range(3)]


@pytest.mark.parametrize("main", [saw, ramp, wave, decay])
def test_a_different_end_value_precedes_the_first_value_of_the_scheduler(main):
    optimizer, scheduler = warm(main, end=0.8)
    rows = run_with(scheduler, optimizer, 12, read=lr)
    assert rows[0] == [0.0]
    assert rows[3] == [0.8]
    assert rows[4:] == alone(main, 8)


def test_an_equal_end_value_replaces_the_first_value_of_the_scheduler():
    optimizer, scheduler = warm(wave, end=0.3)
    assert run_with(scheduler, optimizer, 12, read=lr)[3:] == alone(wave, 9)


def test_groups_stay_aligned_if_only_one_starts_at_the_end_value():
    optimizer, scheduler = warm(decay, (0.5, 0.2), end=0.5)
    rows = run_with(scheduler, optimizer, 6, read=lr)
    assert rows[3:] == [[0.5, 0.5], [0.5, 0.2], pytest.approx([0.45, 0.18])]


def test_a_warm_up_for_one_group_and_another_parameter():
    optimizer, scheduler = warm(lambda optimizer: saw(optimizer, "momentum", param_group_index=1), (0.5, 0.2), end=1.0)
    scheduler(None)
    assert both(optimizer) == [(0.5, 0.9), (0.2, 0.0)]


@pytest.mark.parametrize("main", [NATIVE["CosineAnnealing"], saw])
def test_output_simulated_values_is_filled_in_place(main):
    values = [None] * 10
    optimizer, scheduler = warm(main, (0.5, 0.2), output_simulated_values=values)
    assert lr(optimizer) == [0.5, 0.2]
    assert values == [[index, *row] for index, row in enumerate(run_with(scheduler, optimizer, 10, read=lr))]


@given(before=st.integers(0, 12), after=st.integers(1, 10))
def test_the_state_of_a_warm_up_continues_after_loading_the_optimizer(before, after):
    """The rate in the optimizer, which determines the end value, has changed by then."""
    optimizer, scheduler = warm(NATIVE["CosineAnnealing"], (0.5, 0.2))
    calls(scheduler, before, lambda: None)
    other = sgd(0.5, 0.2)
    cosine = NATIVE["CosineAnnealing"](other)
    other.load_state_dict(optimizer.state_dict())
    fresh = create_lr_scheduler_with_warmup(cosine, 0.0, 4)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert calls(fresh, after, lambda: lr(other)) == calls(scheduler, after, lambda: lr(optimizer))


def test_history_of_a_warm_up_has_one_entry_for_each_event():
    optimizer, scheduler = warm(decay, (0.5, 0.2), save_history=True)
    trainer = Engine(lambda engine, batch: optimizer.step())
    scheduler.attach(trainer)
    trainer.run(range(5))
    assert trainer.state.param_history["lr"][2:] == [
        pytest.approx([1 / 3, 0.4 / 3]), [0.5, 0.2], pytest.approx([0.45, 0.18])
    ]  # fmt: skip


def test_warm_up_and_main_phase_may_use_different_events():
    optimizer, scheduler = warm(decay, (0.6,))
    rates = []
    trainer = Engine(lambda engine, batch: rates.append(optimizer.param_groups[0]["lr"]) or optimizer.step())
    trainer.add_event_handler(Events.ITERATION_STARTED(before=5) | Events.EPOCH_STARTED(after=1), scheduler)
    trainer.run(range(4), max_epochs=3)
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.6] + [0.54] * 4 + [0.486] * 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr_scheduler": 1}, TypeError, "lr_scheduler must be a ParamScheduler, or a scheduler of torch"),
        ({"lr_scheduler": ParamGroupScheduler([ramp(sgd())])}, TypeError, "lr_scheduler must be a ParamScheduler"),
        ({"lr_scheduler": native.ReduceLROnPlateau(sgd())}, TypeError, "ReduceLROnPlateauScheduler"),
        ({"warmup_duration": 2.0}, TypeError, "warmup_duration must be an integer"),
        ({"warmup_duration": 1}, ValueError, "warmup_duration must be at least 2, got 1"),
        ({"warmup_start_value": "0"}, TypeError, "warmup_start_value must be a number"),
        ({"warmup_end_value": "0"}, TypeError, "warmup_end_value must be a number"),
        ({"output_simulated_values": (None,)}, TypeError, "output_simulated_values must be a list"),
    ],
)
def test_invalid_warm_ups_are_rejected(options, error, message):
    given_ones = {"lr_scheduler": ramp(sgd()), "warmup_start_value": 0.0, "warmup_duration": 3, **options}
    with pytest.raises(error, match=message):
        create_lr_scheduler_with_warmup(**given_ones)


def test_group_schedulers_in_a_chain_may_schedule_different_parameters():
    optimizer = sgd(0.1, 0.2)
    optimizer.param_groups[1]["noise"] = 0.0

    def both(value):
        noise = PiecewiseLinear(optimizer, "noise", [(0, value)], param_group_index=1)
        return ParamGroupScheduler([noise, PiecewiseLinear(optimizer, "lr", [(0, value)], param_group_index=0)])

    scheduler = ConcatScheduler([both(1.0), both(2.0)], [1])
    for value in (1.0, 2.0):
        scheduler(None)
        first, second = optimizer.param_groups
        assert (first["lr"], second["lr"], second["noise"]) == (value, 0.2, value)
