"""Helpers for the tests of handlers: objects to save, and engines in a given state."""

from __future__ import annotations

import torch
from torch import nn

from camshaft.engine import Engine
from camshaft.handlers.checkpoint import BaseSaveHandler
from camshaft.handlers.checkpoint.manifest import FOLDER


class Part:
    """An object that only has a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Memory(BaseSaveHandler):
    """Keeps checkpoints in a dict, and a journal of the calls."""

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
    """Return an engine with these counters and metrics."""
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
