"""Test that metrics and events of PyTorch-Ignite work with engines, and that everything else is rejected by name."""

from __future__ import annotations

import io
import logging
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

from camshaft import handlers
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import CSVLogger, ProgressBar, global_step_from_engine
from camshaft.handlers.logger_utils import setup_csv_logging
from tests.mpi.checking import mpirun
from tests.ranks import on_ranks


@pytest.fixture(scope="module")
def ignite():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports parts of torch that are deprecated
        import ignite.engine
        import ignite.handlers
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


def test_ignite_metrics_have_the_same_results_as_on_their_own_engine(ignite, data, model):
    ours = create_supervised_evaluator(model, metrics=several(ignite.metrics))
    theirs = ignite.engine.create_supervised_evaluator(model, metrics=several(ignite.metrics))
    for _ in range(2):
        results, expected = ours.run(data).metrics, theirs.run(data).metrics
        assert set(results) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value)


def test_ignite_metrics_per_iteration_and_running_averages_work(ignite, data, model):
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


def test_ignite_metrics_can_be_detached(ignite, data, model):
    evaluator = create_supervised_evaluator(model)
    accuracy = ignite.metrics.Accuracy()
    accuracy.attach(evaluator, "accuracy")
    assert accuracy.is_attached(evaluator)
    accuracy.detach(evaluator)
    assert not accuracy.is_attached(evaluator)
    assert evaluator.run(data).metrics == {}


def test_ignite_events_are_accepted_with_their_filters(ignite):
    engine, seen = Engine(lambda engine, batch: batch), []
    theirs = ignite.engine.Events
    handler = seen.append
    engine.add_event_handler(theirs.ITERATION_COMPLETED(every=2), lambda engine: handler(engine.state.output))
    engine.add_event_handler(theirs.COMPLETED, lambda: handler("done"))
    engine.run([1, 2, 3, 4])
    assert seen == [2, 4, "done"]
    assert engine.has_registered_events(theirs.STARTED)
    assert not engine.has_registered_events(ignite.engine.EventEnum("Other", {"THING": "thing"}).THING)


def test_unknown_ignite_events_are_rejected(ignite):
    thing = ignite.engine.EventEnum("Other", {"THING": "thing"}).THING
    engine = Engine(lambda engine, batch: batch)
    with pytest.raises(ValueError, match=r"unknown event Events\.THING: register it"):
        engine.add_event_handler(thing, print)
    with pytest.raises(TypeError, match="EventEnum comes from PyTorch-Ignite: use the one from camshaft.engine"):
        engine.register_events(thing)


@pytest.mark.parametrize(
    "join",
    [
        lambda ours, theirs: theirs.ITERATION_COMPLETED(every=2) | theirs.COMPLETED,
        lambda ours, theirs: ours.ITERATION_COMPLETED(every=2) | theirs.COMPLETED,
        lambda ours, theirs: ours.ITERATION_COMPLETED(every=2) | (theirs.COMPLETED | theirs.TERMINATE),
        lambda ours, theirs: (ours.ITERATION_COMPLETED(every=2) | ours.TERMINATE) | theirs.COMPLETED,
    ],
)
def test_ignite_events_can_be_joined(ignite, join):
    engine, seen = Engine(lambda engine, batch: batch), []
    events = join(Events, ignite.engine.Events)
    handle = engine.add_event_handler(events, lambda: seen.append(engine.last_event_name.name))
    engine.run([1, 2, 3, 4])
    assert seen == ["ITERATION_COMPLETED", "ITERATION_COMPLETED", "COMPLETED"]
    handle.remove()
    engine.on(events)(print)
    assert engine.has_event_handler(print, events)
    engine.remove_event_handler(print, events)
    assert not engine.has_event_handler(print)


def test_ignite_events_work_with_loggers_and_progress_bars(ignite, tmp_path):
    engine, theirs = Engine(lambda engine, batch: batch), ignite.engine.Events
    bar = io.StringIO()
    ProgressBar(file=bar).attach(engine, event_name=theirs.EPOCH_COMPLETED, closing_event_name=theirs.COMPLETED)
    with CSVLogger(tmp_path / "log.csv") as logger:
        events = theirs.ITERATION_COMPLETED | theirs.EPOCH_COMPLETED
        logger.attach_output_handler(engine, events, "run", output_transform=lambda output: output)
        engine.run([1, 2], max_epochs=2)
    assert len((tmp_path / "log.csv").read_text().splitlines()) > 4
    assert "2/2" in bar.getvalue()
    assert global_step_from_engine(engine, theirs.ITERATION_STARTED)(None, Events.COMPLETED) == 4


ENGINE = "Engine comes from PyTorch-Ignite: use the one from camshaft.engine"
ATTACH = {
    "BasicTimeProfiler": lambda engine, path: handlers.BasicTimeProfiler().attach(engine),
    "CSVLogger": lambda engine, path: log(engine, path),
    "Checkpoint": lambda engine, path: handlers.Checkpoint({"model": torch.nn.Linear(1, 1)}, path)(engine),
    "EMAHandler": lambda engine, path: handlers.EMAHandler(torch.nn.Linear(1, 1)).attach(engine),
    "EarlyStopping": lambda engine, path: handlers.EarlyStopping(1, lambda engine: 0.0, engine),
    "EarlyStopping.attach": lambda engine, path: stopping().attach(engine),
    "EarlyStopping.attach.reset_engine": lambda engine, path: stopping().attach(nothing(), reset_engine=engine),
    "EpochOutputStore": lambda engine, path: handlers.EpochOutputStore().attach(engine),
    "ExpStateScheduler": lambda engine, path: handlers.ExpStateScheduler(1.0, 0.5, "x").attach(engine),
    "FBResearchLogger": lambda engine, path: handlers.FBResearchLogger(logging.getLogger()).attach(engine, "run"),
    "FastaiLRFinder": lambda engine, path: handlers.FastaiLRFinder().attach(engine, {"optimizer": sgd()}).__enter__(),
    "HandlersTimeProfiler": lambda engine, path: handlers.HandlersTimeProfiler().attach(engine),
    "LRScheduler": lambda engine, path: handlers.LRScheduler(torch.optim.lr_scheduler.StepLR(sgd(), 1))(engine),
    "ModelCheckpoint": lambda engine, path: handlers.ModelCheckpoint(path)(engine, {"model": torch.nn.Linear(1, 1)}),
    "PiecewiseLinear": lambda engine, path: handlers.PiecewiseLinear(sgd(), "lr", [(0, 1.0)]).attach(engine),
    "ProgressBar": lambda engine, path: ProgressBar().attach(engine),
    "RunningAverage": lambda engine, path: handlers.RunningAverage().attach(engine, "loss"),
    "TerminateOnNan": lambda engine, path: handlers.TerminateOnNan()(engine),
    "Throughput": lambda engine, path: handlers.Throughput().attach(engine),
    "TimeLimit": lambda engine, path: handlers.TimeLimit()(engine),
    "Timer": lambda engine, path: handlers.Timer().attach(engine),
    "TorchProfiler": lambda engine, path: handlers.TorchProfiler(path).attach(engine),
    "attach_metrics": lambda engine, path: handlers.attach_metrics(engine, {}),
    "global_step_from_engine": lambda engine, path: global_step_from_engine(engine),
    "setup_csv_logging": lambda engine, path: setup_csv_logging(path, engine),
    "setup_csv_logging.evaluators": lambda engine, path: setup_csv_logging(path, nothing(), evaluators=engine),
}


def nothing():
    return Engine(lambda engine, batch: None)


def log(engine, path):
    with CSVLogger(path) as logger:
        logger.attach_output_handler(engine, Events.COMPLETED, "run", "all")


def stopping():
    return handlers.EarlyStopping(1, lambda engine: 0.0, nothing())


def sgd():
    return torch.optim.SGD([torch.zeros(1)], lr=0.1)


@pytest.mark.parametrize("attach", ATTACH.values(), ids=ATTACH)
def test_ignite_engines_are_rejected_by_name(ignite, attach, tmp_path):
    with pytest.raises(TypeError, match=f"must be .*{ENGINE}"):
        attach(ignite.engine.Engine(lambda engine, batch: None), tmp_path / "log")


@pytest.mark.parametrize(
    "use",
    [
        lambda theirs: handlers.ConcatScheduler([theirs, theirs], [1]),
        lambda theirs: handlers.ParamGroupScheduler([theirs]),
        lambda theirs: handlers.create_lr_scheduler_with_warmup(theirs, 0.0, 2),
        lambda theirs: handlers.LRScheduler(theirs),
    ],
)
def test_ignite_schedulers_are_rejected_by_name(ignite, use):
    theirs = ignite.handlers.PiecewiseLinear(sgd(), "lr", [(0, 1.0)])
    with pytest.raises((TypeError, ValueError), match="PiecewiseLinear comes from PyTorch-Ignite: use the one from"):
        use(theirs)


def test_ignite_metrics_are_rejected_where_torchmetrics_are_expected(ignite):
    with pytest.raises(TypeError, match=r"comes from PyTorch-Ignite: .* metric\.attach\(engine, 'accuracy'\)"):
        handlers.attach_metrics(nothing(), {"accuracy": ignite.metrics.Accuracy()})
    with pytest.raises(TypeError, match="use ignite.metrics.RunningAverage"):
        handlers.RunningAverage(ignite.metrics.Accuracy())
    with pytest.raises(TypeError, match="must be an object, got the class .*: pass Accuracy"):
        create_supervised_evaluator(torch.nn.Linear(1, 1), {"accuracy": ignite.metrics.Accuracy})
    with pytest.raises(TypeError, match=r"Accuracy comes from PyTorch-Ignite; it registers .* attach\(engine"):
        nothing().add_event_handler(Events.COMPLETED, ignite.metrics.Accuracy())


def rejects_metrics_that_collect_samples():
    """Check on each rank that such metrics are rejected without side effects."""
    from camshaft.distributed import get_rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ignite.metrics import Accuracy, EpochMetric, MeanAveragePrecision, MetricGroup
        from ignite.metrics.regression import MedianAbsoluteError

        engine = Engine(lambda engine, batch: batch)
        count = EpochMetric(lambda predictions, targets: float(len(predictions)), check_compute_fn=False)
        for metric in (count, count * 2, MedianAbsoluteError(), MeanAveragePrecision(), MetricGroup({"count": count})):
            with pytest.raises(RuntimeError, match="in a job of 2 ranks gathers .* torchmetrics"):
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
def test_over_gloo_metrics_that_collect_samples_are_rejected():
    rejects_metrics_that_collect_samples()


@pytest.mark.jobs
def test_over_mpi_metrics_that_collect_samples_are_rejected():
    code = (
        "import camshaft.distributed as idist; from tests.handlers import test_metrics_of_ignite as tests\n"
        "with idist.Parallel(backend='mpi') as parallel:\n"
        "    parallel.run(lambda local_rank: tests.rejects_metrics_that_collect_samples())"
    )
    ran = mpirun(2, "-c", code)
    assert ran.returncode == 0, ran.stdout[-6000:]


@on_ranks(2)
def test_over_gloo_ignite_metrics_count_the_samples_of_all_ranks():
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
