"""Scripts of the migration guides that need files written by other libraries."""

from __future__ import annotations

import torch
from torch import nn

from tests.docs.titled import titled


def test_weights_of_lightning_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    prefixed = {f"net.{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": prefixed}, "epoch=3.ckpt")
    exec(titled("migrating/from-lightning.md", "convert.py"), {})
    converted = torch.load("model.pt", weights_only=True)
    assert converted.keys() == model.state_dict().keys()
    assert all(torch.equal(value, converted[name]) for name, value in model.state_dict().items())
