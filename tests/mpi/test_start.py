"""Starting without mpi4py, and with a torch built with MPI; no test needs several ranks."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from camshaft.distributed.backends.mpi import initialize_mpi, register_mpi
from camshaft.distributed.backends.mpi_group import WIDER


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)


@pytest.mark.usefixtures("no_mpi")
def test_without_mpi4py_the_error_says_what_to_install() -> None:
    hook = sys.excepthook
    with pytest.raises(ModuleNotFoundError, match=r"needs mpi4py and an MPI library: pip install 'camshaft\[mpi\]'"):
        initialize_mpi()
    assert sys.excepthook is hook
    assert not dist.is_initialized()


@pytest.mark.usefixtures("no_mpi")
def test_torch_built_with_mpi_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, timedelta]] = []
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: calls.append((backend, timeout)))
    register_mpi()
    initialize_mpi(timedelta(seconds=5))
    assert calls == [("mpi", timedelta(seconds=5))]


def test_a_second_default_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="a default process group already exists"):
        initialize_mpi()


def test_a_sum_of_bools_does_not_overflow_with_many_ranks() -> None:
    assert torch.iinfo(WIDER[torch.bool]).max >= 2**31 - 1
