"""What this machine has for distributed runs: versions, backends, devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from camshaft.distributed.registry import NEEDS, known_backends, lack_of
from camshaft.version import __version__

_LIMIT = 30  # seconds in which an MPI library must tell its version
_GIB = 2**30


@dataclass(frozen=True)
class Status:
    """Whether a backend can be initialized.

    Args:
        available: whether it can.
        version: that of its library.
        lack: what is missing, and what to do.
    """

    available: bool
    version: str | None = None
    lack: str | None = None


def versions() -> dict[str, str]:
    """Give the versions of what every run needs."""
    return {"camshaft": __version__, "Python": platform.python_version(), "torch": torch.__version__}


def backends() -> dict[str, Status]:
    """Look at each backend, without importing what is optional."""
    return {"serial": Status(True, f"camshaft {__version__}"), **{name: _status(name) for name in known_backends()}}


def devices() -> dict[str, str]:
    """Describe the devices that torch sees.

    >>> "cpu" in devices()
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": f"{cores} cores, of which torch uses {torch.get_num_threads()}"}
    kind = _accelerator()
    for index in range(torch.accelerator.device_count() if kind else 0):
        found[f"{kind}:{index}"] = _description(str(kind), index)
    return found


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def _description(kind: str, index: int) -> str:
    ask = getattr(torch.get_device_module(kind), "get_device_properties", None)
    if ask is None:  # not every kind tells
        return "one device"
    properties = ask(index)
    return f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB"


def _status(name: str) -> Status:
    if lack := lack_of(name):
        return Status(False, lack=lack)
    version = _VERSIONS.get(name, _of_torch)()
    if version is None:
        return Status(False, lack=f"mpi4py finds no MPI library: {NEEDS[name]}")
    kinds = dist.Backend.backend_capability.get(name, ["cpu"])
    if "cpu" not in kinds and _accelerator() not in kinds:
        return Status(False, version, f"needs a device of type {' or '.join(kinds)}")
    return Status(True, version)


def _of_torch() -> str:
    return f"torch {torch.__version__}"


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's


def _mpi() -> str | None:
    """Ask for the MPI library, if there is one, in a process of its own: in this one it is not to begin."""
    if dist.is_mpi_available():
        return "torch's own"
    command = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    library = " ".join(said.partition("\n")[0].partition(",")[0].replace("Version:", "").split())
    return f"mpi4py {_of('mpi4py')}, {library}"


def _of(distribution: str) -> str:
    return importlib.metadata.version(distribution)


_VERSIONS: dict[str, Callable[[], str | None]] = {
    "nccl": _nccl,
    "mpi": _mpi,
    "xla-tpu": lambda: f"torch_xla {_of('torch_xla')}",
    "horovod": lambda: f"horovod {_of('horovod')}",
}
