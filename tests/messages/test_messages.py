"""The mistakes of beginners, and the full message that each of them causes.

A message names the argument, what was passed, what is allowed, and what to do, in one or two short sentences. Addresses
and what backends there are, and what they accept, are left out.
"""

from __future__ import annotations

import os
import re
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import camshaft.distributed as idist
import camshaft.engine
import camshaft.handlers
import camshaft.handlers.param_scheduler
from camshaft.contrib.engines.common import setup_common_training_handlers
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.errors import DamagedCheckpointError
from camshaft.handlers import Checkpoint
from camshaft.utils import convert_tensor, manual_seed, to_onehot


class Mean:
    """A metric with the methods of those of torchmetrics."""

    def __repr__(self):
        return "Mean()"

    def reset(self):
        self.values = []

    def update(self, y_pred, y):
        self.values.append((y_pred - y).mean())

    def compute(self):
        return sum(self.values) / len(self.values)


class Descent(torch.optim.Optimizer):
    """An optimizer with the same parameters in all versions of torch."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


NAMES = {
    **vars(camshaft.handlers.param_scheduler),
    **vars(camshaft.handlers),
    **vars(camshaft.engine),
    **{one.__name__: one for one in (DataLoader, Descent, Mean, ReduceLROnPlateau, StepLR, TensorDataset)},
    **{one.__name__: one for one in (convert_tensor, manual_seed, setup_common_training_handlers, to_onehot)},
    "idist": idist,
    "nn": nn,
    "torch": torch,
}

MISTAKES = [
    # === events and handlers ===
    (
        'trainer.add_event_handler("epoch_completd", print)',
        ValueError,
        (
            "unknown event 'epoch_completd': did you mean EPOCH_COMPLETED? Known are EPOCH_STARTED, "
            "EPOCH_COMPLETED, STARTED, COMPLETED, ITERATION_STARTED, ITERATION_COMPLETED, EXCEPTION_RAISED, "
            "GET_BATCH_STARTED, GET_BATCH_COMPLETED, DATALOADER_STOP_ITERATION, TERMINATE, "
            "TERMINATE_SINGLE_EPOCH, INTERRUPT"
        ),
    ),
    (
        'trainer.on("end_of_epoch")(lambda: None)',
        ValueError,
        (
            "unknown event 'end_of_epoch': did you mean EPOCH_COMPLETED? Known are EPOCH_STARTED, "
            "EPOCH_COMPLETED, STARTED, COMPLETED, ITERATION_STARTED, ITERATION_COMPLETED, EXCEPTION_RAISED, "
            "GET_BATCH_STARTED, GET_BATCH_COMPLETED, DATALOADER_STOP_ITERATION, TERMINATE, "
            "TERMINATE_SINGLE_EPOCH, INTERRUPT"
        ),
    ),
    (
        'trainer.on("validated")(lambda: None)',
        ValueError,
        (
            "unknown event 'validated': register it with register_events first. Known are EPOCH_STARTED, "
            "EPOCH_COMPLETED, STARTED, COMPLETED, ITERATION_STARTED, ITERATION_COMPLETED, EXCEPTION_RAISED, "
            "GET_BATCH_STARTED, GET_BATCH_COMPLETED, DATALOADER_STOP_ITERATION, TERMINATE, "
            "TERMINATE_SINGLE_EPOCH, INTERRUPT"
        ),
    ),
    (
        "trainer.on(Events.EPOCH_END)",
        AttributeError,
        "Events has no event 'EPOCH_END': did you mean Events.EPOCH_COMPLETED?",
    ),
    (
        "trainer.on(Events.VALIDATED)",
        AttributeError,
        (
            "Events has no event 'VALIDATED': it has EPOCH_STARTED, EPOCH_COMPLETED, STARTED, COMPLETED, "
            "ITERATION_STARTED, ITERATION_COMPLETED, EXCEPTION_RAISED, GET_BATCH_STARTED, GET_BATCH_COMPLETED, "
            "DATALOADER_STOP_ITERATION, TERMINATE, TERMINATE_SINGLE_EPOCH, INTERRUPT"
        ),
    ),
    (
        "trainer.on(Events.EPOCH_COMPLETED, print)",
        UserWarning,
        (
            "on(Events.EPOCH_COMPLETED, ...) registered nothing, because it decorates no function: for a plain call, "
            "use add_event_handler(event, handler)"
        ),
    ),
    (
        "trainer.add_event_handler(lambda: None, Events.STARTED)",
        ValueError,
        "event must be an event of camshaft, its name, or several joined by |, got the function <lambda>",
    ),
    (
        "trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: None)",
        ValueError,
        (
            "handler <lambda>(engine, batch) cannot be called on Events.EPOCH_COMPLETED, which passes "
            "(engine) or (); read engine.state.batch instead of an argument"
        ),
    ),
    (
        "trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: None, 3)",
        ValueError,
        "handler <lambda>() cannot be called on Events.EPOCH_COMPLETED, which passes (engine, 3) or (3)",
    ),
    (
        'trainer.add_event_handler(Events.EPOCH_COMPLETED, print("done"))',
        TypeError,
        "handler must be callable, got None; pass a function, not what it returns",
    ),
    (
        "trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluator)",
        TypeError,
        ("handler must be callable, got an object of type Engine; call its method run(data, ...) in a function"),
    ),
    (
        "trainer.add_event_handler(Events.ITERATION_COMPLETED, EarlyStopping)",
        ValueError,
        "handler must be an object, got the class EarlyStopping: pass EarlyStopping(...) instead",
    ),
    (
        "trainer.add_event_handler(Events.ITERATION_COMPLETED, ProgressBar())",
        TypeError,
        (
            "handler must be callable, got an object of "
            "type ProgressBar; it registers its handlers itself: call its method attach(engine, ...)"
        ),
    ),
    (
        'trainer.add_event_handler(Events.EPOCH_COMPLETED, ModelCheckpoint("checkpoints"))',
        ValueError,
        (
            "handler ModelCheckpoint(engine, to_save, *rest) cannot be called on Events.EPOCH_COMPLETED, "
            "which passes (engine) or (); it requires to_save: add_event_handler(event, handler, to_save=...)"
        ),
    ),
    (
        "trainer.add_event_handler(Events.ITERATION_COMPLETED, StepLR(optimizer, 3))",
        TypeError,
        ("handler must be callable, got an object of type StepLR; wrap it in camshaft.handlers.LRScheduler"),
    ),
    (
        "trainer.add_event_handler(Events.ITERATION_COMPLETED, StepLR(optimizer, 3).step)",
        TypeError,
        (
            "handler must not be a method of a torch scheduler, got the function LRScheduler.step; wrap it "
            "in camshaft.handlers.LRScheduler"
        ),
    ),
    (
        "trainer.remove_event_handler(print, Events.STARTED)",
        ValueError,
        "handler is not registered on Events.STARTED, got the function print",
    ),
    (
        'trainer.fire_event("backward_completed")',
        ValueError,
        (
            "unknown event 'backward_completed': did you mean GET_BATCH_COMPLETED? Known are EPOCH_STARTED, "
            "EPOCH_COMPLETED, STARTED, COMPLETED, ITERATION_STARTED, ITERATION_COMPLETED, EXCEPTION_RAISED, "
            "GET_BATCH_STARTED, GET_BATCH_COMPLETED, DATALOADER_STOP_ITERATION, TERMINATE, "
            "TERMINATE_SINGLE_EPOCH, INTERRUPT"
        ),
    ),
    (
        "trainer.register_events(3)",
        TypeError,
        "an event to register must be a str or a member of an EventEnum, got 3 of type int",
    ),
    (
        "Events.EPOCH_COMPLETED(3)",
        TypeError,
        "event_filter must be callable, got 3 of type int",
    ),
    (
        "Events.EPOCH_COMPLETED()",
        ValueError,
        (
            "pass exactly one of event_filter, once, or any of every, before and after; got "
            "event_filter=None, every=None, once=None, before=None, after=None"
        ),
    ),
    (
        "Events.EPOCH_COMPLETED(every=0)",
        ValueError,
        "every must be an integer >= 1, got 0",
    ),
    (
        "Events.EPOCH_COMPLETED(every=0.5)",
        ValueError,
        "every must be an integer >= 1, got 0.5",
    ),
    (
        "Events.EPOCH_COMPLETED(every=3, once=1)",
        ValueError,
        (
            "pass exactly one of event_filter, once, or any of every, before and after; got "
            "event_filter=None, every=3, once=1, before=None, after=None"
        ),
    ),
    (
        "Events.EPOCH_COMPLETED(once=0)",
        ValueError,
        "once must be an integer above 0, or a non-empty sequence of such integers, got 0",
    ),
    (
        "Events.EPOCH_COMPLETED(before=-1)",
        ValueError,
        "before must be an integer >= 0, got -1",
    ),
    (
        "Events.EPOCH_COMPLETED(event_filter=lambda engine: True)",
        ValueError,
        "event_filter must take (engine, count), got the function <lambda>, which takes (engine)",
    ),
    (
        "Events.EPOCH_COMPLETED | print",
        TypeError,
        "| joins events, names of events, and lists of events, got <built-in function print>",
    ),
    # === engines and runs ===
    (
        "Engine(None)",
        ValueError,
        "process_function must be given, got None",
    ),
    (
        'Engine("train")',
        TypeError,
        "process_function must be callable, got 'train' of type str",
    ),
    (
        "Engine(lambda batch: None)",
        ValueError,
        "process_function must take (engine, batch), got the function <lambda>, which takes (batch)",
    ),
    (
        "trainer.run(None)",
        ValueError,
        "data must be given, got None; to run without data, pass epoch_length",
    ),
    (
        "trainer.run(3)",
        TypeError,
        "data must be iterable, got 3 of type int",
    ),
    (
        "trainer.run(TensorDataset(torch.ones(4, 3), torch.ones(4, 1)))",
        TypeError,
        ("data must be iterable, got an object of type TensorDataset: pass it to a torch.utils.data.DataLoader"),
    ),
    (
        "trainer.run([])",
        ValueError,
        "data must hold at least one batch, got an empty list",
    ),
    (
        'trainer.run(batches, max_epochs="3")',
        TypeError,
        "max_epochs must be an integer of at least 1, got '3' of type str",
    ),
    (
        "trainer.run(batches, max_epochs=0)",
        ValueError,
        "max_epochs must be at least 1, got 0",
    ),
    (
        "trainer.run(batches, max_epochs=1.5)",
        TypeError,
        "max_epochs must be an integer of at least 1, got 1.5 of type float",
    ),
    (
        "trainer.run(batches, max_epochs=1, max_iters=10)",
        ValueError,
        "pass max_epochs or max_iters, not both, got 1 and 10",
    ),
    (
        "trainer.run(batches, epoch_length=0)",
        ValueError,
        "epoch_length must be at least 1, got 0",
    ),
    (
        "trainer.run(iter(batches), max_epochs=2)",
        UserWarning,
        (
            "the data ran out in epoch 2 after 4 iterations, before the target of 2 epochs: pass data that "
            "can be iterated over again, or assign a new iterator to engine.state.dataloader in a handler of "
            "DATALOADER_STOP_ITERATION"
        ),
    ),
    (
        "trainer.run((batch for batch in batches), epoch_length=10)",
        UserWarning,
        (
            "the data ran out in epoch 1 after 4 iterations, before the target of 1 epoch: pass data that "
            "can be iterated over again, or assign a new iterator to engine.state.dataloader in a handler of "
            "DATALOADER_STOP_ITERATION"
        ),
    ),
    (
        ("trainer.run(batches, max_epochs=2)\ntrainer.run(batches, max_epochs=1)"),
        ValueError,
        (
            "max_epochs must not be below the progress of the state, 2, got 1; to start from the beginning, "
            "set engine.state.max_epochs = None first"
        ),
    ),
    (
        ("trainer.run(batches, max_epochs=2)\ntrainer.run(batches, max_iters=10)"),
        ValueError,
        (
            "max_iters=10 was given, but the state counts by max_epochs=2; to change over, set "
            "engine.state.max_epochs = None first"
        ),
    ),
    (
        ("trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.run(batches))\ntrainer.run(batches)"),
        RuntimeError,
        "run was called on an engine that is running: use another engine inside its handlers",
    ),
    (
        'trainer.should_terminate = "now"',
        TypeError,
        "should_terminate must be one of (False, True, 'skip_completed'), got 'now'",
    ),
    (
        'Engine(lambda engine, batch: None).load_state_dict({"iteration": 10})',
        ValueError,
        "state_dict must hold 'epoch_length', got keys ['iteration']",
    ),
    (
        'trainer.load_state_dict({"iteration": 12, "epoch_length": 4, "max_epochs": 2})',
        ValueError,
        "max_epochs must not be below the progress of the state dict, 3, got 2",
    ),
    (
        (
            'trainer.load_state_dict({"epoch": 2, "epoch_length": 4, "max_epochs": 2})\n'
            "trainer.run(batches, max_epochs=2)"
        ),
        UserWarning,
        (
            "nothing was run: the loaded state has reached its target of 2 epochs; pass a larger target to "
            "continue, or set engine.state.max_epochs = engine.state.max_iters = None first to start from "
            "the beginning"
        ),
    ),
    (
        "DeterministicEngine(lambda engine, batch: None).run(None)",
        ValueError,
        "data must be given to DeterministicEngine, got None",
    ),
    # === supervised training ===
    (
        "create_supervised_trainer(model, None, loss_fn)",
        TypeError,
        "optimizer must have zero_grad() and step(), got None",
    ),
    (
        "create_supervised_trainer(optimizer, model, loss_fn)",
        TypeError,
        (
            "optimizer must have zero_grad() and step(), got Linear(in_features=3, out_features=1, "
            "bias=True) of type Linear"
        ),
    ),
    (
        "create_supervised_trainer(model, Descent, loss_fn)",
        TypeError,
        "optimizer must be an object, got the class Descent: pass Descent(...) instead",
    ),
    (
        "create_supervised_trainer(nn.Linear(3, 1), optimizer, loss_fn)",
        UserWarning,
        (
            "optimizer holds the parameters of another model with the same shapes, so this model will not be trained: "
            "create the optimizer with model.parameters() after the model was created, moved, or replaced"
        ),
    ),
    (
        "create_supervised_trainer(nn.Linear, optimizer, loss_fn)",
        TypeError,
        "model must be an object, got the class Linear: pass Linear(...) instead",
    ),
    (
        "create_supervised_trainer(model, optimizer, nn.MSELoss)",
        TypeError,
        "loss_fn must be an object, got the class MSELoss: pass MSELoss(...) instead",
    ),
    (
        'create_supervised_trainer(model, optimizer, "mse")',
        TypeError,
        "loss_fn must be callable, got 'mse' of type str",
    ),
    (
        "create_supervised_trainer(model, optimizer, lambda y_pred: y_pred.mean())",
        ValueError,
        "loss_fn must take (y_pred, y), got the function <lambda>, which takes (y_pred)",
    ),
    (
        "create_supervised_trainer(model, optimizer, lambda y_pred, y: None).run(batches)",
        TypeError,
        "loss_fn must return a tensor, got None",
    ),
    (
        "create_supervised_trainer(model, optimizer, loss_fn, prepare_batch=lambda batch: batch)",
        ValueError,
        (
            "prepare_batch must take (batch, device=..., non_blocking=...), got the function <lambda>, which "
            "takes (batch)"
        ),
    ),
    (
        "create_supervised_trainer(model, optimizer, loss_fn, output_transform=lambda loss: loss)",
        ValueError,
        "output_transform must take (x, y, y_pred, loss), got the function <lambda>, which takes (loss)",
    ),
    (
        'create_supervised_trainer(model, optimizer, loss_fn, amp_mode="fp16")',
        ValueError,
        (
            "amp_mode must be one of (None, 'amp', 'apex'), got 'fp16'; for mixed precision, pass "
            "amp_mode='amp', amp_dtype=torch.bfloat16"
        ),
    ),
    (
        'create_supervised_trainer(model, optimizer, loss_fn, amp_mode="amp", amp_dtype="bfloat16")',
        TypeError,
        "amp_dtype must be a torch.dtype, got 'bfloat16' of type str",
    ),
    (
        "create_supervised_trainer(model, optimizer, loss_fn, scaler=True)",
        ValueError,
        "scaler needs amp_mode='amp', got amp_mode=None and scaler=True",
    ),
    (
        "create_supervised_trainer(model, optimizer, loss_fn, gradient_accumulation_steps=0)",
        ValueError,
        "gradient_accumulation_steps must be strictly positive, got 0",
    ),
    (
        "create_supervised_trainer(model, optimizer, loss_fn, clip_grad_norm=0)",
        ValueError,
        "clip_grad_norm must be above 0 or None, got 0",
    ),
    (
        'trainer.run([{"x": torch.ones(2, 3), "y": torch.ones(2, 1)}])',
        TypeError,
        (
            "a batch must be a pair of inputs and targets, got one with the keys ['x', 'y']: pass "
            "prepare_batch=..., a function that returns inputs and targets"
        ),
    ),
    (
        "create_supervised_evaluator(model, metrics=[Mean()])",
        TypeError,
        "metrics must be a mapping of names to metrics, got [Mean()] of type list",
    ),
    (
        'create_supervised_evaluator(model, metrics={"mean": Mean})',
        TypeError,
        "metrics['mean'] must be an object, got the class Mean: pass Mean(...) instead",
    ),
    (
        'create_supervised_evaluator(model, metrics={"mean": "mean"})',
        TypeError,
        (
            "metrics['mean'] must have reset(), update() and compute(), as those of torchmetrics, got 'mean' "
            "of type str; an object with attach(engine, name) attaches itself"
        ),
    ),
    # === metrics and outputs ===
    (
        "attach_metrics(evaluator, Mean())",
        TypeError,
        "metrics must be a mapping of names to metrics, got Mean() of type Mean",
    ),
    (
        'attach_metrics(evaluator, {"mean": "mean"})',
        TypeError,
        (
            "metrics['mean'] must have reset(), update() and compute(), as those of torchmetrics, got 'mean' "
            "of type str; an object with attach(engine, name) attaches itself"
        ),
    ),
    (
        'attach_metrics(model, {"mean": Mean()})',
        TypeError,
        "engine must be an Engine, got Linear(in_features=3, out_features=1, bias=True) of type Linear",
    ),
    (
        'RunningAverage(output_transform="loss")',
        TypeError,
        "output_transform must be callable, got 'loss' of type str",
    ),
    (
        "RunningAverage(alpha=2)",
        ValueError,
        "alpha must be at least 0 and below 1, got 2",
    ),
    (
        (
            "trainer = Engine(lambda engine, batch: None)\n"
            'RunningAverage().attach(trainer, "loss")\n'
            "trainer.run(batches)"
        ),
        TypeError,
        ("RunningAverage 'loss' needs engine.state.output, which is None: return a value from the process function"),
    ),
    (
        (
            "trainer = Engine(lambda engine, batch: None)\n"
            'attach_metrics(trainer, {"mean": Mean()})\n'
            "trainer.run(batches)"
        ),
        TypeError,
        (
            "attach_metrics of ['mean'] needs engine.state.output, which is None: return a value from the process "
            "function"
        ),
    ),
    (
        (
            "trainer = Engine(lambda engine, batch: None)\n"
            'ProgressBar(mininterval=0).attach(trainer, output_transform=lambda output: output["loss"])\n'
            "trainer.run(batches)"
        ),
        TypeError,
        "output_transform needs engine.state.output, which is None: return a value from the process function",
    ),
    (
        (
            "trainer = Engine(lambda engine, batch: None)\n"
            'ProgressBar(mininterval=0).attach(trainer, output_transform=lambda loss: {"loss": loss})\n'
            "trainer.run(batches[:2])"
        ),
        UserWarning,
        (
            "bar/loss is not logged because it is a NoneType: engine.state.output is None, so return a value from the "
            "process function, and log after that"
        ),
    ),
    (
        (
            "trainer = Engine(lambda engine, batch: None)\n"
            "trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())\n"
            "trainer.run(batches)"
        ),
        UserWarning,
        "TerminateOnNan checks nothing: engine.state.output is None; return a value from the process function",
    ),
    (
        (
            'trainer = Engine(lambda engine, batch: {"loss": 0.5})\n'
            'RunningAverage().attach(trainer, "loss")\n'
            "trainer.run(batches)"
        ),
        TypeError,
        "output_transform must return a number, or a tensor with one element, got {'loss': 0.5} of type dict",
    ),
    (
        (
            "trainer = Engine(lambda engine, batch: torch.ones(3))\n"
            'RunningAverage().attach(trainer, "loss")\n'
            "trainer.run(batches)"
        ),
        ValueError,
        "output_transform must return a number, or a tensor with one element, got one of shape (3,)",
    ),
    (
        "from camshaft.metrics import Accuracy",
        ImportError,
        (
            "camshaft has no metrics of its own. Those of PyTorch-Ignite attach to its engines unchanged: "
            "leave 'from ignite.metrics import Accuracy' as it is. For those of torchmetrics use "
            "camshaft.handlers.attach_metrics(engine, {'accuracy': Accuracy(...)}), for a running average of "
            "an output camshaft.handlers.RunningAverage."
        ),
    ),
    # === checkpoints ===
    (
        'Checkpoint(model, "checkpoints")',
        TypeError,
        (
            "to_save must be a mapping of names to objects, such as {'model': model}, got "
            "Linear(in_features=3, out_features=1, bias=True) of type Linear"
        ),
    ),
    (
        'Checkpoint({"model": model.state_dict()}, "checkpoints")',
        TypeError,
        (
            "to_save['model']['weight'] must have state_dict(), as models and optimizers do, got "
            "tensor([[0., 0., 0.]]) of type Tensor: pass the object itself, not its state_dict()"
        ),
    ),
    (
        'Checkpoint({"model": model, "epoch": 3}, "checkpoints")',
        TypeError,
        "to_save['epoch'] must have state_dict(), as models and optimizers do, got 3 of type int",
    ),
    (
        'Checkpoint({"model": nn.Linear}, "checkpoints")',
        TypeError,
        "to_save['model'] must be an object, got the class Linear: pass Linear(...) instead",
    ),
    (
        'Checkpoint({"model": model}, None)',
        TypeError,
        ("save_handler must be a str, a Path, or a callable that takes (checkpoint, filename[, metadata]), got None"),
    ),
    (
        'Checkpoint({"model": model}, DiskSaver)',
        TypeError,
        "save_handler must be an object, got the class DiskSaver: pass DiskSaver(...) instead",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", n_saved=0)',
        ValueError,
        "n_saved must be None, for all, or an integer of at least 1, got 0",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", score_function="accuracy")',
        TypeError,
        "score_function must be callable, got 'accuracy' of type str",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", score_function=lambda: 0.5)',
        ValueError,
        "score_function must take (engine), got the function <lambda>, which takes ()",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", score_name=lambda engine: 0.5)',
        TypeError,
        "score_name must be a str, got the function <lambda>",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", global_step_transform=lambda engine: 1)',
        ValueError,
        "global_step_transform must take (engine, event_name), got the function <lambda>, which takes (engine)",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", filename_pattern="{name}_{epoch}.pt")',
        KeyError,
        (
            "filename_pattern '{name}_{epoch}.pt' uses {epoch}; it may use {filename_prefix}, {name}, "
            "{score}, {score_name}, {global_step}, {ext}"
        ),
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", filename_prefix="../best")',
        ValueError,
        "filename_prefix must stay in the directory, got '../best'",
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", filename_pattern="{name}.safetensors")',
        ValueError,
        (
            "filename_pattern must not end in '.safetensors', got '{name}.safetensors': save .pt files, and convert "
            "them with `python -m camshaft.checkpoint consolidate`"
        ),
    ),
    (
        'Checkpoint({"model": model}, "checkpoints", save_on_rank="all")',
        ValueError,
        "save_on_rank must be an integer >= 0 or 'node', got 'all'",
    ),
    (
        (
            'checkpoint = Checkpoint({"model": model}, "checkpoints", score_name="accuracy")\n'
            "evaluator.add_event_handler(Events.COMPLETED, checkpoint)\n"
            "evaluator.run(batches)"
        ),
        KeyError,
        (
            "the score needs the metric 'accuracy', but engine.state.metrics has []: correct the name, or attach "
            "metric and handler to the same engine, usually the evaluator"
        ),
    ),
    (
        (
            'checkpoint = Checkpoint({"model": model}, "checkpoints", score_function=lambda engine: None)\n'
            "evaluator.add_event_handler(Events.COMPLETED, checkpoint)\n"
            "evaluator.run(batches)"
        ),
        ValueError,
        "score_function must return a real number, got None",
    ),
    (
        (
            'checkpoint = Checkpoint({"model": model}, "checkpoints", score_function=lambda engine: torch.ones(1))\n'
            "evaluator.add_event_handler(Events.COMPLETED, checkpoint)\n"
            "evaluator.run(batches)"
        ),
        ValueError,
        "score_function must return a real number, got tensor([1.]) of type Tensor; use its item()",
    ),
    (
        (
            'checkpoint = Checkpoint({"model": model}, "checkpoints", score_name="recall")\n'
            "evaluator.add_event_handler(Events.COMPLETED, checkpoint)\n"
            "evaluator.add_event_handler(Events.STARTED, lambda e: e.state.metrics.update(recall=torch.ones(2)))\n"
            "evaluator.run(batches)"
        ),
        ValueError,
        "the metric 'recall' must be a real number, got tensor([1., 1.]) of type Tensor",
    ),
    (
        (
            'checkpoint = Checkpoint({"model": model}, "checkpoints", n_saved=2)\n'
            "evaluator.add_event_handler(Events.ITERATION_COMPLETED(every=4) | Events.COMPLETED, checkpoint)\n"
            "trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches))\n"
            "trainer.run(batches, max_epochs=2)"
        ),
        UserWarning,
        (
            "the last checkpoint was overwritten on Events.ITERATION_COMPLETED: this engine counts from 0 in each run, "
            "to step 4 again; pass score_name or score_function to keep the best, or a global_step_transform to keep "
            "several"
        ),
    ),
    (
        (
            "for _ in range(2):  # runs of a script\n"
            '    best = ModelCheckpoint("checkpoints", "best", lambda engine: 0.5, "accuracy", require_empty=False)\n'
            '    best(trainer, {"model": model})\n'
            "    del best"
        ),
        UserWarning,
        (
            "'checkpoints' contains 1 checkpoint of an earlier run, such as 'best_model_accuracy=0.5000.pt', which "
            "this handler does not know, so they are neither compared with new ones nor removed: add this handler to "
            "the to_save of the checkpoint that the run resumes from, or call reset() to leave them alone"
        ),
    ),
    (
        (
            "for count in (4, 3):  # batches in two runs of a script\n"
            '    saving = ModelCheckpoint("checkpoints", require_empty=False)\n'
            "    trainer = Engine(lambda engine, batch: 0.5)\n"
            '    trainer.add_event_handler(Events.EPOCH_COMPLETED, saving, {"model": model})\n'
            "    trainer.run(batches[:count])\n"
            "    del saving, trainer"
        ),
        UserWarning,
        (
            "'checkpoints' contains 1 checkpoint of an earlier run, such as 'model_4.pt', and this run starts from the "
            "beginning, so that those of both runs are mixed: resume with Checkpoint.resume(to_load, directory), use "
            "another directory, or call reset() to leave them alone"
        ),
    ),
    (
        (
            'trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model}, "checkpoints"))\n'
            'trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model}, "checkpoints"))\n'
            "trainer.run(batches)"
        ),
        UserWarning,
        (
            "two Checkpoints save under the same names, such as 'checkpoints/model_4.pt': give one of them another "
            "filename_prefix, score_name or directory, or use one handler for both"
        ),
    ),
    (
        (
            "train()  # saves to the directory\n"
            'trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"trainer": trainer}, "checkpoints"))\n'
            "trainer.run(batches)"
        ),
        ValueError,
        (
            "'checkpoints' contains checkpoints of an earlier run, which were not resumed: call "
            "resume_latest() before the run, save this handler with the one that does, or use another "
            "directory"
        ),
    ),
    (
        ('train()\nModelCheckpoint("checkpoints")'),
        ValueError,
        (
            "dirname must not contain checkpoints, got 'checkpoints' with 'model_1.pt': use another one, or "
            "require_empty=False to save beside them; to resume, pass the directory to Checkpoint and call its "
            "resume_latest()"
        ),
    ),
    (
        'ModelCheckpoint("checkpoints", create_dir=False)',
        ValueError,
        "dirname must be an existing directory, got 'checkpoints': create it, or pass create_dir=True",
    ),
    (
        ('open("checkpoints", "w").close()\nCheckpoint({"model": model}, "checkpoints")'),
        ValueError,
        "dirname must be an existing directory, got 'checkpoints', which is a file",
    ),
    (
        'ModelCheckpoint({"model": model}, "checkpoints")',
        TypeError,
        (
            "dirname must be a str or a Path, got {'model': Linear(in_features=3, out_features=1, "
            "bias=True)} of type dict"
        ),
    ),
    (
        (
            'trainer.add_event_handler(Events.EPOCH_COMPLETED, ModelCheckpoint("checkpoints"), model)\n'
            "trainer.run(batches)"
        ),
        TypeError,
        (
            "to_save must be a mapping of names to objects, such as {'model': model}, got "
            "Linear(in_features=3, out_features=1, bias=True) of type Linear"
        ),
    ),
    (
        'ModelCheckpoint("checkpoints").resume_latest()',
        RuntimeError,
        (
            "resume_latest needs to_save, which is unknown before the first call: use Checkpoint, or "
            "Checkpoint.resume(to_load, directory)"
        ),
    ),
    (
        'Checkpoint({"model": model}, lambda checkpoint, filename: None).resume_latest()',
        AttributeError,
        "resume_latest needs a directory as save_handler, got the function <lambda>",
    ),
    (
        'Checkpoint.resume({"model": model}, train())',
        ValueError,
        "directory must contain checkpoints, got the file 'checkpoints/model_1.pt'; load it with load_objects",
    ),
    (
        ('train()\nCheckpoint.resume({"net": model}, "checkpoints")'),
        UserWarning,
        "nothing was loaded: no checkpoint in 'checkpoints' holds ['net'], but one holds ['model']",
    ),
    (
        'Checkpoint.load_objects({"net": model, "trainer": trainer}, {"model": {}, "optimizer": {}})',
        ValueError,
        "checkpoint lacks the key 'net' of to_load, it has ['model', 'optimizer']",
    ),
    (
        (
            "path = train()\n"
            "path.write_bytes(bytes(path.stat().st_size))\n"
            'Checkpoint.load_objects({"model": model}, path)'
        ),
        DamagedCheckpointError,
        "the checkpoint 'checkpoints/model_1.pt' is damaged: its content does not match its checksum",
    ),
    (
        'Checkpoint.get_default_score_fn("loss", score_sign=-2)',
        ValueError,
        "score_sign must be 1 or -1, got -2",
    ),
    (
        'Preemption(Checkpoint({"model": model}, "checkpoints")).attach(trainer)',
        UserWarning,
        (
            "to_save does not contain the trainer: add it as to_save['trainer'], or the next run starts from "
            "the beginning"
        ),
    ),
    # === stopping ===
    (
        "EarlyStopping(0, lambda engine: 0.5, trainer)",
        ValueError,
        "patience must be at least 1, got 0",
    ),
    (
        'EarlyStopping(3, "loss", trainer)',
        TypeError,
        "score_function must be callable, got 'loss' of type str",
    ),
    (
        "EarlyStopping(3, lambda: 0.5, trainer)",
        ValueError,
        "score_function must take (engine), got the function <lambda>, which takes ()",
    ),
    (
        "EarlyStopping(3, lambda engine: 0.5, model)",
        TypeError,
        "trainer must be an Engine, got Linear(in_features=3, out_features=1, bias=True) of type Linear",
    ),
    (
        'EarlyStopping(3, lambda engine: 0.5, trainer, mode="minimum")',
        ValueError,
        "mode must be 'max' or 'min', got 'minimum'",
    ),
    (
        (
            "evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(3, lambda engine: None, trainer))\n"
            "evaluator.run(batches)"
        ),
        TypeError,
        "score_function must return a number, or a tensor with one element, got None",
    ),
    (
        'TerminateOnNan("loss")',
        TypeError,
        "output_transform must be callable, got 'loss' of type str",
    ),
    (
        'TimeLimit("1h")',
        TypeError,
        "limit_sec must be a number, got '1h' of type str",
    ),
    # === schedules ===
    (
        'LinearCyclicalScheduler(optimizer, "learning_rate", 0.1, 0.2, 10)',
        ValueError,
        "param_name must be a parameter of all groups of the optimizer, got 'learning_rate': there are ['lr']",
    ),
    (
        'LinearCyclicalScheduler(model, "lr", 0.1, 0.2, 10)',
        TypeError,
        (
            "optimizer must be one of torch, or have a list param_groups, got Linear(in_features=3, "
            "out_features=1, bias=True) of type Linear"
        ),
    ),
    (
        'LinearCyclicalScheduler(optimizer, "lr", "0.1", 0.2, 10)',
        TypeError,
        "start_value must be a number, got '0.1' of type str",
    ),
    (
        'LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.2, 1)',
        ValueError,
        "cycle_size must be at least 2, got 1",
    ),
    (
        'PiecewiseLinear(optimizer, "lr", [(0, 0.1), (10, 0.2), (5, 0.3)])',
        ValueError,
        "the milestones of milestones_values must be sorted, got [0, 10, 5]",
    ),
    (
        'PiecewiseLinear(optimizer, "lr", {0: 0.1})',
        TypeError,
        "milestones_values must be a list or a tuple, got {0: 0.1} of type dict",
    ),
    (
        "LRScheduler(optimizer)",
        TypeError,
        (
            "lr_scheduler must be a scheduler of torch.optim.lr_scheduler, got Descent ( Parameter Group 0 "
            "lr: 0.1 ) of type Descent"
        ),
    ),
    (
        "LRScheduler(ReduceLROnPlateau(optimizer))",
        TypeError,
        "lr_scheduler must not be a ReduceLROnPlateau: use ReduceLROnPlateauScheduler instead",
    ),
    (
        "create_lr_scheduler_with_warmup(StepLR(optimizer, 3), 0.1, 0)",
        ValueError,
        "warmup_duration must be at least 2, got 0",
    ),
    (
        'ConcatScheduler([PiecewiseLinear(optimizer, "lr", [(0, 0.1)])], [])',
        ValueError,
        "schedulers must hold at least two schedulers, got 1: attach a single one itself",
    ),
    (
        (
            'evaluator.add_event_handler(Events.COMPLETED, ReduceLROnPlateauScheduler(optimizer, "loss", trainer))\n'
            "evaluator.run(batches)"
        ),
        ValueError,
        (
            "metric_name needs the metric 'loss', but engine.state.metrics has []: correct the name, or attach metric "
            "and handler to the same engine, usually the evaluator"
        ),
    ),
    (
        'LambdaStateScheduler(lambda count: 0.5, "epoch").attach(trainer, Events.EPOCH_COMPLETED)',
        ValueError,
        "param_name must not be 'epoch', which is a counter of the engine; choose another name",
    ),
    (
        ('with FastaiLRFinder().attach(trainer, {"model": model}):\n    pass'),
        ValueError,
        "to_save must hold 'optimizer', whose rate is searched, got ['model']",
    ),
    (
        "FastaiLRFinder().lr_suggestion()",
        RuntimeError,
        "there was no search with finite losses: run the trainer in `with finder.attach(...)`",
    ),
    (
        "EMAHandler(model.state_dict())",
        ValueError,
        (
            "model must be a torch.nn.Module, got OrderedDict([('weight', tensor([[0., 0., 0.]])), ('bias', "
            "tensor([0.]))]) of type OrderedDict"
        ),
    ),
    (
        "EMAHandler(model, momentum=2)",
        ValueError,
        "momentum must be above 0 and below 1, got 2",
    ),
    (
        'EMAHandler(model, handle_buffers="keep")',
        ValueError,
        "handle_buffers must be 'copy', 'update' or 'ema_train', got 'keep'",
    ),
    (
        "BatchSizeScheduler(batches, lambda epoch: 2)",
        TypeError,
        (
            "dataloader must be a DataLoader, got [(tensor([[1., 1., 1.], [1., 1., 1.]]), tensor([[1.], "
            "[1.]])), (tensor([[1., ... of type list"
        ),
    ),
    # === loggers and profilers ===
    (
        'ProgressBar().attach(trainer, "loss")',
        TypeError,
        "metric_names must be a list of names or 'all', got 'loss' of type str",
    ),
    (
        "ProgressBar().attach(trainer, event_name=Events.GET_BATCH_STARTED)",
        ValueError,
        (
            "event_name must be one of STARTED, EPOCH_STARTED, ITERATION_STARTED, ITERATION_COMPLETED, "
            "EPOCH_COMPLETED, COMPLETED, got Events.GET_BATCH_STARTED"
        ),
    ),
    (
        "ProgressBar().attach(model)",
        TypeError,
        "engine must be an Engine, got Linear(in_features=3, out_features=1, bias=True) of type Linear",
    ),
    (
        (
            'with CSVLogger("log.csv") as logger:\n'
            '    logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "training")'
        ),
        ValueError,
        "pass at least one of metric_names, output_transform and state_attributes, got none",
    ),
    (
        (
            'with CSVLogger("log.csv") as logger:\n'
            '    logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "training", metric_names=["loss"])\n'
            "    trainer.run(batches[:1])"
        ),
        UserWarning,
        (
            "metric 'loss' is not logged, as engine.state.metrics has []: attach it to this engine, or "
            "correct metric_names"
        ),
    ),
    (
        (
            'with CSVLogger("log.csv") as logger:\n'
            '    logger.attach_output_handler(trainer, "iteration_completd", "training", metric_names="all")'
        ),
        RuntimeError,
        (
            "event_name must be an event with a counter, got 'iteration_completd'; events: "
            "GET_BATCH_STARTED, GET_BATCH_COMPLETED, ITERATION_STARTED, ITERATION_COMPLETED, EPOCH_STARTED, "
            "EPOCH_COMPLETED, STARTED, COMPLETED"
        ),
    ),
    (
        (
            'with CSVLogger("log.csv") as logger:\n'
            "    logger.attach_opt_params_handler(trainer, Events.ITERATION_COMPLETED, model)"
        ),
        TypeError,
        (
            "optimizer must have a sequence param_groups, got Linear(in_features=3, out_features=1, "
            "bias=True) of type Linear"
        ),
    ),
    (
        (
            'with CSVLogger("log.csv") as logger:\n'
            "    logger.attach(trainer, lambda engine: None, Events.EPOCH_COMPLETED)"
        ),
        ValueError,
        (
            "handler <lambda>(engine) cannot be called on Events.EPOCH_COMPLETED, which passes (engine, "
            "<CSVLogger object>, Events.EPOCH_COMPLETED) or (<CSVLogger object>, Events.EPOCH_COMPLETED)"
        ),
    ),
    (
        ('with open("log.csv", "w") as file:\n    file.write("a,b\\n1,2\\n")\nCSVLogger("log.csv")'),
        ValueError,
        "path must be a new file, or one that a CSVLogger wrote, got 'log.csv'",
    ),
    (
        "global_step_from_engine(model)",
        TypeError,
        "engine must be an Engine, got Linear(in_features=3, out_features=1, bias=True) of type Linear",
    ),
    (
        ('without("mlflow")\nMLflowLogger()'),
        ModuleNotFoundError,
        "MLflowLogger needs 'mlflow': pip install 'camshaft[mlflow]'",
    ),
    (
        ('without("matplotlib.pyplot")\nPiecewiseLinear.plot_values(3, param_name="lr", milestones_values=[(0, 0.1)])'),
        ModuleNotFoundError,
        "PiecewiseLinear.plot_values needs 'matplotlib.pyplot': pip install 'camshaft[plot]'",
    ),
    (
        "BasicTimeProfiler().attach(model)",
        TypeError,
        "engine must be an Engine, got Linear(in_features=3, out_features=1, bias=True) of type Linear",
    ),
    (
        'TorchProfiler("traces", active=0)',
        ValueError,
        "active must be at least 1, got 0",
    ),
    # === the distributed layer ===
    (
        'idist.initialize("ncll")',
        ValueError,
        "backend must be one of (...), got 'ncll', which does not exist",
    ),
    (
        "idist.initialize(None)",
        ValueError,
        "backend must be one of (...), got None, which does not exist",
    ),
    (
        'idist.initialize("gloo", rank=0)',
        ValueError,
        "rank and world_size must be given together, got rank=0 and world_size=None",
    ),
    (
        'idist.initialize("gloo", timeout=3)',
        TypeError,
        "timeout must be a datetime.timedelta, got 3",
    ),
    (
        "idist.Parallel(nproc_per_node=2)",
        ValueError,
        ("backend must be given with nproc_per_node, got None and {'nproc_per_node': 2}: pass 'auto' or one of (...)"),
    ),
    (
        'idist.Parallel("gloo", nproc_per_node="2")',
        ValueError,
        "nproc_per_node must be a positive integer, got '2'",
    ),
    (
        'idist.Parallel("gloo", nproc_per_node=1, nnodes=2)',
        ValueError,
        "node_rank must be given with nnodes=2",
    ),
    (
        'idist.Parallel("gloo", nproc=2)',
        TypeError,
        "Parallel on backend 'gloo' got unknown options ['nproc']; it accepts [...]",
    ),
    (
        'idist.Parallel("gloo", nproc_per_node=2, join_timeout=3)',
        TypeError,
        "Parallel on backend 'gloo' got unknown options ['join_timeout']; it accepts [...]",
    ),
    (
        'idist.Parallel("gloo", nnodes=2)',
        UserWarning,
        "nnodes ignored without nproc_per_node, as no processes are started, got {'nnodes': 2}",
    ),
    (
        'idist.Parallel("gloo").run(print)',
        RuntimeError,
        "run must be called within the block: with Parallel(...) as parallel: parallel.run(...)",
    ),
    (
        ('with idist.Parallel() as parallel:\n    parallel.run("train")'),
        TypeError,
        "func must be callable, got 'train' of type str",
    ),
    (
        ("with idist.Parallel() as parallel:\n    parallel.run(lambda: None)"),
        ValueError,
        "func must take (local_rank, *args, **kwargs), got the function <lambda>, which takes ()",
    ),
    (
        'idist.spawn("gloo", lambda local_rank, config: None, args=())',
        ValueError,
        (
            "fn must take (local_rank, *args, **kwargs_dict), got the function <lambda>, which takes "
            "(local_rank, config)"
        ),
    ),
    (
        'idist.spawn("gloo", lambda local_rank: None, args=3)',
        TypeError,
        "args must be a tuple, got 3 of type int",
    ),
    (
        'idist.auto_model("resnet50")',
        TypeError,
        "model must be a torch.nn.Module, got 'resnet50' of type str",
    ),
    (
        "idist.auto_model(nn.Sequential(model), shard=nn.Conv2d)",
        ValueError,
        "shard matches no module, got the class Conv2d: the model has Linear",
    ),
    (
        "idist.auto_optim(model)",
        TypeError,
        (
            "optimizer must be a torch.optim.Optimizer, got Linear(in_features=3, out_features=1, bias=True) "
            "of type Linear"
        ),
    ),
    (
        "idist.auto_dataloader(DataLoader([1, 2]))",
        TypeError,
        (
            "dataset must be a dataset, got a DataLoader: pass loader.dataset, and the arguments of the "
            "loader (batch_size, shuffle, collate_fn, ...) as keywords of auto_dataloader"
        ),
    ),
    (
        "idist.auto_dataloader([])",
        ValueError,
        "dataset must have at least one sample, got an empty list",
    ),
    (
        "idist.auto_dataloader(model)",
        TypeError,
        (
            "dataset must be a dataset with __getitem__() and __len__(), or an IterableDataset, got "
            "Linear(in_features=3, out_features=1, bias=True) of type Linear"
        ),
    ),
    (
        "idist.auto_dataloader([1, 2], batch_size=4, drop_last=True)",
        ValueError,
        (
            "drop_last=True leaves nothing of 2 samples, as one batch of all ranks takes 4: pass a smaller "
            "batch_size, or drop_last=False"
        ),
    ),
    (
        'idist.auto_dataloader([1, 2], shuffle="yes")',
        TypeError,
        "shuffle must be True, False or None, got 'yes'",
    ),
    (
        "idist.make_mesh(dp_shard=2)",
        ValueError,
        (
            "the product of the sizes must be the number of ranks, 1, got dp_replicate=1 * dp_shard=2 * cp=1 "
            "* tp=1; one of them may be -1, for the remaining ranks"
        ),
    ),
    (
        "launched(4)\nidist.make_mesh(dp_shard=-1)",
        RuntimeError,
        (
            "make_mesh needs a backend, as 4 processes were launched and none is initialized: call "
            "camshaft.distributed.initialize first, or use Parallel with a backend"
        ),
    ),
    (
        'idist.all_reduce("loss")',
        TypeError,
        "tensor must be a tensor or a number, got 'loss' of type str",
    ),
    (
        'idist.all_reduce(1.0, op="mean")',
        ValueError,
        "op must be one of ('SUM', 'PRODUCT', 'MIN', 'MAX', 'AND', 'OR') on serial, got 'mean'",
    ),
    (
        "idist.broadcast(torch.ones(1), src=3)",
        ValueError,
        "src must be a rank of the group [0], got 3",
    ),
    (
        "idist.one_rank_only(rank=1)(print)()",
        ValueError,
        "rank must be at least 0 and below 1, the number of processes, got 1",
    ),
    # === utilities ===
    (
        'manual_seed("seed")',
        TypeError,
        "seed must be an integer, got 'seed' of type str",
    ),
    (
        "convert_tensor(3)",
        TypeError,
        "x must be made of Tensor, str, bytes, mappings and sequences, got 3 of type int",
    ),
    (
        "to_onehot(torch.ones(2), 3)",
        TypeError,
        "indices must be a tensor of integers, got dtype torch.float32",
    ),
    (
        'setup_common_training_handlers(trainer, to_save={"model": model})',
        ValueError,
        "to_save needs either output_path or save_handler, got neither",
    ),
]


def names_of_a_script(monkeypatch):
    """Return what the mistakes refer to: a script that is correct up to the mistake."""
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer, loss_fn = Descent(model.parameters()), nn.MSELoss()

    def train():
        """Save a checkpoint of the model, as an earlier run did."""
        trainer, checkpoint = Engine(lambda engine, batch: None), Checkpoint({"model": model}, "checkpoints")
        trainer.add_event_handler(Events.COMPLETED, checkpoint)
        trainer.run([1])
        return checkpoint.last_checkpoint

    def without(package):
        """Hide an optional package, as if it were not installed."""
        monkeypatch.setitem(sys.modules, package, None)

    def launched(world_size):
        """Set the variables of a launcher."""
        for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0}.items():
            monkeypatch.setenv(name, str(value))

    script = {
        "launched": launched,
        "model": model,
        "optimizer": optimizer,
        "loss_fn": loss_fn,
        "trainer": create_supervised_trainer(model, optimizer, loss_fn),
        "evaluator": create_supervised_evaluator(model),
        "batches": [(torch.ones(2, 3), torch.ones(2, 1))] * 4,
        "train": train,
        "without": without,
    }
    return {**NAMES, **script}


def plain(text, folder):
    """Return a message without what depends on the machine."""
    text = text.replace(str(idist.available_backends()), "(...)").replace(f"{folder.resolve()}{os.sep}", "")
    text = re.sub(r"(?<=it accepts \[).*(?=\])", "...", text)  # depends on the version of torch
    return re.sub("0x[0-9a-f]+", "0x...", text)


@pytest.mark.parametrize(("mistake", "kind", "message"), MISTAKES, ids=[row[0].splitlines()[-1] for row in MISTAKES])
def test_a_mistake_causes_a_message_that_helps(monkeypatch, tmp_path, mistake, kind, message):
    if "ProgressBar" in mistake:
        pytest.importorskip("tqdm")
    monkeypatch.chdir(tmp_path)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            exec(mistake, names_of_a_script(monkeypatch))
        except Exception as error:
            found.append((type(error), str(error.args[0])))
    found += [(one.category, str(one.message)) for one in caught]
    assert [(kind, plain(text, tmp_path)) for kind, text in found] == [(kind, message)]
