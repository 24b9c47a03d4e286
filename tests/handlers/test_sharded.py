"""Handlers of models, gradients, and outputs that are DTensors."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist

from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.engine.state import LazyNumber
from camshaft.handlers import EMAHandler, FastaiLRFinder, RunningAverage, TerminateOnNan, attach_metrics
from camshaft.handlers.base_logger import (
    BaseLogger,
    BaseOutputHandler,
    BaseWeightsHistHandler,
    BaseWeightsScalarHandler,
)
from tests.layouts import Layout, Net, data_of, full_weights, made, token_loss, whole_of
from tests.ranks import on_ranks

SIZES = [[2, 1]] * 4
LAYOUTS = {
    "fsdp2": Layout(dp_shard=4),
    "tp": Layout(tp=4),
    "fsdp2 + tp": Layout(dp_shard=2, tp=2),
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def check_equal(values, others):
    for name, value in others.items():
        torch.testing.assert_close(values[name], value, atol=1e-12, rtol=0)


class Recorder(BaseLogger):
    """Records what is written, on rank 0."""

    def __init__(self):
        self.written = []

    def write_values(self, values, step):
        self.written.append(dict(values))

    def write_histograms(self, tensors, step):
        self.written.append(dict(tensors))


class GradientNorms(BaseWeightsScalarHandler):
    of_gradients = True


def check_model_handlers(layout):
    """Check the average, the logged weights and gradients, and a search for a learning rate."""
    own, _ = data_of(layout, SIZES)
    model = made(layout)
    if layout.data_ranks > 1:
        with pytest.raises(ValueError, match="fully_shard, which does not allow copies: pass ema_model"):
            EMAHandler(model)
    second = made(layout) if layout.data_ranks > 1 else None
    ema = EMAHandler(model, momentum=0.25, ema_model=second)
    expected = copy.deepcopy(full_weights(model))
    trainer = create_supervised_trainer(model, sgd(model), token_loss)
    ema.attach(trainer)
    recorder = Recorder()
    for handler in (BaseWeightsScalarHandler(model), BaseWeightsHistHandler(model), GradientNorms(model)):
        recorder.attach(trainer, handler, Events.ITERATION_COMPLETED)

    @trainer.on(Events.ITERATION_COMPLETED)
    def check():
        weights, momentum = full_weights(model), trainer.state.ema_momentum
        assert momentum == 9 / (10 + trainer.state.iteration)
        for name, value in weights.items():
            expected[name].lerp_(value, momentum)
        check_equal(full_weights(ema.ema_model), expected)
        alone = Net()
        alone.load_state_dict(expected)
        x = own[0][0]
        torch.testing.assert_close(ema.ema_model(x), alone(x))  # leaves full weights in the module
        norms_of_gradients = {name: whole_of(one.grad).norm().item() for name, one in model.named_parameters()}
        if dist.get_rank() == 0:
            norms, histograms, gradients = recorder.written[-3:]
            assert len(norms) == len(histograms) == len(gradients) == len(weights)
            for name, value in weights.items():
                path = tuple(name.split("."))
                assert math.isclose(norms[("weights_norm", *path)], value.norm().item())
                assert torch.equal(histograms[("weights", *path)], value)
                assert math.isclose(gradients[("grads_norm", *path)], norms_of_gradients[name])

    trainer.run(own)
    state = copy.deepcopy(ema.state_dict()["ema_model"])
    ema.update(1.0)
    ema.load_state_dict({"ema_model": expected, "momentum_scheduler": None})  # full tensors, as in a checkpoint
    check_equal(full_weights(ema.ema_model), expected)
    ema.load_state_dict({"ema_model": state, "momentum_scheduler": None})
    check_equal(full_weights(ema.ema_model), expected)
    assert len(recorder.written) == (6 if dist.get_rank() == 0 else 0)

    before, optimizer = full_weights(model), torch.optim.Adam(model.parameters(), 1e-3)
    searching = create_supervised_trainer(model, optimizer, token_loss)
    finder = FastaiLRFinder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a search that ends early
        with finder.attach(searching, {"model": model, "optimizer": optimizer}, num_iter=4) as trainer:
            trainer.run(own * 2)
    check_equal(full_weights(model), before)
    losses = [None] * 4
    dist.all_gather_object(losses, finder.get_results()["loss"])
    assert losses.count(losses[0]) == 4


@pytest.mark.parametrize(
    "name", ["fsdp2 + tp", *(pytest.param(name, marks=pytest.mark.jobs) for name in ("fsdp2", "tp"))]
)
@on_ranks(4)
def test_handlers_of_models_see_whole_weights_of_sharded_models(name):
    check_model_handlers(LAYOUTS[name])


@on_ranks(2)
def test_sharded_weights_of_low_precision_are_averaged_in_float32():
    from torch.distributed.fsdp import fully_shard

    def filled(value, shard=True):
        model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        return fully_shard(model) if shard else model

    def updated(ema):
        for _ in range(20):
            ema.update(0.001)
            ema.ema_model(torch.ones(1, 4, dtype=torch.bfloat16))
        return ema

    alone = EMAHandler(filled(1.0, shard=False))
    torch.nn.init.constant_(alone.model.weight, 2.0)
    for _ in range(40):
        alone.update(0.001)
    expected = alone.state_dict()["ema_model"]["weight"]
    ema = EMAHandler(filled(1.0), ema_model=filled(0.0))
    torch.nn.init.constant_(ema.model.weight, 2.0)
    state = copy.deepcopy(updated(ema).state_dict())
    assert torch.equal(whole_of(updated(ema).state_dict()["ema_model"]["weight"]), expected)
    full = {name: whole_of(one) for name, one in state["ema_model"].items()}
    for saved in (state, {**state, "ema_model": full}):
        ema.load_state_dict(saved)
        assert torch.equal(whole_of(updated(ema).state_dict()["ema_model"]["weight"]), expected)
    assert torch.equal(whole_of(ema.ema_model.weight), expected.bfloat16())


class Sum:
    """A metric."""

    def reset(self):
        self.total = 0.0

    def update(self, value):
        assert type(value) is torch.Tensor
        self.total += value.sum().item()

    def compute(self):
        return self.total


@on_ranks(2)
def test_outputs_that_are_dtensors_are_reduced_where_all_ranks_are_and_never_where_one_rank_writes():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def output(engine, batch):
        dist.barrier()
        local = torch.tensor([batch + rank])
        nan = torch.tensor([math.nan if batch == 3.0 and rank == 1 else 1.0])
        return {
            "partial": DTensor.from_local(local.sum(), mesh, [Partial()]),
            "replicated": DTensor.from_local(torch.tensor(batch), mesh, [Replicate()]),
            "sharded": DTensor.from_local(local, mesh, [Shard(0)]),
            "checked": DTensor.from_local(nan, mesh, [Shard(0)]),
        }

    trainer, recorder = Engine(output), Recorder()
    RunningAverage(lambda output: output["partial"], alpha=0.5).attach(trainer, "average")
    attach_metrics(trainer, {"sum": Sum()}, lambda output: output["sharded"])
    handler = BaseOutputHandler(
        "t", ["average"], lambda output: {name: output[name] for name in ("replicated", "sharded")}
    )
    recorder.attach(trainer, handler, Events.ITERATION_COMPLETED)
    with (
        pytest.warns(UserWarning, match="t/sharded is not logged because it is a sharded DTensor")
        if rank == 0
        else (warnings.catch_warnings())
    ):
        state = trainer.run([1.0, 2.0])
    assert state.metrics["average"] == 4.0  # 1 + 2, then 2 + 3
    assert state.metrics["sum"] == 8.0
    if rank == 0:
        assert recorder.written == [
            {("t", "average"): 3.0, ("t", "replicated"): 1.0},
            {("t", "average"): 4.0, ("t", "replicated"): 2.0},
        ]
    assert LazyNumber(state.output["partial"]) == 5.0

    stopping = Engine(output)
    stopping.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(lambda output: output["checked"]))
    assert stopping.run([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).iteration in (3, 4)
