from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from camshaft.distributed import get_local_rank, get_rank, get_world_size, one_rank_only

ROOT = Path(__file__).resolve().parents[2]


def world(monkeypatch, rank, size, **environment):
    """Pretend to be a rank of a group."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def barriers(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda: calls.append("barrier"))
    return calls


def answers():
    return get_rank(), get_world_size(), get_local_rank()


@pytest.mark.parametrize("is_available", [True, False])
def test_without_a_group_there_is_one_process_whatever_the_environment_says(monkeypatch, is_available):
    if not is_available:  # then torch.distributed lacks all else
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        monkeypatch.delattr(torch.distributed, "is_initialized")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert answers() == (0, 1, 0)


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, 2), ({"LOCAL_WORLD_SIZE": "4"}, 1), ({}, 5)],
)
def test_in_a_group_torch_and_the_launcher_answer(monkeypatch, environment, local_rank):
    world(monkeypatch, 5, 8, **environment)
    assert answers() == (5, 8, local_rank)


@pytest.mark.parametrize(("rank", "runs"), [(0, False), (1, True), (2, False)])
def test_the_function_runs_on_its_rank_only(monkeypatch, barriers, rank, runs):
    world(monkeypatch, rank, 3)
    calls = []

    @one_rank_only(rank=1)
    def function(value, *, more):
        calls.append((value, more))
        return "result"

    assert function(1, more=2) == ("result" if runs else None)
    assert calls == ([(1, 2)] if runs else [])
    assert barriers == []


def test_the_rank_is_asked_at_each_call_not_at_definition(monkeypatch):
    function = one_rank_only(rank=1)(lambda: "result")
    assert function() is None
    world(monkeypatch, 1, 2)
    assert function() == "result"


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_meet_once_after_the_call(monkeypatch, barriers, rank):
    world(monkeypatch, rank, 2)
    one_rank_only(with_barrier=True)(lambda: barriers.append("body"))()
    assert barriers == (["barrier"] if rank else ["body", "barrier"])


def test_an_error_in_the_body_leaves_after_the_others_were_released(monkeypatch, barriers):
    world(monkeypatch, 0, 2)
    with pytest.raises(ZeroDivisionError):
        one_rank_only(with_barrier=True)(lambda: 1 / 0)()
    assert barriers == ["barrier"]


def test_one_process_waits_for_nobody():
    assert one_rank_only(with_barrier=True)(lambda: "result")() == "result"


def test_name_and_signature_stay():
    @one_rank_only()
    def save(engine, path="x"):
        """Save."""

    assert (save.__name__, save.__doc__) == ("save", "Save.")
    assert list(inspect.signature(save).parameters) == ["engine", "path"]


def test_forgotten_parentheses_and_impossible_ranks_are_told_at_once():
    with pytest.raises(TypeError, match=r"rank must be an integer, got <function.*write @one_rank_only\(\)"):
        one_rank_only(lambda: None)
    with pytest.raises(ValueError, match="rank must be 0 or more, got -1"):
        one_rank_only(rank=-1)


ONE_OF_TWO = """
import json, sys, time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from camshaft.distributed import get_local_rank, get_rank, get_world_size, one_rank_only
from camshaft.utils import setup_logger

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group(
    "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
)
report = {}
if rank == 1:  # alone: these must not communicate
    report["answers"] = get_rank(), get_world_size(), get_local_rank()
    report["handlers"] = [type(handler).__name__ for handler in setup_logger("run").handlers]

@one_rank_only(rank=1, with_barrier=True)
def save(fails):
    time.sleep(0.2)
    (folder / f"saved-{fails}").touch()
    if fails:
        raise RuntimeError("disk full")
    return "saved"

report["returned"] = save(fails=False)
try:
    report["then"] = save(fails=True)
except RuntimeError as error:
    report["then"] = str(error)
report["seen"] = sorted(path.name for path in folder.glob("saved-*"))
dist.barrier()  # still in step
dist.destroy_process_group()
print(json.dumps(report))
"""


def test_two_processes_ask_alone_meet_after_one_saved_and_go_on_when_it_failed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=40)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    seen = ["saved-False", "saved-True"]
    assert [json.loads(output) for output in outputs] == [
        {"returned": None, "then": None, "seen": seen},
        {"answers": [1, 2, 1], "handlers": ["NullHandler"], "returned": "saved", "then": "disk full", "seen": seen},
    ]
