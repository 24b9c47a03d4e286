"""Horovod: the processes that it joined.

Every operation has a name. Horovod numbers those without a name in each process by itself; after ranks came to
:func:`horovod.torch.join` with different numbers of them, the next one would wait forever. A name is used again by the
next operation of its kind, which begins when this one has ended.
"""

from __future__ import annotations

import inspect
import io
import itertools
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from camshaft.arguments import check_known
from camshaft.distributed.backends.contract import Backend, Group, check_no_closure, variable_set
from camshaft.distributed.backends.dtypes import WIDER, as_bytes, check_reducible, reduced_wider
from camshaft.distributed.failures.trace import Calls
from camshaft.distributed.topology import Launch, Topology

_REDUCTIONS = {"SUM": "Sum", "AVERAGE": "Average", "ADASUM": "Adasum", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}

OPTIONS = {"comm", "process_sets", "timeout"}
_TIMEOUT = timedelta(minutes=30)  # torch's for gloo
_PAUSE = 1e-4  # seconds, of an exchange that takes Horovod ten times as long


class HorovodBackend(Backend):
    """All processes that Horovod joined.

    Args:
        hvd: ``horovod.torch``, initialized.
        topology: the place of this process in the job.
        device: where tensors are moved from and to.
        timeout: how long an operation may take.
    """

    name = "horovod"
    model_name = "horovod-dist"
    reductions = tuple(_REDUCTIONS)
    adds_calls = True
    has_ended = False
    """Whether a run of this process has ended."""

    def __init__(self, hvd: Any, topology: Topology, device: torch.device, timeout: timedelta) -> None:
        self.topology = topology
        self.device = device
        self._hvd = hvd
        self.calls = Calls()
        self.errors = (import_module("horovod.common.exceptions").HorovodInternalError,)
        self._seconds = timeout.total_seconds()
        self._wrapped = itertools.count()

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Reduce in place, or in a wider dtype and back."""
        if op == "ADASUM":
            self._check_adasum()
        if tensor.dtype in WIDER:
            return reduced_wider(tensor, op, lambda wide, op: self.all_reduce(wide, op, group))
        check_reducible(tensor, op)
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        is_mean_of_integers = op == "AVERAGE" and not flat.is_floating_point()  # Horovod would convert them to float64
        kind = getattr(self._hvd, "Sum" if is_mean_of_integers else _REDUCTIONS[op])
        self._wait(self._hvd.allreduce_async_, flat, op=kind, name=f"camshaft.all_reduce.{op}", group=group)
        if is_mean_of_integers:
            flat.div_(len(self.members(group)), rounding_mode="trunc")
        return tensor

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Gather the bytes."""
        shape = (len(self.members(group)), *tensor.shape)
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        row = as_bytes(tensor).view(1, -1)
        rows: Tensor = self._wait(self._hvd.allgather_async, row, name="camshaft.all_gather", group=group)
        return rows.view(-1).view(tensor.dtype).view(shape)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Broadcast the bytes in place."""
        if tensor.numel() > 0:
            flat = as_bytes(tensor).view(-1)
            self._wait(self._hvd.broadcast_async_, flat, src, name=f"camshaft.broadcast.{src}", group=group)
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Reduce a number; Horovod's own barrier has no timeout."""
        self._wait(self._hvd.allreduce_async_, torch.zeros(1), op=self._hvd.Sum, name="camshaft.barrier", group=group)

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Exchange the bytes."""
        shape = (sum(receives), *tensor.shape[1:])
        width = tensor.shape[1:].numel() * tensor.element_size()
        if width == 0:
            return tensor.new_empty(shape)
        rows, _ = self._wait(
            self._hvd.alltoall_async,
            as_bytes(tensor).view(-1, width),
            torch.tensor(sends, dtype=torch.int32),
            name="camshaft.all_to_all",
            group=group,
        )
        exchanged: Tensor = rows.view(-1).view(tensor.dtype).view(shape)
        return exchanged

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Create a process set, or find the one of these ranks: Horovod does not allow a second."""
        check_known(options, (), "new_group on backend 'horovod'")
        ranks = sorted(ranks)
        for number, members in self._hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items():
            if members == ranks:
                if number == 0:
                    return self._hvd.global_process_set
                found = self._hvd.ProcessSet(ranks)
                found.process_set_id = number
                return found
        try:
            return self._hvd.add_process_set(ranks)
        except ValueError as error:
            raise RuntimeError(
                "Horovod was initialized without process sets, which groups require: call "
                "camshaft.distributed.initialize('horovod'), or hvd.init(process_sets='dynamic')"
            ) from error

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Return the ranks of a process set that is registered with Horovod."""
        if not isinstance(group, self._hvd.ProcessSet) or group.process_set_id is None:
            return None
        return tuple(group.ranks)

    def is_alive(self) -> bool:
        """Whether Horovod is still initialized, with the same ranks: an elastic run changes them."""
        hvd, place = self._hvd, self.topology
        return bool(hvd.is_initialized()) and (hvd.rank(), hvd.size()) == (place.rank, place.world_size)

    def close(self) -> None:
        """Shut Horovod down; ranks that still wait for this one get an error."""
        self._hvd.shutdown()
        HorovodBackend.has_ended = True

    def wrap_optimizer(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        """Make a ``DistributedOptimizer`` with the state of rank 0.

        It shares its groups and its state with the given one, so a scheduler of that one stays valid.
        """
        hvd = self._hvd
        known = {*inspect.signature(hvd.DistributedOptimizer).parameters} - {"optimizer"}
        check_known(options, known, "Horovod's DistributedOptimizer")
        if hasattr(optimizer, "skip_synchronize"):
            return optimizer  # already wrapped
        is_adasum = options.get("op") == hvd.Adasum and self.topology.world_size > 1
        if is_adasum:
            self._check_adasum()
        prefix = f"camshaft.optimizer.{next(self._wrapped)}"  # several may reduce gradients at once
        if self.topology.world_size > 1:
            self._take_state_of_rank_0(optimizer, f"{prefix}.state")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = options.pop("named_parameters", None) or enumerate(parameters)
        names = [(f"{prefix}.{name}", parameter) for name, parameter in named]
        options["compression"] = _compatible(options.get("compression", hvd.Compression.none))
        wrapped: Optimizer = hvd.DistributedOptimizer(optimizer, names, **options)
        wrapped.state = optimizer.state  # Horovod's begins without
        if not is_adasum:
            _adapt(hvd, wrapped, f"{prefix}.other", self._await_end)
        return wrapped

    def _take_state_of_rank_0(self, optimizer: Optimizer, name: str) -> None:
        """Load the state of rank 0; Horovod's own function steps if there is no state yet, which changes weights."""
        buffer = io.BytesIO()
        if self.topology.rank == 0:
            torch.save(optimizer.state_dict(), buffer)
        buffer = io.BytesIO(self._hvd.broadcast_object(buffer.getvalue(), 0, name=name))
        if self.topology.rank > 0:  # the state goes to the devices of the parameters, whatever device it had on rank 0
            optimizer.load_state_dict(torch.load(buffer, map_location="cpu", weights_only=False))

    def _check_adasum(self) -> None:
        if not self._hvd.mpi_enabled():
            raise NotImplementedError(
                "backend 'horovod' does not support ADASUM over gloo: build Horovod with MPI (HOROVOD_WITH_MPI=1) and "
                "start with mpirun, or use 'AVERAGE'"
            )

    def _wait(self, begin: Any, *args: Any, name: str, group: Group | None, **kwargs: Any) -> Any:
        """Begin an operation, wait for it, and return its result."""
        process_set = self._hvd.global_process_set if group is None else group
        handle = begin(*args, name=name, process_set=process_set, **kwargs)
        self._await_end(handle, name)
        return self._hvd.synchronize(handle)

    def _await_end(self, handle: Any, what: str) -> None:
        """Wait for the end of an operation; Horovod itself would wait forever, and take a whole core.

        Raises:
            RuntimeError: it takes longer than the timeout.
        """
        begin = time.monotonic()
        while not self._hvd.poll(handle):
            if time.monotonic() - begin > self._seconds:
                raise RuntimeError(
                    f"{what} on rank {self.topology.rank} timed out after {self._seconds:g} s: another rank did not "
                    "take part; initialize('horovod', timeout=...) sets the limit"
                )
            time.sleep(_PAUSE)


# --- starting a run, and adopting one --------------------------------------------------------------------------


def create(name: str, launch: Launch | None, local_rank: int | None = None, **options: Any) -> HorovodBackend:
    """Initialize Horovod; all processes that horovodrun, or mpirun for a Horovod with MPI, started call this.

    Args:
        name: ``"horovod"``.
        launch: how this process was started, ``None`` if no launcher started it.
        local_rank: ignored, as Horovod knows it.
        options: ``timeout``, a ``timedelta`` for each operation; ``comm`` and ``process_sets``, as
            ``horovod.torch.init`` takes them.

    Raises:
        ModuleNotFoundError: Horovod is missing, or was not built for the installed torch.
        TypeError: an option is unknown, or ``timeout`` is not a ``timedelta``.
        RuntimeError: Horovod is already initialized, or another launcher started the processes.
    """
    check_known(options, OPTIONS, f"backend {name!r}")
    timeout = options.pop("timeout", None) or _TIMEOUT
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    try:
        hvd: Any = import_module("horovod.torch")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"backend 'horovod' needs Horovod, built for the installed torch: see docs/reference/backends.md ({error})"
        ) from error
    if hvd.is_initialized():
        raise RuntimeError("Horovod is already initialized and is used automatically: do not call initialize")
    by_horovodrun = launch is not None and launch.launcher == "horovodrun" and launch.topology.world_size > 1
    if HorovodBackend.has_ended and by_horovodrun:
        raise RuntimeError(  # the rendezvous may keep the addresses of the first run, which no process uses any more
            "processes of horovodrun can be initialized only once, and these were finalized: initialize and finalize "
            "once, around all code that needs the backend"
        )
    with variable_set("HOROVOD_DYNAMIC_PROCESS_SETS", "1"):  # groups may be made later
        hvd.init(**{option: value for option, value in options.items() if value is not None})
    try:
        started = 1 if launch is None or launch.launcher == "horovodrun" else launch.topology.world_size
        if launch is not None and options.get("comm") is None and hvd.size() == 1 < started:
            raise RuntimeError(  # of processes of another launcher, Horovod makes many jobs of one process each
                f"{launch.launcher} started {started} processes, but Horovod joined only this one: start them with "
                "horovodrun, or use camshaft.distributed.spawn"
            )
        topology = _topology(hvd)
        if not hvd.mpi_ops.is_homogeneous():
            host = (launch and launch.host) or socket.gethostname()
            topology = Topology.from_hosts(hvd.rank(), hvd.allgather_object(host, name="camshaft.hosts"))
        device = _device(hvd, topology.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return HorovodBackend(hvd, topology, device, timeout)
    except BaseException:
        hvd.shutdown()
        raise


def adopt(infer: object) -> HorovodBackend | None:
    """Adopt what ``horovod.torch.init`` began, if it did, without any communication."""
    hvd: Any = sys.modules["horovod.torch"]
    if not hvd.is_initialized():
        return None
    topology = _topology(hvd)
    backend = HorovodBackend(hvd, topology, _device(hvd, topology.local_rank), _TIMEOUT)
    if not hvd.mpi_ops.is_homogeneous():  # Horovod's "cross" numbers count only the nodes that have this local rank
        backend.assumed = ("node_rank", "num_nodes")
    return backend


def _topology(hvd: Any) -> Topology:
    return Topology(
        rank=hvd.rank(),
        world_size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_world_size=hvd.local_size(),
        node_rank=hvd.cross_rank(),
        num_nodes=hvd.cross_size(),
    )


def _device(hvd: Any, local_rank: int) -> torch.device:
    """Choose the device of a process: its own GPU, where Horovod can use it and each process of the node has one."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    if not hvd.cuda_built() and not hvd.rocm_built():
        warnings.warn(
            "Horovod was built without GPU support, so GPUs are not used: see docs/reference/backends.md", stacklevel=2
        )
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


# --- optimizers ------------------------------------------------------------------------------------------------


def _compatible(compression: Any) -> Any:
    """Accept gradients of any dtype and layout, which Horovod would refuse during ``backward``."""

    class Compatible:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, Any]:
            compressed, context = compression.compress(tensor)
            dtype = compressed.dtype
            if dtype == torch.bfloat16:
                compressed = compressed.float()
            return compressed.contiguous(), (context, dtype)

        @staticmethod
        def decompress(tensor: Tensor, context: Any) -> Tensor:
            inner, dtype = context
            decompressed: Tensor = compression.decompress(tensor.to(dtype), inner)
            return decompressed

    return Compatible


def _adapt(hvd: Any, optimizer: Any, name: str, await_end: Callable[[Any, str], None]) -> None:
    """Support gradients that are read before the step, and accumulated gradients that are discarded.

    Horovod reduces while ``backward`` runs. Code that clips or unscales calls ``synchronize()`` first; the step then
    does not synchronize again.
    """
    kind: Any = type(optimizer)
    # without torch's wrapper, which runs the hooks of a step: the step of the original class, called inside, has it too
    horovod_synchronize, horovod_step = kind.synchronize, inspect.unwrap(kind.step)

    def synchronize(self: Any) -> None:
        """Wait until the gradients are those of all ranks."""
        if self._handles or not self._synchronized:
            for handle, _ in self._handles.values():
                if isinstance(handle, int):
                    await_end(handle, "the exchange of gradients")
            horovod_synchronize(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients of all ranks."""
        check_no_closure(closure, "horovod", hvd.size())
        if self._should_synchronize:
            synchronize(self)
        with self.skip_synchronize():
            return horovod_step(self, closure)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Reset the gradients, also those that no step has used."""
        for handle, _ in self._handles.values():
            if handle is not None:
                handle() if callable(handle) else hvd.synchronize(handle)
        if self._handles:
            self._handles.clear()
            self._group_counts = dict.fromkeys(self._group_counts, 0)
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = False
        super(kind, self).zero_grad(set_to_none)

    def reduce_as_gradients(self: Any, tensor: Tensor) -> Tensor:
        """Reduce another tensor over the same ranks in the same way."""
        reduced: Tensor = hvd.allreduce(tensor, name=name, op=self.op, process_set=self.process_set)
        return reduced

    kind.synchronize, kind.step, kind.zero_grad = synchronize, step, zero_grad
    kind.reduce_as_gradients = reduce_as_gradients
