"""Test RunningAverage, which does not synchronize."""

from __future__ import annotations

import copy
import io
import json
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.engine.state import LazyNumber
from camshaft.handlers import ProgressBar, RunningAverage
from tests.handlers.schedules import reread


def echo(engine, batch):
    return batch


def averages(data, alpha=0.5, **options):
    engine, seen = Engine(echo), []
    RunningAverage(alpha=alpha).attach(engine, "mean")
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(engine.state.metrics["mean"]))
    engine.run(data, **options)
    return seen


def tensor(number):
    return torch.tensor(number, dtype=torch.float64)


VALUES = st.tuples(st.floats(-100, 100), st.sampled_from([float, tensor, lambda number: LazyNumber(tensor(number))]))


@given(st.lists(VALUES, min_size=1, max_size=8), st.floats(0, 0.99))
def test_the_average_of_numbers_and_tensors_starts_with_the_first(values, alpha):
    expected = values[0][0]
    found = averages([make(number) for number, make in values], alpha)
    for (number, _), average in zip(values, found, strict=True):
        expected = alpha * expected + (1 - alpha) * number
        assert float(average) == pytest.approx(expected, abs=1e-6)


def test_reading_the_metrics_returns_python_numbers():
    """This includes json and torch reading or copying the dict."""
    engine = Engine(echo)
    RunningAverage(alpha=0.5).attach(engine, "mean")
    engine.state.metrics = {"own": 1.0}  # as users do
    engine.state_dict_user_keys.append("metrics")
    for read in (
        json.dumps,
        lambda metrics: json.dumps(dict(metrics)),
        lambda metrics: json.dumps({**metrics}),
        lambda metrics: json.dumps(metrics.copy()),
        lambda metrics: json.dumps(copy.deepcopy(metrics)),
        lambda metrics: json.dumps({"own": metrics.get("own"), "mean": metrics.get("mean")}),
        lambda metrics: json.dumps(dict(zip(metrics, torch.tensor([*metrics.values()]).tolist(), strict=True))),
        lambda metrics: json.dumps({"own": metrics["own"], "mean": torch.tensor([metrics["mean"]]).item()}),
        lambda metrics: json.dumps({"own": metrics["own"], "mean": metrics.pop("mean")}),
        lambda metrics: json.dumps(reread(engine.state_dict())["metrics"]),
    ):
        metrics = engine.run([torch.tensor(4.0), torch.tensor(2.0)]).metrics
        assert read(metrics) == '{"own": 1.0, "mean": 3.0}'
    assert metrics.get("none", 7) == metrics.pop("none", 7) == 7


def test_a_metric_is_fetched_when_it_is_read(monkeypatch):
    engine, reads, read = Engine(echo), [], LazyNumber.read
    monkeypatch.setattr(LazyNumber, "read", lambda number: reads.append(number) or read(number))
    for name in ("first", "second"):
        RunningAverage().attach(engine, name)
    state = engine.run([torch.tensor(4.0), torch.tensor(2.0)])
    assert reads == []
    assert list(state.metrics) == ["first", "second"]
    assert state.metrics["first"] == state.metrics["first"]
    assert len(reads) == 2


def test_integers_and_half_precision_are_averaged_exactly():
    assert averages([torch.tensor(1), torch.tensor(2)]) == [1.0, 1.5]
    small = averages([torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)], 0.75)
    assert float(small[-1]) == 1.001953125


def test_the_average_continues_over_epochs_and_restarts_with_a_run():
    engine = Engine(echo)
    RunningAverage(alpha=0.5).attach(engine, "mean")
    assert engine.run([4.0, 2.0], max_epochs=2).metrics["mean"] == 2.75
    assert engine.run([8.0]).metrics["mean"] == 8.0


def test_earlier_averages_do_not_change():
    seen = averages([torch.tensor(4.0), torch.tensor(2.0)])
    assert [float(one) for one in reversed(seen)] == [3.0, 4.0]


def test_no_graph_is_kept_alive():
    weight = torch.ones((), requires_grad=True)
    graphs = []

    def step(engine, batch):
        kept_by_graph = weight * batch
        graphs.append(weakref.ref(kept_by_graph))
        return kept_by_graph * kept_by_graph

    engine = Engine(step)
    RunningAverage().attach(engine, "mean")
    engine.run([1.0, 2.0])
    engine.state.output = None
    assert [graph() for graph in graphs] == [None, None]


def test_a_bar_attached_earlier_shows_the_average():
    model = torch.nn.Linear(1, 1)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.0), torch.nn.MSELoss())
    file = io.StringIO()
    ProgressBar(persist=True, file=file, mininterval=0, ascii=True).attach(trainer, metric_names=["loss"])
    RunningAverage().attach(trainer, "loss")
    trainer.run([(torch.ones(1, 1), torch.zeros(1, 1))] * 2)
    assert "loss=" in file.getvalue()


def test_the_average_is_saved_and_restored():
    first, second = RunningAverage(alpha=0.5), RunningAverage(alpha=0.5)
    engine = Engine(echo)
    first.attach(engine, "mean")
    engine.run([torch.tensor(4.0)])
    state = first.state_dict()
    assert state == {"average": 4.0}
    assert type(state["average"]) is float
    other = Engine(echo)
    other.load_state_dict({"iteration": 1, "epoch_length": 1, "max_epochs": 2})
    second.load_state_dict(state)
    second.attach(other, "mean")
    assert other.run([torch.tensor(2.0)]).metrics["mean"] == 3.0
    with pytest.raises(ValueError, match="average"):
        second.load_state_dict({})


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (torch.zeros(2), ValueError, r"one element, got one of shape \(2,\)"),
        ("0.5", TypeError, "got '0.5' of type str"),
        (None, TypeError, "needs engine.state.output, which is None"),
    ],
)
def test_outputs_must_be_numbers(output, error, message):
    with pytest.raises(error, match=message):
        averages([output])


def test_invalid_arguments_are_rejected():
    class Accuracy:
        def compute(self): ...

        def __call__(self, y_pred, y): ...

    for alpha in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="alpha must be"):
            RunningAverage(alpha=alpha)
    with pytest.raises(TypeError, match="output_transform must be callable"):
        RunningAverage(output_transform="loss")
    for metric in (Accuracy(), Accuracy):
        with pytest.raises(TypeError, match="got the metric"):
            RunningAverage(metric)
