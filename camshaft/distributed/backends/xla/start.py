"""Beginning a run on XLA, or taking over the runtime that is there."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from camshaft.distributed.backends.xla.backend import XlaBackend
from camshaft.distributed.backends.xla.spmd import XlaSpmdBackend
from camshaft.distributed.topology import Launch, Topology

logger = logging.getLogger("camshaft.distributed.utils")

_left = False  # the runtime lives on after the run; nobody wants it to be taken over then


def create(
    name: str, launch: Launch | None, local_rank: int | None = None, spmd: bool = False, **options: Any
) -> XlaBackend:
    """Begin to use XLA; all processes call this.

    Args:
        name: ``"xla-tpu"``.
        launch: how this process was started, ``None`` if it was started alone.
        local_rank: of no use, the runtime knows it.
        spmd: one process for all devices of this machine, instead of one for each.
        options: none.

    Raises:
        TypeError: an option is not known.
        RuntimeError: the runtime was started in another way, or knows nothing of the processes of the launcher.
    """
    global _left
    if options:
        raise TypeError(f"initialize knows only spmd for {name!r}, got {sorted(options)}")
    import torch_xla.core.xla_model as xla_model
    import torch_xla.runtime as runtime

    was_running = _is_running()
    if spmd or runtime.is_spmd():
        backend: XlaBackend = _begin_spmd(runtime)
    else:
        _join(launch)
        backend = _of_this_process(runtime)
    _check_joined(launch, backend.topology, runtime)
    if not was_running:
        xla_model.set_rng_state(torch.initial_seed())  # what torch was seeded with before there was anything to seed
    backend.barrier(None)
    _left = False
    return backend


def adopt(infer: object) -> XlaBackend | None:
    """Take over the runtime of XLA if it runs, without any communication; that its library is there means nothing."""
    if _left or not _is_running():
        return None
    import torch_xla.runtime as runtime

    return XlaSpmdBackend(_leave) if runtime.is_spmd() else _of_this_process(runtime)


def _is_running() -> bool:
    library: Any = getattr(sys.modules["torch_xla"], "_XLAC", None)  # None while it is being imported
    return library is not None and library._xla_runtime_is_initialized()


def _begin_spmd(runtime: Any) -> XlaSpmdBackend:
    if _is_running() and not runtime.is_spmd():
        raise RuntimeError(
            "spmd=True comes too late, as the runtime of XLA runs already: initialize before the first tensor is put "
            "on an XLA device"
        )
    if not runtime.is_spmd():
        runtime.use_spmd()
    if runtime.process_count() > 1:
        raise RuntimeError(f"spmd=True is for a single process, got one of {runtime.process_count()}")
    backend = XlaSpmdBackend(_leave)
    logger.info("SPMD over %d %s devices", runtime.global_runtime_device_count(), runtime.device_type())
    return backend


def _join(launch: Launch | None) -> None:
    """Tell the runtime of the processes of a launcher; torch_xla's own has done so."""
    from torch_xla._internal import pjrt

    if launch is not None and launch.topology.world_size > 1 and not _is_running():
        pjrt.initialize_multiprocess(launch.topology.local_rank, launch.topology.local_world_size)


def _of_this_process(runtime: Any) -> XlaBackend:
    import torch_xla

    topology = _topology(runtime)
    if topology.world_size > 1 and runtime.addressable_device_count() > 1:
        raise RuntimeError(
            f"a process for each device is needed, and this one has {runtime.addressable_device_count()}: use "
            "initialize('xla-tpu', spmd=True)"
        )
    return XlaBackend(topology, torch_xla.device(), _leave)


def _topology(runtime: Any) -> Topology:
    """Ask the runtime where this process stands."""
    if runtime.world_size() == 1:
        return Topology()
    local_size = runtime.local_device_count()
    return Topology(
        rank=runtime.global_ordinal(),
        world_size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_world_size=local_size,
        node_rank=runtime.host_index(),
        num_nodes=runtime.world_size() // local_size,
    )


def _check_joined(launch: Launch | None, topology: Topology, runtime: Any) -> None:
    """Refuse many runs of one process each, which the runtime makes of processes that it cannot join."""
    if launch is not None and topology.world_size == 1 < launch.topology.world_size:
        raise RuntimeError(
            f"{launch.launcher} started {launch.topology.world_size} processes, which XLA does not join on devices of "
            f"type {runtime.device_type()!r}: take backend 'gloo' on CPUs, or start one process, which spmd=True lets "
            "use several devices"
        )


def _leave() -> None:
    global _left
    _left = True
