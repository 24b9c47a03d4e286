"""torch.distributed: gloo, nccl, and what is registered with torch for other devices."""

from __future__ import annotations

import inspect
import socket
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from camshaft.arguments import check_known
from camshaft.distributed.backends import gloo_network
from camshaft.distributed.backends.contract import Backend, Group, Work, accelerator
from camshaft.distributed.backends.dtypes import FLOAT8, as_bytes, check_reducible, from_bytes, reduced_wider
from camshaft.distributed.backends.release import release_groups
from camshaft.distributed.backends.rendezvous import open_store
from camshaft.distributed.connections import connections_to
from camshaft.distributed.failures.trace import RECORDS_GLOO, Calls
from camshaft.distributed.topology import Launch, Topology
from camshaft.dtensors import is_wrapped

_CPU = torch.device("cpu")
_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
_torch_world: Any = dist.distributed_c10d._world  # whose default_pg is dist.group.WORLD, found in half the time
_REDUCTIONS = {
    "SUM": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "AND": dist.ReduceOp.BAND,
    "OR": dist.ReduceOp.BOR,
}
_UNKNOWN_TO_GLOO = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
_REDUCED_WIDER = _UNKNOWN_TO_GLOO | {torch.bool}
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_MOVED_AS_BYTES = _UNKNOWN_TO_GLOO | FLOAT8 | _COMPLEX
# the first name is that of newer torch, which deprecates the second
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PASSED_ON = {one for one in inspect.signature(dist.init_process_group).parameters if not one.startswith("_")}
OPTIONS = (_PASSED_ON | {"device"}) - {"backend", "store", "group_name"}


class NativeBackend(Backend):
    """The default process group of torch.distributed.

    Args:
        topology: the place of this process in the job.
        device: where tensors are moved from and to.
        interface: the network interface to set for gloo, if any.
        timeout: how long an operation of a group may take; torch's default if ``None``.
        assumed: the numbers of ``topology`` that are guesses.
    """

    model_name = "native-dist"

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        interface: str | None = None,
        timeout: timedelta | None = None,
        assumed: tuple[str, ...] = (),
    ) -> None:
        config = dist.get_backend_config()
        self.name = dist.get_backend()
        self.has_meshes = self.name != "mpi"  # torch's operations on distributed tensors are not made for it
        self.topology = topology
        self.assumed = assumed
        self.device = device
        if "nccl" in config and device.type == "cuda":
            self.reductions = tuple(op for op in _REDUCTIONS if op not in ("AND", "OR"))  # nccl has none of bits
        self.carrier = _CPU if "cpu:" in config else device  # also on a machine with GPUs
        self._not_always_reducible = _COMPLEX if "nccl" in config else _COMPLEX | FLOAT8
        self._reduced_specially = _REDUCED_WIDER | self._not_always_reducible
        self._interface = interface
        self._timeout = timeout
        self._world: Any = dist.group.WORLD
        self._send_waiters: defaultdict[int, gloo_network.SendWaiter] = defaultdict(gloo_network.SendWaiter)
        # Reading torch's records of nccl asks the device, which ends a capture of a graph that is in progress.
        self.adds_calls = not hasattr(self._world, "calls") and ("nccl" in config or not RECORDS_GLOO)
        self.calls = Calls(self.name) if self.adds_calls else getattr(self._world, "calls", None)
        self._connections = connections_to(self.store())  # without those of its clones, which are made later

    def enter(self) -> None:
        """Drain gloo at the exit of this process, and learn which connections are its own."""
        gloo_network.drain_at_exit(self._world)
        if "gloo" in dist.get_backend_config() and self.topology.world_size > 1:
            gloo_network.in_thread(lambda: gloo_network.addresses_of(self._world), "camshaft-addresses")

    def messages_at(self, group: Group | None) -> torch.device:
        """Return the CPU: nccl ignores tags, and two ranks that send to each other would wait forever."""
        if "cpu:" not in dist.get_backend_config(group):
            self.lack("send and recv", "gloo or mpi, or pass group=new_group(ranks, backend='gloo')")
        return _CPU

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce in place."""
        if tensor.dtype in self._reduced_specially:
            return self._reduced(tensor, op, lambda own, op: dist.all_reduce(own, _REDUCTIONS[op], group))
        dist.all_reduce(tensor, _REDUCTIONS[op], group)
        return tensor

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Gather into one tensor."""
        sent = _movable(tensor)
        out = sent.new_empty((dist.get_world_size(group), *sent.shape))
        _all_gather_single(out.view(-1), sent.view(-1), group)
        return out if sent is tensor else from_bytes(out, tensor.dtype)

    def all_gather_into(self, out: Tensor, tensor: Tensor, group: Group | None) -> None:
        """Gather into one tensor that exists."""
        _all_gather_single(_movable(out), _movable(tensor), group)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast in place."""
        dist.broadcast(_movable(tensor), src, group)
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Wait for the others; nccl gets the device, so that it need not guess."""
        device_ids = [self.device.index] if self.name == "nccl" and self.device.index is not None else None
        dist.barrier(group, device_ids=device_ids)

    def reduce(self, tensor: Tensor, dst: int, op: str, group: Group | None) -> Tensor:
        """Reduce in place."""
        return self._reduced(tensor, op, lambda own, op: dist.reduce(own, dst, _REDUCTIONS[op], group))

    def gather(self, tensor: Tensor, dst: int, group: Group | None) -> Tensor:
        """Gather into the rows of one tensor."""
        sent = _movable(tensor)
        if self.topology.rank != dst:
            dist.gather(sent, None, dst, group)
            return tensor
        out = sent.new_empty((dist.get_world_size(group), *sent.shape))
        dist.gather(sent, list(out.unbind()), dst, group)
        return out if sent is tensor else from_bytes(out, tensor.dtype)

    def scatter(self, tensors: Tensor | None, out: Tensor, src: int, group: Group | None) -> Tensor:
        """Scatter the rows of one tensor."""
        rows = None if tensors is None else list(_movable(tensors).unbind())
        dist.scatter(_movable(out), rows, src, group)
        return out

    def reduce_scatter(self, tensors: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce and scatter the rows of one tensor."""

        def reduce(tensors: Tensor, op: str) -> Tensor:
            out = torch.empty_like(tensors[0])
            _reduce_scatter_single(out.view(-1), tensors.view(-1), _REDUCTIONS[op], group)
            return out

        return self._reduced(tensors, op, reduce)

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange the parts of one tensor."""
        sent = _movable(tensor)
        out = sent.new_empty((sum(receives), *sent.shape[1:]))
        dist.all_to_all_single(out, sent, receives, sends, group)
        return out if sent is tensor else from_bytes(out, tensor.dtype)

    def send(self, tensor: Tensor, dst: int, tag: int, group: Group | None) -> Work:
        """Begin to send."""
        work: Any = dist.isend(tensor, dst, group, tag)
        return work if self.name == "mpi" else gloo_network.Send(work, self._send_waiters[dst])

    def receive(self, tensor: Tensor, src: int, tag: int, group: Group | None) -> Work:
        """Begin to receive."""
        work: Any = dist.irecv(tensor, src, group, tag)
        return work  # type: ignore[no-any-return]  # never None, as this rank is a member of the group

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Create a process group."""
        with gloo_network.using(self._interface):
            return gloo_network.connected(dist.new_group(ranks, **{"timeout": self._timeout, **options}))

    @property
    def members_make_groups(self) -> bool:
        """True, unless the communicator of a group is a part of that of all ranks.

        nccl splits that if it is bound to a device, and so does torch's own MPI.
        """
        is_of_torch = type(self._world) is dist.ProcessGroup
        return self._world.bound_device_id is None and not (self.name == "mpi" and is_of_torch)

    def group_of_members(self, ranks: list[int]) -> Group:
        """Create a process group without the other ranks.

        ``torch.distributed.new_group(use_local_synchronization=True)`` names the group after the number of groups that
        a rank is in, so ranks that disagree on it would wait forever. Here the ranks are the name.
        """
        if self.topology.rank not in ranks:
            return _NO_MEMBER
        name = "camshaft/" + "_".join(map(str, ranks))
        for known, other_name in _torch_world.pg_names.items():
            if other_name == name:  # made when the default group was adopted before
                return known
        backend, store = _torch_world.pg_map[self._world]
        kind = dist.Backend(backend)
        make: Any = dist.distributed_c10d._new_process_group_helper
        timeout = self._timeout or dist.distributed_c10d._get_default_timeout(kind)
        with gloo_network.using(self._interface):
            group, _ = make(len(ranks), ranks.index(self.topology.rank), ranks, kind, store, name, timeout=timeout)
            _torch_world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
            return gloo_network.connected(group)

    def new_mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """Create a mesh, and wait until the members of its groups are connected."""
        with gloo_network.using(self._interface):
            mesh = init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            both = [mesh["dp_shard", "cp"]._flatten("dp_shard_cp")] if "cp" in axes else []
        for group in (group for one in (mesh, *both) for group in one.get_all_groups()):
            gloo_network.connected(group)
            if self._timeout is not None:  # torch has no argument for it
                dist.distributed_c10d._set_pg_timeout(self._timeout, group)
        return mesh

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the ranks of an existing process group; an empty tuple for what torch returns to non-members."""
        if isinstance(group, dist.ProcessGroup):
            ranks = _torch_world.pg_group_ranks.get(group)  # a dictionary in the order of the members
            return None if ranks is None else tuple(ranks)  # None for a group that was destroyed, or of an earlier run
        return () if isinstance(group, type(_NO_MEMBER)) and group == _NO_MEMBER else None

    def is_alive(self) -> bool:
        """Whether the process group is still the default one."""
        return _torch_world.default_pg is self._world

    def store(self) -> Store | None:
        """Return the store that the process group was made with."""
        store: Store = dist.distributed_c10d._get_default_store()
        return store

    def release(self) -> None:
        """Close the connections of gloo, abort the communicators of nccl, and end the waits over mpi4py.

        A thread that waits in the store itself, such as for the members of a new group or the first collective of nccl,
        is released too: the connections to the store that this process had before the job began are closed then, after
        a second. All other connections are left alone.
        """
        if self.is_alive():
            release_groups(self.store(), self._connections)

    def close(self) -> None:
        """Destroy the process groups."""
        if dist.is_initialized():
            gloo_network.destroy_groups()

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Wrap in ``DistributedDataParallel``."""
        if self.topology.world_size == 1 or is_wrapped(model):
            return model
        if sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self.broadcast_model(model)  # nothing to reduce, so torch does not wrap it
            return model
        if self.device.type != "cpu":
            if "device_ids" in options:
                raise ValueError(f"device_ids is chosen by auto_model, got {options['device_ids']!r}")
            options["device_ids"] = [self.device.index]
        return nn.parallel.DistributedDataParallel(model, **options)

    def _reduced(self, tensor: Tensor, op: str, reduce: Callable[[Tensor, str], Any]) -> Tensor:
        """Reduce a tensor, in another dtype if torch does not reduce its own.

        Args:
            tensor: the tensor.
            op: the name of the reduction.
            reduce: returns the result, or ``None`` if it works in place.
        """
        if tensor.dtype in _REDUCED_WIDER:
            return reduced_wider(tensor, op, lambda wide, op: self._reduced(wide, op, reduce))
        if tensor.dtype in self._not_always_reducible:
            check_reducible(tensor, op)
        result = reduce(tensor, op)
        return tensor if result is None else result


def _movable(tensor: Tensor) -> Tensor:
    return as_bytes(tensor) if tensor.dtype in _MOVED_AS_BYTES else tensor


# --- starting a run, and adopting one --------------------------------------------------------------------------


def create(name: str, launch: Launch | None, local_rank: int | None = None, **options: Any) -> NativeBackend:
    """Create the default process group; all ranks call this.

    Args:
        name: ``"gloo"``, ``"nccl"``, or another backend of torch.
        launch: how this process was started, ``None`` if no launcher started it.
        local_rank: ignored, as the ranks exchange their hosts.
        options: ``init_method``, ``rank``, ``world_size``, ``timeout``, ``device`` (an override), and what else
            ``torch.distributed.init_process_group`` takes.

    Raises:
        TypeError: an option is unknown.
        ValueError: rank and world size are missing, or given although Slurm sets them.
        RuntimeError: the device of the backend is missing, a group exists, or the environment contradicts itself.
    """
    check_options(name, options)
    if dist.is_initialized():
        raise RuntimeError("a default process group already exists and is used automatically: do not call initialize")
    device, method = options.pop("device", None), options.pop("init_method", None)
    rank, size = _rank_and_size(launch, options.pop("rank", None), options.pop("world_size", None), method)
    store = open_store(launch, method, rank, size, options.get("timeout") or dist.default_pg_timeout)
    on_one_node = launch is not None and launch.topology.num_nodes == 1 and not launch.assumed
    interface = None if on_one_node else gloo_network.find_interface(store, rank, size)
    given = {option: value for option, value in options.items() if value is not None}
    with gloo_network.using(interface):
        dist.init_process_group(name, store=store, rank=rank, world_size=size, **given)
    try:
        # Hosts are exchanged in the store: a collective would need the device, which depends on the topology. Each rank
        # publishes its own, as a launcher may tell some ranks more than others (horovodrun).
        store.set(f"camshaft/host/{rank}", (launch and launch.host) or socket.gethostname())
        if launch is not None and not launch.assumed:
            topology = launch.topology
        else:
            hosts = [store.get(f"camshaft/host/{other}").decode() for other in range(size)]
            topology = Topology.from_hosts(rank, hosts)
        chosen = device_of(topology.local_rank) if device is None else torch.device(device)
        backend = NativeBackend(topology, chosen, interface, options.get("timeout"))
        if (here := accelerator()) is not None and chosen.type == here.type:
            torch.accelerator.set_device_index(chosen)
        backend.barrier(None)
    except BaseException:
        gloo_network.destroy_groups()
        raise
    return backend


def check_options(name: str, options: dict[str, Any]) -> None:
    """Reject unknown options, and a backend whose devices are missing.

    Raises:
        TypeError: an option is unknown.
        RuntimeError: there is no device for the backend.
    """
    check_known(options, OPTIONS, f"backend {name!r}")
    kinds = dist.Backend.backend_capability.get(name, ["cpu"])
    here = accelerator()
    if "cpu" not in kinds and (here is None or here.type not in kinds):
        needed = " or ".join(kinds).replace("cuda", "CUDA")
        raise RuntimeError(f"backend {name!r} needs a {needed} device, and none was found; 'gloo' works on the CPU")


def adopt(infer: Callable[[int, int], tuple[Topology, tuple[str, ...]]]) -> NativeBackend | None:
    """Adopt the default process group if there is one, without any communication.

    Args:
        infer: returns the topology of a rank and a world size, and which of its numbers are assumed.
    """
    if dist.distributed_c10d.GroupMember.WORLD is None or dist.get_backend() == "xla":
        return None  # the runtime of XLA knows more than torch's group over it
    topology, assumed = infer(dist.get_rank(), dist.get_world_size())
    if "local_rank" in assumed:
        warnings.warn(
            f"the local rank of rank {topology.rank} is unknown; assuming {topology.local_rank}, as on a single node; "
            "start with torchrun, or call set_local_rank first",
            stacklevel=6,
        )
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return NativeBackend(topology, bound or device_of(topology.local_rank), assumed=assumed)


def device_of(local_rank: int) -> torch.device:
    """Choose the device of a process: one of the accelerators that it sees, if the process group works there.

    A process may see all accelerators of its node, or only its own (``srun --gpus-per-task=1``, Kubernetes), and
    nothing says which. So the local rank is taken modulo the number of those that it sees.
    """
    kind = accelerator()
    if kind is None or f"{kind.type}:" not in dist.get_backend_config():
        return _CPU
    count = torch.accelerator.device_count()
    return torch.device(kind.type, local_rank % count) if count else _CPU


def _rank_and_size(launch: Launch | None, rank: Any, size: Any, init_method: str | None) -> tuple[int, int]:
    if launch is not None:
        if launch.launcher == "slurm" and (rank is not None or size is not None):
            raise ValueError(f"rank and world_size come from Slurm, got rank={rank!r} and world_size={size!r}")
        return launch.topology.rank, launch.topology.world_size
    if (rank is None) != (size is None):
        raise ValueError(f"rank and world_size must be given together, got rank={rank!r} and world_size={size!r}")
    if rank is None and init_method is not None and not init_method.startswith("env://"):
        raise ValueError(f"rank and world_size must be given with init_method={init_method!r}, or by a launcher")
    rank, size = (0, 1) if rank is None else (rank, size)
    Topology(rank=rank, world_size=size, local_world_size=size, local_rank=rank)  # checks them
    return rank, size
