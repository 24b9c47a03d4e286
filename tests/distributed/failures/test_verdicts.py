"""A verdict needs a proof: calls that differ under one number, a cycle of waits, or an end that somebody waits for."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.distributed.failures import verdicts
from camshaft.distributed.failures.record import LEFT_BY_EXIT, Snapshot
from camshaft.distributed.failures.trace import DEBUG
from tests.distributed.failures.stand_in import sent, snapshot, waiting

RUN = {"line": "train.py:9 in main", "number": 1, "epoch": 1, "iteration": 3, "event": "ITERATION_COMPLETED"}
END = {**RUN, "how": "terminate() at train.py:5 in stop", "time": 90.0}
FLOAT = "torch.float32 4"
ALL_REDUCE = {"operation": "all_reduce", "value": "", "via": "", "what": "all_reduce", "line": "a.py:1"}
LOST = {"ranks": "0-1", "key": ["0", 5], **ALL_REDUCE}
IN_BACKWARD = ["/x/torch/autograd/graph.py:9 in _engine_run_backward", "t.py:3 in step"]


def judged(*ranks: Snapshot | dict[str, Any]) -> verdicts.Verdict | None:
    """Return the verdict on ranks, or on their statuses."""
    all_ranks = [snapshot(rank, len(ranks), **one) if isinstance(one, dict) else one for rank, one in enumerate(ranks)]
    return verdicts.verdict(all_ranks, 100.0)


def computing(**status: Any) -> dict[str, Any]:
    return {"begun": {"0": 4}, "at_most": {}, "calls": [], "is_stuck": False, **status}


# kind, a pattern of the text, and the status of each rank
PROOFS: dict[str, Any] = {
    "another size, while one rank has completed the call": (
        "diverged",
        r"rank 0 +all_reduce +torch.float32 4 +a.py:1\nrank 1 +all_reduce +torch.float32 3 +\(completed\)",
        waiting("0", 5, "all_reduce", "0-1", "a.py:1", value=FLOAT),
        sent(("0", 4, "barrier"), ("0", 5, "all_reduce", "torch.float32 3"), ("0", 6, "barrier")),
    ),
    "of several differences, the first one": (
        "diverged",
        r"rank 0 +barrier +\(completed\)\nrank 1 +all_reduce +\(completed\)",
        sent(("0", 4, "x"), ("0", 5, "barrier"), ("0", 6, "all_reduce")),
        sent(("0", 4, "x"), ("0", 5, "all_reduce"), ("0", 6, "barrier")),
    ),
    "a rank that terminated its run, named with the difference": (
        "diverged",
        r"^rank 1 stopped alone in epoch 1, iteration 3 of the run at train.py:9 in main: terminate\(\) at "
        r"train.py:5 in stop; rank 0 is still in that run. .*stop_together\(engine\)\nthe ranks call different things",
        waiting("0", 5, "all_reduce", "0-1", "a.py:1", engines=[RUN]),
        waiting("0", 5, "barrier", "0-1", "b.py:2", ended=[END]),
    ),
    "two groups in another order": (
        "diverged",
        r"wait for each other(.|\n)*rank 0 +0-1 +barrier +a.py:1 +rank 1\nrank 1 +0-1 +barrier +b.py:2 +rank 0",
        {**waiting("0", 5, "barrier", "0-1", "a.py:1"), "begun": {"0": 5, "1": 2}},
        {**waiting("1", 3, "barrier", "0-1", "b.py:2"), "begun": {"0": 4, "1": 3}},
    ),
    "a first call that debug mode compares, and a call of another group": (
        "diverged",
        r"the ranks wait for each other",
        {**waiting("0", 5, "all_reduce", "0-1"), "at_most": {DEBUG: 0}},
        {**waiting(f"{DEBUG}all", 1, "all_reduce", "0-1"), "begun": {"0": 4, f"{DEBUG}all": 1}},
    ),
    "a rank that has left and is waited for": (
        "failed",
        r"rank 1 has left the run; rank 0 waits for it in barrier at a.py:1",
        waiting("0", 5, "barrier", "0-1", "a.py:1"),
        {"left": "has left the run", **sent(("0", 4, "barrier"))},
    ),
    "a rank that ended by os._exit(0) and is waited for": (
        "failed",
        r"rank 1 has ended with exit code 0, .*; it was last seen at c.py:3 in g; rank 0 waits for it in barrier",
        waiting("0", 5, "barrier", "0-1"),
        {"is_alive": False, "left": LEFT_BY_EXIT, "stack": ["c.py:3 in g"], **sent(("0", 4, "barrier"))},
    ),
    "a rank that was killed, whoever waits": (
        "failed",
        r"rank 1's process was killed or crashed \(SIGKILL\)",
        computing(),
        {"is_alive": False, "killed": "SIGKILL"},
    ),
    "a rank that disappeared and is waited for": (
        "failed",
        r"rank 1's process was killed or crashed; it was last seen at c.py:3 in g; rank 0 waits for it",
        waiting("0", 5, "barrier", "0-1"),
        {"is_alive": False, "stack": ["c.py:3 in g"], **sent(("0", 4, "barrier"))},
    ),
    "a crash in a collective, with the calls of the others": (
        "failed",
        r"\(Aborted\); it was at t.py:3 in step. A library aborts(.|\n)*"
        r"rank 0 +all_reduce +a.py:1\nrank 1 +backward \(gradient reduction\) +t.py:3 in step",
        waiting("0", 5, "all_reduce", "0-1", "a.py:1"),
        {"is_alive": False, "crash": "Aborted", "killed": "Aborted", "stack": IN_BACKWARD},
    ),
}


@pytest.mark.parametrize("name", PROOFS)
def test_what_is_proven_gives_a_verdict(name: str) -> None:
    kind, pattern, *ranks = PROOFS[name]
    found = judged(*ranks)
    assert found is not None
    assert found.kind == kind
    assert re.search(pattern, found.text, re.MULTILINE), found.text


# the status of each rank of jobs that proceed without help
HEALTHY: dict[str, list[dict[str, Any]]] = {
    "a rank is late, and has not reported": [waiting("0", 5, "barrier", "0-1")],
    "a rank is late, and has another thread that waits": [
        waiting("0", 5, "barrier", "0-1"),
        {**waiting("1", 3, "barrier", "0-1"), "begun": {"0": 4, "1": 3}, "is_stuck": False},
    ],
    "groups of other ranks under the same number": [
        sent(("1/a", 1, "barrier")),
        {},
        sent(("1/b", 1, "all_reduce")),
    ],
    "sizes that may differ": [sent(("0", 1, "all_to_all"))] * 2,
    "a part of a coalesced call was dropped from one record": [
        sent(("0", 2, "broadcast"), ("0", 2, "all_reduce"), ("0", 3, "barrier")),
        sent(("0", 2, "all_reduce"), ("0", 3, "barrier")),
    ],
    "a rank has left, and nobody needs it": [
        computing(),
        {"left": "has left the run", **sent(("0", 4, "barrier"))},
    ],
    "a rank has left after its last call, in which another one still is": [
        waiting("0", 5, "all_reduce", "0-1"),
        {"left": "has left the run", **sent(("0", 5, "all_reduce"))},
    ],
    "a rank ended by os._exit(0), and nobody needs it": [
        computing(),
        {"is_alive": False, "left": LEFT_BY_EXIT},
    ],
    "a process disappeared, and nobody needs it": [computing(), {"is_alive": False}],
    "a broadcast that comes from a rank that is late, and a third one has left": [
        waiting("0", 5, "broadcast", "0-2"),
        computing(),
        {"left": "has left the run", **sent(("0", 4, "barrier"))},
    ],
    "an error of a user after a rank has left that had sent the last call": [
        {"lost": LOST},
        {"left": "has left the run", **sent(("0", 5, "all_reduce"))},
    ],
    "a rank that ended a run early waits itself, for a rank that proceeds": [
        waiting("0", 5, "barrier", "0-2", engines=[RUN]),
        {**waiting("1", 2, "barrier", "1-2"), "begun": {"0": 4, "1": 2}, "ended": [END]},
        computing(),
    ],
    "how far a rank is in a group of debug mode is unknown": [
        waiting("0", 5, "all_reduce", "0-1"),
        {**waiting(f"{DEBUG}all", 1, "all_reduce", "0-1"), "begun": {"0": 4, f"{DEBUG}all": 1}},
    ],
    "how far a rank is in a group is unknown": [
        {**waiting("0", 5, "barrier", "0-1"), "begun": {"0": 5}},
        {**waiting("1", 5, "barrier", "0-1"), "begun": {"1": 5}, "at_most": {"0": 9}},
    ],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_not_proven_gives_no_verdict(name: str) -> None:
    assert judged(*HEALTHY[name]) is None


# --- programs ---------------------------------------------------------------------------------------------------------


class Simulated:
    """Ranks with several threads each, which call collectives of groups, in lists, and compute in between."""

    def __init__(self, size: int, programs: list[list[list[tuple[str, str, tuple[int, ...]]]]]) -> None:
        self.size = size
        self._programs = [[list(thread) for thread in rank] for rank in programs]
        self._sent = [dict[str, int]() for _ in range(size)]
        self._calls = [list[tuple[str, int, str]]() for _ in range(size)]
        self._in: list[list[Any]] = [[None] * len(rank) for rank in programs]

    def moves(self) -> list[tuple[int, int]]:
        """Return which rank and thread can do something: send its next call, or leave one that all have sent."""
        found = []
        for rank, threads in enumerate(self._programs):
            for number, thread in enumerate(threads):
                call = self._in[rank][number]
                if thread and (call is None or self._is_complete(call)):
                    found.append((rank, number))
        return found

    def move(self, rank: int, number: int) -> None:
        self._in[rank][number] = None
        group, operation, members = self._programs[rank][number].pop(0)
        sequence = self._sent[rank][group] = self._sent[rank].get(group, 0) + 1
        self._calls[rank].append((group, sequence, operation))
        self._in[rank][number] = group, sequence, operation, members

    def _is_complete(self, call: Any) -> bool:
        group, sequence, _, members = call
        return all(self._sent[rank].get(group, 0) >= sequence for rank in members)

    def snapshots(self) -> list[Snapshot]:
        """Return what the ranks report, all of whose running calls look as if they had been there for long."""
        found = []
        for rank in range(self.size):
            running = [call for call in self._in[rank] if call is not None and not self._is_complete(call)]
            waits = [waiting(*call[:3], ", ".join(map(str, call[3])))["waits"][0] for call in running]
            idle = [i for i, call in enumerate(self._in[rank]) if call is None and self._programs[rank][i]]
            can_move = [move for move in self.moves() if move[0] == rank]
            status = {**sent(*self._calls[rank]), "waits": waits, "is_stuck": bool(waits) and not idle and not can_move}
            groups = {group for one in self._sent for group in one}
            status["begun"] = {group: self._sent[rank].get(group, 0) for group in groups}
            found.append(snapshot(rank, self.size, **status))
        return found


@st.composite
def programs(draw: Any) -> tuple[int, list[list[list[tuple[str, str, tuple[int, ...]]]]]]:
    """Draw programs without mistakes: each thread has its groups, and all members call them in the same order."""
    size, num_threads = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    result: list[list[list[Any]]] = [[[] for _ in range(num_threads)] for _ in range(size)]
    for thread in range(num_threads):
        for _ in range(draw(st.integers(1, 8))):
            members = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=size))))
            group = f"{thread}/{members}"
            operation = draw(st.sampled_from(["all_reduce", "barrier", "all_gather"]))
            for rank in members:
                result[rank][thread].append((group, operation, members))
    return size, result


@given(programs(), st.integers(0, 2**32))
@settings(max_examples=150)
def test_correct_programs_get_no_verdict_and_end(drawn: Any, seed: int) -> None:
    job, choose = Simulated(*drawn), random.Random(seed)
    while moves := job.moves():
        assert judged(*job.snapshots()) is None
        job.move(*choose.choice(moves))
    assert judged(*job.snapshots()) is None


@given(programs(), st.integers(0, 2**32), st.sampled_from(["replace", "swap"]))
@settings(max_examples=150)
def test_programs_in_which_a_rank_does_something_else_proceed_or_get_a_verdict(drawn: Any, seed: int, how: str) -> None:
    size, all_programs = drawn
    choose = random.Random(seed)
    rank = choose.randrange(size)
    thread = choose.choice(all_programs[rank])
    if len(thread) < 2:
        return
    place = choose.randrange(len(thread) - 1)
    if how == "swap":
        thread[place : place + 2] = thread[place + 1], thread[place]
    else:
        group, _, members = thread[place]
        thread[place] = group, "reduce_scatter", members
    job = Simulated(size, all_programs)
    while moves := job.moves():
        job.move(*choose.choice(moves))
    found = judged(*job.snapshots())
    is_complete = not any(map(any, job._programs)) and not any(one.status["waits"] for one in job.snapshots())
    assert found is not None or (is_complete and how == "swap")
    assert found is None or how == "swap" or f"rank {rank}" in found.text


def test_a_table_of_1024_ranks_is_short() -> None:
    ranks = [
        snapshot(rank, 1024, **waiting("0", 5, "barrier" if rank == 7 else "all_reduce", "0-1023"))
        for rank in range(1024)
    ]
    found = judged(*ranks)
    assert found is not None
    assert re.search(r"ranks 0-6, 8-1023 +all_reduce", found.text)
    assert len(found.text) < 500
