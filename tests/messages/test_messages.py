"""The mistakes of beginners, and the full message that each of them causes: mistakes.txt beside this file.

A message names the argument, what was passed, what is allowed, and what to do, in one or two short sentences. Addresses
and what backends there are, and what they accept, are left out.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

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


def entries():
    """Yield the entries of the table: code, the name of the error or warning that it causes, and the message."""
    for entry in Path(__file__).with_name("mistakes.txt").read_text("utf-8").split("\n\n"):
        lines = entry.splitlines()
        code = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        if code:  # not a heading
            kind, _, message = " ".join(line.strip() for line in lines[len(code) :]).partition(": ")
            yield "\n".join(code), kind, message


MISTAKES = [*entries()]


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
            found.append((type(error).__name__, str(error.args[0])))
    found += [(one.category.__name__, str(one.message)) for one in caught]
    assert [(kind, plain(text, tmp_path)) for kind, text in found] == [(kind, message)]
