"""What the replicas of a model have in common, their weights, and what not, the data that they are trained on.

Both are compared through the store, in a few requests, and no rank waits for another.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.collectives.values import is_dense
from camshaft.distributed.failures.alone import alone
from camshaft.distributed.failures.store import store_at
from camshaft.distributed.job import current, data_place
from camshaft.dtensors import any_dtensor, is_wrapped
from camshaft.errors import level_of_caller
from camshaft.tree import apply_to_type

_BLOCK = 1 << 24  # elements that are summed at once, as integers of eight bytes
_KEPT = 8  # moments that stay in the store, for ranks that fall behind
_PLAIN = ((BatchSampler, RandomSampler), (BatchSampler, SequentialSampler))
_COMPARED = 1 << 12  # elements of each tensor of a batch
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


class Replicas:
    """One model, of which each rank holds a replica.

    Args:
        model: this rank's.
        wrapper: what reduces its gradients.
        backend: of the job.
    """

    def __init__(self, model: nn.Module, wrapper: nn.Module, backend: Backend) -> None:
        self._model, self._wrapper, self.backend = ref(model), ref(wrapper), backend
        self._name = backend.job.unique_name("replicas")
        self._written: deque[str] = deque()
        self._is_done = False

    def compare_weights(self, engine: Any, when: str) -> None:
        """Warn, or in debug mode raise, if the weights are not those that another rank had at the same time.

        The first rank writes checksums to the store, and each other one compares with them. This waits for the device.
        Buffers may differ between replicas. Ranks on different hardware, which may round differently, are not compared.

        Args:
            engine: whose run it is.
            when: the same text on all ranks, and another one each time in a run.

        Raises:
            ValueError: in debug mode.
        """
        model, store, rank = self._model(), store_at(self.backend, self._name), self.backend.topology.rank
        averages_seldom = getattr(self._wrapper(), "_comm_hooks", ())  # perhaps, as in local SGD
        if self._is_done or model is None or store is None or averages_seldom or alone.get() is not None:
            return
        weights = _weights(model)
        sums, hardware = _checksums(list(weights.values())), sorted({_hardware(one.device) for one in weights.values()})
        kind = [crc32(repr([*weights]).encode()), *hardware]
        text = json.dumps([rank, kind, sums])
        key = f"{engine.run_line.rpartition(os.sep)[2]}/{engine.run_number}/{when}"  # folders may differ between nodes
        try:
            found = store.compare_set(key, "", text).decode()
            if found == text:
                self._written.append(key)
                if len(self._written) > _KEPT:
                    store.delete_key(self._written.popleft())
        except RuntimeError:  # the process that holds the store has ended
            return
        other, their_kind, theirs = json.loads(found)
        if theirs == sums or their_kind != kind:
            return
        self._is_done = True
        different = [name for name, own, its in zip(weights, sums, theirs, strict=True) if own != its]
        message = (
            f"the replicas of the model differ {when}: ranks {other} and {rank} have different weights in "
            f"{len(different)} of {len(weights)} parameters, the first of which is {different[0]!r}: unfreeze "
            "parameters before auto_model, call the model that it returned, also in model_fn, and load weights on all "
            "ranks"
        )
        if self.backend.job.compares_collectives:
            raise ValueError(message)
        if store.add("reported", 1) == 1:
            warnings.warn(message, stacklevel=level_of_caller())

    def compare_data(self, loader: Any, batch: Any) -> None:
        """Warn if this rank trains on the same data as another one, of which a first batch is the sign.

        Only loaders of torch with the default samplers are compared, which yield all samples of a dataset.
        """
        kinds = type(getattr(loader, "batch_sampler", None)), type(getattr(loader, "sampler", None))
        store = store_at(self.backend, self._name) if kinds in _PLAIN and alone.get() is None else None
        content = _content(batch) if store is not None else None
        if store is None or content is None:
            return
        (place, size), rank = data_place(self.backend), self.backend.topology.rank
        with suppress(RuntimeError):
            other, their_place, theirs = json.loads(store.compare_set("batch", "", json.dumps([rank, place, content])))
            if theirs == content and place != their_place and store.add("same", 1) == 1:
                warnings.warn(
                    f"ranks {other} and {rank} train on the same batch, so each of the {size} ranks reads all of the "
                    "data: create the loader with camshaft.distributed.auto_dataloader, which divides the samples "
                    "between ranks, or with a DistributedSampler",
                    stacklevel=level_of_caller(),
                )


_replicas: WeakKeyDictionary[nn.Module, Replicas] = WeakKeyDictionary()


def register(model: nn.Module, is_replicated: bool = False) -> Replicas | None:
    """Return the replicas of a model that all ranks train together, ``None`` for any other.

    Args:
        model: perhaps compiled or wrapped.
        is_replicated: all ranks hold its weights, even if it is not wrapped in ``DistributedDataParallel``.
    """
    backend, here, outer, inner = current(), alone.get(), *_unwrapped(model)
    is_parallel = outer is not inner and isinstance(outer, DistributedDataParallel)
    if (known := _replicas.get(inner)) is not None and known.backend is backend:
        return known
    is_alone = backend.topology.world_size == 1 or (here is not None and here.turn is None)
    if is_alone or any_dtensor(inner.parameters()) or is_wrapped(inner) or any(map(is_lazy, inner.parameters())):
        return None
    if is_parallel:
        is_replicated = outer.process_group.size() == backend.topology.world_size
    if not is_replicated:
        return None
    _replicas[inner] = Replicas(inner, outer, backend)
    return _replicas[inner]


def compare_saved(objects: Mapping[str, Any], engine: Any, when: str) -> None:
    """Compare the weights of models that are saved; see :meth:`Replicas.compare_weights`."""
    for name, one in objects.items():
        replicas = _replicas.get(_unwrapped(one)[1]) if isinstance(one, nn.Module) else None
        if replicas is not None and replicas.backend is current():
            replicas.compare_weights(engine, f"{when}, as {name!r}")


def _unwrapped(model: nn.Module) -> tuple[Any, Any]:
    """Return a model without what compiles it, and without what averages its gradients, too."""
    outer: Any = getattr(model, "_orig_mod", model)
    inner = outer.module if isinstance(outer, DistributedDataParallel) else outer
    return outer, getattr(inner, "_orig_mod", inner)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    named = ((name, one.detach()) for name, one in model.named_parameters() if name not in ignored)
    return {name: one for name, one in named if is_dense(one)}


def _checksums(tensors: list[Tensor]) -> list[str]:
    """Return the sums over the bits of tensors, waiting for each device once."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = real.contiguous().view(_INTEGERS[real.element_size()]).flatten()
        blocks = [block.sum(dtype=torch.int64) for block in bits.split(_BLOCK)]  # type: ignore[no-untyped-call]
        sums.setdefault(tensor.device, []).append(torch.stack(blocks).sum())
    found = {device: iter(torch.stack(some).tolist()) for device, some in sums.items()}
    return [f"{next(found[tensor.device]) % 2**64:x}" for tensor in tensors]


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _content(batch: Any) -> int | None:
    """Return a hash of a batch, of each tensor a part.

    ``None`` if it holds anything but tensors, numbers and text, or nothing that tells data apart: keys, which each rank
    may look up in files of its own, and zeros are the same where the samples are not.
    """
    content, is_telling = [], False

    def note(leaf: Any) -> Any:
        nonlocal is_telling
        if isinstance(leaf, Tensor):
            part = leaf.detach().flatten()[:_COMPARED].tolist()
            is_telling |= leaf.dim() > 1 and len({*part}) > 1
        content.append((leaf.shape, part) if isinstance(leaf, Tensor) else leaf)
        return leaf

    try:
        apply_to_type(batch, (Tensor, int, float, str, bytes), note)
    except (TypeError, RuntimeError):  # another object, or a sparse tensor
        return None
    return crc32(repr(content).encode()) if is_telling else None
