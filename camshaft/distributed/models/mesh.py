"""The device mesh of a job: its ranks along named axes, and this rank's share of the data."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from camshaft.arguments import check_type
from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.collectives.call import enter
from camshaft.distributed.environments import detect
from camshaft.distributed.job import current, data_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def make_mesh(dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1) -> DeviceMesh | None:
    """Arrange the ranks of the job along the axes of a torch ``DeviceMesh``; all ranks must call this.

    :func:`get_mesh` then returns this mesh, and data are distributed by it: ranks that differ only along ``cp`` or
    ``tp`` get the same samples. Create it before loaders and samplers. Neighbors along ``tp`` have consecutive ranks,
    so that they are on one node.

    Args:
        dp_replicate: number of ranks that hold the same part of the model and get different samples.
        dp_shard: number of ranks that hold different parts of the model and get different samples.
        cp: number of ranks that divide each sequence (context parallelism); the model is also sharded over them.
        tp: number of ranks that divide layers (tensor parallelism) and process the same samples together.
            One of these sizes may be -1, for the remaining ranks.

    Returns:
        The mesh, with ``dp_shard`` and all axes larger than one; ``None`` in a single process.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is out of range, or the product of the sizes is not the number of ranks.
        RuntimeError: a launcher started several processes, but no backend is initialized.
        NotImplementedError: the backend does not support meshes.

    >>> make_mesh(dp_shard=-1) is None
    True
    """
    backend = current()
    if not backend.has_meshes:
        backend.lack("device meshes", "gloo or nccl")
    launch = None
    if backend.name is None:
        with suppress(RuntimeError):  # contradictory variables do not matter here
            launch = detect(os.environ)
    if launch is not None and launch.topology.world_size > 1:  # each process would train a model of its own
        raise RuntimeError(
            f"make_mesh needs a backend, as {launch.topology.world_size} processes were launched and none is "
            "initialized: call camshaft.distributed.initialize first, or use Parallel with a backend"
        )
    sizes = _checked(dict(zip(AXES, (dp_replicate, dp_shard, cp, tp), strict=True)), backend.topology.world_size)
    if backend.name is None:
        return None
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    with enter("make_mesh", backend, None, how=str(axes)):
        mesh: DeviceMesh = backend.new_mesh(axes)
    backend.job.mesh = mesh
    return mesh


def get_mesh() -> DeviceMesh | None:
    """Return the mesh of the job, which is the latest one from :func:`make_mesh`, or ``None`` if there is none.

    >>> get_mesh() is None
    True
    """
    mesh: DeviceMesh | None = current().job.mesh
    return mesh


def get_data_parallel_rank() -> int:
    """Return the index of the share of the data that this rank processes.

    It is the rank's position along ``dp_replicate`` and ``dp_shard``. Ranks with the same index process the same
    samples. Without a mesh, this is :func:`get_rank`.

    >>> get_data_parallel_rank()
    0
    """
    return data_place()[0]


def get_data_parallel_size() -> int:
    """Return the number of shares into which the data are divided; without a mesh, this is :func:`get_world_size`.

    >>> get_data_parallel_size()
    1
    """
    return data_place()[1]


def output_place() -> tuple[int, int]:
    """Return the index of this rank's part of the outputs, and the number of parts: only peers along ``tp`` share one.

    Peers along ``cp`` get the same samples, and process different parts of each sequence.
    """
    return data_place(axes=AXES[:3])


def size_of(mesh: DeviceMesh, axis: str) -> int:
    """Return the size of an axis of a mesh, or 1 if the mesh lacks it."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def use_mesh(backend: Backend, mesh: DeviceMesh) -> None:
    """Check a mesh that the user passes, and make it the mesh of the job if there is none yet.

    Raises:
        ValueError: it has other axes, lacks ranks, or divides the data differently from the mesh of the job.
    """
    names, size = mesh.mesh_dim_names or (), backend.topology.world_size
    if not names or not set(names) <= set(AXES) or mesh.size() != size:
        raise ValueError(f"mesh must have all {size} ranks, along axes named as in {AXES}, got {mesh}: use make_mesh")
    if backend.job.mesh is None:
        backend.job.mesh = mesh
    ours, its = data_place(backend), data_place(backend, mesh)
    if ours != its:
        raise ValueError(
            f"mesh divides the data among {its[1]} ranks, of which this is number {its[0]}, but that of the job "
            f"(get_mesh) among {ours[1]}, of which it is number {ours[0]}: use one mesh for model and data"
        )


def _checked(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Return sizes that multiply to the number of ranks, with -1 resolved."""
    for name, size in sizes.items():
        check_type(name, size, int, "an integer")
    rest = [name for name, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size != -1)
    fits = given > 0 and (not world_size % given if rest else given == world_size)
    if fits and min(sizes.values()) >= -1 and len(rest) < 2:
        return {**sizes, **dict.fromkeys(rest, world_size // given)}
    product = " * ".join(f"{name}={size}" for name, size in sizes.items())
    raise ValueError(
        f"the product of the sizes must be the number of ranks, {world_size}, got {product}; one of them may be -1, "
        "for the remaining ranks"
    )
