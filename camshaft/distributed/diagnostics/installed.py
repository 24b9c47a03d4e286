"""What this machine has for distributed training: versions, backends, devices."""

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

from camshaft.distributed.backend import accelerator
from camshaft.distributed.registry import NEEDS, known_backends, lack_of
from camshaft.version import __version__

_LIMIT = 30  # seconds for an MPI library to report its version
_GIB = 2**30


@dataclass(frozen=True)
class Status:
    """Whether a backend can be initialized.

    Args:
        available: whether it can.
        version: the version of its library.
        lack: what is missing, and what to do.
    """

    available: bool
    version: str | None = None
    lack: str | None = None


def versions() -> dict[str, str]:
    """Return the versions of what every job needs."""
    return {"camshaft": __version__, "Python": platform.python_version(), "torch": torch.__version__}


def backends() -> dict[str, Status]:
    """Return the status of each backend, without importing optional libraries."""
    return {"serial": Status(True, f"camshaft {__version__}"), **{name: _status(name) for name in known_backends()}}


def devices() -> dict[str, str]:
    """Return a description of each device that torch sees.

    >>> "cpu" in devices()
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": f"{cores} cores, of which torch uses {torch.get_num_threads()}"}
    if (here := accelerator()) is not None:
        properties_of = getattr(torch.get_device_module(here.type), "get_device_properties", None)
        for index in range(torch.accelerator.device_count()):
            properties = properties_of and properties_of(index)  # some kinds of devices have none
            text = f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB" if properties else "one device"
            found[f"{here.type}:{index}"] = text
    return found


def _status(name: str) -> Status:
    if lack := lack_of(name):
        return Status(False, lack=lack)
    version = _VERSIONS.get(name, lambda: f"torch {torch.__version__}")()
    if version is None:
        return Status(False, lack=f"mpi4py finds no MPI library: {NEEDS[name]}")
    kinds, here = dist.Backend.backend_capability.get(name, ["cpu"]), accelerator()
    if "cpu" not in kinds and (here is None or here.type not in kinds):
        return Status(False, version, f"needs a device of type {' or '.join(kinds)}")
    return Status(True, version)


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's


def _mpi() -> str | None:
    """Return the version of the MPI library, from another process: in this one, MPI must not be initialized."""
    if dist.is_mpi_available():
        return "torch's own"
    command = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    library = " ".join(output.partition("\n")[0].partition(",")[0].replace("Version:", "").split())
    return f"mpi4py {importlib.metadata.version('mpi4py')}, {library}"


_VERSIONS: dict[str, Callable[[], str | None]] = {
    "nccl": _nccl,
    "mpi": _mpi,
    "xla-tpu": lambda: f"torch_xla {importlib.metadata.version('torch_xla')}",
    "horovod": lambda: f"horovod {importlib.metadata.version('horovod')}",
}
