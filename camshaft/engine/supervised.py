"""Trainers, evaluators, and their steps, for models that learn from pairs of inputs and targets."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from camshaft.arguments import check_is_no_class, check_takes, check_type, described
from camshaft.distributed import get_world_size, model_name
from camshaft.distributed.failures.alone import alone
from camshaft.distributed.models.replicas import register
from camshaft.dtensors import full_value, is_dtensor, is_wrapped, reshard
from camshaft.engine.compilation import Compiler
from camshaft.engine.deterministic import DeterministicEngine
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, Order
from camshaft.engine.metrics import attach_metrics
from camshaft.engine.mode import Mode
from camshaft.engine.state import LazyNumber
from camshaft.engine.update import Accumulation, Update, autocast, complete_step, device_type_of, scaled_to_all_ranks
from camshaft.errors import annotate, level_of_caller
from camshaft.tree import convert_tensor
from camshaft.types import DeviceLike

P = ParamSpec("P")
Step = Callable[[Any, Any], Any]
PrepareBatch = Callable[..., tuple[Any, Any]]
_AMP_MODES = (None, "amp", "apex")


# --- the functions that users can replace, by default --------------------------------------------------------------


def prepare_batch(batch: Any, device: DeviceLike | None = None, non_blocking: bool = False) -> tuple[Any, Any]:
    """Split a batch into inputs and targets, and move both to a device.

    >>> prepare_batch((torch.ones(2), torch.zeros(2)))
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    # Others may have two rows or two keys; the check of the usual types is the faster one.
    if not isinstance(batch, (list, tuple)) and (hasattr(batch, "shape") or isinstance(batch, (Mapping, str, bytes))):
        what = f"one with the keys {list(batch)}" if isinstance(batch, Mapping) else described(batch)
        hint = "pass prepare_batch=..., a function that returns inputs and targets"
        raise TypeError(f"a batch must be a pair of inputs and targets, got {what}: {hint}")
    try:
        x, y = batch
    except (TypeError, ValueError) as error:
        annotate(error, "a batch must be a pair of inputs and targets; pass prepare_batch=... to make one of it")
        raise
    return (
        x if device is None and isinstance(x, Tensor) else convert_tensor(x, device, non_blocking),
        y if device is None and isinstance(y, Tensor) else convert_tensor(y, device, non_blocking),
    )


def loss_value(x: Any, y: Any, y_pred: Any, loss: Tensor) -> Any:
    """Return the loss as a number, which on devices other than the CPU is read on first use."""
    loss = full_value(loss)  # here, where all ranks are; the number may be read on one of them
    return loss.item() if loss.is_cpu else LazyNumber(loss)


def predictions_and_targets(x: Any, y: Any, y_pred: Any) -> Any:
    """Return predictions and targets, the output that metrics take."""
    return y_pred, y


def identity(output: Any) -> Any:
    """Return the output of the model."""
    return output


def call_model(model: Any, x: Any) -> Any:
    """Call a model with its input."""
    return model(x)


_prepare_batch = prepare_batch  # which the name of an argument hides


# --- steps and engines -----------------------------------------------------------------------------------------------


def _with_arguments_of(plain: Callable[P, Step]) -> Callable[[Callable[..., Step]], Callable[P, Step]]:
    """Return a decorator that gives a builder of steps the signature of another one."""

    def decorate(variant: Callable[..., Step]) -> Callable[P, Step]:
        parameters = inspect.signature(plain).parameters.values()
        shown = [one for one in parameters if not one.name.startswith("_")]
        variant.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # inspect reads it
        return variant

    return decorate


def supervised_training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
    compile: bool | str | Mapping[str, Any] = False,
    _update: Callable[..., Update] = Update,
) -> Step:
    """Return a step that trains in the precision of the model.

    The arguments are those of :func:`create_supervised_trainer`.

    Returns:
        A function of an engine and a batch.

    Raises:
        ValueError: as for :func:`create_supervised_trainer`.

    >>> model = torch.nn.Linear(1, 1)
    >>> step = supervised_training_step(
    ...     model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss()
    ... )
    >>> from camshaft.engine import Engine
    >>> losses: list[float] = []
    >>> trainer = Engine(step)
    >>> @trainer.on("ITERATION_COMPLETED")
    ... def keep(engine: Engine) -> None:
    ...     losses.append(engine.state.output)
    >>> state = trainer.run([(torch.ones(2, 1), torch.zeros(2, 1))] * 5)
    >>> losses[-1] < losses[0]
    True
    """
    compiler = None if compile is False else Compiler(compile)
    compiled = {} if compiler is None else {"step": compiler.step_of(optimizer)}
    update = _update(optimizer, clip_grad_norm, clip_grad_value, **compiled)
    _check_parts(model, prepare_batch, model_transform, output_transform, "(x, y, y_pred, loss)")
    check_takes("loss_fn", loss_fn, "(y_pred, y)")
    for name, part in (("optimizer", optimizer), ("loss_fn", loss_fn)):
        check_is_no_class(name, part)
    _check_holds_parameters(optimizer, model, model_fn)
    accumulation: Accumulation | None = Accumulation(model, update, gradient_accumulation_steps, batch_weight)
    if gradient_accumulation_steps == 1 and batch_weight is None:
        accumulation = None
    batch_of, set_mode = _preparing(prepare_batch, device, non_blocking), Mode(model, training=True)
    is_compiled_inside = False
    if compiler is not None:
        is_compiled_inside = compiler.inside(model)
        loss_fn = compiler.function(loss_fn) if is_compiled_inside else loss_fn
    context, is_plain = update.context, update.is_plain

    def forward(x: Any, y: Any) -> tuple[Any, Tensor]:
        y_pred = model_transform(model_fn(model, x))
        loss = loss_fn(y_pred, y)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return a tensor, got {described(loss)}")
        return y_pred, loss

    whole_forward = forward if compiler is None or is_compiled_inside else compiler.function(forward)

    def forward_in_context(x: Any, y: Any) -> tuple[Any, Tensor]:
        with context():  # type: ignore[misc]  # chosen only if it is given
            return whole_forward(x, y)

    predict = whole_forward if context is None else forward_in_context

    def step(engine: Any, batch: Any) -> Any:
        if accumulation is None:
            optimizer.zero_grad()
        else:
            is_last = accumulation.begin(engine)
        set_mode(engine)
        x, y = batch_of(batch)
        if accumulation is not None:
            with accumulation.synchronization(engine, is_last):
                y_pred, loss = predict(x, y)
                update.backward(accumulation.scaled(engine, x, y, loss))
            accumulation.end(engine, is_last)
        else:
            y_pred, loss = predict(x, y)
            if is_plain:
                scaled_to_all_ranks(engine, loss).backward()  # type: ignore[no-untyped-call]  # untyped in torch
                optimizer.step()
            else:
                update.backward(scaled_to_all_ranks(engine, loss))
                update.apply()
            complete_step(engine)
        return output_transform(x, y, y_pred, loss)

    step.parts = (set_mode,) if compiler is None else (set_mode, compiler)  # type: ignore[attr-defined]
    return step


def supervised_training_step_amp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    scaler: torch.amp.GradScaler | None = None,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
    compile: bool | str | Mapping[str, Any] = False,
) -> Step:
    """Return a step that trains in mixed precision, on any device that torch has autocast for.

    The arguments are those of :func:`create_supervised_trainer`; ``scaler`` is a ``GradScaler`` or ``None``.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> step = supervised_training_step_amp(
    ...     model, optimizer, torch.nn.MSELoss(), amp_dtype=torch.bfloat16
    ... )
    >>> isinstance(step(None, (torch.ones(2, 1), torch.zeros(2, 1))), float)
    True
    """
    return supervised_training_step(
        model, optimizer, loss_fn, device, non_blocking, prepare_batch, model_transform, output_transform,
        gradient_accumulation_steps, model_fn, clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value,
        batch_weight=batch_weight, compile=compile,
        _update=partial(Update, context=autocast(device, model, amp_dtype), scaler=scaler),
    )  # fmt: skip


@_with_arguments_of(supervised_training_step)
def supervised_training_step_apex(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Step:
    """Return a step for a model and an optimizer that were prepared by ``apex.amp.initialize``.

    The arguments are those of :func:`create_supervised_trainer`, except for ``compile``.

    Raises:
        ModuleNotFoundError: apex is not installed.
        ValueError: ``compile`` is not ``False``.
    """
    _check_is_not_compiled("apex", kwargs)
    amp = _import_for("supervised_training_step_apex", "apex.amp", "see NVIDIA/apex for how to build it")

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return supervised_training_step(model, optimizer, *args, **kwargs, _update=partial(Update, backward=backward))


@_with_arguments_of(supervised_training_step)
def supervised_training_step_tpu(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Step:
    """Return a step that trains on XLA devices.

    The arguments are those of :func:`create_supervised_trainer`, except for ``compile``.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        ValueError: ``compile`` is not ``False``.
    """
    _check_is_not_compiled("XLA", kwargs)
    xla_model = _import_for("supervised_training_step_tpu", "torch_xla.core.xla_model", "pip install torch_xla")

    def step() -> None:
        if hasattr(optimizer, "wrapped_optimizer"):  # of auto_optim, whose step does all of this
            optimizer.step()
        else:
            xla_model.optimizer_step(optimizer, barrier=True)

    return supervised_training_step(model, optimizer, *args, **kwargs, _update=partial(Update, step=step))


def supervised_evaluation_step(
    model: torch.nn.Module,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    model_fn: Callable[[Any, Any], Any] = call_model,
) -> Step:
    """Return a step that evaluates in the precision of the model.

    Args:
        output_transform: ``output_transform(x, y, y_pred)`` returns the output; by default ``y_pred, y``.

    The other arguments are those of :func:`create_supervised_trainer`.

    >>> step = supervised_evaluation_step(torch.nn.Identity())
    >>> step(None, (torch.ones(1), torch.zeros(1)))
    (tensor([1.]), tensor([0.]))
    """
    _check_parts(model, prepare_batch, model_transform, output_transform, "(x, y, y_pred)")
    batch_of, set_mode = _preparing(prepare_batch, device, non_blocking), Mode(model, training=False)

    @torch.no_grad()
    def step(engine: Any, batch: Any) -> Any:
        set_mode(engine)
        x, y = batch_of(batch)
        y_pred = model_transform(model_fn(model, x))
        return output_transform(x, y, y_pred)

    step.parts = (set_mode,)  # type: ignore[attr-defined]
    return step


def supervised_evaluation_step_amp(
    model: torch.nn.Module,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
) -> Step:
    """Return a step that evaluates in mixed precision: the model and ``model_transform`` run under autocast.

    The arguments are those of :func:`create_supervised_evaluator`.

    >>> step = supervised_evaluation_step_amp(torch.nn.Linear(1, 1))
    >>> y_pred, y = step(None, (torch.ones(1), torch.zeros(1)))
    >>> y_pred.dtype
    torch.bfloat16
    """
    context = autocast(device, model, amp_dtype)

    def predict(model: Any, x: Any) -> Any:
        with context():
            return model_transform(model_fn(model, x))

    return supervised_evaluation_step(model, device, non_blocking, prepare_batch, identity, output_transform, predict)


def create_supervised_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = loss_value,
    deterministic: bool = False,
    amp_mode: str | None = None,
    scaler: bool | torch.amp.GradScaler = False,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    batch_weight: Callable[[Any, Any], float | Tensor] | None = None,
    compile: bool | str | Mapping[str, Any] = False,
) -> Engine[Any, Any]:
    """Return an engine that trains a model on batches of inputs and targets.

    A run starts with the whole model in train mode. To freeze a part, such as the statistics of batch norm in a
    backbone, put it into eval mode in a handler of ``STARTED`` or ``EPOCH_STARTED``; evaluations do not change that.

    Args:
        model: the model, plain, compiled, wrapped for several ranks, or sharded by ``fully_shard`` or
            ``parallelize_module``, on one or several meshes. It is not moved.
        optimizer: optimizer of its parameters, created after they were sharded.
        loss_fn: ``loss_fn(y_pred, y)`` returns the loss, a tensor with one element.
        device: device that batches are moved to; ``None`` leaves them where they are.
        non_blocking: whether to move them asynchronously where that is possible.
        prepare_batch: ``prepare_batch(batch, device=..., non_blocking=...)`` returns ``x, y``.
        model_transform: applied to the output of the model.
        output_transform: ``output_transform(x, y, y_pred, loss)`` returns the output of the step; by default the loss
            as a number, which waits for the device only when it is read.
        deterministic: whether to return a :class:`DeterministicEngine`.
        amp_mode: ``None`` for the precision of the model, ``"amp"`` for the mixed precision of torch, ``"apex"``.
        scaler: gradient scaler for ``"amp"``, which float16 needs; ``True`` creates one and stores it as
            ``state.scaler``. Torch then waits for the device in each step unless the optimizer is fused.
        gradient_accumulation_steps: batches whose gradients make up one step of the optimizer. Ranks exchange gradients
            once per step; until then, models sharded by ``fully_shard`` keep full gradients on each rank.
        model_fn: ``model_fn(model, x)`` calls the model.
        amp_dtype: the lower precision of ``"amp"``; by default that of torch for the device.
        clip_grad_norm: maximum norm of all gradients together, including those of all shards.
        clip_grad_value: maximum absolute value of any element of a gradient.
        batch_weight: ``batch_weight(x, y)`` returns the weight of a batch among those of one step and of all ranks,
            given what ``prepare_batch`` returned: the number of samples (``lambda x, y: len(y)``) or tokens that the
            loss is a mean over, or the sum of the weights in a weighted loss. By default, the batches of a step have
            equal weights, and those of different ranks are weighted by their samples. Ranks along a mesh dimension
            named ``"tp"`` have the same batches, which count once.
        compile: whether ``torch.compile`` compiles the step: the model with its transform and the loss, as one
            function, and the step of the optimizer, whose learning rates become tensors. ``"model"`` leaves the
            optimizer as it is; a mapping has options of ``torch.compile``. Models that are wrapped or sharded are
            compiled in place, inside of their wrappers, and sharded ones per block. The optimizer is not compiled with
            a scaler, for DTensors, or if its step communicates. State dicts are the same as without.

    Raises:
        ValueError: the arguments contradict each other, a number is out of range, or the optimizer was created before
            the model was sharded.
        TypeError: ``compile`` is none of these, or another argument has the wrong type.
        RuntimeError: ``device`` is ``"xla"`` and torch_xla is not installed.
        ModuleNotFoundError: ``amp_mode`` is ``"apex"`` and apex is not installed.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), clip_grad_norm=1.0)
    >>> trainer.run([(torch.ones(2, 1), torch.zeros(2, 1))], max_epochs=3).iteration
    3
    """
    mode = _mode(device, amp_mode, scaler, amp_dtype)
    builders: Mapping[str | None, Callable[..., Step]] = {
        None: supervised_training_step,
        "amp": supervised_training_step_amp,
        "apex": supervised_training_step_apex,
        "xla": supervised_training_step_tpu,
    }
    new_scaler = torch.amp.GradScaler(device_type_of(device, model)) if scaler is True else None
    of_amp = {"scaler": new_scaler or scaler or None, "amp_dtype": amp_dtype} if mode == "amp" else {}
    step = builders[mode](
        model, optimizer, loss_fn, device=device, non_blocking=non_blocking, prepare_batch=prepare_batch,
        model_transform=model_transform, output_transform=output_transform,
        gradient_accumulation_steps=gradient_accumulation_steps, model_fn=model_fn, clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value, batch_weight=batch_weight, compile=compile, **of_amp,
    )  # fmt: skip
    _warn_unless_synchronized(model)
    trainer: Engine[Any, Any] = DeterministicEngine(step) if deterministic else Engine(step)
    for part in step.parts:  # type: ignore[attr-defined]  # set by the builder
        part.attach(trainer)
    _compare_replicas(trainer, model)
    if isinstance(model, torch.nn.Module):
        _precisions[_innermost(model)] = _precision(mode, amp_dtype, device, model)
    if new_scaler is not None:
        trainer.state.scaler = new_scaler
    return trainer


def create_supervised_evaluator(
    model: torch.nn.Module,
    metrics: Mapping[str, Any] | None = None,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
    model_transform: Callable[[Any], Any] = identity,
    output_transform: Callable[[Any, Any, Any], Any] = predictions_and_targets,
    amp_mode: str | None = None,
    model_fn: Callable[[Any, Any], Any] = call_model,
    *,
    amp_dtype: torch.dtype | None = None,
) -> Engine[Any, Any]:
    """Return an engine that evaluates a model on batches of inputs and targets.

    Args:
        metrics: by name, metrics of torchmetrics, which are attached by
            :func:`attach_metrics <camshaft.handlers.attach_metrics>`, or objects with ``attach(engine, name)``, such as
            those of PyTorch-Ignite. Their results appear in ``state.metrics``.
        amp_mode: ``"amp"`` for the mixed precision of torch; otherwise the precision of the model, which for ``"apex"``
            apex has changed already.
        output_transform: ``output_transform(x, y, y_pred)`` returns the output; by default ``y_pred, y``.

    The other arguments are those of :func:`create_supervised_trainer`.

    Raises:
        ValueError: the arguments contradict each other.
        RuntimeError: ``device`` is ``"xla"`` and torch_xla is not installed.

    >>> evaluator = create_supervised_evaluator(torch.nn.Identity())
    >>> evaluator.run([(torch.ones(1), torch.zeros(1))]).output
    (tensor([1.]), tensor([0.]))
    """
    mode = _mode(device, amp_mode, False, amp_dtype)
    _warn_if_precisions_differ(model, _precision(mode, amp_dtype, device, model))
    builder = (
        partial(supervised_evaluation_step_amp, amp_dtype=amp_dtype) if mode == "amp" else supervised_evaluation_step
    )
    step = builder(model, device, non_blocking, prepare_batch, model_transform, output_transform, model_fn)
    evaluator: Engine[Any, Any] = Engine(step)
    for part in step.parts:  # type: ignore[attr-defined]
        part.attach(evaluator)
    check_type("metrics", metrics or {}, Mapping, "a mapping of names to metrics")
    others = {}
    for name, metric in (metrics or {}).items():
        check_is_no_class(f"metrics[{name!r}]", metric)
        if callable(getattr(metric, "attach", None)):
            metric.attach(evaluator, name)
        else:
            others[name] = metric
    if others:
        attach_metrics(evaluator, others)
    return evaluator


def _mode(device: DeviceLike | None, amp_mode: str | None, scaler: Any, amp_dtype: torch.dtype | None) -> str | None:
    """Return the kind of step; reject arguments that contradict each other."""
    kind = None if device is None else torch.device(device).type
    if amp_mode not in _AMP_MODES:
        hint = "; for mixed precision, pass amp_mode='amp', amp_dtype=torch.bfloat16"
        raise ValueError(f"amp_mode must be one of {_AMP_MODES}, got {amp_mode!r}{hint}")
    if amp_dtype is not None:
        check_type("amp_dtype", amp_dtype, torch.dtype, "a torch.dtype")
    if kind in ("mps", "xla") and amp_mode is not None:
        raise ValueError(f"amp_mode must be None on {kind}, got {amp_mode!r}")
    if kind == "xla" and find_spec("torch_xla") is None:
        raise RuntimeError("device 'xla' needs torch_xla: pip install torch_xla")
    if scaler and amp_mode != "amp":
        raise ValueError(f"scaler needs amp_mode='amp', got amp_mode={amp_mode!r} and scaler={scaler!r}")
    if amp_dtype is not None and amp_mode != "amp":
        raise ValueError(f"amp_dtype needs amp_mode='amp', got amp_mode={amp_mode!r} and amp_dtype={amp_dtype}")
    return "xla" if kind == "xla" else amp_mode


def _check_is_not_compiled(kind: str, options: Mapping[str, Any]) -> None:
    if options.get("compile", False) is not False:
        raise ValueError(f"compile must be False with {kind}, which has a step of its own, got {options['compile']!r}")


def _preparing(
    prepare: PrepareBatch, device: DeviceLike | None, non_blocking: bool
) -> Callable[[Any], tuple[Any, Any]]:
    if device is None and prepare is _prepare_batch:
        return prepare
    return lambda batch: prepare(batch, device=device, non_blocking=non_blocking)


def _check_parts(model: Any, prepare: Any, model_transform: Any, output_transform: Any, outputs: str) -> None:
    """Reject arguments of the wrong kind, such as two in the wrong order, and functions that take other arguments."""
    check_is_no_class("model", model)
    if not callable(getattr(model, "train", None)) or not callable(getattr(model, "eval", None)):
        raise TypeError(f"model must be a module, or have train() and eval(), got {described(model)}")
    check_takes("prepare_batch", prepare, "(batch, device=..., non_blocking=...)")
    check_takes("model_transform", model_transform, "(y_pred)")
    check_takes("output_transform", output_transform, outputs)


def _check_holds_parameters(optimizer: Any, model: Any, model_fn: Any) -> None:
    """Reject an optimizer that was created before the model was sharded, since sharding replaces the parameters.

    Warn if it was created for another model of the same shapes, such as this one before a cell of a notebook created it
    again. Sharing no parameter alone proves nothing, because an optimizer can hold those of a loss, or copies in
    another precision; nor do equal shapes if a custom ``model_fn`` replaces the parameters in its calls.
    """
    if not isinstance(model, torch.nn.Module):
        return
    reshard(model)
    groups = getattr(optimizer, "param_groups", ())  # which an optimizer that wraps others may lack
    current, held = list(model.parameters()), [one for group in groups for one in group["params"]]
    missing = {one.shape for one in _without(current, held) if is_dtensor(one) and one.requires_grad}
    stale = [one for one in _without(held, current) if not is_lazy(one) and one.shape in missing]
    if stale:
        raise ValueError(
            f"optimizer must hold the parameters of model, got {len(stale)} that are no longer in it, the first of "
            f"shape {tuple(stale[0].shape)}: create the optimizer after the model was sharded or parallelized"
        )
    trainable = [one for one in current if one.requires_grad]
    is_foreign = bool(trainable and held) and len(_without(held, current)) == len(held)
    if is_foreign and model_fn is call_model and _kinds(held) in (_kinds(current), _kinds(trainable)):
        warnings.warn(
            "optimizer holds the parameters of another model with the same shapes, so this model will not be trained: "
            "create the optimizer with model.parameters() after the model was created, moved, or replaced",
            stacklevel=level_of_caller(),
        )


def _warn_unless_synchronized(model: Any) -> None:
    """Warn if each of several ranks would train a model of its own; other backends synchronize in the optimizer."""
    is_alone = get_world_size() == 1 or alone.get() is not None  # as in a function of one_rank_only
    if is_alone or model_name() != "native-dist" or not isinstance(model, torch.nn.Module):
        return
    trainable = [one for one in model.parameters() if one.requires_grad]
    if trainable and not any(map(is_wrapped, model.modules())) and not any(map(is_dtensor, trainable)):
        warnings.warn(
            f"each of the {get_world_size()} ranks trains a model of its own, as nothing averages the gradients: pass "
            "the model through camshaft.distributed.auto_model, unless that is intended",
            stacklevel=level_of_caller(),
        )


_precisions: weakref.WeakKeyDictionary[torch.nn.Module, torch.dtype | None] = weakref.WeakKeyDictionary()  # of trainers


def _precision(
    mode: str | None, dtype: torch.dtype | None, device: DeviceLike | None, model: Any
) -> torch.dtype | None:
    """Return the lower precision of an engine, or ``None`` for that of the model."""
    kind = device_type_of(device, model)
    if mode != "amp" or not torch.amp.is_autocast_available(kind):
        return None
    return dtype or torch.get_autocast_dtype(kind)


def _innermost(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _warn_if_precisions_differ(model: Any, precision: torch.dtype | None) -> None:
    """Warn if the trainer of a model computes in another precision than its evaluator, in a job of several ranks."""
    if not isinstance(model, torch.nn.Module) or get_world_size() == 1:
        return
    of_trainer = _precisions.get(_innermost(model), precision)
    if of_trainer != precision:
        ours, theirs = (one or "the precision of the model" for one in (precision, of_trainer))
        warnings.warn(
            f"the evaluator computes in {ours}, but the trainer of the same model in {theirs}: pass the same amp_mode "
            "and amp_dtype to both, unless that is intended",
            stacklevel=level_of_caller(),
        )


def _compare_replicas(trainer: Engine[Any, Any], model: Any) -> None:
    """Compare the replicas of a model when a run starts and after each epoch, and the data that they train on once."""
    replicas = register(model) if isinstance(model, torch.nn.Module) and get_world_size() > 1 else None
    if replicas is None:
        return

    def compare_weights(engine: Engine[Any, Any]) -> None:
        is_start = engine.last_event_name is Events.STARTED
        when = "when a run starts" if is_start else f"after epoch {engine.state.epoch}"
        replicas.compare_weights(engine, f"{when}, in iteration {engine.state.iteration}")

    def compare_data(engine: Engine[Any, Any]) -> None:
        handle.remove()
        replicas.compare_data(engine.state.dataloader, engine.state.batch)

    trainer.add_event_handler(Events.STARTED | Events.EPOCH_COMPLETED, compare_weights, order=Order.RESULTS)
    handle = trainer.add_event_handler(Events.ITERATION_STARTED, compare_data, order=Order.RESULTS)


def _kinds(parameters: list[Any]) -> Counter[Any]:
    return Counter((None if is_lazy(one) else one.shape, one.dtype) for one in parameters)


def _without(parameters: list[Any], others: list[Any]) -> list[Any]:
    excluded = {id(one) for one in others}
    return [one for one in parameters if id(one) not in excluded]


def _import_for(user: str, module: str, remedy: str) -> Any:
    """Import an optional library; if it is missing, raise an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{user} needs {module.split('.')[0]}: {remedy}") from error
