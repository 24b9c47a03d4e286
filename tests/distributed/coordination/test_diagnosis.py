"""Diagnosis: no verdict on ranks that follow a correct program, and one that names the culprit otherwise."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from camshaft import activity
from camshaft.distributed import get_rank
from camshaft.distributed.coordination import diagnosis
from camshaft.distributed.coordination.diagnosis import (
    BACKWARD,
    _operation_in,
    departed,
    describe,
    divergence,
    hang_report,
    stopped,
)
from camshaft.distributed.record import Entry, Snapshot
from camshaft.engine import Engine
from tests.ranks import on_ranks

ROOTED_FROM, ROOTED_TO = ("broadcast", "scatter"), ("reduce", "gather")
AUTOGRAD = "/site-packages/torch/autograd/graph.py:979 in _engine_run_backward"
DIRECT = "/site-packages/torch/distributed/distributed_c10d.py:5356 in barrier"
LEFT = "has left the run without an error"


# --- a job in a simulation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What some ranks do next: a collective, a backward pass with reductions, or something by themselves."""

    line: str
    ranks: tuple[int, ...]
    collective: str = "all_reduce"
    how: str = ""
    root: str = ""
    value: str = ""
    kind: str = "call"  # or "direct", to torch, "backward", "async", "local backward", "busy", "idle"

    @property
    def call(self):
        return self.kind, self.collective, self.how, self.root, self.value


@dataclass
class SimulatedRank:
    rank: int
    program: list[Step]
    history: deque
    now: float = 0.0
    place: int = 0  # in the program
    wakes: float = 0.0
    step: Step | None = None  # in which it is
    began: float = 0.0
    calls: Counter = field(default_factory=Counter)
    torch: Counter = field(default_factory=Counter)
    unfinished: dict = field(default_factory=dict)  # operations of torch, with their step
    left: str | None = None
    status: dict = field(default_factory=dict)


class Job:
    """Ranks that follow their programs, with random delays and interleavings.

    A rank leaves a collective when the ranks have begun it from which it needs something; for collectives with a root,
    these are random ones beside the root. Calls that differ never complete, or complete as if they did not differ.

    Over MPI, what torch calls is recorded, too, and completes when somebody looks, which may be never.
    """

    def __init__(self, programs, seed, history=64, is_mpi=False):
        self.is_mpi = is_mpi
        self.random = random.Random(seed)
        self.size = len(programs)
        self.ranks = [SimulatedRank(k, list(program), deque(maxlen=history)) for k, program in enumerate(programs)]
        self.begun = defaultdict(dict)  # the steps of the ranks, by group and sequence
        self.begun_in_torch = defaultdict(dict)
        self.completes = self.random.random() < 0.5
        self.now = 1000.0
        self.views = {}
        for one in self.ranks:
            for step in chain(*programs):
                if one.rank in step.ranks:
                    one.torch[self.torch_name(step.ranks)] = 0  # torch creates groups on all ranks
            self.tell(one)
            self.look(one)

    def name(self, ranks):
        return "all" if len(ranks) == self.size else str(list(ranks))

    def torch_name(self, ranks):
        return f"{sum(1 << rank for rank in ranks)}: {self.name(ranks)}"

    # what ranks do

    def tick(self):
        """Let time pass, some ranks act, some statuses be written, and some snapshots be taken."""
        chosen = self.random
        self.now += chosen.choice((0.001, 0.01, 0.1, 0.9, 5.0))
        for one in chosen.sample(self.ranks, self.size):
            if chosen.random() < 0.7:
                self.act(one)
        for one in self.ranks:
            if chosen.random() < 0.3 or self.now - one.status["time"] > 1.0:
                self.tell(one)
            if chosen.random() < 0.5:
                self.look(one)

    def act(self, one):
        if self.is_mpi:
            self.complete(one)
        for key in [key for key, step in one.unfinished.items() if self.is_reduced(key, step)]:
            del one.unfinished[key]
        if one.left is not None or one.wakes > self.now:
            return
        if one.step is not None:
            if not self.can_leave(one):
                return
            if one.step.kind == "call":
                self.end(one, one.history[-1])
                one.unfinished.pop((self.torch_name(one.step.ranks), one.torch[self.torch_name(one.step.ranks)]), None)
            one.step = None
            one.wakes = self.now + self.random.choice((0.0, 0.0, 0.1, 2.0))
        elif one.place == len(one.program):
            one.left = LEFT
        else:
            self.begin(one)

    def begin(self, one):
        one.step, one.began = one.program[one.place], self.now
        one.place += 1
        step = one.step
        if step.kind == "call":
            self.record(one, step, (step.collective, step.how, step.root, step.value, step.line))
        elif self.is_mpi and step.kind in ("direct", "backward", "async"):
            call = (BACKWARD, "all_reduce SUM") if step.kind == "backward" else ("torch.distributed.all_reduce", "SUM")
            for _ in range(3 if step.kind == "backward" else 1):
                self.record(one, step, (*call, "", "", step.line))
        elif step.kind in ("direct", "backward", "async"):
            self.count(one, step)
        if step.kind == "call" and not self.is_mpi:
            self.count(one, step)
        if step.kind in ("local backward", "busy", "idle"):
            one.wakes = self.now + self.random.choice((0.5, 8.0, 60.0))

    def record(self, one, step, texts):
        name = self.name(step.ranks)
        one.calls[name] += 1
        self.begun[name, one.calls[name]][one.rank] = step
        number = one.history[-1].number + 1 if one.history else 1
        one.history.append(Entry(number, name, one.calls[name], *texts, self.now, None, False))

    def end(self, one, entry):
        one.history[one.history.index(entry)] = replace(entry, ended=self.now)

    def complete(self, one):
        """End what torch has called over MPI; if a rank does not wait for it, whenever it looks."""
        waits = one.step is not None and one.step.kind in ("direct", "backward")
        for entry in [entry for entry in one.history if entry.ended is None and entry.is_of_torch]:
            here = self.begun[entry.group, entry.sequence]
            is_complete = len(here) == len(here[one.rank].ranks) and (self.completes or not clash(here.values()))
            if is_complete and (here[one.rank] is one.step or (waits and self.random.random() < 0.5)):
                self.end(one, entry)

    def count(self, one, step):
        if step.kind in ("call", "direct", "backward", "async"):
            for _ in range(3 if step.kind == "backward" else 1):
                key = self.torch_name(step.ranks)
                one.torch[key] += 1
                self.begun_in_torch[key, one.torch[key]][one.rank] = step
                one.unfinished[key, one.torch[key]] = step

    def can_leave(self, one):
        step = one.step
        if self.is_mpi and step.kind in ("direct", "backward"):
            return all(
                entry.ended is not None or self.begun[entry.group, entry.sequence][one.rank] is not step
                for entry in one.history
            )
        if step.kind in ("direct", "backward"):
            return step not in one.unfinished.values()
        if step.kind != "call":
            return True
        name = self.name(step.ranks)
        here = self.begun[name, one.calls[name]]
        if not self.completes and clash(here.values()):
            return False
        needs = set(step.ranks)
        some = {
            rank for rank in step.ranks if random.Random(f"{name} {one.calls[name]} {one.rank} {rank}").random() < 0.3
        }
        if step.collective in ROOTED_FROM:
            needs = some if str(one.rank) == step.root else some | {int(step.root)}
        elif step.collective in ROOTED_TO and str(one.rank) != step.root:
            needs = some
        return needs <= here.keys()

    def is_reduced(self, key, step):
        return step.kind != "call" and set(step.ranks) <= {
            rank for rank, other in self.begun_in_torch[key].items() if other.kind == step.kind
        }

    # what is seen of them

    def tell(self, one):
        """Write the status of a rank."""
        step, stack = one.step, [f"/job/train.py:{one.place} in main"]
        is_idle = step is not None and step.kind != "busy"
        if step is not None:
            inner = {
                "call": [
                    "/site-packages/torch/distributed/distributed_c10d.py:1 in wait",
                    "/camshaft/distributed/x.py:1 in f",
                ],
                "direct": [DIRECT],
                "backward": [AUTOGRAD],
                "local backward": [AUTOGRAD],
            }
            stack = [*inner.get(step.kind, []), step.line]
        one.status = {
            "time": self.now,
            "host": "here",
            "engines": [
                {"line": "/job/train.py:1 in main", "number": 1, "event": "", "epoch": 1, "iteration": one.place}
            ],
            "ended": [],
            "stack": stack,
            "doing": "",
            "torch": dict(one.torch),
            "unfinished": self.unfinished_of(one),
            "since": one.began,
            "is_in_mpi": self.is_mpi and step is not None and step.kind in ("call", "direct", "backward"),
            "cpu": 0.0,
            "idle_for": self.now - one.began if is_idle else 0.0,
            "left": one.left,
            "failure": None,
        }

    def unfinished_of(self, one):
        found = defaultdict(list)
        for (key, number), step in one.unfinished.items():
            found[key].append([number, step.collective])
        return dict(found)

    def look(self, one):
        """Take a snapshot of a rank."""
        path = Path(f"/dev/shm/camshaft-{one.rank}.record")
        self.views[one.rank] = Snapshot(
            path, "job", one.rank, self.size, one.rank, True, "here", dict(one.status), tuple(one.history)
        )

    def seen(self):
        return list(self.views.values())

    def is_stuck(self):
        """Return whether no rank can do anything any more."""
        return all(
            one.left is not None or (one.step is not None and one.wakes <= self.now and not self.can_leave(one))
            for one in self.ranks
        )

    def run(self, check=lambda: None, limit=20_000):
        """Run until no rank does anything any more, and for some seconds longer."""
        for _ in range(limit):
            for one in self.ranks:
                self.settle(one)
            if self.is_stuck():
                break
            self.tick()
            check()
        else:
            pytest.fail("the simulation does not end")
        for _ in range(2):
            self.now += 20.0
            for one in self.ranks:
                self.tell(one)
                self.look(one)
            check()

    def settle(self, one):
        if self.is_mpi:
            self.complete(one)
        for key in [key for key, step in one.unfinished.items() if self.is_reduced(key, step)]:
            del one.unfinished[key]

    def has_ended(self):
        return all(one.left is not None for one in self.ranks)


def clash(steps):
    """Return whether steps that meet are not the same collective."""
    kinds = {step.kind for step in steps}
    if kinds == {"call"}:
        return len({step.call for step in steps}) > 1
    if "call" not in kinds:
        return False
    calls = {(step.collective, step.how, step.root) for step in steps if step.kind == "call"}
    return "backward" in kinds or calls != {("all_reduce", "SUM", "")}  # the user may ask torch for the same


def verdicts(job):
    seen, now = job.seen(), job.now
    found = [text for _, text in filter(None, (departed(seen, rank, now) for rank in range(job.size)))]
    return found + [text for text in (stopped(seen, now), divergence(seen, now)) if text is not None]


# --- programs -------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw, most=30, kinds=("direct", "backward", "async", "local backward", "busy", "idle")):
    """Return what the ranks of a job do: all of them call the collectives of their groups in the same order."""
    size = draw(st.integers(2, 4))
    groups = [tuple(range(size))]
    if size > 2:
        groups += draw(st.lists(st.permutations(range(size)).map(lambda ranks: tuple(sorted(ranks[:2]))), max_size=3))
    steps = []
    for number in range(draw(st.integers(1, most))):
        line = f"/job/train.py:{number + 10} in main"
        kind = draw(st.sampled_from(("call",) * 8 + kinds))
        ranks = draw(st.sampled_from(groups))
        if kind != "call":
            ranks = ranks if kind in ("direct", "async") else groups[0]
            who = (
                ranks
                if kind in ("direct", "backward", "async")
                else draw(st.permutations(ranks))[: draw(st.integers(1, size))]
            )
            steps.append((who, Step(line, ranks, kind=kind)))
            continue
        collective = draw(
            st.sampled_from(("all_reduce", "all_reduce", "barrier", "all_gather", *ROOTED_FROM, *ROOTED_TO))
        )
        is_rooted = collective in ROOTED_FROM + ROOTED_TO
        how = draw(st.sampled_from(("SUM", "MAX"))) if collective in ("all_reduce", "reduce") else ""
        root = str(draw(st.sampled_from(ranks))) if is_rooted else ""
        value = (
            "" if collective == "barrier" else draw(st.sampled_from(("", "torch.float32 [4]", "torch.float32 [2, 2]")))
        )
        steps.append((ranks, Step(line, ranks, collective, how, root, value)))
    return [[step for who, step in steps if rank in who] for rank in range(size)]


SLOW = settings(suppress_health_check=list(HealthCheck), max_examples=200)


@SLOW
@given(programs(), st.integers(0, 2**32), st.sampled_from((4, 8, 64)), st.booleans())
def test_correct_programs_get_no_verdict(program, seed, history, is_mpi):
    job = Job(program, seed, history, is_mpi)

    def check():
        assert verdicts(job) == []

    job.run(check)
    assert job.has_ended()


@st.composite
def mistakes(draw):
    """Return programs of which one differs in one call, and the rank that makes the mistake."""
    # a call of torch matches an asynchronous one of another rank, unless their names differ
    program = draw(programs(kinds=("backward", "async", "local backward", "busy", "idle")))
    rank = draw(st.integers(0, len(program) - 1))
    steps = program[rank]
    kind = draw(st.sampled_from(("changed", "dropped", "added")))
    shared = [k for k, step in enumerate(steps) if step.kind in ("call", "backward") and len(step.ranks) > 1]
    assume(shared)
    place = draw(st.sampled_from(shared))
    step = steps[place]
    if kind == "dropped":
        wrong = []
    elif kind == "added":
        wrong = [step, replace(step, line="/job/train.py:900 in extra")]
    else:
        assume(step.kind == "call")
        other = draw(st.sampled_from(("collective", "how", "root", "value")))
        wrong = [replace(step, **{other: {"collective": "all_to_all", "root": str(step.ranks[0])}.get(other, "other")})]
        assume(wrong != [step])
    program[rank] = steps[:place] + wrong + steps[place + 1 :]
    return program, rank


@SLOW
@given(mistakes(), st.integers(0, 2**32), st.booleans())
def test_once_nobody_can_proceed_the_verdict_names_the_line_of_the_rank_that_made_the_mistake(mistake, seed, is_mpi):
    program, culprit = mistake
    job = Job(program, seed, is_mpi=is_mpi)
    job.run()
    if job.has_ended() and not differ(job):
        return  # nobody needed the call
    found = verdicts(job)
    if not found:  # nothing tells whether the backward pass of one rank is a later one than that of another
        assert all(one.step.kind == "backward" for one in job.ranks if one.left is None), story(job)
        reports = [hang_report(job.seen(), one.rank, job.now) for one in job.ranks if one.left is None]
        assert all(report.is_alarm for report in reports)
        found = [report.text for report in reports]
    recorded = ("call", "backward", "direct", "async") if is_mpi else ("call", "backward")
    lines = {step.line for step in program[culprit] if step.kind in recorded}
    if all(step.kind != "call" for step in program[culprit]):
        lines.add("it had called no collective of camshaft")
    assert any(line in text for text in found for line in lines), found
    assert any(culprit in ranks_in(text) for text in found), found


def story(job):
    """Return what the ranks of a job did last."""
    lines = [f"calls that differ complete: {job.completes}"]
    for one in job.ranks:
        steps = (f"{step.kind} {step.collective} {step.ranks} {step.root} {step.line[-12:]}" for step in one.program)
        program = [f"{'>' if one.step is step else ' '} {text}" for step, text in zip(one.program, steps, strict=True)]
        lines += [f"rank {one.rank}: {one.left or 'inside'}, {dict(one.torch)}, {one.status['unfinished']}", *program]
    return "\n".join(lines)


def differ(job):
    return any(clash(here.values()) for here in job.begun.values())


def ranks_in(text):
    """Return the ranks that a text names, as in "rank 3" or "ranks 0-2, 5"."""
    found = set()
    for spans in re.findall(r"\branks? ([\d, -]*\d)", text):
        for span in spans.split(", "):
            first, _, last = span.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


# --- single cases ---------------------------------------------------------------------------------------------------

NOW = 100.0
TRAIN, EVALUATE = "/job/train.py:30 in main", "/job/train.py:40 in evaluate"


def call(sequence=1, collective="all_reduce", *, line="/job/train.py:5 in step", since=90.0, ended=None, **texts):
    texts = {"group": "all", "how": "", "root": "", "value": "", "is_long": False, **texts}
    return Entry(
        number=sequence, sequence=sequence, collective=collective, line=line, began=since, ended=ended, **texts
    )


def run(line=TRAIN, number=1, iteration=7):
    return {"line": line, "number": number, "event": "ITERATION_STARTED", "epoch": 2, "iteration": iteration}


def snapshot(rank, *entries, size=2, is_alive=True, **status):
    """Return a snapshot of a rank that wrote its status just now; without entries, of one that computes."""
    inside = [entry.line for entry in entries if entry.ended is None]
    defaults = {"time": NOW - 0.5, "stack": [*inside, "/job/train.py:20 in main"], "engines": [run()], "idle_for": 0.0}
    return Snapshot(
        Path(f"/dev/shm/{rank}"), "job", rank, size, rank, is_alive, "here", {**defaults, **status}, tuple(entries)
    )


def test_a_table_shows_who_called_what_with_which_shape():
    ranks = [snapshot(rank, call(how="SUM", value=f"torch.float32 [{2 + rank // 3}]"), size=4) for rank in range(4)]
    assert divergence(ranks, NOW) == (
        "the ranks call different things:\n"
        "           collective  ranks  how  value              line\n"
        "ranks 0-2  all_reduce  all    SUM  torch.float32 [2]  /job/train.py:5 in step\n"
        "rank 3     all_reduce  all    SUM  torch.float32 [3]  /job/train.py:5 in step"
    )


def test_a_call_within_a_handler_is_shown_with_both_lines_and_found_in_the_stack_by_the_inner_one():
    metric = "/site-packages/camshaft/handlers/metrics.py:240 in _over_all_ranks"
    within = call(collective="all_gather", via=metric)
    ranks = [snapshot(0, within, stack=[metric, within.line]), snapshot(1, call())]
    assert f"{within.line}, in {metric}" in divergence(ranks, NOW)
    ended = snapshot(0, within, stack=[within.line])  # the user's line runs on after the handler has left
    assert hang_report([ended, snapshot(1)], 0, NOW) is None
    waiting = hang_report([ranks[0], snapshot(1)], 0, NOW)
    assert waiting is not None
    assert f"in {within.collective} at {within.line}, in {metric}, for rank 1" in waiting.text


@pytest.mark.parametrize("field", ["collective", "how", "root", "value"])
def test_calls_that_differ_are_found_though_they_completed(field):
    ranks = [
        snapshot(0, call(ended=91.0)),
        snapshot(1, call(**{"collective": "all_reduce", field: "other"}, ended=91.0)),
    ]
    assert "other" in divergence(ranks, NOW)


def test_calls_that_differ_in_a_loop_give_the_same_text_in_each_iteration():
    def seen(first):
        numbers = range(first, first + 6)
        return [
            snapshot(rank, *(call(k, how=how[k % 2], line=f"/job/a.py:{k % 2} in f", ended=91.0) for k in numbers))
            for rank, how in enumerate((("SUM", "MAX"), ("MAX", "SUM")))
        ]

    assert divergence(seen(1), NOW) == divergence(seen(2), NOW) is not None


def test_dimensions_of_size_one_make_no_difference():
    ranks = [snapshot(0, call(value="torch.float32 [4]")), snapshot(1, call(value="torch.float32 [1, 4]"))]
    assert divergence(ranks, NOW) is None
    ranks = [snapshot(0, call(value="torch.float32 [2, 3]")), snapshot(1, call(value="torch.float32 [3, 2]"))]
    assert divergence(ranks, NOW) is not None


BUCKET = {"collective": BACKWARD, "how": "all_reduce SUM", "value": "torch.float32 [5]", "line": "/job/train.py:9 in f"}
DIRECTLY = {"collective": "torch.distributed.all_reduce", "how": "SUM", "value": "torch.float32 [5]"}


@pytest.mark.parametrize(
    ("one", "other", "is_found"),
    [
        (BUCKET, {"how": "SUM", "value": "torch.float32 [5]"}, True),
        (BUCKET, {"collective": "barrier"}, True),
        (BUCKET, {**BUCKET, "line": "/job/train.py:10 in f"}, False),
        (BUCKET, {**BUCKET, "value": "torch.float32 [6]"}, True),
        # a rank without data takes part in the reductions of the others outside of a backward pass
        (BUCKET, {**BUCKET, "collective": "DistributedDataParallel (parameters or buffers)"}, False),
        (DIRECTLY, BUCKET, False),
        (DIRECTLY, {**DIRECTLY, "value": "torch.float32 [5, 1]"}, False),
        (DIRECTLY, {**DIRECTLY, "how": "MAX"}, True),
        (DIRECTLY, {**DIRECTLY, "value": "torch.float64 [5]"}, True),
        (DIRECTLY, {"collective": "torch.distributed.broadcast"}, True),
        # torch and this package, asked for the same
        (DIRECTLY, {"how": "SUM", "value": "torch.float32 [5]"}, False),
        ({"collective": "torch.distributed.all_gather_into_tensor"}, {"collective": "all_gather"}, False),
        (DIRECTLY, {"how": "MAX"}, True),
        (DIRECTLY, {"collective": "barrier"}, True),
    ],
)
def test_what_torch_begins_is_compared_by_what_it_does(one, other, is_found):
    ranks = [snapshot(0, call(**one, ended=91.0)), snapshot(1, call(**other, ended=91.0))]
    assert (divergence(ranks, NOW) is not None) is is_found


def test_a_rank_that_stopped_while_another_one_reduces_gradients_is_found_though_its_next_call_met_that():
    ranks = [snapshot(0, call(**BUCKET)), snapshot(1, call(collective="barrier"), engines=[], ended=[ENDED])]
    assert "rank 0 still waits for it in backward (gradient reduction) at /job/train.py:9 in f" in stopped(ranks, NOW)


def test_a_rank_that_stopped_is_found_by_its_calls_since_then_though_they_completed():
    ranks = [
        snapshot(0, call(**BUCKET, ended=91.0)),
        snapshot(1, call(collective="barrier", ended=91.0), engines=[], ended=[{**ENDED, "time": 89.0}]),
    ]
    assert "; rank 0 met another call of it in backward (gradient reduction) at /job/train.py:9" in stopped(ranks, NOW)
    ranks[1].status["ended"][0]["time"] = 90.5  # the calls differed before
    assert stopped(ranks, NOW) is None


def test_collectives_of_torch_that_nobody_waits_for_do_not_hide_a_deadlock():
    begun = call(**{**DIRECTLY, "line": "/job/train.py:3 in f"})
    ranks = [
        snapshot(
            0, begun, call(2, line="/job/train.py:5 in f"), size=3, stack=["/job/train.py:5 in f"], is_in_mpi=True
        ),
        snapshot(1, begun, call(1, group="[1, 2]"), size=3, stack=["/job/train.py:5 in step"], is_in_mpi=True),
        snapshot(
            2, begun, call(2, line="/job/train.py:5 in f"), size=3, stack=["/job/train.py:5 in f"], is_in_mpi=True
        ),
    ]
    assert "the ranks wait for each other" in divergence(ranks, NOW)


def test_a_wait_for_what_torch_began_at_another_line():
    begun = call(**{**DIRECTLY, "line": "/job/train.py:3 in f"})
    waiting = snapshot(0, begun, stack=["/job/train.py:20 in main"], is_in_mpi=True)
    text = hang_report([waiting, snapshot(1)], 0, NOW).text
    assert (
        "rank 0 has been waiting for 10 s in torch.distributed.all_reduce at /job/train.py:3 in f, for rank 1" in text
    )
    assert hang_report([replace(waiting, status=waiting.status | {"is_in_mpi": False}), snapshot(1)], 0, NOW) is None


def test_calls_that_are_just_being_made_are_not_compared():
    ranks = [snapshot(0, call(how="SUM", since=NOW - 1)), snapshot(1, call(how="MAX", since=NOW - 1))]
    assert divergence(ranks, NOW) is None
    assert divergence(ranks, NOW + 3) is not None


def test_a_call_that_killed_a_rank_is_compared_at_once():
    ranks = [
        snapshot(0, call(value="torch.float32 [2]", since=NOW - 1)),
        snapshot(1, call(value="torch.float32 [3]", since=NOW - 1), is_alive=False),
    ]
    assert "torch.float32 [3]" in divergence(ranks, NOW)


def test_ranks_in_two_groups_wait_for_each_other():
    pair = call(line="/job/train.py:8 in pair", group="[0, 1]")
    ranks = [snapshot(0, call(), size=3), snapshot(1, pair, size=3), snapshot(2, call(), size=3)]
    assert divergence(ranks, NOW) == (
        "the ranks wait for each other, and none of them can proceed:\n"
        "            collective  ranks   line                     waits for\n"
        "ranks 0, 2  all_reduce  all     /job/train.py:5 in step  rank 1\n"
        "rank 1      all_reduce  [0, 1]  /job/train.py:8 in pair  rank 0"
    )


@pytest.mark.parametrize("other", ["computes", "in another thread", "has not reported since"])
def test_ranks_that_may_still_proceed_are_not_in_a_deadlock(other):
    stuck = snapshot(0, call())
    pair = call(group="[0, 1]")
    by_name = {
        "computes": snapshot(1),
        "in another thread": snapshot(1, pair, stack=["/job/train.py:20 in main"]),
        "has not reported since": snapshot(1, pair, time=89.0),
    }
    assert divergence([stuck, by_name[other]], NOW) is None
    assert divergence([stuck, snapshot(1, pair)], NOW) is not None


def test_a_root_that_may_leave_without_the_rank_that_waits_for_it_is_not_in_a_deadlock():
    root = call(collective="broadcast", root="0", group="all")
    ranks = [snapshot(0, root, size=3), snapshot(1, size=3), snapshot(2, call(group="[0, 2]"), size=3)]
    assert divergence(ranks, NOW) is None  # rank 0 may need only rank 1, which computes


@pytest.mark.parametrize(
    ("status", "is_found"),
    [
        ({}, True),
        ({"idle_for": 1.0}, False),  # a slow backward pass
        ({"unfinished": {}}, False),  # on a GPU, or waiting for something else than a reduction
        ({"torch": {"0: all": 4}, "unfinished": {"0: all": [[4, "all_reduce"]]}}, False),  # behind
        ({"since": 98.0}, False),  # it was idle before
        ({"unfinished": {"0: all": []}}, True),
        ({"unfinished": None}, True),  # a torch that does not count them
        ({"stack": ["/job/offload.py:3 in backward", f"/x{AUTOGRAD}"]}, False),  # code of the user
        ({"stack": ["/x/site-packages/torch/optim/adam.py:3 in step", "/job/train.py:9 in step"]}, False),
    ],
)
def test_a_backward_pass_that_other_ranks_skip(status, is_found):
    stack = [f"/x{AUTOGRAD}", "/x/site-packages/torch/_tensor.py:6 in backward", "/job/train.py:9 in step"]
    evidence = {"stack": stack, "idle_for": 9.0, "torch": {"0: all": 7}}
    evidence["unfinished"] = {"0: all": [[6, "all_reduce"], [7, "all_reduce"]]}
    inside = snapshot(0, **{**evidence, **status})
    other = in_recorded_barrier(torch={"0: all": 6}, unfinished={"0: all": [[6, "all_reduce"]]})
    text = divergence([inside, other], NOW)
    assert (text is not None) == is_found
    assert not is_found or ("backward (gradient reduction)" in text and "/job/train.py:9 in step" in text)


def in_recorded_barrier(**status):
    entry = call(collective="barrier")
    return snapshot(1, entry, stack=[DIRECT, "/x/camshaft/distributed/collectives.py:9 in f", entry.line], **status)


@pytest.mark.parametrize(
    ("other", "is_found"),
    [
        ({"unfinished": {"0: all": [[7, "all_reduce"]]}}, True),
        ({"unfinished": {"0: all": []}}, True),
        ({"unfinished": {}}, False),  # it begins its barrier
        ({"unfinished": None}, False),
        ({"unfinished": None, "idle_for": 2.0}, True),
    ],
)
def test_a_rank_that_completed_the_reductions_of_a_backward_pass_is_ahead_of_it(other, is_found):
    stack = [f"/x{AUTOGRAD}", "/job/train.py:9 in step"]
    inside = snapshot(0, stack=stack, idle_for=9.0, torch={"0: all": 7}, unfinished={"0: all": [[7, "all_reduce"]]})
    assert (divergence([inside, in_recorded_barrier(torch={"0: all": 7}, **other)], NOW) is not None) == is_found


# --- collectives that are called on torch directly ---


OWN = "/job/train.py:9 in step"
INSIDE = "/x/site-packages/torch/"


def direct(rank, number=7, name="barrier", size=2, **status):
    """Return a snapshot of a rank that waits in a collective of torch without a record."""
    inner = f"{INSIDE}distributed/distributed_c10d.py:5356 in {name}"
    defaults = {"idle_for": 9.0, "torch": {"0: all": number}, "unfinished": {"0: all": [[number, name]]}}
    return snapshot(rank, size=size, **{"stack": [inner, OWN], **defaults, **status})


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        (["distributed/distributed_c10d.py:9 in barrier", "distributed/c10d_logger.py:83 in wrapper"], ".barrier"),
        (["distributed/distributed_c10d.py:9 in all_gather", "distributed/distributed_c10d.py:8 in all_gather_object"],
         ".all_gather_object"),
        (["distributed/distributed_c10d.py:9 in all_gather", "distributed/fsdp/_fully_shard/_fsdp_state.py:8 in f",
          "nn/modules/module.py:7 in _call_impl"], "FSDP (parameters or gradients)"),
        (["distributed/fsdp/_fully_shard/_fsdp_collectives.py:9 in foreach_all_gather_copy_out",
          "nn/modules/module.py:7 in _call_impl"], "FSDP (parameters or gradients)"),
        (["distributed/utils.py:9 in _verify_param_shape_across_processes", "nn/parallel/distributed.py:8 in __init__"],
         "DistributedDataParallel (parameters or buffers)"),
        (["_ops.py:9 in __call__", "distributed/_functional_collectives.py:8 in wait_tensor"], "torch.distributed"),
    ],
)  # fmt: skip
def test_the_report_of_a_hang_names_collectives_that_torch_was_asked_for_directly(stack, what):
    waiting = direct(0, stack=[*(INSIDE + line for line in stack), OWN])
    report = hang_report([waiting, snapshot(1, torch={"0: all": 6})], 0, NOW)
    first, second, *_ = report.text.splitlines()
    assert re.fullmatch(rf"rank 0 has been waiting for 10 s in .*{re.escape(what)} at {OWN}, for rank 1:", first)
    assert second == f"  rank 1 is at /job/train.py:20 in main, in epoch 2, iteration 7 of the run at {TRAIN}"
    assert report.is_alarm


@pytest.mark.parametrize(
    "status",
    [
        {"idle_for": 0.0},  # it computes, or the collective progresses
        {"since": 99.5},  # it has just begun
        {"unfinished": {}},  # it waits for something else, such as other processes to connect
        {"stack": [f"{INSIDE}nn/modules/linear.py:9 in forward", f"{INSIDE}distributed/fsdp/api.py:8 in f", OWN]},
        {"stack": [OWN, f"{INSIDE}distributed/fsdp/_fully_shard/_fsdp_state.py:8 in f"]},
        {"stack": [DIRECT, "/x/camshaft/distributed/backends/native/backend.py:9 in barrier", OWN]},  # it has completed
        {"stack": [DIRECT.replace(" in barrier", " in recv"), OWN]},  # it waits for one rank, not for a group
    ],
)
def test_ranks_that_do_not_wait_in_torch_have_no_report(status):
    assert hang_report([direct(0, **status), snapshot(1, torch={"0: all": 6})], 0, NOW) is None


def waiting_for_message(rank, peer, **status):
    stack = [DIRECT.replace(" in barrier", " in recv"), OWN]
    return direct(rank, **{"stack": stack, "unfinished": {}, "awaited": ["torch.distributed.recv", peer], **status})


def test_the_report_of_a_hang_names_the_rank_that_a_message_is_to_come_from():
    others = [snapshot(1, torch={"0: all": 6}, size=3), snapshot(2, torch={"0: all": 6}, size=3)]
    report = hang_report([waiting_for_message(0, 2, size=3), *others], 0, NOW)
    assert report.missing == [2]
    assert report.text.startswith(f"rank 0 has been waiting for 10 s in torch.distributed.recv at {OWN}, for rank 2:\n")
    assert hang_report([waiting_for_message(0, None, size=3), *others], 0, NOW).missing == [1, 2]


@pytest.mark.parametrize("other", [waiting_for_message(1, 0), snapshot(1, call()), direct(1)])
def test_no_verdict_on_ranks_that_wait_for_messages_which_may_have_been_sent(other):
    assert verdicts_on([waiting_for_message(0, 1), other]) == []


@pytest.mark.parametrize(
    ("status", "is_found"),
    [
        ({}, True),
        ({"awaited": None}, False),  # it may sleep, with an operation in progress
        ({"unfinished": {}}, False),
        ({"unfinished": None}, False),  # of torch 2.9, which does not tell how many have ended
        ({"unfinished": {"0: all": [[6, "all_reduce"], [7, "all_reduce"]]}}, False),  # it may wait for the sixth
    ],
)
def test_a_rank_that_waits_for_an_asynchronous_operation(status, is_found):
    waiting = direct(0, **{"stack": [OWN], "awaited": ["torch.distributed.Work.wait", None], **status})
    other = snapshot(1, call(how="SUM"), torch={"0: all": 6}, unfinished={})
    text = divergence([waiting, other], NOW)
    assert (text is not None) == is_found
    assert not is_found or "rank 0  torch.distributed.Work.wait  all    -    /job/train.py:9 in step  rank 1" in text


def test_a_collective_of_torch_on_one_rank_and_a_recorded_one_on_the_other():
    behind = snapshot(1, call(how="SUM"), torch={"0: all": 6}, unfinished={})
    text = divergence([direct(0), behind], NOW)
    assert text == (
        "the ranks wait for each other, and none of them can proceed:\n"
        "        collective                 ranks  how  line                     waits for\n"
        "rank 0  torch.distributed.barrier  all    -    /job/train.py:9 in step  rank 1\n"
        "rank 1  all_reduce                 all    SUM  /job/train.py:5 in step  rank 0"
    )
    inside = in_recorded_barrier(torch={"0: all": 7}, unfinished={"0: all": [[7, "all_reduce"]]})
    assert divergence([direct(0), inside], NOW) is not None


def test_different_collectives_of_torch_under_the_same_number():
    ranks = [direct(0, size=3), direct(1, name="all_reduce", size=3), direct(2, size=3)]
    text = divergence(ranks, NOW)
    assert re.search(r"ranks 0, 2  torch.distributed.barrier     all    /job/train.py:9 in step  rank 1\n", text)
    assert re.search(r"rank 1      torch.distributed.all_reduce  all    /job/train.py:9 in step  ranks 0, 2$", text)


@pytest.mark.parametrize(
    "other",
    [
        direct(1),  # the collective takes long
        direct(1, 8, unfinished={"0: all": [[7, "barrier"], [8, "barrier"]]}),  # it has begun the next one, too
        snapshot(1, torch={"0: all": 6}),  # computes
        snapshot(1, torch={"0: all": 6}, idle_for=50.0),  # sleeps
        direct(1, 3, torch={"0: all": 6, "1: [1, 2]": 3}, unfinished={"1: [1, 2]": [[3, "barrier"]]}),  # is late
        # began it without waiting, and waits elsewhere: in the store, or in another group
        snapshot(1, call(), torch={"0: all": 7}, unfinished={"0: all": [[7, "barrier"]]}),
        snapshot(
            1,
            call(group="[0, 1]"),
            stack=[DIRECT, call().line],
            torch={"0: all": 7},
            unfinished={"0: all": [[7, "barrier"]]},
        ),
    ],
)
def test_no_verdict_on_ranks_that_may_proceed_in_collectives_of_torch(other):
    ranks = [direct(0, size=3), replace(other, world_size=3), snapshot(2, size=3, torch={"0: all": 6, "1: [1, 2]": 2})]
    assert verdicts_on(ranks) == []


def verdicts_on(ranks):
    found = [departed(ranks, one.rank, NOW) for one in ranks] + [stopped(ranks, NOW), divergence(ranks, NOW)]
    return [text for text in found if text is not None]


@pytest.mark.parametrize(
    ("inner", "missing"),
    [
        ("distributed/fsdp/_fully_shard/_fsdp_collectives.py:9 in f", [2]),
        ("distributed/distributed_c10d.py:9 in b", [1, 2]),
    ],
)
def test_of_several_collectives_fsdp_may_wait_for_the_first_one_and_a_call_waits_for_the_last_one(inner, missing):
    unfinished = {"0: all": [[7, "all_gather"], [8, "all_gather"]]}
    waiting = direct(0, 8, size=3, stack=[INSIDE + inner, OWN], unfinished=unfinished)
    others = [snapshot(1, torch={"0: all": 7}, size=3), snapshot(2, torch={"0: all": 6}, size=3)]
    assert hang_report([waiting, *others], 0, NOW).missing == missing


def test_a_root_in_torch_that_may_leave_without_the_rank_that_waits_for_it():
    root = direct(0, name="broadcast_object_list", size=3, unfinished={"0: all": [[7, "broadcast"]]})
    waits = snapshot(1, call(group="[0, 1]"), size=3, torch={"0: all": 6})
    assert divergence([root, waits, snapshot(2, size=3, torch={"0: all": 6})], NOW) is None
    every = direct(0, size=3)
    assert divergence([every, waits, snapshot(2, size=3, torch={"0: all": 6})], NOW) is not None


@pytest.mark.parametrize("counts", [{"0: all": 6}, {"0: all": 7}])
def test_a_rank_that_stopped_or_left_while_another_one_waits_in_torch(counts):
    is_behind = counts["0: all"] < 7
    ended = snapshot(1, engines=[], ended=[ENDED], torch=counts)
    assert (stopped([direct(0), ended], NOW) is not None) == is_behind
    left = snapshot(1, left=LEFT, torch=counts)
    text = "rank 1 has left the run without an error; it had called no collective of camshaft; it last reported "
    text += f"epoch 2, iteration 7 of the run at {TRAIN}; rank 0 waits for it in torch.distributed.barrier at {OWN}"
    assert departed([direct(0), left], 0, NOW) == ((1, text) if is_behind else None)


@pytest.mark.parametrize(("collective", "is_found"), [("all_reduce", True), ("broadcast", False)])
def test_a_short_history_tells_what_a_rank_cannot_have_begun_before(collective, is_found):
    waiting = snapshot(0, call(collective=collective, group="[0, 1]"), size=3)
    later = [call(number, since=number, ended=number + 0.5) for number in range(70, 90)]
    other = snapshot(1, *later, call(90), size=3)
    third = snapshot(2, *later, call(90), size=3)
    assert (divergence([waiting, other, third], NOW) is not None) == is_found  # the root may have left before


ENDED = {"line": TRAIN, "number": 1, "how": "terminate() at /job/train.py:33 in stop", "epoch": 2, "iteration": 7}


def test_a_rank_that_terminated_alone():
    ranks = [snapshot(0, call()), snapshot(1, engines=[], ended=[ENDED])]
    assert stopped(ranks, NOW) == (
        "rank 1 stopped alone in epoch 2, iteration 7 of the run at /job/train.py:30 in main: terminate() at "
        "/job/train.py:33 in stop; rank 0 still waits for it in all_reduce at /job/train.py:5 in step. To stop all "
        "ranks after the same iteration, call camshaft.handlers.stop_together(engine)"
    )
    swallowed = {**ENDED, "how": "ValueError: bad at /job/train.py:34 in step"}
    text = stopped([snapshot(0, call()), snapshot(1, engines=[], ended=[swallowed])], NOW)
    assert "ValueError: bad at /job/train.py:34 in step" in text
    assert "stop_together" not in text


@pytest.mark.parametrize(
    ("waiting", "ended"),
    [
        (snapshot(0, call(since=NOW - 1)), snapshot(1, engines=[], ended=[ENDED])),
        (snapshot(0, call(), engines=[run(iteration=6)]), snapshot(1, engines=[], ended=[ENDED])),
        (snapshot(0, call(), engines=[run(EVALUATE)]), snapshot(1, engines=[], ended=[ENDED])),  # ran it for itself
        (snapshot(0, call(), engines=[run(number=2)]), snapshot(1, engines=[], ended=[ENDED])),
        (snapshot(0, call()), snapshot(1, ended=[ENDED])),  # still in its handlers
        (snapshot(0, call()), snapshot(1, call(ended=91.0), engines=[], ended=[ENDED])),  # waits for others
        (snapshot(0, call()), snapshot(1, engines=[], ended=[{**ENDED, "how": activity.TOGETHER}])),
    ],
)
def test_ranks_may_terminate_while_nobody_waits_for_them_there(waiting, ended):
    assert stopped([waiting, ended], NOW) is None


def failure(error, time, where="in handler 'log' on ITERATION_COMPLETED, epoch 2, iteration 1041"):
    return {"error": error, "where": where, "traceback": "", "time": time}


def test_the_first_failure_is_the_cause_and_lost_connections_are_its_consequences():
    closed = failure("RuntimeError: Connection closed by peer [127.0.0.1]:29500", 89.0)
    ranks = [
        snapshot(0, call(), size=4),
        snapshot(1, failure=closed, size=4),
        snapshot(2, failure=failure("KeyError: 'a'", 92.0), size=4),
        snapshot(3, failure=failure("ValueError: bad", 91.0), size=4),
    ]
    text = "rank 3 failed first: ValueError: bad, in handler 'log' on ITERATION_COMPLETED, epoch 2, iteration 1041"
    assert departed(ranks, 0, NOW) == (3, text)
    assert departed(ranks, 3, NOW) is None


def test_a_process_that_disappeared():
    gone = snapshot(1, call(ended=91.0), is_alive=False, engines=[run(iteration=12)])
    text = (
        "rank 1's process was killed or crashed; its last call of camshaft was all_reduce at /job/train.py:5 in step; "
        "it last reported epoch 2, iteration 12 of the run at /job/train.py:30 in main"
    )
    assert departed([snapshot(0), gone], 0, NOW) == (1, text)
    in_torch = snapshot(1, call(ended=91.0, collective="torch.distributed.barrier"), is_alive=False)
    assert "; its last call was torch.distributed.barrier at " in departed([snapshot(0), in_torch], 0, NOW)[1]


def test_a_process_that_crashed_in_a_collective_of_torch_is_shown_with_the_calls_of_the_others():
    stack = [AUTOGRAD, "/job/train.py:9 in step"]
    crashed = snapshot(1, call(ended=91.0), is_alive=False, stack=stack, crash="Aborted")
    assert departed([snapshot(0, call(2)), crashed], 0, NOW)[1] == (
        "rank 1's process was killed or crashed (Aborted); it was in backward (gradient reduction) at "
        "/job/train.py:9 in step; rank 0's last call was all_reduce at /job/train.py:5 in step"
    )
    elsewhere = snapshot(1, call(ended=91.0), is_alive=False, stack=["/job/train.py:9 in step"], crash="Aborted")
    assert departed([snapshot(0), elsewhere], 0, NOW)[1].endswith("(Aborted); it was at /job/train.py:9 in step")


def test_who_died_first_a_rank_that_failed_or_one_that_its_launcher_killed():
    failed, early, late = failure("ValueError: bad", 90.0), {"time": 85.0}, {"time": 89.8}
    ranks = [snapshot(0, size=3), snapshot(1, failure=failed, size=3)]
    assert departed([*ranks, snapshot(2, is_alive=False, size=3, **early)], 0, NOW)[0] == 2
    assert departed([*ranks, snapshot(2, is_alive=False, size=3, **late)], 0, NOW)[0] == 1


def test_a_rank_that_left_is_the_cause_for_those_that_wait_for_it_also_indirectly():
    pair = call(group="[0, 1]", line="/job/train.py:8 in pair")
    left = snapshot(2, left=LEFT, is_alive=False, size=3)
    ranks = [snapshot(0, pair, size=3), snapshot(1, call(), size=3), left]
    rank, text = departed(ranks, 0, NOW)
    assert rank == 2
    assert text.startswith("rank 2 has left the run without an error; it had called no collective of camshaft")
    assert text.endswith("; rank 1 waits for it in all_reduce at /job/train.py:5 in step")
    assert departed([snapshot(0, size=3), snapshot(1, size=3), left], 0, NOW) is None


@pytest.mark.parametrize(
    ("other", "text", "is_alarm"),
    [
        (
            {"doing": "is saving or loading a checkpoint"},
            "rank 1 is saving or loading a checkpoint at /job/train.py:20",
            False,
        ),
        ({"doing": "is compiling"}, "rank 1 is compiling", False),
        ({"doing": "is paused in a debugger"}, "rank 1 is paused in a debugger", False),
        ({"doing": "is waiting for the workers of its data loader"}, "rank 1 is waiting for the workers", True),
        (
            {"engines": [run(), run(EVALUATE)]},
            "rank 1 is evaluating at /job/train.py:20 in main, in epoch 2, iter",
            False,
        ),
        (
            {"engines": [run(), run(EVALUATE)], "idle_for": 60.0},
            "rank 1 is evaluating at /job/train.py:20 in main, in epoch 2, iter",
            True,
        ),
        (
            {"idle_for": 8.0},
            "rank 1 is at /job/train.py:20 in main, in epoch 2, iteration 7 of the run at /job/t",
            True,
        ),
        (
            {"time": 60.0},
            "rank 1 has not run any Python for 40 s: its process is stopped, or code of an extension",
            True,
        ),
        ({"left": LEFT}, "rank 1 has left the run without an error", True),
        ({"is_alive": False}, "rank 1's process was killed or crashed", True),
    ],
)
def test_the_report_of_a_hang_says_what_the_missing_rank_does(other, text, is_alarm):
    report = hang_report([snapshot(0, call()), snapshot(1, **other)], 0, NOW)
    assert report.text.startswith(
        f"rank 0 has been waiting for 10 s in all_reduce at /job/train.py:5 in step, for rank 1:\n  {text}"
    )
    assert report.text.endswith("\n    /job/train.py:20 in main")
    assert report.is_alarm == is_alarm


def test_a_rank_in_the_body_of_one_rank_first_is_no_alarm():
    waiting = snapshot(0, call(collective="one_rank_first", root="1", is_long=True))
    report = hang_report([waiting, snapshot(1)], 0, NOW)
    assert "rank 1 is in the body of one_rank_first at /job/train.py:20 in main" in report.text
    assert not report.is_alarm


def test_a_rank_that_evaluates_with_the_one_that_waits_is_an_alarm():
    both = [run(), run(EVALUATE)]
    assert hang_report([snapshot(0, call(), engines=both), snapshot(1, engines=both)], 0, NOW).is_alarm


def test_the_report_of_a_hang_follows_the_ranks_that_wait_themselves():
    pair = call(group="[1, 2]", line="/job/train.py:8 in pair")
    ranks = [snapshot(0, call(), size=4), snapshot(1, pair, size=4), snapshot(2, doing="is compiling", size=4)]
    report = hang_report(ranks, 0, NOW)
    assert "rank 1 waits for rank 2 in all_reduce at /job/train.py:8 in pair" in report.text
    assert "rank 2 is compiling" in report.text
    assert "rank 3 has not reported" in report.text
    assert report.is_alarm
    assert not hang_report([*ranks, snapshot(3, call(), size=4)], 0, NOW).is_alarm


def test_a_rank_that_does_not_wait_has_no_report():
    assert hang_report([snapshot(0), snapshot(1, call())], 0, NOW) is None


# --- this process ---------------------------------------------------------------------------------------------------


def test_the_status_tells_where_this_process_is():
    main, seen = threading.get_ident(), []
    engine = Engine(lambda engine, batch: seen.append(describe(main, seen[-1] if seen else {})))
    engine.run([0, 1])
    first, second = seen
    assert [one["engines"][0]["iteration"] for one in seen] == [1, 2]
    assert first["engines"][0]["line"] == f"{__file__}:{_line_of('engine.run([0, 1])')} in {_here()}"
    assert first["stack"][0].endswith("in describe")
    assert len(first["stack"]) <= 30
    assert second["time"] > first["time"]
    assert second["since"] == second["time"]
    assert describe(main, second)["engines"] == []
    json.dumps(second)


def _here():
    return sys._getframe(1).f_code.co_name


def _line_of(text):
    return next(k for k, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == text)


def test_time_without_cpu_and_without_changes_adds_up():
    entered, leave = threading.Event(), threading.Event()

    def wait():
        entered.set()
        leave.wait()

    def be_busy():
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    with ThreadPoolExecutor(1) as pool:
        try:
            entered.wait()
            time.sleep(0.2)
            first = pool.submit(describe, thread.ident, {}).result()
            time.sleep(0.5)
            pool.submit(be_busy).result()  # on the thread of the watcher, whose time does not count
            second = pool.submit(describe, thread.ident, first).result()
            be_busy()
            third = pool.submit(describe, thread.ident, second).result()
        finally:
            leave.set()
            thread.join()
    assert second["since"] == third["since"] == first["since"]
    assert second["cpu"] < 0.1 <= third["cpu"]
    assert third["idle_for"] == 0.0


def test_early_ends_are_in_the_status():
    engine = Engine(lambda engine, batch: engine.terminate())
    engine.run([0, 1], max_epochs=2)
    (*_, end) = describe(threading.get_ident(), {})["ended"]
    assert end["how"].startswith(f"terminate() at {__file__}")
    assert end["iteration"] == 1


@on_ranks(2)
def test_a_rank_that_waits_for_reductions_inside_backward():
    model = torch.nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    found, main, rank = [], threading.get_ident(), get_rank()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()

    def look():
        status = {}
        while status.get("idle_for", 0.0) < 1.5:
            time.sleep(0.4)
            status = describe(main, status)
        found.append(status)
        store.set(f"{rank}", "seen")

    store = dist.PrefixStore("look", dist.distributed_c10d._get_default_store())
    thread = threading.Thread(target=look)
    thread.start()
    if rank == 1:
        while not store.check(["0", "1"]):  # store.wait would keep the thread from using it
            time.sleep(0.2)
    model(torch.ones(2, 4)).sum().backward()
    thread.join()
    ((name, number),) = found[0]["torch"].items()
    assert name == "0: all"
    numbers = [None, None]
    dist.all_gather_object(numbers, (number, found[0]["unfinished"]))
    assert numbers[0][0] > numbers[1][0]
    missing = [[number, "all_reduce"] for number in range(numbers[1][0] + 1, numbers[0][0] + 1)]
    assert numbers[0][1] in (None, {"0: all": missing}), "torch 2.9 does not tell"
    assert numbers[1][1] in (None, {})
    if rank == 0:
        assert _operation_in(found[0]["stack"]) == BACKWARD


class Holder:
    """An object with an operation."""


@pytest.mark.jobs
@on_ranks(2)
def test_what_a_rank_waits_in_that_its_stack_does_not_tell():
    main, tensor, found, holder = threading.get_ident(), torch.ones(3), [], Holder()
    store = dist.PrefixStore("look", dist.distributed_c10d._get_default_store()).clone()

    def look():
        status = {}
        with mock.patch.object(diagnosis, "PATIENCE", 1.0):
            while status.get("idle_for", 0.0) < 1.5:
                time.sleep(0.4)
                status = describe(main, status)
        found.append(status["awaited"])
        store.set(f"seen/{len(found)}", "")

    def wait_for_collective():
        holder.work = dist.all_reduce(tensor, async_op=True)
        holder.work.wait()

    def wait_for_message():
        work = dist.irecv(tensor, 1)
        work.wait()

    waits = [wait_for_collective, wait_for_message, lambda: dist.recv(tensor, 1), lambda: dist.recv(tensor)]
    for number, wait in enumerate(waits, 1):
        if get_rank() == 0:
            thread = threading.Thread(target=look)
            thread.start()
            wait()
            thread.join()
        else:
            store.wait([f"seen/{number}"])
            dist.all_reduce(tensor) if number == 1 else dist.send(tensor, 0)
    if get_rank() == 0:
        work = ("torch.distributed.Work.wait", None) if sys.version_info >= (3, 11) else None
        assert found == [work, None, ("torch.distributed.recv", 1), ("torch.distributed.recv", None)]
