"""Trainers for recurrent models: backpropagation through time, truncated to chunks of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn, optim, stack

from camshaft.arguments import check_is_no_class, integer
from camshaft.engine.engine import Engine
from camshaft.engine.events import EventEnum, OptimizerEvents
from camshaft.engine.mode import Mode
from camshaft.engine.supervised import PrepareBatch, loss_value, prepare_batch
from camshaft.engine.update import scaled_to_all_ranks
from camshaft.tree import apply_to_tensor
from camshaft.types import DeviceLike

__all__ = ["Tbptt_Events", "create_supervised_tbptt_trainer"]

_prepare_batch = prepare_batch


class Tbptt_Events(EventEnum):  # the name that scripts import
    """Events of the chunks of a sequence, which have no counters.

    Attributes:
        TIME_ITERATION_STARTED: the trainer starts a chunk.
        TIME_ITERATION_COMPLETED: the optimizer has stepped for a chunk; ``state.output`` is the loss of the chunk.
    """

    TIME_ITERATION_STARTED = "time_iteration_started"
    TIME_ITERATION_COMPLETED = "time_iteration_completed"


def create_supervised_tbptt_trainer(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    tbtt_step: int,
    dim: int = 0,
    device: DeviceLike | None = None,
    non_blocking: bool = False,
    prepare_batch: PrepareBatch = _prepare_batch,
) -> Engine[Any, Any]:
    """Return an engine that trains a recurrent model on chunks of long sequences.

    Each batch, of sequences and a target per time step, is split along the time dimension. For each chunk, the model is
    called, as ``model(x)`` for the first chunk and ``model(x, hidden)`` for the others, and the optimizer steps. The
    model returns predictions and its hidden state, which is detached before it is passed to the next chunk, so that
    gradients do not flow between chunks.

    Args:
        model: the model, plain, compiled or wrapped for several ranks. It is not moved.
        optimizer: optimizer of its parameters.
        loss_fn: ``loss_fn(y_pred, y)`` returns the loss of a chunk, a tensor with one element.
        tbtt_step: number of time steps in a chunk; the last chunk may be shorter.
        dim: the time dimension of inputs and targets.
        device: device that batches are moved to; ``None`` leaves them where they are.
        non_blocking: whether to move them asynchronously where that is possible.
        prepare_batch: ``prepare_batch(batch, device=..., non_blocking=...)`` returns ``x, y``.

    Returns:
        A trainer that also fires :class:`Tbptt_Events`. Its output is the mean loss of the chunks.

    Raises:
        TypeError: ``tbtt_step`` is not an integer, or ``loss_fn`` is a class.
        ValueError: ``tbtt_step`` is below 1.

    >>> from torch.nn.functional import mse_loss
    >>> model = nn.RNN(input_size=1, hidden_size=1)
    >>> trainer = create_supervised_tbptt_trainer(
    ...     model, optim.SGD(model.parameters(), 0.1), mse_loss, tbtt_step=10
    ... )
    >>> handle = trainer.add_event_handler(
    ...     Tbptt_Events.TIME_ITERATION_COMPLETED, lambda: print("a chunk")
    ... )
    >>> from torch import ones, zeros
    >>> state = trainer.run([(ones(25, 1, 1), zeros(25, 1, 1))])
    a chunk
    a chunk
    a chunk
    """
    tbtt_step = integer("tbtt_step", tbtt_step, least=1)
    check_is_no_class("loss_fn", loss_fn)
    set_mode = Mode(model, training=True)

    def step(engine: Engine[Any, Any], batch: Any) -> Any:
        x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
        inputs, targets = x.split(tbtt_step, dim=dim), y.split(tbtt_step, dim=dim)
        if len(inputs) != len(targets):
            raise ValueError(
                f"inputs and targets must have the same number of time steps, got {x.size(dim)} and {y.size(dim)} in "
                f"dimension {dim}; dim selects another dimension"
            )
        losses: list[Tensor] = []
        hidden: Any = None
        for x_chunk, y_chunk in zip(inputs, targets, strict=True):
            engine.fire_event(Tbptt_Events.TIME_ITERATION_STARTED)
            set_mode(engine)  # for each chunk, as a handler may evaluate the model
            optimizer.zero_grad()
            y_pred, hidden = model(x_chunk) if hidden is None else model(x_chunk, hidden)
            hidden = apply_to_tensor(hidden, Tensor.detach)
            loss = loss_fn(y_pred, y_chunk)
            scaled_to_all_ranks(engine, loss).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimizer.step()
            engine.fire_event(OptimizerEvents.STEP_COMPLETED)
            losses.append(loss.detach())
            engine.state.output = loss_value(x_chunk, y_chunk, y_pred, losses[-1])
            engine.fire_event(Tbptt_Events.TIME_ITERATION_COMPLETED)
        if all(loss.is_cpu for loss in losses):
            return sum(loss.item() for loss in losses) / len(losses)
        return loss_value(x, y, None, stack(losses).mean())

    trainer: Engine[Any, Any] = Engine(step)
    set_mode.attach(trainer)
    trainer.register_events(*Tbptt_Events)
    return trainer
