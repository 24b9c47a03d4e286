"""Test metrics of torchmetrics on engines: exact over epochs, batches and ranks, with one exchange, also resumed."""

from __future__ import annotations

import io
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from camshaft import distributed as idist
from camshaft.distributed.job import current
from camshaft.engine import Engine, Events, create_supervised_evaluator
from camshaft.engine import metrics as metrics_module
from camshaft.engine.state import LazyNumber
from camshaft.handlers import attach_metrics
from tests.ranks import on_ranks
from tests.threads import on_threads
from tests.torchvision_import import import_torchvision

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


def echo(engine, batch):
    return batch


def samples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def batches(scores, targets, *sizes):
    return list(zip(scores.split(sizes), targets.split(sizes), strict=True))


class Library:
    """Imports torchmetrics, which takes seconds, on first use."""

    def __getattr__(self, name):
        if not name[0].isupper():
            raise AttributeError(name)
        import_torchvision()
        import torchmetrics
        from torchmetrics import classification, regression, wrappers

        modules = (torchmetrics, classification, regression, wrappers)
        return next(getattr(module, name) for module in modules if hasattr(module, name))


library = Library()


def rows():
    """Return a metric with a list state that is not reduced, like metrics for object detection."""

    class Rows(library.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("rows", default=[], dist_reduce_fx=None)

        def update(self, scores, targets):
            self.rows.extend(targets.unbind())

        def compute(self):
            return torch.stack(self.rows)

    return Rows()


def every_kind():
    collection = library.MetricCollection([library.MulticlassPrecision(3), library.MulticlassRecall(3)])
    return {
        "accuracy": library.MulticlassAccuracy(3, average="micro"),
        "both": collection,
        "confusion": library.MulticlassConfusionMatrix(3),
        "double": library.MulticlassAccuracy(3, average="micro") * 2 + 1,
        "extremes": library.MinMaxMetric(library.MulticlassAccuracy(3, average="micro")),
        "rows": rows(),
    }


def plain(results):
    """Flatten and round results to compare them."""
    flat = {}
    for name, value in results.items():
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            numbers = [round(number, 5) for number in torch.as_tensor(one).double().flatten().tolist()]
            flat[name, key] = sorted(numbers) if name == "rows" else numbers
    return flat


def expected(metrics, scores, targets):
    for metric in metrics.values():
        metric.update(scores, targets)
    return {name: metric.compute() for name, metric in metrics.items()}


def run(metrics, data, **options):
    engine = Engine(echo)
    attach_metrics(engine, metrics, **options)
    return engine.run(data, epoch_length=len(data)).metrics


# --- one process -------------------------------------------------------------------------------------------


def test_an_evaluator_takes_metrics_of_torchmetrics_and_objects_that_attach_themselves():
    class Count:
        def attach(self, engine, name):
            engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: engine.state.metrics.update({name: 12}))

    scores, targets = samples(12)
    evaluator = create_supervised_evaluator(torch.nn.Identity(), metrics={**every_kind(), "count": Count()})
    results = evaluator.run(batches(scores, targets, 5, 5, 2)).metrics
    assert type(results["accuracy"]) is type(results["both"]["MulticlassRecall"]) is float
    assert results.pop("count") == 12
    assert plain(results) == plain(expected(every_kind(), scores, targets))


def test_metrics_are_reset_each_epoch():
    engine, seen = Engine(echo), []
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(engine.state.metrics["sum"]))
    attach_metrics(engine, {"sum": library.SumMetric()})  # handlers attached earlier see the results
    engine.run([1.0, 2.0, 4.0], max_epochs=2)
    engine.run([8.0])
    assert seen == [7.0, 7.0, 8.0]


@pytest.mark.parametrize(
    "transform",
    [
        lambda output: (output["a"], output["b"]),
        lambda output: [output["a"], output["b"]],
        lambda output: {"preds": output["a"], "target": output["b"]},
    ],
)
def test_the_transform_returns_the_arguments(transform):
    data = [{"a": torch.tensor([1.0]), "b": torch.tensor([3.0]), "c": 5}]
    assert run({"error": library.MeanSquaredError()}, data, output_transform=transform) == {"error": 4.0}


def test_a_lazy_loss_does_not_synchronize(monkeypatch):
    monkeypatch.setattr(LazyNumber, "read", lambda self: pytest.fail("synchronized"))
    engine = Engine(lambda engine, batch: LazyNumber(torch.tensor(batch)))
    attach_metrics(engine, {"mean": library.MeanMetric()})
    assert engine.run([1.0, 2.0]).metrics == {"mean": 1.5}


def test_metrics_move_to_the_device_of_their_arguments():
    metric = library.MulticlassConfusionMatrix(3, validate_args=False)
    engine = Engine(lambda engine, batch: (torch.ones(2, 3, device="meta"), torch.ones(2, device="meta")))
    attach_metrics(engine, {"confusion": metric}, output_transform=lambda output: seen.append(metric.device) or output)
    seen = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(metric.device))
    with pytest.raises(NotImplementedError):  # counting does not work on the meta device
        engine.run([0])
    assert metric.device == torch.device("meta")


def test_metrics_on_a_trainer_point_to_the_evaluator():
    trainer = Engine(lambda engine, batch: torch.tensor(0.5))
    attach_metrics(trainer, {"accuracy": library.MulticlassAccuracy(3)})
    with pytest.raises(TypeError, match="update") as caught:
        trainer.run([1])
    assert any("a single value, as that of a trainer; that of an evaluator" in note for note in caught.value.__notes__)


def test_remove_detaches_the_metrics():
    engine = Engine(echo)
    attached = attach_metrics(engine, {"sum": library.SumMetric()})
    attached.remove()
    assert engine.run([1.0]).metrics == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3],), "metrics must be a mapping"),
        (({"mean": 3},), r"metrics\['mean'\] must have reset\(\), update\(\) and compute\(\)"),
        (({"list": list},), r"metrics\['list'\] must be an object, got the class .*: pass list\(\.\.\.\) instead"),
        (({}, "loss"), "output_transform must be callable"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    engine = Engine(echo)
    before = [plan.registrations for plan in engine._dispatcher.plans.values()]
    with pytest.raises(TypeError, match=message):
        attach_metrics(engine, *arguments)
    assert [plan.registrations for plan in engine._dispatcher.plans.values()] == before


# --- resuming ----------------------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def save_at(iteration, data, metrics):
    """Run two epochs and return what a checkpoint of this iteration would contain."""
    engine, saved = Engine(echo), {}
    attached = attach_metrics(engine, metrics)

    def save():
        saved.update(engine=engine.state_dict(), metrics=attached.state_dict())

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), save)
    engine.run(data, max_epochs=2)
    return through_a_file(saved), engine.state.metrics


def test_an_epoch_resumed_in_the_middle_is_complete():
    data = batches(*samples(8), 3, 1, 2, 2)
    saved, whole = save_at(6, data, every_kind())
    engine = Engine(echo)
    attached = attach_metrics(engine, every_kind())
    engine.load_state_dict(saved["engine"])
    attached.load_state_dict(saved["metrics"])
    assert plain(engine.run(data[2:]).metrics) == plain(whole)
    assert engine.state.iteration == 8


def test_a_state_of_a_completed_epoch_is_not_reused():
    data = [1.0, 2.0, 4.0]
    saved, _ = save_at(3, data, {"sum": library.SumMetric()})
    engine = Engine(echo)
    attached = attach_metrics(engine, {"sum": library.SumMetric()})
    engine.load_state_dict(saved["engine"])
    attached.load_state_dict(saved["metrics"])
    assert engine.run(data).metrics == {"sum": 7.0}


def test_without_its_state_only_the_rest_of_the_epoch_counts_with_a_warning():
    data = [1.0, 2.0, 4.0]
    saved, _ = save_at(5, data, {"sum": library.SumMetric()})
    engine = Engine(echo)
    attach_metrics(engine, {"sum": library.SumMetric()})
    engine.load_state_dict(saved["engine"])
    with pytest.warns(UserWarning, match=r"\['sum'\] leave out the first iterations of epoch 2"):
        assert engine.run(data[2:]).metrics == {"sum": 4.0}


def test_a_state_from_another_iteration_is_discarded():
    data = [1.0, 2.0, 4.0, 8.0]
    saved, _ = save_at(7, data, {"sum": library.SumMetric()})
    engine = Engine(echo)
    attached = attach_metrics(engine, {"sum": library.SumMetric()})
    engine.load_state_dict({"iteration": 5, "epoch_length": 4, "max_epochs": 2})
    attached.load_state_dict(saved["metrics"])
    with pytest.warns(UserWarning, match="the first iterations of epoch 2"):
        assert engine.run(data[1:]).metrics == {"sum": 14.0}


def test_an_epoch_resumed_after_a_failure_is_complete():
    engine, failures = Engine(lambda engine, batch: failures.pop() if batch == 2.0 and failures else batch), [None]
    attach_metrics(engine, {"sum": library.SumMetric()}, output_transform=lambda output: output + 0.0)
    with pytest.raises(TypeError):
        engine.run([1.0, 2.0, 4.0])
    assert engine.run([4.0]).metrics["sum"] == 1.0 + 4.0  # without the failed batch


def test_a_state_of_other_metrics_is_rejected():
    engine = Engine(echo)
    attached = attach_metrics(engine, {"sum": library.SumMetric()})
    state = attach_metrics(engine, {"mean": library.MeanMetric()}).state_dict()
    with pytest.raises(ValueError, match=r"\['sum'\], got \['mean'\]"):
        attached.load_state_dict(state)
    with pytest.raises(ValueError, match="metrics"):
        attached.load_state_dict({"epoch": 1, "iteration": 2})


# --- several ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_uneven_ranks_are_exact_with_one_exchange(size, monkeypatch):
    calls = []
    gather = metrics_module.all_gather
    monkeypatch.setattr(metrics_module, "all_gather", lambda value: calls.append(idist.get_rank()) or gather(value))
    scores, targets = samples(13)
    parts = {2: ((5, 1), (3, 4)), 3: ((4, 1), (1, 1), (3, 3))}[size]
    ends = torch.tensor([sum(part) for part in parts]).cumsum(0).tolist()

    @on_threads(size)
    def check():
        rank = idist.get_rank()
        mine = slice(ends[rank] - sum(parts[rank]), ends[rank])
        metrics = every_kind()
        engine = create_supervised_evaluator(torch.nn.Identity(), metrics)
        data = batches(scores[mine], targets[mine], *parts[rank])
        everything = plain(expected(every_kind(), scores, targets))
        for epoch in (1, 2):
            assert plain(engine.run(data).metrics) == everything, epoch
        states = [one.metric_state for one in metrics.values() if isinstance(one, library.Metric)]
        assert len(metrics["rows"].rows) == sum(parts[rank]), "the metric keeps what it has, not what the others have"
        assert states[0]["tp"].sum() <= sum(parts[rank])

    check()
    assert sorted(calls) == sorted([*range(size)] * 2)


@on_threads(2)
def test_a_rank_without_samples_participates():
    scores, targets = torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 1, 1])
    engine = Engine(echo)
    attached = attach_metrics(engine, {"area": library.BinaryAUROC()})
    if idist.get_rank() == 1:
        engine.run(iter([]))
    else:
        engine.run([(scores[:1], targets[:1]), (scores[1:], targets[1:])])
    assert engine.state.metrics == {"area": 1.0}
    assert attached.state_dict()["metrics"] == {}


@on_threads(2)
def test_a_metric_that_merges_states_itself_is_exact():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(10, generator=generator), torch.rand(10, generator=generator)
    mine = slice(0, 7) if idist.get_rank() == 0 else slice(7, 10)
    assert run({"r": library.PearsonCorrCoef()}, [(x[mine], y[mine])])["r"] == pytest.approx(
        expected({"r": library.PearsonCorrCoef()}, x, y)["r"].item(), abs=1e-6
    )


@on_threads(2)
def test_metrics_without_synchronization_stay_local():
    rank = idist.get_rank()
    gathered = []

    def gather(tensor, group=None):
        gathered.append(group)
        return [tensor]

    own = library.SumMetric(dist_sync_fn=gather, distributed_available_fn=lambda: True)
    mine = library.CatMetric(sync_on_compute=False)
    results = run({"mine": mine, "own": own, "all": library.SumMetric()}, [1.0 + rank, 1.0])
    assert results["mine"].tolist() == [1.0 + rank, 1.0]
    assert (results["own"], results["all"]) == (2.0 + rank, 5.0)
    assert len(gathered) == 1


@on_threads(2)
def test_metrics_of_a_collection_may_share_a_state():
    class Total(library.Metric):
        def __init__(self, times):
            super().__init__()
            self.times = times
            self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, value):
            self.total = self.total + value

        def compute(self):
            return self.times * self.total

    both = library.MetricCollection({"once": Total(1), "twice": Total(2)})
    results = run({"both": both}, [1.0, 2.0, 4.0])
    assert len(both.compute_groups) == 1
    assert results == {"both": {"once": 14.0, "twice": 28.0}}


@on_threads(2)
def test_different_metrics_on_ranks_are_reported():
    name = f"sum of {idist.get_rank()}"
    with pytest.raises(RuntimeError, match=r"the same metrics, got \[\['sum of 0'\], \['sum of 1'\]\]"):
        run({name: library.SumMetric()}, [1.0])


@on_threads(2)
def test_metrics_are_restored_after_an_error():
    class Failing(library.SumMetric):
        def compute(self):
            raise ZeroDivisionError

    metric = Failing()
    available = metric.distributed_available_fn
    with pytest.raises(ZeroDivisionError):
        run({"sum": metric}, [1.0])
    assert metric.dist_sync_fn is None
    assert metric.distributed_available_fn is available


@on_threads(4)
def test_the_samples_of_ranks_that_share_them_count_once():
    place = idist.get_rank() // 2
    names = {"mesh_dim_names": ("dp_shard", "tp"), "shape": (2, 2), "get_coordinate": lambda: [place, 0]}
    current().job.mesh = SimpleNamespace(**names)
    metrics = run({"sum": library.SumMetric(), "all": library.CatMetric()}, [1.0 + place, 3.0 + place])
    assert metrics["sum"] == 10.0
    assert metrics["all"].tolist() == [1.0, 3.0, 2.0, 4.0]


@on_threads(4)
def test_ranks_that_divide_sequences_all_count():
    rank = idist.get_rank()
    names = {
        "mesh_dim_names": ("dp_shard", "cp"),
        "shape": (2, 2),
        "get_coordinate": lambda: divmod(rank, 2),
    }
    current().job.mesh = SimpleNamespace(**names)
    assert run({"sum": library.SumMetric()}, [1.0 + rank]) == {"sum": 10.0}


@on_threads(2)
def test_a_state_of_one_process_is_loaded_by_one_rank():
    engine = Engine(echo)
    attached = attach_metrics(engine, {"sum": library.SumMetric()})
    engine.load_state_dict({"iteration": 1, "epoch_length": 2, "max_epochs": 1})
    one = library.SumMetric()
    one.persistent(True)
    one.update(10.0)
    attached.load_state_dict({"epoch": 1, "iteration": 1, "metrics": {"sum": one.state_dict()}})
    assert engine.run([1.0, 1.0]).metrics == {"sum": 12.0}


@pytest.mark.jobs  # each rank imports torchmetrics
@on_ranks(2)
def test_over_gloo_there_is_one_exchange():
    calls = []
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast"):
        function = getattr(dist, name)

        def count(*args, function=function, name=name, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        setattr(dist, name, count)
    rank = idist.get_rank()
    scores, targets = samples(12)
    mine = slice(0, 7) if rank == 0 else slice(7, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run(every_kind(), batches(scores[mine], targets[mine], *((4, 3) if rank == 0 else (4, 1))))
    assert plain(results) == plain(expected_alone(scores, targets))
    counted = len(calls)
    calls.clear()
    idist.all_gather(("one", "object" * 1000))
    assert counted == len(calls)


def expected_alone(scores, targets):
    """Compute over all samples in this process."""
    metrics = every_kind()
    for metric in metrics.values():
        for one in metric.modules():
            one.distributed_available_fn = lambda: False
    return expected(metrics, scores, targets)
