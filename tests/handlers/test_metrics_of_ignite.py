"""Metrics of PyTorch-Ignite, which know nothing of this library, on its engines."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from tests.mpi.checking import mpirun
from tests.ranks import on_ranks


@pytest.fixture(scope="module")
def ignite():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports parts of torch that are deprecated
        import ignite.engine
        import ignite.metrics

        return ignite


@pytest.fixture
def data():
    torch.manual_seed(0)
    return [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for size in (5, 5, 2)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def several(metrics):
    precision = metrics.Precision(average=False)
    return {
        "accuracy": metrics.Accuracy(),
        "loss": metrics.Loss(cross_entropy),
        "precision": precision,
        "confusion": metrics.ConfusionMatrix(3),
        "best of two": metrics.TopKCategoricalAccuracy(2),
        "double": metrics.Accuracy() * 2,
        "mean": metrics.MetricsLambda(lambda one: one.mean().item(), precision),
        "f1": metrics.Fbeta(1),
    }


def test_they_give_what_they_give_on_their_own_engine(ignite, data, model):
    ours = create_supervised_evaluator(model, metrics=several(ignite.metrics))
    theirs = ignite.engine.create_supervised_evaluator(model, metrics=several(ignite.metrics))
    for _ in range(2):
        results, expected = ours.run(data).metrics, theirs.run(data).metrics
        assert set(results) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value)


def test_those_of_each_iteration_and_running_ones_work_too(ignite, data, model):
    metrics, seen = ignite.metrics, []
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1), cross_entropy)
    metrics.RunningAverage(output_transform=lambda loss: loss, alpha=0.5).attach(trainer, "loss")
    metrics.Average(output_transform=lambda loss: 2.0).attach(trainer, "last", usage=metrics.metric.BatchWise())
    metrics.RunningAverage(metrics.Average(output_transform=lambda loss: 3.0)).attach(trainer, "of a metric")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.output))
    results = trainer.run(data).metrics
    assert results["last"] == 2.0
    assert results["of a metric"] == 3.0
    assert results["loss"] == pytest.approx(seen[0] / 4 + seen[1] / 4 + seen[2] / 2)


def test_they_can_be_detached(ignite, data, model):
    evaluator = create_supervised_evaluator(model)
    accuracy = ignite.metrics.Accuracy()
    accuracy.attach(evaluator, "accuracy")
    assert accuracy.is_attached(evaluator)
    accuracy.detach(evaluator)
    assert not accuracy.is_attached(evaluator)
    assert evaluator.run(data).metrics == {}


def test_their_events_mean_ours_with_their_filters(ignite):
    engine, seen = Engine(lambda engine, batch: batch), []
    theirs = ignite.engine.Events
    handler = seen.append
    engine.add_event_handler(theirs.ITERATION_COMPLETED(every=2), lambda engine: handler(engine.state.output))
    engine.add_event_handler(theirs.COMPLETED, lambda: handler("done"))
    engine.run([1, 2, 3, 4])
    assert seen == [2, 4, "done"]
    assert engine.has_registered_events(theirs.STARTED)
    assert not engine.has_registered_events(ignite.engine.EventEnum("Other", {"THING": "thing"}).THING)


def test_an_event_that_is_not_known_here_is_refused(ignite):
    thing = ignite.engine.EventEnum("Other", {"THING": "thing"}).THING
    with pytest.raises(ValueError, match="event must be an event of camshaft"):
        Engine(lambda engine, batch: batch).add_event_handler(thing, print)


def refuses_metrics_that_collect_samples():
    """Check on each rank what is refused, and that nothing is left behind by it."""
    from camshaft.distributed import get_rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ignite.metrics import Accuracy, EpochMetric, MeanAveragePrecision, MetricGroup
        from ignite.metrics.regression import MedianAbsoluteError

        engine = Engine(lambda engine, batch: batch)
        count = EpochMetric(lambda predictions, targets: float(len(predictions)), check_compute_fn=False)
        for metric in (count, count * 2, MedianAbsoluteError(), MeanAveragePrecision(), MetricGroup({"count": count})):
            with pytest.raises(RuntimeError, match="must not be attached in a job of 2 ranks.* torchmetrics"):
                metric.attach(engine, "metric")
        Accuracy().attach(engine, "accuracy")
        size = (4, 3)[get_rank()]
        batch = torch.ones(size), torch.full((size,), get_rank())
        assert engine.run([batch]).metrics == {"accuracy": pytest.approx(3 / 7)}


def test_one_process_may_collect_samples(ignite):
    engine = Engine(lambda engine, batch: batch)
    count = ignite.metrics.EpochMetric(lambda predictions, targets: len(predictions), check_compute_fn=False)
    count.attach(engine, "count")
    assert engine.run([(torch.ones(4), torch.ones(4)), (torch.ones(3), torch.ones(3))]).metrics == {"count": 7}


@on_ranks(2)
def test_over_gloo_metrics_that_collect_samples_are_refused():
    refuses_metrics_that_collect_samples()


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_over_mpi_metrics_that_collect_samples_are_refused():
    code = (
        "import camshaft.distributed as idist; from tests.handlers import test_metrics_of_ignite as tests\n"
        "with idist.Parallel(backend='mpi') as parallel:\n"
        "    parallel.run(lambda local_rank: tests.refuses_metrics_that_collect_samples())"
    )
    ran = mpirun(2, "-c", code, seconds=60)
    assert ran.returncode == 0, ran.stdout[-6000:]


@on_ranks(2)
def test_over_gloo_they_count_the_samples_of_all_ranks():
    from camshaft.distributed import get_rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ignite.metrics import Accuracy

    accuracy = Accuracy()
    engine = Engine(lambda engine, batch: (torch.eye(3)[batch], torch.zeros(len(batch), dtype=torch.int64)))
    accuracy.attach(engine, "accuracy")
    mine = [torch.tensor([0, 0, 0]), torch.tensor([0])] if get_rank() == 0 else [torch.tensor([1]), torch.tensor([2])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Local rank information")
        assert engine.run(mine).metrics["accuracy"] == pytest.approx(4 / 6)
