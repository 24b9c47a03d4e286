"""The values of schedulers of optimizers: in a run, simulated, after loading a state, in the history, and plotted."""

from __future__ import annotations

import copy
import inspect
import sys
import types

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as native

from camshaft.engine import Engine, Events
from camshaft.handlers import (
    ConcatScheduler,
    ExpStateScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    ParamScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from tests.handlers.schedules import (
    CASES,
    COSINE,
    DECAY,
    NATIVE,
    RAMP,
    SAW,
    TEETH,
    TRIANGLE,
    WAVES,
    after_warm_up,
    calls,
    chain,
    cycles,
    entries,
    lr,
    per_group,
    piecewise,
    reread,
    run_with,
    seen,
    sgd,
)

COUNT = 20
RATES = (0.5, 0.2)
GROUPS = CASES["groups"][0]
each = pytest.mark.parametrize(("make", "reference"), CASES.values(), ids=CASES)


def approximately(rows):
    return [[pytest.approx(pair, rel=1e-9, abs=1e-9) for pair in row] for row in rows]


# --- values ----------------------------------------------------------------------------------------------------------


def simulated(scheduler, count):
    if isinstance(scheduler, LRScheduler):
        return LRScheduler.simulate_values(count, scheduler.lr_scheduler)
    return ConcatScheduler.simulate_values(count, scheduler.schedulers, scheduler.durations, ("lr",))


@each
@pytest.mark.parametrize("rates", [(0.5,), RATES], ids=["one group", "two groups"])
def test_a_simulation_and_a_run_and_its_history_have_the_values_of_the_reference(make, reference, rates):
    """[H22] [H23] A simulation changes nothing."""
    rates = RATES if make is GROUPS else rates
    optimizer, rows = sgd(*rates), []
    scheduler, trainer = make(optimizer), Engine(lambda engine, batch: (rows.append(seen(optimizer)), optimizer.step()))
    scheduler.save_history = True
    before, groups = copy.deepcopy(scheduler.state_dict()), entries(optimizer)
    if isinstance(scheduler, (LRScheduler, ConcatScheduler)):
        simulation = simulated(scheduler, COUNT)
    assert (scheduler.state_dict(), entries(optimizer), scheduler.save_history) == (before, groups, True)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    trainer.run(range(COUNT))
    assert rows == approximately(reference(rates, COUNT))
    used = [[rate for rate, _ in row] for row in rows]
    assert make is GROUPS or trainer.state.param_history == {"lr": used}
    if isinstance(scheduler, (LRScheduler, ConcatScheduler)):
        assert simulation == [[index, *row] for index, row in enumerate(used)]
        assert scheduler.event_index == COUNT


def test_every_scheduler_of_torch_is_tested():
    kinds = {
        kind
        for kind in vars(native).values()
        if inspect.isclass(kind) and issubclass(kind, native.LRScheduler) and kind.__module__ == native.__name__
    }
    kinds -= {native.LRScheduler, native._LRScheduler, native.ReduceLROnPlateau}
    assert kinds == {type(make(sgd())) for make in NATIVE.values()}


numbers = st.floats(-10, 10)
lines = st.lists(st.tuples(st.integers(0, 30), numbers), min_size=1, max_size=6).map(
    lambda pairs: piecewise(sorted(pairs, key=lambda pair: pair[0]))
)
mults = st.floats(0.5, 1.5)


def all_cycles(shape, warmups):
    return st.builds(
        cycles, st.just(shape), numbers, numbers, st.integers(2, 12), st.floats(0.1, 2), mults, mults, warmups
    )


short = st.integers(0, 5)


@given(st.one_of(lines, all_cycles(TRIANGLE, st.just(0)), all_cycles(SAW, short), all_cycles(COSINE, short)))
def test_curves_follow_their_formulas(case):
    """[H21] also if cycles shrink to a single call."""
    optimizer = sgd()
    found = calls(case[0](optimizer), 40, lambda: lr(optimizer)[0])
    expected = [rate for ((rate, _),) in case[1]((0.5,), 40)]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6 * max(1, *map(abs, expected)))


def test_a_cyclical_scheduler_knows_its_cycle():
    scheduler = LinearCyclicalScheduler(sgd(), "lr", 0, 1, 4, cycle_mult=2.0, warmup_duration=1, monotonic=True)
    assert calls(scheduler, 7, lambda: scheduler.total_cycle_size) == [5, 5, 5, 5, 5, 10, 10]
    assert (scheduler.cycle, scheduler.cycle_size, scheduler.event_index) == (1, 8, 2)


# --- combinations ----------------------------------------------------------------------------------------------------


def test_a_warm_up_may_schedule_one_group_and_another_parameter():
    optimizer = sgd(*RATES)
    main = PiecewiseLinear(optimizer, "momentum", [(0, 1.0)], param_group_index=1)
    create_lr_scheduler_with_warmup(main, 0.0, 4)(None)
    assert seen(optimizer) == [(0.5, 0.9), (0.2, 0.0)]


def test_warm_up_and_main_phase_may_use_different_events():
    optimizer, rates = sgd(0.6), []
    trainer = Engine(lambda engine, batch: rates.append(lr(optimizer)[0]) or optimizer.step())
    scheduler = after_warm_up(DECAY)[0](optimizer)
    trainer.add_event_handler(Events.ITERATION_STARTED(before=5) | Events.EPOCH_STARTED(after=1), scheduler)
    trainer.run(range(4), max_epochs=3)
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.6] + [0.54] * 4 + [0.486] * 4)


def test_a_group_scheduler_combines_several_optimizers():
    one, other = sgd(0.1, 0.2), sgd(0.3)
    ramp, teeth = RAMP[0](one, param_group_index=1), TEETH[0](other)
    scheduler = ParamGroupScheduler([ramp, teeth])
    assert (scheduler.optimizer, scheduler.param_name, scheduler.names) == ([one, other], ["lr", "lr"], ["lr", "lr"])
    expected = [one.param_groups[1], *other.param_groups]
    assert all(group is own for group, own in zip(scheduler.optimizer_param_groups, expected, strict=True))
    scheduler(None)
    assert (lr(one), lr(other), scheduler.get_param()) == ([0.1, 1.0], [1.0], [1.0, 0.875])


def test_group_schedulers_in_a_chain_may_schedule_different_parameters():
    optimizer = sgd(0.1, 0.2)
    optimizer.param_groups[1]["noise"] = 0.0

    def part(value):
        noise = PiecewiseLinear(optimizer, "noise", [(0, value)], param_group_index=1)
        return ParamGroupScheduler([noise, PiecewiseLinear(optimizer, "lr", [(0, value)], param_group_index=0)])

    scheduler = ConcatScheduler([part(1.0), part(2.0)], [1])
    for value in (1.0, 2.0):
        scheduler(None)
        assert (*lr(optimizer), optimizer.param_groups[1]["noise"]) == (value, 0.2, value)


# --- writing ---------------------------------------------------------------------------------------------------------


class Own(ParamScheduler):
    """Returns a fixed value."""

    def __init__(self, optimizer, param_name="lr", value=1.0, **options):
        super().__init__(optimizer, param_name, **options)
        self.value = value

    def get_param(self):
        return self.value


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, 1.0]),
        ({"param_group_index": 0}, [1.0, 0.2]),
        ({"param_group_index": 1}, [0.5, 1.0]),
        ({"param_group_index": -1}, [0.5, 1.0]),
        ({"value": [3.0, 4.0]}, [3.0, 4.0]),
    ],
)
def test_one_or_all_groups_are_set(options, expected):
    optimizer = sgd(*RATES)
    scheduler = Own(optimizer, **options)
    assert len(scheduler.optimizer_param_groups) == (1 if "param_group_index" in options else 2)
    optimizer.load_state_dict(optimizer.state_dict())  # which replaces the groups
    scheduler(None)
    assert lr(optimizer) == expected
    scheduler.value = [5.0, 6.0, 7.0]
    with pytest.raises(ValueError, match="get_param"):
        scheduler(None)
    assert lr(optimizer) == expected


@pytest.mark.parametrize("make", [RAMP[0], DECAY[0]])
def test_values_written_by_others_are_overwritten(make):
    optimizer, plain = sgd(), sgd()
    scheduler = make(optimizer)
    found = calls(scheduler, 9, lambda: (lr(optimizer), optimizer.param_groups[0].update(lr=7.0))[0])
    assert found == calls(make(plain), 9, lambda: lr(plain))


@pytest.mark.parametrize("make", [RAMP[0], DECAY[0]])
def test_a_tensor_is_written_in_place(make):
    """Compiled steps refer to it."""

    def create():
        rate = torch.tensor(0.5, dtype=torch.float64)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        return rate, optimizer, make(optimizer)

    rate, optimizer, scheduler = create()
    scheduler.save_history = True
    trainer, plain = Engine(lambda engine, batch: optimizer.step()), sgd()
    scheduler.attach(trainer)
    trainer.run(range(2))
    expected = calls(make(plain), 4, lambda: lr(plain))
    if isinstance(scheduler, LRScheduler):
        rows = LRScheduler.simulate_values(2, scheduler.lr_scheduler)
        assert [row[1:] for row in rows] == expected[1:3]  # the scheduler of torch has stepped once
    assert (rate.item(), trainer.state.param_history) == (expected[1][0], {"lr": expected[:2]})
    fresh, _, loaded = create()
    loaded.load_state_dict(reread(scheduler.state_dict()))
    assert calls(loaded, 2, fresh.tolist) == [row[0] for row in expected[2:]]
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_parameter_must_exist_in_the_scheduled_groups():
    optimizer = sgd(*RATES)
    optimizer.param_groups[1]["noise"] = 0.0
    PiecewiseLinear(optimizer, "noise", [(0, 1.0)], param_group_index=-1)(None)
    assert optimizer.param_groups[1]["noise"] == 1.0
    for name, index in (("noise", 0), ("noise", None), ("params", 1)):
        with pytest.raises(ValueError, match="param_name"):
            PiecewiseLinear(optimizer, name, [(0, 1.0)], param_group_index=index)
    assert "noise" not in optimizer.param_groups[0]


def test_any_object_with_param_groups_is_accepted_and_a_call_makes_few_function_calls():
    """A call makes no deep copies and formats nothing."""
    groups = ({"noise": 0.1},)
    scheduler, counted = PiecewiseLinear(types.SimpleNamespace(param_groups=groups), "noise", [(0, 1.0)]), []
    sys.setprofile(lambda frame, kind, _: counted.append(frame.f_code.co_name) if kind == "call" else None)
    try:
        scheduler(None)
    finally:
        sys.setprofile(None)
    assert groups == ({"noise": 1.0},)
    assert len(counted) <= 9, counted


# --- history ---------------------------------------------------------------------------------------------------------


def test_history_uses_the_given_names():
    optimizer = sgd(*RATES)
    group, trainer = GROUPS(optimizer, names=["a", "b", "c"], save_history=True), Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.ITERATION_STARTED, group)
    trainer.run([0])
    assert trainer.state.param_history == {"a": [[1.0]], "b": [[0.3]], "c": [[1.0, 1.0]]}
    group(trainer, "all")
    assert [len(row) for row in trainer.state.param_history["all"]] == [1, 1, 2]
    group.save_history = False
    group(trainer)
    assert len(trainer.state.param_history["a"]) == 1


# --- simulation ------------------------------------------------------------------------------------------------------


def test_simulating_needs_no_optimizer_and_changes_none():
    optimizer = sgd(*RATES)
    before = entries(optimizer)
    options = {"param_name": "dampening", "milestones_values": [(0, 1.0)], "save_history": True}
    rows = PiecewiseLinear.simulate_values(2, optimizer=optimizer, param_group_index=7, **options)
    assert (rows, entries(optimizer)) == ([[0, 1.0], [1, 1.0]], before)


def test_simulating_a_group_lists_the_values_of_its_schedulers():
    optimizer = sgd(*RATES)
    group, decay = GROUPS(optimizer, save_history=True), DECAY[0](sgd(0.4))
    before = group.state_dict(), decay.state_dict(), entries(optimizer)
    rows = ParamGroupScheduler.simulate_values(1, [*group.schedulers, decay], names=[*"abcd"])
    assert rows == [[0, 1.0, 0.3, 1.0, 0.4]]
    assert (group.state_dict(), decay.state_dict(), entries(optimizer)) == before
    assert group.save_history


def test_simulating_a_chain_of_groups_lists_the_requested_parameters():
    optimizer = sgd(0.1, 0.1)
    parts = [GROUPS(optimizer), per_group(WAVES, RAMP, momentum=RAMP)[0](optimizer)]
    rows = ConcatScheduler.simulate_values(3, parts, [2], param_names=["lr", "momentum"])
    assert [row[1::2] for row in rows] == [[1.0, 1.0], [1.0, 0.875], [0.3, 1.0]]
    scheduler = ConcatScheduler(parts, [2])
    assert [row[1:3] for row in rows] == calls(scheduler, 3, lambda: lr(optimizer))


def test_simulating_beyond_the_end_of_a_scheduler_changes_nothing():
    optimizer = sgd()
    scheduler = native.OneCycleLR(optimizer, 0.5, total_steps=5)
    before, groups = copy.deepcopy(scheduler.state_dict()), entries(optimizer)
    with pytest.raises(ValueError, match="total steps"):
        LRScheduler.simulate_values(20, scheduler)
    assert (scheduler.state_dict(), entries(optimizer)) == (before, groups)
    assert len(run_with(LRScheduler(scheduler), optimizer, 5)) == 5


def test_a_warm_up_fills_a_list_with_its_values():
    optimizer, values = sgd(*RATES), [None] * 10
    scheduler = after_warm_up(DECAY)[0](optimizer, output_simulated_values=values)
    assert lr(optimizer) == [0.5, 0.2]
    assert values == [[index, *row] for index, row in enumerate(calls(scheduler, 10, lambda: lr(optimizer)))]


# --- state -----------------------------------------------------------------------------------------------------------


@each
@settings(max_examples=8)
@given(before=st.integers(0, 12), after=st.integers(1, 10), loads_optimizer=st.booleans())
def test_a_state_saved_at_any_call_continues(make, reference, before, after, loads_optimizer):
    """Also where the state of the optimizer is not loaded, or is loaded first, so that rates in it have changed."""
    optimizer, other = sgd(*RATES), sgd(*RATES)
    scheduler = make(optimizer)
    calls(scheduler, before, optimizer.step)
    if loads_optimizer:
        other.load_state_dict(optimizer.state_dict())
    fresh = make(other)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    rows = [
        calls(one, after, lambda where=where: (seen(where), where.step())[0])
        for one, where in ((fresh, other), (scheduler, optimizer))
    ]
    assert rows[0] == rows[1]


def without(state, *keys):
    """Return a copy of a state without the last of the keys that lead to it."""
    *path, last = keys
    place = state = copy.deepcopy(state)
    for key in path:
        place = place[key]
    del place[last]
    return state


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (RAMP[0], lambda one, state: without(state, "values")),
        (TEETH[0], lambda one, state: without(state, "cycle")),
        (DECAY[0], lambda one, state: WAVES[0](one).state_dict()),
        (CASES["Sequential"][0], lambda one, state: DECAY[0](one).state_dict()),
        (CASES["chain"][0], lambda one, state: chain((RAMP, 1), (DECAY, 1))[0](one).state_dict()),
        (CASES["chain"][0], lambda one, state: without(state, "schedulers", 3, "cycle")),
        (GROUPS, lambda one, state: {}),
        (GROUPS, lambda one, state: GROUPS(one, names=["a", "b", "c"]).state_dict()),
        (GROUPS, lambda one, state: without(state, "schedulers", 2, 1, "cycle")),
    ],
)
def test_a_state_that_does_not_fit_is_rejected_and_changes_nothing(make, wrong):
    optimizer = sgd(*RATES)
    scheduler, other = make(optimizer), make(optimizer)
    calls(scheduler, 3, optimizer.step)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="must"):
        scheduler.load_state_dict(wrong(optimizer, other.state_dict()))
    with pytest.raises(TypeError, match="must be a mapping"):
        scheduler.load_state_dict([])
    assert scheduler.state_dict() == before


# --- plots -----------------------------------------------------------------------------------------------------------


def test_a_plot_has_a_line_for_each_group():
    matplotlib.use("agg")
    from matplotlib import pyplot

    curve = PiecewiseLinear.plot_values(2, param_name="a", milestones_values=[(0, 0.0), (2, 1.0)])
    groups = LRScheduler.plot_values(2, lr_scheduler=NATIVE["Step"](sgd(*RATES)))
    state = ExpStateScheduler.plot_values(2, initial_value=8, gamma=0.5, param_name="noise")
    drawn = [line.get_ydata().tolist() for line in (*curve, *groups, *state)]
    assert drawn == [[0.0, 0.5], [0.5, 0.5], [0.2, 0.2], [4.0, 2.0]]
    assert curve[0].get_xdata().tolist() == [0.0, 1.0]
    labels = [text.get_text() for text in pyplot.gca().get_legend().get_texts()]
    assert labels == ["a", "learning rate", "learning rate", "noise"]
    pyplot.close("all")
