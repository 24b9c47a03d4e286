"""Schedulers that follow a formula: values, parameter groups, history, state, and plots."""

from __future__ import annotations

import math
import sys

import matplotlib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as native

from camshaft.engine import Engine, Events
from camshaft.handlers import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    CyclicalScheduler,
    ExpStateScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamScheduler,
    PiecewiseLinear,
    ReduceLROnPlateauScheduler,
)
from tests.handlers.schedules import calls, entries, reread, run_with, sgd


class Own(ParamScheduler):
    """Returns a fixed value."""

    def __init__(self, optimizer, param_name="lr", value=1.0, **options):
        super().__init__(optimizer, param_name, **options)
        self.value = value

    def get_param(self):
        return self.value


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def values(kind, count, **options):
    return [value for _, value in kind.simulate_values(count, param_name="lr", **options)]


# --- writing -----------------------------------------------------------------------------------------------------


def test_iteration_k_uses_the_value_of_index_k_minus_1():
    optimizer = sgd()
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 1.0), (4, 0.0)])
    assert run_with(scheduler, optimizer, 5, read=rates) == [[1.0], [0.75], [0.5], [0.25], [0.0]]
    assert scheduler.event_index == 5


def test_attach_takes_an_event_and_returns_a_handle():
    optimizer = sgd()
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 1.0), (4, 0.0)])
    trainer = Engine(lambda engine, batch: None)
    with scheduler.attach(trainer, Events.EPOCH_STARTED):
        trainer.run([0, 0], max_epochs=3)
    assert scheduler.event_index == 3
    trainer.run([0], max_epochs=9)
    assert scheduler.event_index == 3


@pytest.mark.parametrize(
    ("index", "expected"), [(None, [1.0, 1.0]), (0, [1.0, 0.2]), (1, [0.1, 1.0]), (-1, [0.1, 1.0])]
)
def test_one_or_all_groups_are_set(index, expected):
    optimizer = sgd(0.1, 0.2)
    scheduler = Own(optimizer, param_group_index=index)
    scheduler(None)
    assert rates(optimizer) == expected
    assert len(scheduler.optimizer_param_groups) == (2 if index is None else 1)


def test_groups_replaced_by_load_state_dict_are_found():
    optimizer = sgd(0.1, 0.2)
    scheduler = Own(optimizer, param_group_index=1)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler(None)
    assert rates(optimizer) == [0.1, 1.0]


def test_a_list_sets_one_value_per_group():
    optimizer = sgd(0.1, 0.2)
    Own(optimizer, value=[3.0, 4.0])(None)
    assert rates(optimizer) == [3.0, 4.0]
    with pytest.raises(ValueError, match=r"2 values, one for each group, got "):
        Own(optimizer, value=[5.0])(None)
    assert rates(optimizer) == [3.0, 4.0]


def test_whatever_is_in_the_optimizer_is_overwritten():
    optimizer = sgd()
    scheduler = Own(optimizer)
    scheduler(None)
    optimizer.param_groups[0]["lr"] = 7.0
    scheduler(None)
    assert rates(optimizer) == [1.0]


def test_a_tensor_is_written_in_place():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=rate, capturable=True)
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 1.0), (2, 0.5)], save_history=True)
    trainer = Engine(lambda engine, batch: float(rate))
    scheduler.attach(trainer)
    assert trainer.run(range(2)).output == 0.75
    assert optimizer.param_groups[0]["lr"] is rate
    assert trainer.state.param_history["lr"] == [[1.0], [0.75]]


def test_any_object_with_param_groups_is_accepted():
    class Groups:
        param_groups = ({"weight_decay": 0.1}, {"weight_decay": 0.1})

    Own(Groups(), "weight_decay")(None)
    assert [group["weight_decay"] for group in Groups.param_groups] == [1.0, 1.0]


def test_a_call_makes_few_function_calls():
    """A call makes no deep copies and formats nothing."""
    optimizer = sgd()
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 1.0), (100, 0.0)])
    counted = []
    sys.setprofile(lambda frame, kind, _: counted.append(frame.f_code.co_name) if kind == "call" else None)
    try:
        scheduler(None)
    finally:
        sys.setprofile(None)
    assert len(counted) <= 9, counted


# --- history -----------------------------------------------------------------------------------------------------


def test_history_has_one_entry_for_each_call():
    optimizer = sgd(0.1, 0.2)
    trainer = Engine(lambda engine, batch: None)
    PiecewiseLinear(optimizer, "lr", [(0, 1.0), (2, 0.0)], save_history=True).attach(trainer)
    PiecewiseLinear(optimizer, "momentum", [(0, 0.5)], True, param_group_index=1).attach(trainer)
    trainer.run(range(3))
    assert trainer.state.param_history == {"lr": [[1.0] * 2, [0.5] * 2, [0.0] * 2], "momentum": [[0.5]] * 3}


def test_history_uses_the_given_name():
    trainer = Engine(lambda engine, batch: None)
    scheduler = Own(sgd(), save_history=True)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler, "encoder")
    trainer.run([0])
    assert trainer.state.param_history == {"encoder": [[1.0]]}


def test_history_is_kept_only_on_request():
    trainer = Engine(lambda engine, batch: None)
    scheduler = Own(sgd())
    scheduler.attach(trainer)
    trainer.run([0])
    assert not hasattr(trainer.state, "param_history")
    scheduler.save_history = True
    scheduler(trainer)
    assert trainer.state.param_history == {"lr": [[1.0]]}


# --- values ------------------------------------------------------------------------------------------------------


def test_values_of_the_contract():
    course = {"start_value": 0.0, "end_value": 1.0, "cycle_size": 4}
    assert values(LinearCyclicalScheduler, 5, **course) == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert [round(one, 4) for one in values(CosineAnnealingScheduler, 5, **course)] == [0.0, 0.1464, 0.5, 0.8536, 0.0]
    course = {"start_value": 1.0, "end_value": 0.0, "cycle_size": 4}
    assert values(LinearCyclicalScheduler, 8, **course, monotonic=True, warmup_duration=2) == [
        1.0, 0.75, 0.5, 0.25, 0.0, 0.5, 1.0, 0.75
    ]  # fmt: skip
    assert values(LinearCyclicalScheduler, 5, **course, monotonic=True) == [1.0, 0.75, 0.5, 0.25, 1.0]
    assert values(PiecewiseLinear, 7, milestones_values=[(1, 1.0), (3, 0.8), (5, 0.2)]) == [
        1.0, 1.0, 0.9, 0.8, 0.5, 0.2, 0.2
    ]  # fmt: skip


numbers = st.floats(-10, 10)
small = st.integers(0, 30)


@given(
    st.lists(st.tuples(small, numbers), min_size=1, max_size=6).map(lambda pairs: sorted(pairs, key=lambda one: one[0]))
)
def test_piecewise_linear_equals_plain_interpolation(pairs):
    def plainly(index):
        if index < pairs[0][0]:
            return pairs[0][1]
        begin = [pair for pair in pairs if pair[0] <= index][-1]
        rest = [pair for pair in pairs if pair[0] > index]
        if not rest:
            return begin[1]
        share = (index - begin[0]) / (rest[0][0] - begin[0])
        return begin[1] * (1 - share) + rest[0][1] * share

    found = values(PiecewiseLinear, 35, milestones_values=pairs)
    assert found == pytest.approx([plainly(index) for index in range(35)], abs=1e-9)


def closed_form(kind, index, start, end, size, mult, start_mult, end_mult, warmup):
    """Compute the value from the cycle of an index and the position in it."""
    cycle = 0
    while index >= size + warmup:
        index -= size + warmup
        size, warmup, cycle = max(1, int(size * mult)), int(warmup * mult), cycle + 1
    start, end, after = start * start_mult**cycle, end * end_mult**cycle, start * start_mult ** (cycle + 1)
    share = index / size
    if index > size:
        return end + (after - end) * (index - size) / warmup
    if kind == "cosine":
        return (start if index < size else after) * (1 - s(share)) + end * s(share)
    if kind == "saw":
        return start * (1 - share) + end * share
    return start + (end - start) * (2 * share if share <= 0.5 else 2 - 2 * share)


def s(share):
    return (1 - math.cos(math.pi * share)) / 2


KINDS = {
    "triangle": (LinearCyclicalScheduler, {}),
    "saw": (LinearCyclicalScheduler, {"monotonic": True}),
    "cosine": (CosineAnnealingScheduler, {}),
}


@given(
    kind=st.sampled_from(list(KINDS)),
    start=numbers,
    end=numbers,
    size=st.integers(2, 12),
    mult=st.floats(0.1, 2),
    start_mult=st.floats(0.5, 1.5),
    end_mult=st.floats(0.5, 1.5),
    warmup=st.integers(0, 5),
)
def test_cycles_follow_their_closed_formulas(kind, start, end, size, mult, start_mult, end_mult, warmup):
    warmup = 0 if kind == "triangle" else warmup
    scheduler, more = KINDS[kind]
    found = values(
        scheduler, 60, start_value=start, end_value=end, cycle_size=size, cycle_mult=mult,
        start_value_mult=start_mult, end_value_mult=end_mult, warmup_duration=warmup, **more,
    )  # fmt: skip
    expected = [closed_form(kind, index, start, end, size, mult, start_mult, end_mult, warmup) for index in range(60)]
    largest = max(1, abs(start) * max(1, start_mult) ** 60, abs(end) * max(1, end_mult) ** 60)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12 * largest + 1e-6)


def test_a_cycle_that_shrinks_keeps_one_call():
    """[H21]"""
    found = values(LinearCyclicalScheduler, 6, start_value=1.0, end_value=0.0, cycle_size=2, cycle_mult=0.1)
    assert found == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_total_cycle_includes_its_warm_up():
    optimizer = sgd()
    scheduler = LinearCyclicalScheduler(optimizer, "lr", 0.0, 1.0, 4, cycle_mult=2.0, warmup_duration=1, monotonic=True)
    assert scheduler.total_cycle_size == 5
    assert calls(scheduler, 7, lambda: scheduler.total_cycle_size) == [5, 5, 5, 5, 5, 10, 10]


def test_cycles_are_counted():
    scheduler = CosineAnnealingScheduler(sgd(), "lr", 1.0, 0.0, 3, cycle_mult=2)
    for _ in range(10):
        scheduler(None)
    assert (scheduler.cycle, scheduler.cycle_size, scheduler.event_index) == (2, 12, 1)


def test_a_custom_cyclical_scheduler():
    class Square(CyclicalScheduler):
        def get_param(self):
            return self.start_value if 2 * self.event_index < self.cycle_size else self.end_value

    assert values(Square, 6, start_value=1, end_value=0, cycle_size=4) == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


# --- simulation -------------------------------------------------------------------------------------------------

COURSE = {"start_value": 1.0, "end_value": 0.1, "cycle_size": 4}
ALL = {
    "piecewise": lambda optimizer, **more: PiecewiseLinear(
        optimizer, "lr", [(1, 1.0), (5, 0.5), (5, 0.2), (9, 0)], **more
    ),
    "triangle": lambda optimizer, **more: LinearCyclicalScheduler(optimizer, "lr", **COURSE, cycle_mult=1.5, **more),
    "saw": lambda optimizer, **more: LinearCyclicalScheduler(
        optimizer, "lr", **COURSE, monotonic=True, warmup_duration=3, start_value_mult=0.5, **more
    ),
    "cosine": lambda optimizer, **more: CosineAnnealingScheduler(
        optimizer, "lr", **COURSE, end_value_mult=0.5, warmup_duration=2, cycle_mult=2, **more
    ),
}


def test_simulated_values_are_those_of_a_run():
    optimizer = sgd()
    expected = run_with(ALL["saw"](optimizer), optimizer, 20, read=rates)
    rows = LinearCyclicalScheduler.simulate_values(
        20, optimizer=optimizer, param_name="lr", **COURSE, monotonic=True, warmup_duration=3, start_value_mult=0.5,
        save_history=True, param_group_index=3,
    )  # fmt: skip
    assert rows == [[index, *row] for index, row in enumerate(expected)]


def test_simulating_does_not_change_the_optimizer():
    optimizer = sgd(0.1, 0.2)
    before = entries(optimizer)
    PiecewiseLinear.simulate_values(5, optimizer=optimizer, param_name="dampening", milestones_values=[(0, 1.0)])
    assert entries(optimizer) == before


# --- state -------------------------------------------------------------------------------------------------------


@given(kind=st.sampled_from(list(ALL)), before=st.integers(0, 30), after=st.integers(1, 30))
def test_a_state_saved_at_any_call_continues(kind, before, after):
    optimizer, other = sgd(), sgd(0.3)
    scheduler, fresh = ALL[kind](optimizer), ALL[kind](other)
    calls(scheduler, before, lambda: rates(optimizer))
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert calls(fresh, after, lambda: rates(other)) == calls(scheduler, after, lambda: rates(optimizer))


def test_a_state_is_a_copy():
    scheduler = ALL["piecewise"](sgd())
    state = scheduler.state_dict()
    state["milestones"].append(3)
    assert len(scheduler.milestones) == 4
    scheduler(None)
    assert state["event_index"] == 0


def test_a_state_that_does_not_fit_is_rejected():
    scheduler = ALL["piecewise"](sgd())
    state = scheduler.state_dict()
    with pytest.raises(TypeError, match="must be a mapping"):
        scheduler.load_state_dict([1])
    for missing in scheduler._state_dict_all_req_keys:
        wrong = {key: 5 for key in state if key != missing}
        with pytest.raises(ValueError, match=f"must hold '{missing}'"):
            scheduler.load_state_dict(wrong)
    assert scheduler.state_dict() == state


# --- invalid arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, {}, 1, torch.zeros(1), type("Odd", (), {"param_groups": "abc"})()])
def test_an_unsuitable_optimizer_is_rejected(optimizer):
    with pytest.raises(TypeError, match="optimizer must be one of torch"):
        Own(optimizer)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (2, ValueError, "below 2, got 2"),
        (-3, ValueError, "got -3"),
        ("1", TypeError, "integer"),
        (0.0, TypeError, "0.0"),
    ],
)
def test_a_missing_group_is_rejected(index, error, message):
    with pytest.raises(error, match=f"param_group_index must be .*{message}"):
        Own(sgd(0.1, 0.2), param_group_index=index)


def test_param_name_must_be_a_string():
    with pytest.raises(TypeError, match="param_name must be a str, got 1"):
        Own(sgd(), 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cycle_size": 1}, ValueError, "cycle_size must be at least 2, got 1"),
        ({"cycle_size": 2.5}, TypeError, "cycle_size must be an integer, got 2.5"),
        ({"cycle_size": "4"}, TypeError, "cycle_size"),
        ({"warmup_duration": -1}, ValueError, "warmup_duration must be at least 0, got -1"),
        ({"warmup_duration": 2}, ValueError, "warmup_duration must be 0 unless monotonic=True"),
        ({"start_value": "1"}, TypeError, "start_value must be a number, got '1'"),
        ({"end_value": None}, TypeError, "end_value"),
        ({"cycle_mult": "2"}, TypeError, "cycle_mult"),
    ],
)
def test_invalid_cycles_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        LinearCyclicalScheduler(sgd(), "lr", **{"start_value": 0.0, "end_value": 1.0, "cycle_size": 4, **options})


@pytest.mark.parametrize(
    ("milestones", "error", "message"),
    [
        (None, TypeError, "must be a list or a tuple"),
        ({1: 2.0}, TypeError, "must be a list or a tuple"),
        ([], ValueError, "at least one pair"),
        ([[0, 1.0]], ValueError, "must hold tuples"),
        ([(0, 1.0, 2.0)], ValueError, "must hold tuples"),
        ([0.5], ValueError, "must hold tuples"),
        ([(0.5, 1.0)], TypeError, "a milestone must be an integer, got 0.5"),
        ([(3, 1.0), (2, 1.0)], ValueError, "must be sorted"),
        ([(0, "1")], TypeError, "must be a number"),
    ],
)
def test_invalid_milestones_are_rejected(milestones, error, message):
    with pytest.raises(error, match=message):
        PiecewiseLinear(sgd(), "lr", milestones)


@pytest.mark.parametrize("name", ["rl", "params"])
def test_a_missing_parameter_is_rejected_and_not_created(name):
    optimizer = sgd(0.1, 0.2)
    with pytest.raises(ValueError, match=f"param_name must be .*, got '{name}': there are .*'lr'"):
        PiecewiseLinear(optimizer, name, [(0, 1.0)])
    assert name == "params" or all(name not in group for group in optimizer.param_groups)


def test_a_parameter_must_exist_only_in_the_scheduled_groups():
    optimizer = sgd(0.1, 0.2)
    optimizer.param_groups[1]["noise"] = 0.0
    for index in (1, -1):
        scheduler = PiecewiseLinear(optimizer, "noise", [(0, 1.0)], param_group_index=index)
    scheduler(None)
    assert optimizer.param_groups[1]["noise"] == 1.0
    assert "noise" not in optimizer.param_groups[0]
    for index in (0, None):
        with pytest.raises(ValueError, match="got 'noise'"):
            PiecewiseLinear(optimizer, "noise", [(0, 1.0)], param_group_index=index)


def test_values_of_any_parameter_can_be_simulated():
    assert PiecewiseLinear.simulate_values(2, param_name="noise", milestones_values=[(0, 1.0)]) == [[0, 1.0], [1, 1.0]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_are_rejected(value):
    with pytest.raises(ValueError, match=f"a value of milestones_values must be a finite number, got {value}"):
        PiecewiseLinear(sgd(), "lr", [(0, value)])
    with pytest.raises(ValueError, match=f"cycle_mult must be a finite number, got {value}"):
        LinearCyclicalScheduler(sgd(), "lr", 0.0, 1.0, 2, cycle_mult=value)


# --- plots -------------------------------------------------------------------------------------------------------


@pytest.fixture
def figures():
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def drawn(lines):
    return [list(map(tuple, line.get_xydata().tolist())) for line in lines]


def test_a_schedule_is_one_line(figures):
    lines = PiecewiseLinear.plot_values(3, param_name="momentum", milestones_values=[(0, 0.0), (2, 1.0)])
    assert drawn(lines) == [[(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]]
    assert [text.get_text() for text in figures.gca().get_legend().get_texts()] == ["momentum"]


def test_each_group_is_a_line(figures):
    optimizer = sgd(0.5, 0.1)
    lines = LRScheduler.plot_values(2, lr_scheduler=native.ExponentialLR(optimizer, 0.5))
    assert drawn(lines) == [[(0.0, 0.5), (1.0, 0.25)], [(0.0, 0.1), (1.0, 0.05)]]


def test_other_schedulers_can_be_plotted(figures):
    optimizer = sgd()
    parts = [PiecewiseLinear(optimizer, "lr", [(0, 1.0)]), CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.0, 4)]
    assert drawn(ConcatScheduler.plot_values(2, schedulers=parts, durations=[1])) == [[(0.0, 1.0), (1.0, 0.5)]]
    assert drawn(ExpStateScheduler.plot_values(2, initial_value=8, gamma=0.5, param_name="noise")) == [
        [(0.0, 4.0), (1.0, 2.0)]
    ]
    assert drawn(ReduceLROnPlateauScheduler.plot_values(2, metric_values=[1.0, 1.0], init_lr=0.5)) == [
        [(0.0, 0.5), (1.0, 0.5)]
    ]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"PiecewiseLinear.plot_values needs .* pip install 'camshaft\[plot\]'"
    ):
        PiecewiseLinear.plot_values(3, param_name="lr", milestones_values=[(0, 0.0)])
