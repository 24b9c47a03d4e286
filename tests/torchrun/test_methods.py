"""How processes find each other without a launcher: variables set by hand, an address, a file."""

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

import camshaft.distributed as idist
from camshaft.distributed.backends.native import rendezvous
from camshaft.distributed.backends.native.rendezvous import open_store
from camshaft.distributed.environments import detect
from tests.ranks import context, run_on_ranks
from tests.torchrun.launching import free_port

TIMEOUT, SHORT = timedelta(seconds=20), timedelta(seconds=1)


def begin(rank: int, size: int, method: str, timeout: timedelta = TIMEOUT) -> None:
    """Initialize in the manner of a user: ``env://HOST:PORT`` stands for variables set by hand."""
    options: dict[str, Any] = {"init_method": method, "rank": rank, "world_size": size}
    if method.startswith("env://"):
        address, _, port = method.removeprefix("env://").partition(":")
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        options = {}
    idist.initialize("gloo", timeout=timeout, **options)


def leave() -> int:
    """Leave the group in which the ranks of a test begin, and give the number of this one."""
    rank = dist.get_rank()
    dist.barrier()  # so that all have come to it
    dist.destroy_process_group()
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # that of the ranks of a test
    return rank


def run(size: int, method: str) -> None:
    rank = leave()
    time.sleep(0.3 if rank == 0 else 0)  # so that the other one reads what is there already
    for number in range(3):  # each time as if nothing had been before
        begin(rank, size, method)
        assert idist.all_gather((number, rank)) == [(number, other) for other in range(size)]
        assert (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()) == (rank, size, rank)
        time.sleep(0.2 if rank == number % 2 else 0)  # the other one comes back too early
        idist.finalize()
        assert not dist.is_initialized()


@pytest.mark.parametrize("address", ["env://127.0.0.1:{port}", "tcp://localhost:{port}"])
def test_an_address(address: str) -> None:
    run_on_ranks(2, run, 2, address.format(port=free_port()))


def test_a_file(tmp_path: Path) -> None:
    run_on_ranks(2, run, 2, f"file://{tmp_path}/meet")
    assert not Path(tmp_path, "meet").exists()


def crash(rank: int, method: str, how: str) -> None:
    """Leave a file behind."""
    if how == "torch's own":
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=TIMEOUT)
    elif how == "in the run":
        begin(rank, 2, method)
    else:  # rank 1 never comes
        with pytest.raises(dist.DistStoreError):
            begin(0, 2, method, SHORT)
    os._exit(0)


@pytest.mark.parametrize("how", ["torch's own", "in the run", "alone"])
def test_a_file_that_a_crash_has_left_does_not_matter(tmp_path: Path, how: str) -> None:
    method = f"file://{tmp_path}/meet"
    crashing = [context.Process(target=crash, args=(rank, method, how)) for rank in range(2 if how != "alone" else 1)]
    for process in crashing:
        process.start()
    for process in crashing:
        process.join()
        process.close()
    assert list(tmp_path.iterdir()), "nothing is left of the crash, so this test shows nothing"
    run_on_ranks(2, run, 2, method)
    assert not Path(tmp_path, "meet").exists()


@contextmanager
def refused(error: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(error, match=match):
        yield
    assert not dist.is_initialized()
    assert idist.backend() is None


def find_the_port_in_use(method: str, said: str, free: str) -> None:
    rank = leave()
    mistake = "the port is in use; choose another one" if rank == 0 else "rank 0 did not come, or the port is another"
    with refused(dist.DistNetworkError, f"^rank {rank} .* the store at {re.escape(said)}.*{mistake}"):
        begin(rank, 2, method, SHORT)
    begin(rank, 2, free)
    idist.finalize()


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_a_port_in_use_is_named_on_every_rank(scheme: str) -> None:
    with socket.socket() as taken:  # it accepts and never says a word
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        source = {"env": "MASTER_ADDR and MASTER_PORT", "tcp": "init_method"}[scheme]
        free = f"{scheme}://127.0.0.1:{free_port()}"
        run_on_ranks(2, find_the_port_in_use, f"{scheme}://{address}", f"{address} ({source})", free)


def miss_some(size: int, method: str, missing: str) -> None:
    rank = leave()
    with refused(dist.DistStoreError, f"2 of {size} ranks came to .*{method[-5:]}.* within 1 s; missing: {missing}"):
        begin(rank, size, method, SHORT)


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    run_on_ranks(2, miss_some, 4, f"tcp://127.0.0.1:{free_port()}", "2, 3")
    run_on_ranks(2, miss_some, 3, f"file://{tmp_path}/meet", "2")


def miss_rank_0(method: str, mistake: str) -> None:
    leave()
    with refused(dist.DistError, mistake):
        begin(1, 2, method, SHORT)


def test_a_rank_0_that_never_comes_is_named(tmp_path: Path) -> None:
    port = free_port()
    run_on_ranks(
        1, miss_rank_0, f"env://127.0.0.1:{port}", f"no answer from .*:{port} .*within 1 s: rank 0 did not come"
    )
    run_on_ranks(1, miss_rank_0, f"file://{tmp_path}/meet", f"rank 0 did not come to the file {tmp_path}/meet")


def test_the_log_names_a_rank_0_that_serves_no_store_long_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "REPORT_AFTER", 0.05)
    with pytest.raises(dist.DistNetworkError, match="rank 0 did not come"):
        open_store(None, f"tcp://127.0.0.1:{free_port()}", 1, 2, timedelta(seconds=0.3))
    assert caplog.messages == ["rank 1 has waited 0.05 s for rank 0, which has not reached initialize"]


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
def test_a_method_that_names_no_place_is_refused(method: str, allowed: str) -> None:
    with refused(ValueError, f"init_method must be {allowed}.*, got '{method}'"):
        begin(0, 2, method)


def test_a_timeout_is_a_timedelta() -> None:
    with refused(TypeError, r"timeout must be a datetime\.timedelta, got 30"):
        idist.initialize("gloo", timeout=30)


def again(local_rank: int) -> None:
    launch = detect(os.environ)
    assert launch is not None
    assert launch.agent_store, "rank 0 would take the port of the store for free, and torch would log an error"
    for _ in range(3):
        idist.finalize()
        idist.initialize("gloo", timeout=TIMEOUT)
        assert idist.all_gather(local_rank) == [0, 1]


def test_spawned_processes_may_begin_again() -> None:
    idist.spawn("gloo", again, (), nproc_per_node=2, start_method="forkserver", timeout=TIMEOUT)
