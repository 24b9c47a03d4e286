"""A number on its way from the device: it behaves as the number, is read when it is used, and only once."""

from __future__ import annotations

import copy
import io
import json
import math
import numbers
import operator
import pickle
import weakref

import numpy
import pytest
import torch

from camshaft.engine.state import LazyNumber, State


class Counting(torch.Tensor):
    """A tensor that counts how often it is read; what is computed from it counts along."""

    reads = 0

    def item(self):
        Counting.reads += 1
        return super().item()


@pytest.fixture
def reads(monkeypatch):
    monkeypatch.setattr(Counting, "reads", 0)
    return lambda: Counting.reads


def lazy(value):
    return LazyNumber(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None))


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = (
    float, int, bool, complex, abs, round, hash, repr, str, operator.neg, operator.pos, operator.truth,
    math.floor, math.ceil, math.trunc, math.sqrt, math.exp, math.log, math.isnan, math.isfinite, numpy.float64,
    lambda number: round(number, 1),
    lambda number: math.isclose(number, 2.75),
    lambda number: sum([number] * 3),
    lambda number: float(max(number, 1.0)),
    lambda number: numpy.mean([number, 1.0]),
    lambda number: f"{number:.2f} {number} {number!r} {number:>8}",
    lambda number: "%.3f %d %s" % (number, number, number),  # noqa: UP031 - loggers format so
    lambda number: [number] == [number],
    lambda number: {number: 1}[number],
)  # fmt: skip
REAL = (
    lambda number: divmod(number, 2),
    lambda number: divmod(7, number),
    lambda number: (number.real, number.imag),
    lambda number: number.conjugate(),
)


@pytest.mark.parametrize("function", UNARY)
def test_functions_give_what_they_give_for_the_number(function):
    for value in (2.75, 3):
        assert function(lazy(value)) == function(value)
        assert type(function(lazy(value))) is type(function(value))


@pytest.mark.parametrize("function", REAL)
def test_what_every_real_number_has_it_has(function):
    assert function(lazy(2.75)) == function(2.75)


@pytest.mark.parametrize("name", ARITHMETIC + COMPARISONS)
def test_operators_give_what_they_give_for_the_numbers(name):
    operation = getattr(operator, name)
    for other in (2, 0.5, True, numpy.float64(1.5), 2.75):
        expected, reflected = operation(2.75, other), operation(other, 2.75)
        assert operation(lazy(2.75), other) == expected
        assert operation(other, lazy(2.75)) == reflected
        assert operation(lazy(2.75), lazy(float(other))) == expected


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "lt", "ge", "eq"])
@pytest.mark.parametrize("make", [torch.tensor, numpy.array])
def test_operators_go_through_tensors_and_arrays(name, make):
    operation, other = getattr(operator, name), make([1.0, 2.5])
    assert (operation(lazy(2.5), other) == operation(2.5, other)).all()
    assert (operation(other, lazy(2.5)) == operation(other, 2.5)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_special_values_keep_their_rules(value):
    assert (lazy(value) == value) == (value == value)
    assert repr(lazy(value)) == repr(value)
    assert math.isnan(lazy(value)) == math.isnan(value)


def test_it_equals_nothing_else():
    assert lazy(2.5) != "2.5"
    assert lazy(2.5) not in (None, "2.5", [2.5])
    with pytest.raises(TypeError, match="not supported"):
        operator.lt(lazy(2.5), "2.5")


def test_it_is_a_number():
    assert isinstance(lazy(2.5), numbers.Number)
    assert isinstance(lazy(2.5), numbers.Real)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, *(lambda n, p=p: pickle.loads(pickle.dumps(n, p)) for p in range(2, 6))]
)
def test_copies_and_pickles_are_plain_numbers(copied):
    result = copied(lazy(2.75))
    assert (result, type(result)) == (2.75, float)


def test_it_is_read_once_and_only_when_it_is_used(reads):
    number = LazyNumber(torch.tensor(2.75).as_subclass(Counting))
    kept = [number, number]
    assert isinstance(number, numbers.Number)
    assert number is kept[0]
    assert reads() == 0
    assert (float(number), number + 1, f"{number:.1f}", hash(number), number.read()) == (
        2.75,
        3.75,
        "2.8",
        hash(2.75),
        2.75,
    )
    assert reads() == 1


def test_the_graph_is_let_go_at_once_and_the_tensor_when_it_was_read():
    class Hook:
        """Lives as long as the graph that it hangs on."""

        def __call__(self, gradient):
            return gradient

    middle, hook = torch.ones(3, requires_grad=True) * 2, Hook()
    middle.register_hook(hook)
    graph = weakref.ref(hook)
    loss = middle.sum()
    number = LazyNumber(loss)
    del middle, hook, loss
    assert graph() is None
    tensor = weakref.ref(number._tensor)
    assert number == 6.0
    assert tensor() is None


def test_the_loss_is_not_changed_by_what_is_computed_with_the_number():
    loss = torch.tensor(1.5)
    number = LazyNumber(loss)
    number += 1
    assert (number, loss) == (2.5, 1.5)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_element_in_any_shape_is_enough(shape):
    assert LazyNumber(torch.full(shape, 4.0)) == 4.0


def results(**more):
    """Return the metrics of a state, with two numbers that are still being computed."""
    state = State(**more)
    state.metrics.update({name: LazyNumber(torch.tensor(0.25).as_subclass(Counting)) for name in ("loss", "norm")})
    return state.metrics


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda metrics: metrics.update(step=1), 0),
        (lambda metrics: operator.setitem(metrics, "step", 1), 0),
        (lambda metrics: ("loss" in metrics, "x" in metrics, len(metrics), list(metrics), metrics.keys()), 0),
        (lambda metrics: metrics["loss"], 1),
        (lambda metrics: metrics.get("loss"), 1),
        (lambda metrics: metrics.pop("loss"), 1),
        (lambda metrics: metrics.setdefault("loss", 1), 1),
        (lambda metrics: [metrics["loss"], metrics["loss"]], 1),
        (lambda metrics: metrics.items(), 2),
    ],
)
def test_using_a_metric_reads_that_one_and_nothing_else(reads, use, expected):
    use(results())
    assert reads() == expected


def loaded(metrics):
    file = io.BytesIO()
    torch.save(metrics, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "read",
    [
        dict, copy.copy, copy.deepcopy, loaded,
        lambda metrics: metrics.copy(),
        lambda metrics: dict(metrics.items()),
        lambda metrics: dict(zip(metrics, metrics.values(), strict=True)),
        lambda metrics: {**metrics},
        lambda metrics: metrics | {},
        lambda metrics: {} | metrics,
        lambda metrics: json.loads(json.dumps(metrics)),
        lambda metrics: pickle.loads(pickle.dumps(metrics)),
        lambda metrics: {name: metrics.setdefault(name, 0) for name in metrics},
        lambda metrics: dict([metrics.popitem(), metrics.popitem()]),
    ],
)  # fmt: skip
def test_whatever_reads_metrics_gets_plain_numbers(read):
    read_metrics = read(results())
    assert read_metrics == {"loss": 0.25, "norm": 0.25}
    assert {type(value) for value in dict.values(read_metrics)} == {float}


def test_metrics_are_a_dict_that_stays_the_same():
    state = State(metrics={"loss": 1})
    assert "_metrics" not in vars(state)
    assert state.metrics is vars(state)["metrics"]
    assert (state.metrics.get("x"), state.metrics.get("x", 2), state.metrics.pop("x", 3)) == (None, 2, 3)
    with pytest.raises(KeyError, match="x"):
        state.metrics.pop("x")


def test_a_metric_that_does_not_exist_is_a_key_error_with_a_note_that_lists_the_others():
    metrics = State().metrics
    metrics.update(loss=1, mse=2)
    with pytest.raises(KeyError) as caught:
        metrics["acc"]
    assert caught.type is KeyError
    assert caught.value.args == ("acc",)
    (note,) = caught.value.__notes__
    assert "['loss', 'mse']" in note
