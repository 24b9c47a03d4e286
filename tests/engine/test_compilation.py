"""Compiled trainers: the same results, few compilations, and state dicts without a trace of them."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import camshaft.distributed as idist
from camshaft.engine import (
    Engine,
    Events,
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_training_step_apex,
    supervised_training_step_tpu,
)
from camshaft.engine.compilation import compilations_since, now
from camshaft.handlers import EMAHandler, LinearCyclicalScheduler, LRScheduler, Throughput
from tests.ranks import on_ranks

pytestmark = [  # of torch, while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
EAGER = {"backend": "eager"}  # dynamo without a compiler of the machine
torch_compile = torch.compile


def data_of(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]


DATA = data_of(4, 4, 4, 2)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def trained(compile, prepare=lambda trainer, model, optimizer: None, epochs=4, make=torch.optim.AdamW, **options):
    """Train; return the trainer, the model, and the optimizer."""
    model = model_of()
    optimizer = make(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), compile=compile, **options)
    prepare(trainer, model, optimizer)
    trainer.run(DATA, max_epochs=epochs)
    return trainer, model, optimizer


def steps_of_torch(trainer, model, optimizer):
    schedule = LRScheduler(StepLR(optimizer, step_size=3, gamma=0.5))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, schedule)


def cycles(trainer, model, optimizer):
    schedule = LinearCyclicalScheduler(optimizer, "lr", 0.01, 0.001, 8)
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)


def by_hand(trainer, model, optimizer):
    @trainer.on(Events.EPOCH_STARTED)
    def change(engine: Engine) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / engine.state.epoch


def evaluated(trainer, model, optimizer):
    evaluator = create_supervised_evaluator(model)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(DATA))


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch.compiler.reset()


@pytest.fixture
def without_inductor(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch_compile, backend="eager"))


@pytest.mark.parametrize("compile", [True, "model"])
@pytest.mark.usefixtures("without_inductor")
def test_a_compiled_trainer_trains_like_the_plain_one(compile):
    began = now()
    _, model, _ = trained(compile)
    names = {one.co_name for one in compilations_since(began)}
    assert ("step" in names) is (compile is True)
    assert "forward" in names
    torch.testing.assert_close(model.state_dict(), trained(False)[1].state_dict())


OPTIONS = {
    "accumulated": {"gradient_accumulation_steps": 3},
    "weighed": {"gradient_accumulation_steps": 2, "batch_weight": lambda x, y: len(y)},
    "clipped": {"clip_grad_norm": 0.1, "make": torch.optim.SGD},
    "bfloat16": {"amp_mode": "amp", "amp_dtype": torch.bfloat16},
    "float16": {"amp_mode": "amp", "amp_dtype": torch.float16, "scaler": True},
    "deterministic": {"deterministic": True},
    "a schedule of torch": {"prepare": steps_of_torch},
    "a schedule": {"prepare": cycles},
    "rates set by hand": {"prepare": by_hand},
    "evaluations": {"prepare": evaluated},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_so_it_does_with_any_option_and_it_compiles_nothing_after_the_first_epoch(options):
    counts, prepare = [], options.get("prepare", lambda trainer, model, optimizer: None)

    def prepare_and_count(trainer, model, optimizer):
        prepare(trainer, model, optimizer)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: counts.append(len(compilations_since(began))))

    began = now()
    torch.manual_seed(0)
    _, compiled, _ = trained(EAGER, **{**options, "prepare": prepare_and_count})
    torch.manual_seed(0)
    _, plain, _ = trained(False, **options)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), atol=1e-5, rtol=1e-4)
    assert 0 < counts[0] == counts[-1]


def test_state_dicts_have_no_trace_of_it_in_either_direction():
    trainer, model, optimizer = trained(EAGER, steps_of_torch)
    _, plain_model, plain_optimizer = trained(False, steps_of_torch)
    assert list(model.state_dict()) == list(plain_model.state_dict())
    saved, plain = optimizer.state_dict(), plain_optimizer.state_dict()
    assert saved["param_groups"] == plain["param_groups"]
    assert isinstance(saved["param_groups"][0]["lr"], float)
    optimizer.load_state_dict(copy.deepcopy(plain))
    trainer.run(DATA, max_epochs=6)
    assert optimizer.param_groups[0]["lr"].item() < plain["param_groups"][0]["lr"]


def test_an_average_of_the_weights_is_the_same():
    averages = []

    def average(trainer, model, optimizer):
        ema = EMAHandler(model, momentum=0.1)
        ema.attach(trainer, event=Events.ITERATION_COMPLETED)
        averages.append(ema.ema_model)

    trained(EAGER, average)
    trained(False, average)
    torch.testing.assert_close(averages[0].state_dict(), averages[1].state_dict())


def test_a_compilation_after_the_first_epoch_is_reported_once_with_function_and_reason():
    def change(trainer, model, optimizer):
        trainer.add_event_handler(
            Events.EPOCH_STARTED, lambda engine: optimizer.param_groups[0].update(momentum=engine.state.epoch / 10)
        )

    with pytest.warns(UserWarning, match="torch compiled 'step' again in epoch 2, because .*momentum") as caught:
        trained(EAGER, change, make=partial(torch.optim.SGD, momentum=0.1))
    assert len(caught) == 1


def test_every_trainer_of_a_process_is_compiled():
    began = now()
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            trained(EAGER, epochs=1)
    assert sum(one.co_name == "forward" for one in compilations_since(began)) >= 4


def test_throughput_reports_the_compilations_of_the_run():
    results = []

    def measure(trainer, model, optimizer):
        Throughput().attach(trainer, Events.EPOCH_COMPLETED)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: results.append(dict(trainer.state.metrics)))

    trained(EAGER, measure)
    assert results[0]["compilations"] == results[-1]["compilations"] >= 2
    assert 0 < results[0]["compilation_seconds"] == results[-1]["compilation_seconds"]
    results.clear()
    trained(False, measure)
    assert "compilations" not in results[0]


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"compile": "optimizer"}, TypeError, "compile"),
        ({"compile": 3}, TypeError, "compile"),
        ({"compile": True, "amp_mode": "apex"}, ValueError, "compile"),
    ],
)
def test_what_cannot_be_compiled_is_rejected(options, error, named):
    model = model_of()
    with pytest.raises(error, match=named):
        create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), **options)


def shard(model):
    from torch.distributed.fsdp import fully_shard  # takes a second

    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def inside(model):
    return nn.Sequential(idist.auto_model(model))


class Both:
    """Two optimizers, as one that torch does not know."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        self.parts = [torch.optim.SGD(one, lr) for one in (parameters[:2], parameters[2:])]
        self.param_groups = [group for one in self.parts for group in one.param_groups]

    def zero_grad(self):
        for one in self.parts:
            one.zero_grad()

    def step(self):
        for one in self.parts:
            one.step()


@pytest.mark.usefixtures("without_inductor")
def test_the_step_of_an_optimizer_that_is_not_one_of_torch_is_left_as_it_is():
    _, model, optimizer = trained(True, make=Both)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    torch.testing.assert_close(model.state_dict(), trained(False, make=Both)[1].state_dict())


@pytest.mark.parametrize("builder", [supervised_training_step_apex, supervised_training_step_tpu])
def test_steps_of_other_libraries_are_not_compiled(builder):
    model = model_of()
    with pytest.raises(ValueError, match="compile"):
        builder(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), compile=True)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [idist.auto_model, inside, shard])
def test_wrapped_and_sharded_models_are_compiled_inside_of_their_wrappers(wrap):
    warnings.simplefilter("ignore")  # of torch, as above
    weights, own = [], data_of(4, 4, 4, 4, seed=idist.get_rank())
    for compile in (EAGER, False):
        model = wrap(model_of())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        began = now()
        trainer = create_supervised_trainer(
            model, optimizer, nn.MSELoss(), compile=compile, gradient_accumulation_steps=2
        )
        trainer.run(own, max_epochs=2)
        assert bool(compilations_since(began)) is (compile is not False)
        assert not any("_orig_mod" in name for name in model.state_dict())
        weights.append([getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()])
    torch.testing.assert_close(*weights)
