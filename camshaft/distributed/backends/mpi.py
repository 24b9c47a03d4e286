"""MPI, through torch.distributed: torch's own where torch was built with one, else a process group over mpi4py."""

from __future__ import annotations

import atexit
import functools
import math
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from camshaft.distributed.backends.mpi_group import MPIGroup, mpi, wait_for
from camshaft.distributed.backends.torch_distributed import NativeBackend
from camshaft.distributed.topology import Launch, Topology

OPTIONS = {"device", "timeout"}
_ROOM = 1024  # bytes for the address of the store
# what the launchers of Open MPI and of MPICH and Intel MPI set, and srun if it started us itself
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_LOOK = 2.0  # seconds between two looks at the processes of other ranks
_REPORTING = 10.0  # seconds that a failed process gives the others to report why, before it ends them
_ENDING = 30.0  # seconds that a failed process gets to end by itself, for which torchrun allows as many

_registered = False
_process: int | None = None  # that has joined a job; those that it forks are not ranks
_patience = 0.0  # seconds that this process waits for the others at its end; without a limit once all have joined
_made: Counter[tuple[int, ...]] = Counter()  # groups of these ranks since the default group was made
_numbers = count(1)  # of the default groups that were made
_servers: list[TCPStore] = []  # on rank 0
_addresses: list[tuple[str, int]] = []  # of the store, once it is known
_visible: dict[int, int] = {}  # process id of each rank that has one on this machine, in the same namespace


def create(
    name: str,
    launch: Launch | None,
    local_rank: int | None = None,
    timeout: timedelta | None = None,
    device: Any = None,
) -> NativeBackend:
    """Start a run over MPI; all processes that mpirun started call this.

    Args:
        name: ``"mpi"``.
        launch: ignored, as MPI knows the ranks.
        local_rank: ignored, as the ranks exchange their hosts.
        timeout: how long an operation may take; torch's default if ``None``.
        device: where tensors are moved from and to; the CPU if ``None``.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: a default process group exists, or the processes were started by another MPI's launcher.
    """
    initialize_mpi(timeout)
    try:
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, (socket.gethostname(), _namespace(), os.getpid()))
        here = places[dist.get_rank()][:2]
        _visible.update({rank: place[2] for rank, place in enumerate(places) if place[:2] == here})
        topology = Topology.from_hosts(dist.get_rank(), [host for host, _, _ in places])
        return NativeBackend(topology, torch.device("cpu" if device is None else device))
    except BaseException:
        dist.destroy_process_group()
        raise


def initialize_mpi(timeout: timedelta | None = None) -> None:
    """Create a default process group over MPI; all processes that mpirun started call this.

    From here to the end of the group, an uncaught error ends all processes of the job.

    Args:
        timeout: how long an operation may take; torch's default if ``None``. MPI itself waits without a limit until
            all processes have started.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: a default process group already exists, or the processes were started by the launcher of
            another MPI library.
        DistBackendError: not all processes joined in time.
    """
    if dist.is_initialized():
        raise RuntimeError("a default process group already exists: destroy it first")
    register_mpi()
    if not _registered:  # torch's own
        dist.init_process_group("mpi", timeout=timeout)
        return
    guard = JobGuard()
    try:
        dist.init_process_group("mpi", timeout=timeout)
    finally:
        guard.start()  # after torch, whose hook prints only what other hooks have returned from
    world = dist.group.WORLD
    assert isinstance(world, MPIGroup)
    # torch has no store for this backend; code that looks up the default one finds ours
    c10d._world.pg_map[world] = (dist.get_backend(world), world.store)
    world.when_shut_down = guard.stop


def register_mpi() -> None:
    """Register the ``mpi`` backend with a torch that was built without MPI.

    This initializes MPI, as any import of mpi4py does, until the process ends. Does nothing if torch already has a
    backend of that name.

    Raises:
        ModuleNotFoundError: mpi4py or an MPI library is missing.
        RuntimeError: the processes were started by the launcher of another MPI library.
    """
    global _registered
    if _registered or dist.is_mpi_available():
        return
    try:
        world_size = mpi().COMM_WORLD.size
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter when it finds no MPI library
        raise ModuleNotFoundError(
            "backend 'mpi' needs mpi4py and an MPI library: pip install 'camshaft[mpi]'"
        ) from error
    check_launcher(os.environ, world_size)
    if torch.__version__ >= "2.14":  # compared as versions, not as text
        dist.Backend.register_backend(
            "mpi",
            lambda options, _: create_group(options.global_ranks_in_group, options.timeout),
            extended_api=True,
            devices=["cpu", "cuda"],
        )
    else:
        _replace_built_in()
    _registered = True


def check_launcher(environ: Mapping[str, str], world_size: int) -> None:
    """Reject a start as many jobs of one process, as when mpirun and mpi4py belong to different MPI libraries.

    Raises:
        RuntimeError: the launcher started several processes, MPI sees one.

    >>> check_launcher({"PMI_SIZE": "2"}, world_size=2)
    """
    name = next((name for name in _SIZES if name in environ), None)
    if world_size == 1 and name is not None and environ[name] != "1":
        raise RuntimeError(
            f"MPI sees 1 process, but the launcher started {environ[name]} ({name}): start with the mpirun of the "
            "MPI library that mpi4py uses (python -m mpi4py --mpi-library), or under Slurm with srun --mpi=pmi2 "
            "(MPICH) or --mpi=pmix (Open MPI)"
        )


def create_group(ranks: Sequence[int], timeout: timedelta) -> MPIGroup:
    """Create a process group; only its members call this, for the default group all ranks.

    Args:
        ranks: global ranks, in the order of their rank in the group; none for the default group.
        timeout: how long an operation may take.

    Raises:
        DistBackendError: not all members joined within ``timeout``.
        DistNetworkError: the host of rank 0 cannot be reached.
        RuntimeError: the default group is not over MPI.
    """
    global _patience
    if not ranks:
        _made.clear()
        if not _addresses:  # MPI's own communicator must not be used again while a rank is at its end
            _addresses.append(_address(timeout))
        host, port = _addresses[0]
        connection = TCPStore(host, port, None, False, timeout, False)
        store = PrefixStore(str(next(_numbers)), connection)
        _wait_for_members(PrefixStore("world", store), mpi().COMM_WORLD.size, timeout)
        _patience = math.inf
        return MPIGroup(mpi().COMM_WORLD.Dup(), store, timeout)
    world = dist.group.WORLD
    if not isinstance(world, MPIGroup):
        raise RuntimeError(
            f"a group over MPI requires the default group to be over MPI, got backend {dist.get_backend()!r}"
        )
    _made[tuple(ranks)] += 1  # the same on all members
    store = PrefixStore(f"{list(ranks)}/{_made[tuple(ranks)]}", world.store)
    _wait_for_members(store, len(ranks), timeout)
    everybody = world.comm.Get_group()
    members = everybody.Incl(list(ranks))
    try:
        title = f"{_made[tuple(ranks)]}: {list(ranks)}"
        return MPIGroup(world.comm.Create_group(members), store, timeout, world, title, ranks)
    finally:
        members.Free()
        everybody.Free()


def _address(timeout: timedelta) -> tuple[str, int]:
    """Return host and port of the store that rank 0 serves as long as its process lasts; MPI broadcasts them.

    ``MASTER_ADDR`` names the host of rank 0 where its own name does not reach it.

    Raises:
        DistBackendError: rank 0 did not join within ``timeout``.
    """
    world, here, seconds = mpi().COMM_WORLD, mpi().Get_processor_name(), timeout.total_seconds()
    buffer = bytearray(_ROOM)
    if world.rank == 0:
        _servers.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        buffer = bytearray(f"{here} {_servers[0].port}".encode().ljust(_ROOM))

    def check(waited: float) -> None:
        if waited > seconds:
            raise dist.DistBackendError(
                f"creating a group over MPI timed out after {seconds:g} s: not all ranks joined"
            )

    wait_for(world.Ibcast([buffer, mpi().BYTE], 0), None, check)
    first, port = buffer.decode().split()
    return os.environ.get("MASTER_ADDR") or ("localhost" if first == here else first), int(port)


def _wait_for_members(store: Store, size: int, timeout: timedelta) -> None:
    """Wait until all are here, asleep: MPI would take a whole core for it, and has no timeout."""
    if store.add("present", 1) == size:
        store.compare_set("complete", "", "yes")
    with suppress(RuntimeError):
        store.wait(["complete"], timeout)
    if store.compare_set("complete", "", "no") != b"yes":  # the first that gives up decides for all
        present = store.add("present", 0)
        raise dist.DistBackendError(
            f"creating a group over MPI timed out after {timeout.total_seconds():g} s: {present} of {size} ranks joined"
        )


def _replace_built_in() -> None:
    """Replace the MPI group of torch, which the name always stands for before torch 2.14.

    Torch passes the ranks to it but no timeout, which is recorded on its way.
    """
    make_group = c10d._new_process_group_helper
    recorded = SimpleNamespace(timeout=c10d.default_pg_timeout)

    @functools.wraps(make_group)
    def make_group_and_record(*args: Any, **kwargs: Any) -> Any:
        recorded.timeout = kwargs.get("timeout") or c10d.default_pg_timeout
        return make_group(*args, **kwargs)

    vars(c10d).update(
        _MPI_AVAILABLE=True,
        ProcessGroupMPI=SimpleNamespace(create=lambda ranks: create_group(ranks, recorded.timeout)),
        _new_process_group_helper=make_group_and_record,
    )


class JobGuard:
    """Ends all processes of the job with this one, if an uncaught error ends it.

    A process that has failed waits for the others in ``MPI_Finalize``, and they may wait for it. So such an error ends
    the job, after its traceback is written and the exit handlers of the program have run. Before that, the others have
    the time to report why they fail in consequence.
    """

    def __init__(self) -> None:
        global _process
        self._is_active, _process = True, os.getpid()

    def start(self) -> None:
        """Begin to guard."""
        self._previous, sys.excepthook = sys.excepthook, self._on_error

    def stop(self) -> None:
        """Stop guarding; during an error, only after that error has ended the process.

        So an error that leaves a ``with`` block which finalizes still ends the job.
        """
        if sys.exc_info()[0] is None:
            if sys.excepthook == self._on_error:
                sys.excepthook = self._previous
            self._is_active = False  # another hook may still call this one

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        if self._is_active and os.getpid() == _process:
            from mpi4py.run import set_abort_status

            global _patience
            code, _patience = 130 if issubclass(kind, KeyboardInterrupt) else 1, _REPORTING
            set_abort_status(code)  # the job ends when Python exits, or later if a thread or an exit handler hangs
            watchdog = threading.Timer(_REPORTING + _ENDING, mpi().COMM_WORLD.Abort, (code,))
            watchdog.daemon = True
            watchdog.start()


def _namespace() -> str:
    """Return the namespace of process ids that this process belongs to."""
    with suppress(OSError):  # not on Linux
        return os.readlink("/proc/self/ns/pid")
    return ""


def _has_ended(pid: int) -> bool:
    if sys.platform == "win32":  # where this would interrupt the process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    with suppress(OSError):  # not on Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"  # a launcher may not look
    return False


@atexit.register
def _end_together() -> None:
    """Wait at the end of this process until all others have come to theirs, after an error not for long.

    ``MPI_Finalize`` would wait as well, but take a whole core, and the store of rank 0 would be gone by then. It would
    wait forever for a rank that was killed, which the launcher may leave to us, so then this process ends without it.
    """
    gone, next_look = set[int](), _LOOK

    def check(waited: float) -> None:
        nonlocal gone, next_look
        if waited > _patience:
            raise TimeoutError
        if waited < next_look:
            return
        before, gone = gone, {rank for rank, pid in _visible.items() if _has_ended(pid)}
        next_look = waited + _LOOK
        if killed := sorted(before & gone):  # else the barrier, which ranks leave before they end, would be over
            os.write(2, f"camshaft: MPI cannot be finalized, as ranks {killed} were killed; exiting\n".encode())
            sys.stdout.flush()
            os._exit(1)

    if os.getpid() == _process and _patience > 0 and not mpi().Is_finalized():
        if isinstance(dist.group.WORLD, MPIGroup):
            dist.group.WORLD.shutdown()
        with suppress(TimeoutError):
            wait_for(mpi().COMM_WORLD.Ibarrier(), None, check)
