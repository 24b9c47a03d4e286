"""Diagnosis: no verdict on ranks that follow a correct program, and one that names the culprit otherwise."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from camshaft.distributed.coordination.diagnosis import departed, divergence, stopped
from camshaft.distributed.record import Entry, Snapshot

ROOTED_FROM, ROOTED_TO = ("broadcast", "scatter"), ("reduce", "gather")
AUTOGRAD = "/site-packages/torch/autograd/graph.py:979 in _engine_run_backward"
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
    kind: str = "call"  # or "backward", "async", "local backward", "busy", "idle"

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
    """

    def __init__(self, programs, seed, history=64):
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
        for key in [key for key, step in one.unfinished.items() if self.is_reduced(key, step)]:
            del one.unfinished[key]
        if one.left is not None or one.wakes > self.now:
            return
        if one.step is not None:
            if not self.can_leave(one):
                return
            if one.step.kind == "call":
                one.history[-1] = replace(one.history[-1], ended=self.now)
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
        step, name = one.step, self.name(one.step.ranks)
        if step.kind == "call":
            one.calls[name] += 1
            self.begun[name, one.calls[name]][one.rank] = step
            texts = (step.collective, step.how, step.root, step.value, step.line)
            number = one.history[-1].number + 1 if one.history else 1
            one.history.append(Entry(number, name, one.calls[name], *texts, self.now, None, False))
        if step.kind in ("call", "backward", "async"):
            for _ in range(3 if step.kind == "backward" else 1):
                key = self.torch_name(step.ranks)
                one.torch[key] += 1
                self.begun_in_torch[key, one.torch[key]][one.rank] = step
                one.unfinished[key, one.torch[key]] = step
        if step.kind in ("local backward", "busy", "idle"):
            one.wakes = self.now + self.random.choice((0.5, 8.0, 60.0))

    def can_leave(self, one):
        step = one.step
        if step.kind == "backward":
            return step not in one.unfinished.values()
        if step.kind != "call":
            return True
        name = self.name(step.ranks)
        here = self.begun[name, one.calls[name]]
        if not self.completes and len({other.call for other in here.values()}) > 1:
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
            "unfinished": dict(Counter(key for key, _ in one.unfinished)),
            "since": one.began,
            "cpu": 0.0,
            "idle_for": self.now - one.began if is_idle else 0.0,
            "left": one.left,
            "failure": None,
        }

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
        for key in [key for key, step in one.unfinished.items() if self.is_reduced(key, step)]:
            del one.unfinished[key]

    def has_ended(self):
        return all(one.left is not None for one in self.ranks)


def verdicts(job):
    seen, now = job.seen(), job.now
    found = [text for _, text in filter(None, (departed(seen, rank, now) for rank in range(job.size)))]
    return found + [text for text in (stopped(seen, now), divergence(seen, now)) if text is not None]


# --- programs -------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw, most=30):
    """Return what the ranks of a job do: all of them call the collectives of their groups in the same order."""
    size = draw(st.integers(2, 4))
    groups = [tuple(range(size))]
    if size > 2:
        groups += draw(st.lists(st.permutations(range(size)).map(lambda ranks: tuple(sorted(ranks[:2]))), max_size=3))
    steps = []
    for number in range(draw(st.integers(1, most))):
        line = f"/job/train.py:{number + 10} in main"
        kind = draw(st.sampled_from(("call",) * 8 + ("backward", "async", "local backward", "busy", "idle")))
        ranks = draw(st.sampled_from(groups))
        if kind != "call":
            ranks = groups[0] if kind != "async" else ranks
            who = ranks if kind in ("backward", "async") else draw(st.permutations(ranks))[: draw(st.integers(1, size))]
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
@given(programs(), st.integers(0, 2**32), st.sampled_from((4, 8, 64)))
def test_correct_programs_get_no_verdict(program, seed, history):
    job = Job(program, seed, history)

    def check():
        assert verdicts(job) == []

    job.run(check)
    assert job.has_ended()


@st.composite
def mistakes(draw):
    """Return programs of which one differs in one call, and the rank that makes the mistake."""
    program = draw(programs())
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
@given(mistakes(), st.integers(0, 2**32))
def test_once_nobody_can_proceed_the_verdict_names_the_line_of_the_rank_that_made_the_mistake(mistake, seed):
    program, culprit = mistake
    job = Job(program, seed)
    job.run()
    if job.has_ended() and not differ(job):
        return  # nobody needed the call
    found = verdicts(job)
    assert found, story(job)
    lines = {step.line for step in program[culprit] if step.kind in ("call", "backward")}
    if all(step.kind != "call" for step in program[culprit]):
        lines.add("it had not called any collective")
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
    return any(len({step.call for step in here.values()}) > 1 for here in job.begun.values())


def ranks_in(text):
    """Return the ranks that a text names, as in "rank 3" or "ranks 0-2, 5"."""
    found = set()
    for spans in re.findall(r"\branks? ([\d, -]*\d)", text):
        for span in spans.split(", "):
            first, _, last = span.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
