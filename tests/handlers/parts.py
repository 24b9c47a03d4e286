"""What the tests of handlers share: small things to save, and an engine at a given place."""

from __future__ import annotations

import torch
from torch import nn

from camshaft.engine import Engine
from camshaft.handlers.checkpoint import BaseSaveHandler
from camshaft.handlers.checkpoint.manifest import FOLDER


class Part:
    """Has a state, and nothing else."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Memory(BaseSaveHandler):
    """Keeps checkpoints in a dict, and a journal of what was asked of it."""

    def __init__(self):
        self.files = {}
        self.journal = []
        self.metadata = None

    def __call__(self, checkpoint, filename, metadata=None):
        self.journal.append(("save", filename))
        self.files[filename] = checkpoint
        self.metadata = metadata

    def remove(self, filename):
        self.journal.append(("remove", filename))
        del self.files[filename]


def at(iteration=0, epoch=0, **metrics):
    """Give an engine that has come so far."""
    engine = Engine(lambda engine, batch: None)
    engine.state.iteration, engine.state.epoch, engine.state.metrics = iteration, epoch, metrics
    return engine


def linear(value):
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, value)
    return layer


def weight(layer):
    return layer.weight.item()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != FOLDER)


def load(path):
    return torch.load(path, weights_only=True)
