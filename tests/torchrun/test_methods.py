"""How processes connect without a launcher: variables set by hand, an address, a file."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import camshaft.distributed as idist
from camshaft.distributed.backends import rendezvous
from camshaft.distributed.backends.rendezvous import open_store
from camshaft.distributed.environments import detect
from tests.limits import HANG, TIMEOUT, wait_until
from tests.ranks import context, run_on_ranks
from tests.torchrun.launching import free_port

SHORT = timedelta(seconds=5)


def initialize(rank: int, size: int, method: str, timeout: timedelta = TIMEOUT) -> None:
    """Initialize as a user would; ``env://HOST:PORT`` stands for variables set by hand."""
    options: dict[str, Any] = {"init_method": method, "rank": rank, "world_size": size}
    if method.startswith("env://"):
        address, _, port = method.removeprefix("env://").partition(":")
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        options = {}
    idist.initialize("gloo", timeout=timeout, **options)


def destroy_group() -> int:
    """Destroy the group in which the ranks of a test start, and return the rank."""
    rank = dist.get_rank()
    dist.barrier()  # so that no rank is still initializing
    dist.destroy_process_group()
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # set by run_on_ranks
    return rank


def run(size: int, method: str) -> None:
    rank = destroy_group()
    time.sleep(0.3 if rank == 0 else 0)  # so that the other rank reads what is already there
    for number in range(3):  # each time from scratch
        initialize(rank, size, method)
        assert idist.all_gather((number, rank)) == [(number, other) for other in range(size)]
        assert (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()) == (rank, size, rank)
        time.sleep(0.2 if rank == number % 2 else 0)  # the other rank returns too early
        idist.finalize()
        assert not dist.is_initialized()


@pytest.mark.parametrize("address", ["env://127.0.0.1:{port}", "tcp://localhost:{port}"])
def test_an_address(address: str) -> None:
    run_on_ranks(2, run, 2, address.format(port=free_port()))


def test_a_file(tmp_path: Path) -> None:
    run_on_ranks(2, run, 2, f"file://{tmp_path}/meet")
    assert not Path(tmp_path, "meet").exists()


def crash(rank: int, method: str, how: str) -> None:
    """Exit without removing the file."""
    if how == "torch's own":
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=TIMEOUT)
    elif how == "in the run":
        initialize(rank, 2, method)
    else:  # rank 1 is missing
        with pytest.raises(dist.DistStoreError):
            initialize(0, 2, method, SHORT)
    os._exit(0)


@pytest.mark.parametrize("how", ["torch's own", "in the run", "alone"])
def test_a_file_left_by_a_crash_does_no_harm(tmp_path: Path, how: str) -> None:
    method = f"file://{tmp_path}/meet"
    crashing = [context.Process(target=crash, args=(rank, method, how)) for rank in range(2 if how != "alone" else 1)]
    for process in crashing:
        process.start()
    for process in crashing:
        process.join()
        process.close()
    assert list(tmp_path.iterdir()), "the crash left no file, so this test proves nothing"
    run_on_ranks(2, run, 2, method)
    assert not Path(tmp_path, "meet").exists()


@contextmanager
def refused(error: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(error, match=match):
        yield
    assert not dist.is_initialized()
    assert idist.backend() is None


def fail_on_the_port_in_use(method: str, store: str, free: str) -> None:
    rank = destroy_group()
    mistake = "the port is in use; choose another one" if rank == 0 else "another program uses the port"
    with refused(dist.DistNetworkError, f"^rank {rank} .* the store at {re.escape(store)}.*{mistake}"):
        initialize(rank, 2, method, SHORT if rank else TIMEOUT)  # rank 0 is refused at once
    initialize(rank, 2, free)
    idist.finalize()


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_every_rank_reports_a_port_in_use(scheme: str) -> None:
    with socket.socket() as taken:  # it accepts connections and never answers
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        source = {"env": "MASTER_ADDR and MASTER_PORT", "tcp": "init_method"}[scheme]
        free = f"{scheme}://127.0.0.1:{free_port()}"
        run_on_ranks(2, fail_on_the_port_in_use, f"{scheme}://{address}", f"{address} ({source})", free)


def fail_to_meet(size: int, method: str, mistake: str, offset: int, joined: Path) -> None:
    """Fail for want of a rank that never comes; of two ranks, the time is over for rank 0 once the other has joined."""
    rank = destroy_group()
    timeout = SHORT
    if offset == 0:
        timeout = TIMEOUT

        class Meeting(PrefixStore):
            def set(self, key: str, value: str) -> None:
                super().set(key, value)
                if value == "here":
                    joined.touch()

        class Clock:
            sleep = time.sleep

            @staticmethod
            def monotonic() -> float:
                return time.monotonic() + HANG * (rank == 0 and joined.exists())

        # the pause is also how long rank 0 waits until the other has learnt of it
        vars(rendezvous).update(PrefixStore=Meeting, time=Clock, _LONGEST_PAUSE=HANG)
    with refused(dist.DistError, mistake):
        initialize(rank + offset, size, method, timeout)


@pytest.mark.parametrize(
    ("ranks", "size", "method", "mistake"),
    [
        ([0, 1], 4, "tcp://127.0.0.1:{port}", "2 of 4 ranks connected to .*{port}.* within 900 s; missing: 2, 3"),
        ([0, 1], 3, "file://{folder}/meet", "2 of 3 ranks connected to .*/meet.* within 900 s; missing: 2"),
        (
            [1],
            2,
            "env://127.0.0.1:{port}",
            "no answer from .*:{port} .*within 5 s: no process listens there: rank 0 has not reached initialize",
        ),
        ([1], 2, "file://{folder}/meet", "rank 0 did not connect to the file {folder}/meet"),
    ],
)
def test_missing_ranks_are_reported(ranks: list[int], size: int, method: str, mistake: str, tmp_path: Path) -> None:
    names = {"port": free_port(), "folder": tmp_path}
    texts = method.format(**names), mistake.format(**names)
    run_on_ranks(len(ranks), fail_to_meet, size, *texts, ranks[0], tmp_path / "joined")


@pytest.mark.parametrize(
    ("rank", "host", "why"),
    [
        (1, "127.0.0.1", "no process listens there: rank 0 has not reached initialize, or this is not its address"),
        (1, "nobody.invalid", "the name 'nobody.invalid' cannot be resolved"),
        (0, "nobody.invalid", "the name 'nobody.invalid' cannot be resolved"),
    ],
)
def test_a_store_that_cannot_be_reached_is_logged_with_the_reason_before_the_timeout(
    rank: int, host: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 listens, but connects to the address as the others do."""
    monkeypatch.setattr(rendezvous, "REPORT_AFTER", 0.05)
    port = free_port()

    def open_once_reported(*args: Any, **options: Any) -> TCPStore:
        wait_until(lambda: caplog.messages)  # however late the other thread looks whether it is open
        return TCPStore(*args, **options)

    monkeypatch.setattr(rendezvous, "TCPStore", open_once_reported)
    with pytest.raises(dist.DistNetworkError, match=why):
        open_store(None, f"tcp://{host}:{port}", rank, 2, timedelta(seconds=0.3))
    (message,) = caplog.messages
    assert message.startswith(f"rank {rank} has waited 0.05 s for the store at {host}:{port} (init_method): {why}")


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:many", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "tcp://HOST:PORT"),
        ("file:///", "file:///FOLDER/FILE"),
        ("file:///no/such/folder/meet", "file:///FOLDER/FILE, in a folder that exists"),
    ],
)
def test_an_incomplete_init_method_is_refused(method: str, allowed: str) -> None:
    with refused(ValueError, f"init_method must be {allowed}.*, got '{method}'"):
        initialize(0, 2, method)


def test_a_timeout_must_be_a_timedelta() -> None:
    with refused(TypeError, r"timeout must be a datetime\.timedelta, got 30"):
        idist.initialize("gloo", timeout=30)


def initialize_twice(local_rank: int) -> None:
    launch = detect(os.environ)
    assert launch is not None
    assert launch.agent_store, "without it, rank 0 would treat the store's port as free, and torch would log an error"
    for _ in range(3):
        idist.finalize()
        idist.initialize("gloo", timeout=TIMEOUT)
        assert idist.all_gather(local_rank) == [0, 1]


def test_spawned_processes_can_initialize_again() -> None:
    idist.spawn("gloo", initialize_twice, (), nproc_per_node=2, start_method="forkserver", timeout=TIMEOUT)
