"""Choose a backend that fits the launcher and the devices of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from camshaft.distributed.topology import Launch


def choose(
    environ: Mapping[str, str], launch: Launch | None, nproc_per_node: int | None, available: Sequence[str]
) -> tuple[str | None, str]:
    """Choose a backend.

    Args:
        environ: the environment variables.
        launch: how this process was started, ``None`` without a launcher.
        nproc_per_node: the number of processes about to be started, ``None`` if none are.
        available: the backends that can be initialized.

    Returns:
        Its name, ``None`` for a single process, and the reason.

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
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "gloo", "there is no accelerator"
    try:
        name = dist.get_default_backend_for_device(accelerator.type)
    except ValueError:
        return "gloo", f"torch knows no backend for {accelerator.type}"
    if name not in available:
        return "gloo", f"{name!r} is not available for {accelerator.type}"
    count, local_size = (
        torch.accelerator.device_count(),
        nproc_per_node or (launch.topology.local_world_size if launch else 1),
    )
    return (
        "gloo" if count < local_size else name,
        f"there are {count} {accelerator.type} devices for {local_size} processes",
    )
