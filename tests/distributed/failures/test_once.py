"""One of the ranks of a machine prints a report, whatever becomes of the others."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest import mock

import pytest

from camshaft.distributed.failures import once


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setattr(once, "default_folders", lambda: [tmp_path])
    monkeypatch.setattr(once, "_PATIENCE", 600.0)
    return tmp_path


def reporter(rank: int, job: str = "job") -> int | None:
    """Return whose report this rank refers to; it prints its own if there is none."""
    with once.reporting(job, rank) as found:
        return found


@pytest.mark.parametrize("size", [1, 2, 8])
def test_one_of_the_ranks_that_raise_at_once_prints_the_report(size: int) -> None:
    together = Barrier(size)

    def fail(rank: int) -> int | None:
        together.wait()
        return reporter(rank)

    with ThreadPoolExecutor(size) as ranks:
        found = list(ranks.map(fail, range(size)))
    printed = [rank for rank, other in enumerate(found) if other is None]
    assert len(printed) == 1
    assert {other for other in found if other is not None} <= set(printed)


def test_a_rank_that_ends_before_it_has_printed_leaves_the_report_to_the_next() -> None:
    with pytest.raises(SystemExit), once.reporting("job", 0):
        raise SystemExit
    assert [reporter(1), reporter(2)] == [None, 1]


def test_each_rank_prints_its_own_report_if_another_takes_long_or_is_of_another_job(monkeypatch: Any) -> None:
    assert [reporter(1, "one"), reporter(2, "other"), reporter(3, "one")] == [None, None, 1]
    monkeypatch.setattr(once, "_PATIENCE", 0.0)
    with once.reporting("job", 0):
        assert reporter(1) is None


@pytest.mark.parametrize("what", ["no job", "no folder", "no space", "a link", "no locks"])
def test_each_rank_prints_if_the_ranks_cannot_tell(what: str, folder: Path, monkeypatch: Any) -> None:
    target = folder / "precious"
    if what == "no folder":
        monkeypatch.setattr(once, "default_folders", lambda: [folder / "gone"])
    if what == "no space":
        monkeypatch.setattr(once.os, "pwrite", mock.Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    if what == "a link":
        target.touch()
        (folder / "camshaft-job.reported").symlink_to(target)
    if what == "no locks":
        monkeypatch.setattr(once, "fcntl", None)
    assert [reporter(rank, "" if what == "no job" else "job") for rank in (1, 2)] == [None, None]
    assert what != "a link" or target.read_text() == ""
