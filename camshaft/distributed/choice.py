"""Choosing a backend from the launcher and the devices that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from camshaft.distributed.topology import Launch


def choose(
    environ: Mapping[str, str], launch: Launch | None, nproc_per_node: int | None, available: Sequence[str]
) -> tuple[str | None, str]:
    """Choose a backend, and say why.

    Args:
        environ: the variables of the environment.
        launch: how this process was started, ``None`` if it stands alone.
        nproc_per_node: how many processes are about to be started, ``None`` if none are.
        available: names of the backends that can be initialized.

    Returns:
        The name, ``None`` for a single process, and the reason.

    >>> choose({}, None, None, ["gloo"])
    (None, 'no launcher started this process, and nproc_per_node is not given')
    """
    if "xla-tpu" in available and "PJRT_DEVICE" in environ:
        return "xla-tpu", f"PJRT_DEVICE={environ['PJRT_DEVICE']} is set, and torch_xla is installed"
    if nproc_per_node is None and launch is None:
        return None, "no launcher started this process, and nproc_per_node is not given"
    if nproc_per_node is None and launch is not None:
        if launch.launcher == "horovodrun" and "horovod" in available:
            return "horovod", "horovodrun started this process"
        if launch.mpi and "mpi" in available:
            return "mpi", f"{launch.launcher} started this process, for MPI"
    local_size = nproc_per_node or (launch.topology.local_world_size if launch else 1)
    return _of_devices(local_size, available)


def _of_devices(local_size: int, available: Sequence[str]) -> tuple[str, str]:
    """Choose what moves tensors between the devices of this machine."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "gloo", "there is no accelerator"
    count = torch.accelerator.device_count()
    try:
        name = dist.get_default_backend_for_device(accelerator.type)
    except ValueError:
        return "gloo", f"torch knows no backend for {accelerator.type}"
    if name not in available:
        return "gloo", f"{name!r} is not available for {accelerator.type}"
    if count < local_size:
        return "gloo", f"there are {count} {accelerator.type} devices for {local_size} processes"
    return name, f"there are {count} {accelerator.type} devices for {local_size} processes"
