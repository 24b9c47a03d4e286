"""The path of PyTorch-Ignite's ``auto_model`` and its companions."""

from __future__ import annotations

from camshaft.data.loaders import auto_dataloader
from camshaft.data.samplers import DistributedProxySampler
from camshaft.distributed.models.auto import auto_model, auto_optim

__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]
