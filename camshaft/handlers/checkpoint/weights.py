"""Files in the format of safetensors, which hold named tensors and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import torch

from camshaft.handlers.utils import load_optional

SUFFIX = ".safetensors"


def is_weights_file(path: str | PathLike[str]) -> bool:
    """Say whether a file is one of named tensors, by its name."""
    return fspath(path).endswith(SUFFIX)


def as_weights(checkpoint: Any) -> bytes:
    """Give the content of a file of named tensors.

    Raises:
        TypeError: the checkpoint is something else.
    """
    if not isinstance(checkpoint, Mapping) or not all(isinstance(one, torch.Tensor) for one in checkpoint.values()):
        raise TypeError(f"a {SUFFIX} file holds the state of one model, a dict of tensors; got {_kinds(checkpoint)}")
    seen: set[int] = set()
    alone = {name: _of_its_own(tensor, seen) for name, tensor in checkpoint.items()}
    content: bytes = _library().save(alone)
    return content


def read_weights(path: str | PathLike[str], device: Any) -> dict[str, torch.Tensor]:
    """Read named tensors to a device."""
    tensors: dict[str, torch.Tensor] = _library().load_file(path, device=str(device))
    return tensors


def _of_its_own(tensor: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """Give a dense tensor that shares no memory, as tied weights do, with one already seen."""
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    is_alone = storage.data_ptr() not in seen and storage.nbytes() == tensor.numel() * tensor.element_size()
    seen.add(storage.data_ptr())
    return tensor.contiguous() if is_alone else tensor.clone(memory_format=torch.contiguous_format)


def _library() -> Any:
    return load_optional("safetensors.torch", extra="safetensors", needed_by=f"a checkpoint in a {SUFFIX} file")


def _kinds(checkpoint: Any) -> str:
    if not isinstance(checkpoint, Mapping):
        return f"a {type(checkpoint).__name__}"
    return f"a dict with {sorted({type(one).__name__ for one in checkpoint.values()})}"
