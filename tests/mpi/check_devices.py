"""Tensors on another device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from tests.distributed.checking import check
from tests.mpi.checking import place


class FakeDeviceTensor(torch.Tensor):
    """A tensor on a fake device, whose memory MPI cannot read."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> FakeDeviceTensor:
        made = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
        made.__class__ = cls
        made.values = values
        return made


def add_device() -> None:
    """Register the device with torch, with functions that copy and detach its tensors."""
    backend_registration._setup_privateuseone_for_python_backend("fake")

    @torch.library.impl("aten::_copy_from", "privateuseone")
    def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        place = target.values if isinstance(target, FakeDeviceTensor) else target
        place.copy_(source.values if isinstance(source, FakeDeviceTensor) else source)
        return target

    @torch.library.impl("aten::detach", "privateuseone")
    def detach(source: FakeDeviceTensor) -> FakeDeviceTensor:
        return FakeDeviceTensor(source.values)


@check
def tensors_on_another_device_are_copied_to_the_cpu_and_back() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return  # older versions of torch do not support devices written in Python
    add_device()
    rank, size = place()
    for tensor in (torch.full((3,), float(rank)), torch.full((3,), rank, dtype=torch.bfloat16)):
        on_device = FakeDeviceTensor(tensor)
        assert on_device.device.type == "fake"
        dist.all_reduce(on_device)
        assert on_device.values.tolist() == [sum(range(size))] * 3
        parts = [FakeDeviceTensor(torch.zeros_like(tensor)) for _ in range(size)]
        dist.all_gather(parts, FakeDeviceTensor(torch.full_like(tensor, rank)))
        assert [part.values[0].item() for part in parts] == list(range(size))
        sending = dist.isend(FakeDeviceTensor(torch.full_like(tensor, rank)), (rank + 1) % size)
        dist.recv(on_device, (rank - 1) % size)
        sending.wait()
        assert on_device.values[0] == (rank - 1) % size
