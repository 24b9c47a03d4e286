"""The factories of trainers and evaluators."""

from __future__ import annotations

import inspect
import re
import sys
import types
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim

import camshaft.distributed as idist
import camshaft.engine as engine_package
from camshaft.engine import (
    DeterministicEngine,
    Engine,
    Events,
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_evaluation_step,
    supervised_evaluation_step_amp,
    supervised_training_step,
    supervised_training_step_amp,
    supervised_training_step_apex,
    supervised_training_step_tpu,
)
from tests.ranks import on_ranks

# === Trainers and evaluators ===


TRAIN = "model optimizer loss_fn device non_blocking prepare_batch model_transform output_transform"
EVALUATE = "device non_blocking prepare_batch model_transform output_transform"
PARAMETERS = {
    "supervised_training_step": f"{TRAIN} gradient_accumulation_steps model_fn",
    "supervised_training_step_amp": f"{TRAIN} scaler gradient_accumulation_steps model_fn",
    "supervised_training_step_apex": f"{TRAIN} gradient_accumulation_steps model_fn",
    "supervised_training_step_tpu": f"{TRAIN} gradient_accumulation_steps model_fn",
    "supervised_evaluation_step": f"model {EVALUATE} model_fn",
    "supervised_evaluation_step_amp": f"model {EVALUATE} model_fn",
    "create_supervised_trainer": (f"{TRAIN} deterministic amp_mode scaler gradient_accumulation_steps model_fn"),
    "create_supervised_evaluator": f"model metrics {EVALUATE} amp_mode model_fn",
}
REQUIRED = inspect.Parameter.empty
DEFAULTS = {
    "model": REQUIRED, "optimizer": REQUIRED, "loss_fn": REQUIRED, "device": None, "non_blocking": False,
    "deterministic": False, "amp_mode": None, "gradient_accumulation_steps": 1, "metrics": None,
}  # fmt: skip
BATCH = (torch.ones(2, 1), torch.zeros(2, 1))


class Metric:
    """Something to attach."""

    def __init__(self):
        self.attached = []

    def attach(self, engine, name):
        self.attached.append((engine, name))


def training_arguments(rate=0.1):
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)  # of both random, the sum may be 0 in bfloat16
    nn.init.ones_(model.bias)
    return model, torch.optim.SGD(model.parameters(), rate), nn.MSELoss()


@pytest.fixture
def apex(monkeypatch):
    """Stand in for apex: note each loss that is scaled, and double it."""
    scaled = []

    @contextmanager
    def scale_loss(loss, optimizer):
        scaled.append((loss.item(), optimizer))
        yield loss * 2
        scaled.append("left")

    package, module = types.ModuleType("apex"), types.ModuleType("apex.amp")
    package.amp, module.scale_loss = module, scale_loss
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.amp", module)
    return scaled


@pytest.fixture
def xla_model(monkeypatch):
    """Stand in for torch_xla: note each call of `optimizer_step`, and step."""
    calls = []

    def optimizer_step(optimizer, **options):
        calls.append((optimizer, options))
        optimizer.step()

    names = ("torch_xla", "torch_xla.core", "torch_xla.core.xla_model")
    modules = [types.ModuleType(name) for name in names]
    modules[2].optimizer_step = optimizer_step
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    return calls


# --- signatures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_have_the_order_and_the_defaults_that_users_know(name):
    parameters = inspect.signature(getattr(engine_package, name)).parameters.values()
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert " ".join(one.name for one in positional) == PARAMETERS[name]
    defaults = {**DEFAULTS, "scaler": False if name.startswith("create") else None}
    for one in positional:
        if one.name in defaults:
            assert (one.name, one.default) == (one.name, defaults[one.name])
        else:
            assert callable(one.default)
    others = [one for one in parameters if one not in positional and one.name != "_update"]
    assert all(one.kind is one.KEYWORD_ONLY and one.default in (None, False) for one in others)


def test_the_help_of_a_trainer_describes_every_argument():
    described = re.findall(r"^    (\w+): ", inspect.getdoc(create_supervised_trainer), re.MULTILINE)
    assert described[: described.index("ValueError")] == [*inspect.signature(create_supervised_trainer).parameters]


def test_the_default_functions_do_what_the_documentation_reports():
    parameters = inspect.signature(create_supervised_trainer).parameters
    x, y = torch.ones(1), torch.zeros(1)
    assert parameters["prepare_batch"].default((x, y)) == (x, y)
    assert parameters["model_transform"].default(x) is x
    assert parameters["output_transform"].default(x, y, x, torch.tensor(0.5)) == 0.5
    assert parameters["model_fn"].default(lambda x: x + 1, x) == 2
    assert inspect.signature(create_supervised_evaluator).parameters["output_transform"].default(x, y, x) == (x, y)


# --- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deterministic", "kind"), [(False, Engine), (True, DeterministicEngine)])
@pytest.mark.parametrize("amp_mode", [None, "amp"])
def test_a_trainer_trains(deterministic, kind, amp_mode):
    model, optimizer, loss_fn = training_arguments()
    trainer = create_supervised_trainer(model, optimizer, loss_fn, deterministic=deterministic, amp_mode=amp_mode)
    assert type(trainer) is kind
    losses = []
    trainer.add_event_handler("ITERATION_COMPLETED", lambda engine: losses.append(engine.state.output))
    trainer.run([BATCH] * 20)
    assert losses[-1] < losses[0] / 2
    assert {type(loss) for loss in losses} == {float}


def test_an_evaluator_evaluates_and_changes_nothing():
    model = nn.Linear(1, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    y_pred, y = create_supervised_evaluator(model).run([BATCH]).output
    assert torch.equal(y_pred, model(BATCH[0]))
    assert y is BATCH[1]
    assert not y_pred.requires_grad
    assert all(map(torch.equal, model.parameters(), before))


def test_metrics_are_attached_by_name():
    metrics = {"accuracy": Metric(), "loss": Metric()}
    evaluator = create_supervised_evaluator(nn.Identity(), metrics)
    assert {name: metric.attached for name, metric in metrics.items()} == {
        name: [(evaluator, name)] for name in metrics
    }


def outcome(wrap):
    """Train and evaluate a model, and give all that came of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    trainer = create_supervised_trainer(wrapped, optimizer, nn.MSELoss(), gradient_accumulation_steps=2)
    evaluator = create_supervised_evaluator(wrapped)
    data = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(3)]
    losses, modes = [], []
    trainer.add_event_handler("ITERATION_COMPLETED", lambda engine: losses.append(engine.state.output))
    trainer.add_event_handler("EPOCH_COMPLETED", lambda: evaluator.run(data))
    evaluator.add_event_handler("COMPLETED", lambda: modes.append(model[1].training))
    trainer.run(data, max_epochs=2)
    assert modes == [False, False]
    return losses, list(model.parameters()), evaluator.state.output[0]


def test_a_compiled_model_trains_and_evaluates_like_the_model_itself():
    plain, compiled = outcome(lambda model: model), outcome(lambda model: torch.compile(model, backend="eager"))
    torch.testing.assert_close(compiled, plain)


# --- what does not go together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "mps", "amp_mode": "amp"}, ValueError, "amp_mode must be None on mps, got 'amp'"),
        ({"device": torch.device("mps", 0), "amp_mode": "apex"}, ValueError, "on mps, got 'apex'"),
        ({"device": "xla", "amp_mode": "amp"}, ValueError, "amp_mode must be None on xla, got 'amp'"),
        ({"device": "xla:1", "amp_mode": "apex"}, ValueError, "on xla, got 'apex'"),
        ({"device": "xla"}, RuntimeError, "device 'xla' needs torch_xla: pip install"),
        ({"amp_mode": "bf16"}, ValueError, r"amp_mode must be one of \(None, 'amp', 'apex'\), got 'bf16'"),
        ({"amp_mode": True}, ValueError, "amp_mode must be one of .* got True"),
        ({"scaler": True}, ValueError, "scaler needs amp_mode='amp', got amp_mode=None and scaler=True"),
        ({"scaler": torch.amp.GradScaler("cpu")}, ValueError, "scaler needs amp_mode='amp', got amp_mode=None"),
        ({"scaler": True, "amp_mode": "apex"}, ValueError, "scaler needs amp_mode='amp', got amp_mode='apex'"),
        ({"amp_dtype": torch.bfloat16}, ValueError, "amp_dtype needs amp_mode='amp', got amp_mode=None"),
        ({"amp_mode": "apex"}, ModuleNotFoundError, "supervised_training_step_apex needs apex"),
        ({"device": "meta", "amp_mode": "amp"}, ValueError, "torch has autocast for, got 'meta'"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps must be .*positive, got 0"),
        ({"gradient_accumulation_steps": -2}, ValueError, "gradient_accumulation_steps must be .*positive, got -2"),
        ({"clip_grad_norm": 0.0}, ValueError, "clip_grad_norm must be above 0 or None, got 0.0"),
        ({"clip_grad_value": -1.0}, ValueError, "clip_grad_value must be above 0 or None, got -1.0"),
        ({"clip_grad_value": float("nan")}, ValueError, "clip_grad_value"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm"),
        ({"gradient_accumulation_steps": 2.5}, TypeError, "gradient_accumulation_steps"),
        ({"output_transform": 3}, TypeError, "output_transform"),
    ],
)
def test_a_trainer_that_could_not_train_is_rejected(monkeypatch, arguments, error, message):
    for name in ("apex", "torch_xla"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(error, match=message):
        create_supervised_trainer(*training_arguments(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "mps", "amp_mode": "amp"}, ValueError, "amp_mode must be None on mps"),
        ({"device": "xla", "amp_mode": "amp"}, ValueError, "amp_mode must be None on xla"),
        ({"device": "xla"}, RuntimeError, "device 'xla' needs torch_xla: pip install"),
        ({"amp_mode": "fp16"}, ValueError, "amp_mode must be one of"),
        ({"amp_dtype": torch.bfloat16}, ValueError, "amp_dtype needs amp_mode='amp'"),
        ({"device": "meta", "amp_mode": "amp"}, ValueError, "torch has autocast for, got 'meta'"),
    ],
)
def test_an_evaluator_that_could_not_evaluate_is_rejected(monkeypatch, arguments, error, message):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    metric = Metric()
    with pytest.raises(error, match=message):
        create_supervised_evaluator(nn.Identity(), {"metric": metric}, **arguments)
    assert metric.attached == []


@pytest.mark.parametrize(
    ("builder", "library"), [(supervised_training_step_apex, "apex"), (supervised_training_step_tpu, "torch_xla")]
)
def test_a_step_without_its_library_names_what_is_missing(monkeypatch, builder, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"{builder.__name__} needs {library}"):
        builder(*training_arguments())


# --- steps with a library of their own -----------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "gradient"), [({}, 8.0), ({"clip_grad_value": 0.5}, 0.5)])
def test_apex_scales_the_loss_and_trains(apex, options, gradient):
    model, optimizer, loss_fn = training_arguments(rate=0.0)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    trainer = create_supervised_trainer(model, optimizer, loss_fn, amp_mode="apex", **options)
    assert trainer.run([BATCH]).output == 4.0
    assert apex == [(4.0, optimizer), "left"]
    assert model.weight.grad.item() == gradient  # twice that of the loss


def test_xla_steps_the_optimizer_in_its_own_way(xla_model):
    model, optimizer, loss_fn = training_arguments()
    step = supervised_training_step_tpu(model, optimizer, loss_fn, gradient_accumulation_steps=2, clip_grad_norm=0.5)
    before = model.weight.item()
    Engine(step).run([BATCH] * 4)
    assert xla_model == [(optimizer, {"barrier": True})] * 2
    assert model.weight.item() != before


@pytest.mark.parametrize("builder", [supervised_training_step, supervised_training_step_amp])
def test_training_steps_need_no_engine_unless_they_accumulate(builder):
    assert builder(*training_arguments())(None, BATCH) > 0


@pytest.mark.parametrize("builder", [supervised_evaluation_step, supervised_evaluation_step_amp])
def test_evaluation_steps_need_no_engine(builder):
    y_pred, y = builder(nn.Identity())(None, BATCH)
    assert torch.equal(y_pred, BATCH[0])
    assert y is BATCH[1]


# === An optimizer of other parameters ===


def two_linears():
    return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))


@pytest.mark.parametrize("amp_mode", [None, "amp"])
def test_an_optimizer_of_a_model_that_was_replaced_causes_a_warning_for_the_line(amp_mode):
    optimizer = optim.SGD(two_linears().parameters(), 0.1)
    with pytest.warns(UserWarning, match="another model with the same shapes, so this model will not") as caught:
        create_supervised_trainer(two_linears(), optimizer, nn.MSELoss(), amp_mode=amp_mode)
    with pytest.warns(UserWarning, match="another model with the same shapes") as caught_of_step:
        supervised_training_step(two_linears(), optimizer, nn.MSELoss())
    assert [one.filename for one in (*caught, *caught_of_step)] == [__file__] * 2


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_replaced_model_is_noticed_with_frozen_or_lazy_parameters():
    old, new = two_linears(), two_linears()
    for model in (old, new):
        model[0].requires_grad_(False)
    for held in (old.parameters(), old[1].parameters()):
        with pytest.warns(UserWarning, match="another model"):
            create_supervised_trainer(new, optim.SGD(held, 0.1), nn.MSELoss())
    optimizer = optim.SGD(nn.LazyLinear(1).parameters(), 0.1)
    with pytest.warns(UserWarning, match="another model"):
        create_supervised_trainer(nn.LazyLinear(1), optimizer, nn.MSELoss())


@pytest.mark.parametrize(
    ("held", "options"),
    [
        (lambda model: model.parameters(), {}),
        (lambda model: model[1].parameters(), {}),  # a part; its other groups may come later
        (lambda model: [model[0].weight, nn.Parameter(torch.ones(2, 1))], {}),
        (lambda model: [nn.Parameter(torch.ones(2, 1))], {}),  # of the loss, though the shape is that of a weight
        (lambda model: nn.Linear(3, 3).parameters(), {}),  # a discriminator
        (lambda model: [one.detach().double().requires_grad_() for one in model.parameters()], {}),  # master weights
        (lambda model: two_linears().parameters(), {"model_fn": lambda model, x: x}),  # torch.func.functional_call
        (lambda model: two_linears().parameters() if model.requires_grad_(False) else [], {}),  # nothing to train
    ],
)
def test_an_optimizer_of_other_parameters_may_be_intended(held, options):
    model = two_linears()
    create_supervised_trainer(model, optim.SGD(held(model), 0.1), nn.MSELoss(), **options)
    create_supervised_trainer(nn.Identity(), optim.SGD(held(two_linears()), 0.1), nn.MSELoss(), **options)
    if not options:  # wrapped
        create_supervised_trainer(nn.DataParallel(model), optim.SGD(held(model), 0.1), nn.MSELoss())


# === Mixed precision ===


BATCH_AMP = (torch.ones(2, 4), torch.zeros(2, 1))
PRECISIONS = [(None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]


def here():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Places:
    """Functions for a step that write down whether autocast is on where they are called."""

    def __init__(self):
        self.on = {}

    def note(self, name):
        enabled, dtype = here()
        self.on[name] = dtype if enabled else None

    def wrap(self, name, function):
        def noted(*arguments, **keywords):
            self.note(name)
            return function(*arguments, **keywords)

        return noted

    def options(self, output):
        return {
            "prepare_batch": self.wrap("prepare_batch", lambda batch, device, non_blocking: batch),
            "model_fn": self.wrap("model_fn", lambda model, x: model(x)),
            "model_transform": self.wrap("model_transform", lambda y_pred: y_pred),
            "output_transform": self.wrap("output_transform", output),
        }


def model_of(value=1.0):
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def squared(y_pred, y):
    return ((y_pred - y) ** 2).mean()


@pytest.mark.parametrize(("dtype", "used"), PRECISIONS)
@pytest.mark.parametrize("steps", [1, 2])
def test_forward_transform_and_loss_are_in_lower_precision_and_all_else_is_not(dtype, used, steps):
    places, model = Places(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *arguments: places.note("step"))
    model.weight.register_hook(lambda gradient: places.note("backward"))
    trainer = create_supervised_trainer(
        model,
        optimizer,
        places.wrap("loss_fn", squared),
        **places.options(lambda x, y, y_pred, loss: y_pred.dtype),
        amp_mode="amp",
        amp_dtype=dtype,
        gradient_accumulation_steps=steps,
    )
    assert trainer.run([BATCH_AMP] * 2).output == used
    inside, outside = ("model_fn", "model_transform", "loss_fn"), ("prepare_batch", "backward", "step")
    assert places.on == {**dict.fromkeys(inside, used), **dict.fromkeys((*outside, "output_transform"))}
    assert (model.weight.dtype, model.weight.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(("dtype", "used"), PRECISIONS)
def test_in_evaluation_only_model_and_transform_are_in_lower_precision(dtype, used):
    places = Places()
    evaluator = create_supervised_evaluator(
        model_of(), **places.options(lambda x, y, y_pred: y_pred.dtype), amp_mode="amp", amp_dtype=dtype
    )
    assert evaluator.run([BATCH_AMP]).output == used
    assert places.on == {
        "prepare_batch": None,
        "model_fn": used,
        "model_transform": used,
        "output_transform": None,
    }


def test_without_amp_everything_is_in_the_precision_of_the_model():
    places, model = Places(), model_of()
    trainer = create_supervised_trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        places.wrap("loss_fn", squared),
        **places.options(lambda x, y, y_pred, loss: y_pred.dtype),
    )
    assert trainer.run([BATCH_AMP]).output == torch.float32
    assert set(places.on.values()) == {None}


# --- scalers -------------------------------------------------------------------------------------------------------


def scaled_trainer(model, scaler, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    return create_supervised_trainer(
        model, optimizer, squared, amp_mode="amp", amp_dtype=torch.float16, scaler=scaler, **options
    )


def scaler_of(scale=8.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)


def test_a_scaler_of_the_user_is_used_but_not_kept_in_the_state():
    scaler, model = scaler_of(), model_of()
    trainer = scaled_trainer(model, scaler)
    trainer.run([BATCH_AMP])
    assert scaler.get_scale() == 16.0
    assert not hasattr(trainer.state, "scaler")
    assert model.weight.tolist() == [[0.0] * 4]  # 1 - 0.125 * 8: the scale is not in the step


def test_an_optimizer_may_be_anything_that_steps():
    class Both:
        """Two optimizers, as one."""

        def __init__(self, *optimizers):
            self.optimizers = optimizers

        def zero_grad(self):
            for one in self.optimizers:
                one.zero_grad()

        def step(self):
            for one in self.optimizers:
                one.step()

    model = model_of()
    before = model.weight.tolist()
    optimizer = Both(torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1))
    create_supervised_trainer(model, optimizer, nn.functional.mse_loss).run([BATCH_AMP])
    assert model.weight.tolist() != before


def test_a_scaler_that_is_requested_is_made_for_the_device_and_kept_in_the_state():
    model = model_of()
    trainer = scaled_trainer(model, True)
    assert isinstance(trainer.state.scaler, torch.amp.GradScaler)
    assert (trainer.state.scaler._device, trainer.state.scaler.is_enabled()) == ("cpu", True)
    before = trainer.state.scaler.get_scale()
    trainer.run([BATCH_AMP])
    assert trainer.state.scaler.get_scale() == before / 2  # it begins too large for these gradients


def test_the_scale_makes_small_gradients_visible():
    """Gradients of 1e-9 vanish in float16."""
    weights = []
    for scaler in (False, scaler_of(2.0**24)):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 1e9)
        trainer = create_supervised_trainer(
            model, optimizer, lambda y_pred, y: y_pred.float().mean() * 1e-9, amp_mode="amp", amp_dtype=torch.float16,
            scaler=scaler,
        )  # fmt: skip
        trainer.run([BATCH_AMP])
        weights.append(model.weight[0, 0].item())
    assert weights[0] == 1.0
    assert weights[1] == pytest.approx(0.0, abs=0.01)


def test_a_scaler_steps_once_in_a_window():
    scaler, model = scaler_of(), model_of()
    trainer = scaled_trainer(model, scaler, gradient_accumulation_steps=2)
    scales = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scales.append(scaler.get_scale()))
    trainer.run([BATCH_AMP] * 5)
    assert scales == [8.0, 16.0, 16.0, 32.0, 64.0]


# === Arguments of the wrong kind ===


MODEL = nn.Linear(1, 1)
OPTIMIZER = optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((OPTIMIZER, MODEL, nn.MSELoss()), "optimizer must have"),
        ((5, OPTIMIZER, nn.MSELoss()), "model must be"),
        ((MODEL, OPTIMIZER, "mse"), "loss_fn must be callable"),
    ],
)
def test_a_trainer_of_the_wrong_parts_is_rejected(arguments, named):
    with pytest.raises(TypeError, match=named):
        create_supervised_trainer(*arguments)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"size": len}, r"metrics\['size'\]"),
        (
            {"size": type("Size", (), {"attach": len})},
            "must be an object, got the class .*: pass Size",
        ),
        ({"size": type("Sum", (), {"compute": len})()}, r"must have reset\(\), update\(\) and compute\(\)"),
    ],
)
def test_metrics_that_cannot_be_attached_are_rejected(metrics, named):
    with pytest.raises(TypeError, match=named):
        create_supervised_evaluator(MODEL, metrics)


@on_ranks(2)
def test_a_model_that_nothing_synchronizes_is_reported():
    def create(model):
        parameters = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(parameters or [torch.zeros(1)], lr=0.1)
        create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)

    with pytest.warns(UserWarning, match="each of the 2 ranks trains a model of its own, .*auto_model") as caught:
        create(torch.nn.Linear(1, 1))
    assert [one.filename for one in caught] == [__file__]
    create(idist.auto_model(torch.nn.Linear(1, 1)))
    create(torch.nn.Sequential(idist.auto_model(torch.nn.Linear(1, 1))))
    create(torch.nn.Linear(1, 1).requires_grad_(requires_grad=False))
    idist.one_rank_only()(create)(torch.nn.Linear(1, 1))


@on_ranks(2)
def test_an_evaluator_whose_precision_is_not_that_of_the_trainer_is_reported():
    model = torch.nn.Linear(1, 1)
    wrapped = idist.auto_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = {"amp_mode": "amp", "amp_dtype": torch.bfloat16}
    create_supervised_trainer(wrapped, optimizer, torch.nn.functional.mse_loss, **half)
    for evaluated in (wrapped, model):
        with pytest.warns(UserWarning, match=r"in the precision of the model, but .* in torch.bfloat16") as caught:
            create_supervised_evaluator(evaluated)
        assert [one.filename for one in caught] == [__file__]
    create_supervised_evaluator(wrapped, **half)
    create_supervised_evaluator(wrapped, amp_mode="amp")  # which is bfloat16 on a CPU
    create_supervised_evaluator(torch.nn.Linear(1, 1))
    create_supervised_trainer(wrapped, optimizer, torch.nn.functional.mse_loss)
    create_supervised_evaluator(wrapped)
    with pytest.warns(UserWarning, match=r"in torch.bfloat16, but .* in the precision of the model"):
        create_supervised_evaluator(wrapped, **half)
