"""The watcher of a job: one thread per process that finds out whether the job can still proceed.

Once a second it writes the status of its rank into the record of this process, reads the records of the ranks on its
node, and announces a verdict if there is a proof. If ranks of a node wait, the first of them asks those of other nodes
through the store; each process answers for itself. Every rank raises the verdict, or the failure that came first.
"""

from __future__ import annotations

import dis
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread, get_ident, main_thread
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from camshaft import activity
from camshaft.activity import summary
from camshaft.distributed.backends.contract import Backend, Resource
from camshaft.distributed.failures import hang_reports, verdicts
from camshaft.distributed.failures.board import Board
from camshaft.distributed.failures.once import reporting
from camshaft.distributed.failures.record import Node, Record, Snapshot, remove
from camshaft.distributed.failures.status import PATIENCE, Observer, named, stack_of
from camshaft.distributed.failures.trace import Call, Calls, Found, Trace
from camshaft.distributed.failures.verdicts import Ranks
from camshaft.errors import MismatchError, RankDivergenceError, RankFailedError, RemoteTraceback, annotate
from camshaft.text import spans

PERIOD = 1.0  # seconds between two rounds
URGENT = 0.05  # the same while this rank waits to learn why an operation failed
PLACES = 10.0  # seconds that a rank has to look up the line of a call that has completed
ANSWER = 5.0  # seconds that a rank of another node has to answer; then the job is judged without it
# Seconds without a packet from the host of the store, whose kernel answers, after which it is taken for lost; torchrun
# waits as long for a heartbeat. Of other nodes, silence proves nothing: an extension may hold the GIL as long.
UNREACHABLE = 15.0
SHARING = 10.0  # seconds between two exchanges of shared values among nodes
AGAIN = 600.0  # seconds until a rank that still waits is reported again
_ABLE = 4.0  # age in seconds of the status of a rank that can ask for its node
_LONGEST_BREAK = 60.0  # seconds between two questions of the same rank
_LEARNING = 6.0  # seconds that a rank waits to learn why an operation failed, on a single node
_NOTICING = 0.5  # seconds until it is known on a node that one of its processes has ended
_TELLING = 10.0  # seconds that a rank that leaves waits at most until others know how; its threads may be blocked
_ENDING = 5.0  # seconds that its thread has to end
_RAISING = 2.0  # seconds that this rank has to raise a verdict before it is logged
_ORPHANED = 30.0  # seconds that a rank has to end once its torchrun was killed; torchrun itself allows as many
_MOST_NOTES, _LONGEST_TRACEBACK = 3, 8000
_MOST_KEYS = 16  # of a question
_RAISE = dis.opmap["RAISE_VARARGS"]
_MESSAGES = ("send", "recv", "isend", "irecv")  # functions of torch
_TRANSLATED = "camshaft_translated"  # attribute of an error that was looked at before
OUR_OWN = (RankDivergenceError, RankFailedError, NotImplementedError)
_LIBRARIES = tuple(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (activity, torch))
_TORCH, _OWN = _LIBRARIES[1], os.path.join(_LIBRARIES[0], "distributed", "")
_IN_TORCH = (
    "distributed" + os.sep,
    os.path.join("nn", "parallel", "distributed.py"),
    os.path.join("autograd", "graph.py"),
)

Exchange: TypeAlias = Callable[[dict[int, Any]], Any]
"""Runs on the watcher's thread; gets the values of the ranks, and returns that of this rank, to be written as JSON."""

logger = logging.getLogger("camshaft.distributed")


class Watcher(Resource):
    """Learns what becomes of other ranks, and whether this one can still proceed.

    Args:
        backend: of the job.
        record: of this rank; ``None`` if there is no space for it, then nothing is known of the ranks of this node.
        report_after: seconds that a rank waits in a collective until the log names the ranks that have not arrived.
        agent: process id of the torchrun that started this process, if any; this process ends if torchrun has ended.

    Attributes:
        board: what the ranks tell each other through the store.
        is_everywhere: whether every rank has a watcher, as in a job that is initialized; of a group that was adopted,
            some ranks may never use this package.
    """

    def __init__(
        self, backend: Backend, record: Record | None, report_after: float = 60.0, agent: int | None = None
    ) -> None:
        self._backend, self._record, self._agent = backend, record, agent
        self._rank, self._size = backend.topology.rank, backend.topology.world_size
        self._main = main_thread().ident or get_ident()
        self._wake = Event()
        self.board = Board(backend, self._wake.set, self._name_record)
        self._node = None if record is None else Node(record, backend.topology.local_world_size)
        self._trace = Trace(backend.calls)
        self._observer = Observer(self._trace, self._main)
        self._hangs = _Hangs(self._rank, report_after)
        self._nodes = _OtherNodes(self.board, self._rank, self._size)
        self._sharing = _Sharing(self.board, self._rank, self._size)
        self.is_everywhere = self._is_closed = False
        self._left: str | None = None
        self._failure: dict[str, Any] | None = None
        # by thread, operations that failed, and whose cause is not known yet
        self._lost: dict[int, dict[str, Any]] = {}
        self._final: dict[str, Any] | None = None
        self._local: dict[int, Snapshot] = {}  # what the records of this node said in the last round
        self._obeyed_at = self._end_at = self._gone_since = self._incomplete_since = math.inf
        self._completed: list[Any] | None = None  # group, number, and place of a call that differs
        self._has_told, self._has_verdict, self._has_raised = Event(), Event(), Event()
        self._thread = Thread(target=self._run, name="camshaft-watcher", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        activity.explainers.append(self.translate)
        if self._record is not None:
            try:
                self._record.catch_crashes()
            except OSError as error:
                logger.warning("the stack of a crash of rank %d will not be known: %s", self._rank, error)
        self.board.thread.start()
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------------------------

    def share(self, name: str, exchange: Exchange) -> None:
        """Exchange a value with the other ranks in each round, until :meth:`unshare`.

        Rank 0 gets the values of all ranks, those of other nodes up to 20 s late; the others get those of their node.
        """
        self._sharing.exchanges[name] = exchange

    def unshare(self, name: str) -> None:
        """Share a value no longer."""
        self._sharing.exchanges.pop(name, None)

    def add_calls(self, calls: Calls) -> None:
        """Watch also calls that torch does not record."""
        self._trace.own.append(calls)

    def fail(self, error: BaseException) -> BaseException:
        """Publish that an error ends this rank, before anything else; return the error to raise.

        It is another one if this rank only fails because another one has failed before.
        """
        found = self.translate(error)
        if found is not error and found.__traceback__ is None:
            found = found.with_traceback(error.__traceback__)
        if found is error and self._backend.job.verdict is None and self._failure is None and self._left is None:
            self._failure = _failure(error, self._rank)
            self._has_told.clear()
            is_known = self.board.decide(self._failure)
            self._wake.set()
            if self._thread.is_alive():
                until = time.monotonic() + _TELLING
                is_known.wait(_TELLING if self.board.responds else 0.0)
                self._has_told.wait(max(0.0, until - time.monotonic()))
        return found

    def translate(self, error: BaseException, ranks: frozenset[int] = frozenset()) -> BaseException:
        """Return the verdict in place of an error of a library in a collective, which only shows the consequences.

        What a user raises is returned at once: only an error that torch or the backend has raised counts, and only
        while this thread was in a collective.
        """
        if isinstance(error, OUR_OWN):
            self._has_raised.set()
            return error
        job = self._backend.job
        if self._is_closed or _TRANSLATED in vars(error) or not _is_of_backend(error, self._backend):
            return error
        vars(error)[_TRANSLATED] = True  # it is seen at several places on its way up
        if job.verdict is None:
            self._learn_why(error, ranks)
        if job.verdict is None and (text := self._hangs.last_text) is not None:
            annotate(error, text)
        return error if job.verdict is None else job.verdict()

    def _learn_why(self, error: BaseException, ranks: frozenset[int]) -> None:
        """Wait for a verdict if an error is that of an operation which has failed."""
        thread = get_ident()
        found = self._trace.read(time.monotonic(), is_urgent=True) or Found()
        call = next((one for one in reversed(found.calls) if one.thread in (0, thread)), None)
        if is_message := _is_of_message(error):
            call = None
        is_certain = isinstance(error, (dist.DistError, MismatchError, *self._backend.errors)) or _was_sent(error)
        ranks = verdicts.members(found.members.get(call.group, "")) if call else ranks or frozenset(range(self._size))
        lost = {
            "ranks": spans(ranks),
            "key": None if call is None else call[:2],
            "operation": "" if call is None else call.operation,
            "value": "" if call is None else call.value,
            **named(_lines(error.__traceback__), "" if call is None else call.operation),
        }
        # torch computes there, too
        may_have_failed = is_message or (call is not None and self._observer.may_have_failed(call))
        if not (is_certain or (may_have_failed and self._is_in_trouble(lost, ranks))):
            return
        self._lost[thread] = lost
        self._wake.set()
        has_others = self._backend.topology.local_world_size < self._size
        began = time.monotonic()
        while self._thread.is_alive() and not self._has_verdict.wait(URGENT):
            limit = PATIENCE if self.board.is_lost else _LEARNING + 2 * ANSWER * has_others
            if self._incomplete_since < math.inf:
                limit += PLACES
            if time.monotonic() > began + limit:
                if has_others and self.board.is_lost:
                    annotate(error, "the process that serves the store of the job has ended")
                break
            if isinstance(error, MismatchError) and call is not None and self._all_have_sent(call, ranks):
                break
        self._lost.pop(thread, None)

    def _all_have_sent(self, call: Call, ranks: frozenset[int]) -> bool:
        """Return whether all ranks of a group are known to have met in the same call, whatever their dtypes."""
        sent = [call.group, call.sequence, call.operation], call.size
        return all(
            rank in self._local and any((one[:3], one[4]) == sent for one in self._local[rank].status.get("calls", ()))
            for rank in ranks
        )

    def _is_in_trouble(self, lost: dict[str, Any], ranks: frozenset[int]) -> bool:
        """Return whether a rank is known, or in a moment, to have ended before a call, or to have lost its own."""
        until = time.monotonic() + (_NOTICING if len(ranks) <= self._backend.topology.local_world_size else PATIENCE)
        while time.monotonic() < until:
            local = {} if self._node is None else self._node.read(is_urgent=True)
            known = [one for rank, one in local.items() if rank in ranks and rank != self._rank]
            wait = verdicts.lost_call(self._rank, lost)
            ended = [one for one in known if verdicts.has_ended(one) and not verdicts.has_sent(one, wait)]
            if self._final or _first_final(known) or ended or any(one.status.get("lost") for one in known):
                return True
            if not self._thread.is_alive() or self._has_verdict.wait(URGENT):
                break
        return self._has_verdict.is_set()

    def reported_by(self) -> AbstractContextManager[int | None]:
        """Return a block in which this rank prints its error; it yields the rank of this machine that has, if any.

        The error of a rank is printed by itself, and a verdict by one of those that raise it.
        """
        final = self._final
        if not self._has_verdict.is_set() or final is None:
            return nullcontext()
        near = {} if self._node is None else self._node.read(is_urgent=True)
        if (failed := final.get("rank")) in near:
            return nullcontext(failed)
        return reporting(self.board.job, self._rank)

    def leave(self, how: str) -> None:
        """Publish how this rank leaves the job."""
        if self._left is None and self._thread.is_alive():
            self._has_told.clear()
            self._left = how
            self._wake.set()
            until = time.monotonic() + _TELLING
            self._has_told.wait(_TELLING)
            self.board.say_farewell(self._rank, self._size if self.is_everywhere else 0, until)

    def close(self) -> None:
        """Publish that this rank has left the job, and end the threads."""
        if self._is_closed:
            return
        with suppress(ValueError):
            activity.explainers.remove(self.translate)
        error = sys.exc_info()[1]
        self.leave("has left the run without an error" if error is None else f"has left with {summary(error)}")
        self._is_closed = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_ENDING)
        self.board.close()
        local = {} if self._node is None else self._node.read(is_urgent=True)
        others = [other for rank, other in local.items() if rank != self._rank]
        has_failed = self._failure is not None or self._backend.job.verdict is not None
        are_known = not self.is_everywhere or len(local) >= self._backend.topology.local_world_size  # or still connect
        is_last = not has_failed and are_known and all(map(verdicts.has_ended, others))
        if self._record is not None:
            self._record.close(keep=not is_last)  # of a job that failed the records are kept, for --inspect
        for other in others if is_last else ():
            remove(other.path)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        level = logging.WARNING
        while not self._is_closed:
            try:
                self.look(time.monotonic())
            except Exception:  # the job must not end because nobody watches it
                if self._is_closed:
                    break
                logger.log(level, "the watcher of rank %d could not look", self._rank, exc_info=True)
                level = logging.DEBUG  # log it once
            self._wake.wait(URGENT if self._lost or self._gone_since < math.inf else PERIOD)
            self._wake.clear()

    def look(self, now: float) -> None:
        """Write the status of this rank, read what is new, and judge: one round."""
        told = self._left, self._failure
        status = self._status(told, now)
        self._write(status)
        local = self._local = self._read(status)
        self._nodes.answer(local, now)
        if told == (self._left, self._failure):  # else, it has left or failed in this round
            self._has_told.set()
        self._final = self._final or self.board.final or _first_final(local.values())
        if self._final is not None:
            self._gone_since = math.inf  # nothing is left to decide, and this rank may save for minutes
        if self._agent is not None and os.getppid() != self._agent:
            self._end_without_agent(now)
        if told[0] is not None:
            return
        ranks = self._known_ranks(local, now) if self._final is None else None
        if ranks is not None:
            self._judge(ranks, local, now)
        if self._final is not None and status["final"] is None:
            self._write(status | {"final": self._final})  # the store may end with the next process
        self._obey(now)
        self._hangs.report(ranks, local, now)
        self._sharing.exchange(local, now)

    def _status(self, told: tuple[Any, Any], now: float) -> dict[str, Any]:
        """Return what this rank does, with the last calls if others want to know them."""
        is_urgent = any(told) or bool(self._lost) or self._gone_since < math.inf
        status = self._observer.describe(self._is_asked(self._local, now), is_urgent)
        status |= {"left": told[0], "failure": told[1], "lost": next(iter(tuple(self._lost.values())), None)}
        return status | {"final": self._final, "completed": self._completed, "shared": self._sharing.own}

    def _read(self, status: dict[str, Any]) -> dict[int, Snapshot]:
        """Return what the ranks of this node do; this one also without a record."""
        local = {} if self._node is None else self._node.read(is_urgent=bool(self._lost))
        own = Snapshot(Path(), "", self._rank, self._size, os.getpid(), True, "", status)
        return {self._rank: own, **local}

    def _judge(self, ranks: Ranks, local: dict[int, Snapshot], now: float) -> None:
        """End the job if it certainly cannot proceed, once what belongs to the text of the verdict is known."""
        found = verdicts.verdict(ranks.values(), now)
        if found is None:
            return
        is_ready = self._is_fresh(local, now) if found.kind == "failed" else self._is_complete(found, local, now)
        if is_ready:
            self._give_verdict(found)

    def _write(self, status: dict[str, Any]) -> None:
        if self._record is not None:
            self._record.write_status(status)

    def _name_record(self, job: str) -> None:
        """Allow other ranks to find the record of this one, also if it dies before its next round."""
        if self._record is not None:
            self._record.job = job

    def _is_asked(self, local: Mapping[int, Snapshot], now: float) -> bool:
        """Return whether a rank waits that may wait for this one."""
        return self._nodes.is_asked(now) or any(
            one.status.get("waits_for", 0.0) >= PATIENCE - PERIOD or one.status.get("lost") for one in local.values()
        )

    def _known_ranks(self, local: dict[int, Snapshot], now: float) -> Ranks | None:
        """Return what the ranks have called, as far as they are known; ``None`` until those of other nodes answer.

        These are asked by one rank of each node whose ranks wait.
        """
        waiting = {
            rank: one
            for rank, one in local.items()
            if (hang_reports.waited(one, now) > PATIENCE or one.status.get("lost"))
            and now - one.status.get("time", now) < _ABLE
        }
        if not waiting or len(local) == self._size:
            return local
        if self._rank != min(waiting):
            return None
        host = self.board.host
        if now - self.board.silent_since > UNREACHABLE and host is not None and host not in local:
            return local | {host: _departed(host, self._size)}
        if self.board.usable_store is None:
            return local
        lost = [one.status["lost"] for one in waiting.values() if one.status.get("lost")]
        keys = [wait.key for one in waiting.values() for wait in verdicts.waits_of(one)]
        keys += [tuple(one["key"]) for one in lost if one["key"]]
        longest = max(hang_reports.waited(one, now) for one in waiting.values())
        pause = PERIOD if lost else min(max(longest / 2, PERIOD), _LONGEST_BREAK)
        if longest < self._hangs.after:
            pause = min(pause, max(self._hangs.after - longest, PERIOD))  # when a report is due
        ranks = self._nodes.ask(local, list(dict.fromkeys(keys)), pause, now)
        if ranks is not None and self.is_everywhere and lost:
            gone = set(range(self._size)) - ranks.keys()  # the job fails for want of them, whatever they do
            ranks = {**ranks, **{rank: _departed(rank, self._size) for rank in gone}}
        return ranks

    def _is_fresh(self, local: dict[int, Snapshot], now: float) -> bool:
        """Return whether the ranks have reported since one was found gone: their calls may be the reason."""
        gone = [one for one in local.values() if not one.is_alive and not one.status.get("left")]
        # later than the status of this round, which was taken before the records were read
        self._gone_since = min(self._gone_since, time.monotonic()) if gone else math.inf
        alive = (one for one in local.values() if not verdicts.has_ended(one))
        reported = min((one.status.get("time", now) for one in alive), default=now)
        return not gone or reported > self._gone_since or now - self._gone_since > _ABLE

    def _is_complete(self, found: verdicts.Verdict, local: dict[int, Snapshot], now: float) -> bool:
        """Return whether the line of each call is known, as far as its rank, which judges too, can look it up."""
        unknown = [call for call in found.unknown if not verdicts.has_ended(local.get(call[0], local[self._rank]))]
        if not unknown or len(local) < self._size:
            return True
        self._incomplete_since = min(self._incomplete_since, now)
        for rank, group, sequence in unknown:
            if rank == self._rank and self._completed is None:
                self._completed = [group, sequence, named(self._trace.stack_of(group, sequence))]
                self._wake.set()
        return now - self._incomplete_since > PLACES

    def _give_verdict(self, verdict: verdicts.Verdict) -> None:
        final = {"kind": verdict.kind, "text": verdict.text, "traceback": ""}
        self.board.decide(final).wait(PERIOD)
        self._final = self.board.final or final

    def _end_without_agent(self, now: float) -> None:
        """Announce that torchrun has ended before its workers; if this process is still running later, end it."""
        self._end_at = min(self._end_at, now + _ORPHANED)
        if now >= self._end_at:
            logger.error("rank %d exits: torchrun has ended %g s ago, and this process has not", self._rank, _ORPHANED)
            os._exit(1)  # the main thread may never return to Python
        if not self.board.is_watched() and self._final is None:  # else, a checkpoint may be in progress
            text = f"torchrun (process {self._agent}), which had started rank {self._rank}, was killed"
            self._give_verdict(verdicts.Verdict("failed", text))

    def _obey(self, now: float) -> None:
        """Make this rank raise what was announced; log it if that takes a while."""
        job = self._backend.job
        if (final := self._final) is None or self._failure is not None:
            return
        if job.verdict is None:

            def raised() -> RuntimeError:
                self._has_raised.set()
                return _error(final)

            job.verdict = raised
            self._obeyed_at = now
            self._has_verdict.set()
            self._backend.release()
            for engine in tuple(activity.running):
                engine.raise_soon(_error(final))
        elif now - self._obeyed_at > _RAISING and not self._has_raised.is_set():
            self._has_raised.set()
            logger.error("%s", final["text"])


class _OtherNodes:
    """Questions to the ranks of all nodes, and their answers, which one rank of each node reads whose ranks wait.

    Args:
        board: of the job.
        rank: of this process.
        size: number of ranks of the job.
    """

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self._board, self._rank, self._size = board, rank, size
        self._seen: tuple[int, float] = 0, math.inf  # the last question, and when it was seen
        self._answered = 0
        self._asked: tuple[int, float] | None = None  # the question whose answers are read, and since when
        self._last_number = 0  # of the question that was last read
        self._answers: dict[int, Snapshot] = {}
        self._next = self._next_reading = 0.0

    @property
    def number(self) -> int:
        """Number of the last question."""
        return 0 if self._board.query is None else int(self._board.query["number"])

    def is_asked(self, now: float) -> bool:
        """Return whether a rank has asked what the others have called."""
        if self.number != self._seen[0]:
            self._seen = self.number, now
        return now - self._seen[1] < ANSWER

    def answer(self, local: dict[int, Snapshot], now: float) -> None:
        """Answer the last question for this rank, and for those of its node that cannot, and say how this one leaves.

        Args:
            local: what the ranks of this node have written, this one after :meth:`is_asked`.
            now: the time.
        """
        own, (number, since) = local.get(self._rank), self._seen
        if own is None:
            return
        if not own.status.get("left"):
            is_early = "calls" not in own.status and now - since < ANSWER - 2 * PERIOD
            if number == self._answered or is_early:
                return
        self._answered = number
        keys, content = {tuple(key) for key in (self._board.query or {}).get("keys", ())}, []
        for one in local.values():
            is_able = not verdicts.has_ended(one) and now - one.status.get("time", now) < _ABLE
            if one is not own and is_able:
                continue
            status = one.status | {"calls": [call for call in one.status.get("calls", ()) if tuple(call[:2]) in keys]}
            if status.get("waits"):
                status.pop("stack", None)  # those of the ranks that others wait for are enough
            content.append(asdict(_shifted(replace(one, status=status), -now)))
        self._board.write_place("answer", {"number": number, "ranks": content})

    def ask(self, local: dict[int, Snapshot], keys: list[Any], pause: float, now: float) -> Ranks | None:
        """Ask all ranks, unless another one has; return what they have called once all have had the time to answer.

        Args:
            local: the ranks of this node.
            keys: groups and numbers of the calls to ask for.
            pause: seconds until the next question.
            now: the time.
        """
        self._next = min(self._next, now + pause)  # it may have become urgent
        if self._asked is None or self._asked[0] < self.number:
            if self.number > self._last_number and now - self._seen[1] < ANSWER:
                self._asked, self._last_number, self._answers = (self.number, now), self.number, {}
            elif now >= self._next:
                self._next = now + pause
                before = "-" if self._board.query is None else json.dumps(self._board.query)
                query = json.dumps({"number": 1 + self.number, "keys": keys[:_MOST_KEYS]})
                self._board.submit(lambda store: store.compare_set("query", before, query))
            return None
        if now - self._asked[1] < ANSWER and len(self._answers | local) < self._size:
            if now >= self._next_reading:  # each reading wakes this thread
                self._next_reading = now + PERIOD / 2
                self._board.read_places("answer", self._receive)
            return None
        self._asked = None
        return self._answers | local

    def _receive(self, found: list[Any]) -> None:
        now = time.monotonic()
        for answer in found:
            for item in answer["ranks"]:
                one = _shifted(Snapshot(**{**item, "path": Path(item["path"])}), now)
                if answer["number"] == self._last_number or verdicts.has_ended(one):
                    self._answers = self._answers | {one.rank: one}


class _Sharing:
    """Values that ranks exchange in each round.

    Args:
        board: of the job.
        rank: of this process.
        size: number of ranks of the job.
    """

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self._board, self._rank, self._size = board, rank, size
        self.exchanges: dict[str, Exchange] = {}
        self.own: dict[str, Any] = {}  # values of this rank, by name
        self._values: dict[str, dict[int, Any]] = {}  # of other nodes, by name and rank
        self._next = 0.0

    def exchange(self, local: dict[int, Snapshot], now: float) -> None:
        """Pass the values of the ranks to who compares them: those of this node, and on rank 0 all of them."""
        alive = {rank: one for rank, one in local.items() if not verdicts.has_ended(one)}
        near = {rank: one.status["shared"] for rank, one in alive.items() if one.status.get("shared")}
        if self.exchanges and len(local) < self._size and now >= self._next:
            self._next = now + SHARING
            self._board.write_place("shared", [self._rank, self.own])
            if self._rank == 0:
                self._board.read_places("shared", self._receive)
        own = {}
        for name, exchange in tuple(self.exchanges.items()):
            known = {rank: values[name] for rank, values in near.items() if name in values}
            try:
                value = exchange(self._values.get(name, {}) | known)
            except Exception:
                logger.warning("what compares %s failed", name, exc_info=True)
                continue
            if value is not None:
                own[name] = value
        self.own = own

    def _receive(self, found: list[Any]) -> None:
        self._values = {}
        for rank, values in found:
            for name, value in values.items():
                self._values.setdefault(name, {})[rank] = value


class _Hangs:
    """Logs what this rank waits for, if it is the first that is known to have waited for long.

    Args:
        rank: of this process.
        after: seconds that it has waited.

    Attributes:
        last_text: the last report, while this rank waits.
    """

    def __init__(self, rank: int, after: float) -> None:
        self._rank, self.after = rank, after
        self.last_text: str | None = None
        self._call: Any = None
        self._next = 0.0
        self._complete_since = 0.0  # when all ranks that this one waits for had arrived

    def report(self, ranks: Ranks | None, local: dict[int, Snapshot], now: float) -> None:
        """Log a report if it is time, and the ranks of other nodes have just answered."""
        own = local.get(self._rank)
        waited, shortest = 0.0 if own is None else hang_reports.waited(own, now), min(PATIENCE, self.after)
        if waited < shortest:
            self._next, self._complete_since, self._call = 0.0, now, None
            if own is None or not own.status.get("lost"):
                self.last_text = None
            return
        if ranks is None:
            return
        able = (one for rank, one in ranks.items() if rank < self._rank and not hang_reports.is_stale(one, now))
        is_first = all(hang_reports.waited(one, now) < shortest for one in able)
        if not is_first or (waited < self.after and self.last_text is not None):
            return
        report = hang_reports.hang_report(ranks, self._rank, now)
        if report is None:
            return
        if self._call != report.call:  # nobody looked between the two waits
            self._call, self._next = report.call, 0.0
        self.last_text = report.text
        if report.missing:
            self._complete_since = now
        elif now - self._complete_since < self.after:  # the last rank has arrived, and the operation may take a while
            return
        if waited >= self.after and now >= self._next:
            self._next = now + AGAIN
            logger.log(logging.WARNING if report.is_alarm else logging.INFO, "%s", report.text)


def _failure(error: BaseException, rank: int) -> dict[str, Any]:
    """Describe an error for the other ranks."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    lines = [f"at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}"] if own else []
    what = summary(error)[:_LONGEST_TRACEBACK]
    where = ", ".join([*getattr(error, "__notes__", ())[:_MOST_NOTES], *lines])[-_LONGEST_TRACEBACK:]
    return {
        "kind": "failed",
        "rank": rank,
        "error": what,
        "where": where,
        "text": f"rank {rank} failed first: {what}, {where}",
        "traceback": "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
    }


def _is_of_backend(error: BaseException, backend: Backend) -> bool:
    """Return whether torch's collectives, or the backend, have raised an error, and not a user or this package."""
    if isinstance(error, (MismatchError, *backend.errors)):
        return True
    trace = _innermost(error)
    if not isinstance(error, RuntimeError) or trace is None:
        return False
    path = trace.tb_frame.f_code.co_filename
    if path.startswith(_OWN):  # which calls the backend, and raises errors of its own
        return isinstance(error, dist.DistError) or not _has_raised(trace)
    return path.startswith(_TORCH) and path.removeprefix(_TORCH).startswith(_IN_TORCH)


def _is_of_message(error: BaseException) -> bool:
    """Return whether an error comes from a message, which torch does not record: from the wait, or as it is sent."""
    trace = _innermost(error)
    is_sent = trace is not None and trace.tb_frame.f_code.co_name in _MESSAGES
    return not isinstance(error, (dist.DistError, MismatchError)) and (is_sent or _is_own(trace))


def _was_sent(error: BaseException) -> bool:
    """Return whether an error comes from the wait for a call, and not from the check of its arguments."""
    trace = _innermost(error)
    works = () if trace is None else (one for one in trace.tb_frame.f_locals.values() if isinstance(one, dist.Work))
    return _is_own(trace) or any(True for _ in works)


def _is_own(trace: TracebackType | None) -> bool:
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN)


def _innermost(error: BaseException) -> TracebackType | None:
    """Return where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _has_raised(trace: TracebackType) -> bool:
    """Return whether a frame executed a ``raise`` statement, and not a call of compiled code."""
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def _lines(trace: TracebackType | None) -> list[str]:
    """Return where an error was raised, and the stack of this thread from there outwards, innermost first."""
    raised = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(trace)]
    return raised[::-1] + stack_of(sys._getframe(1))[0]


def _first_final(ranks: Any) -> dict[str, Any] | None:
    """Return what ends the job, as far as the ranks of this node know, in case the store has ended."""
    known = (one.status.get("final") or one.status.get("failure") for one in ranks)
    return next((final for final in known if final), None)


def _error(final: dict[str, Any]) -> RuntimeError:
    """Return a new error for a verdict or a failure."""
    if final["kind"] == "diverged":
        return RankDivergenceError(final["text"])
    error = RankFailedError(final["text"])
    error.__cause__ = RemoteTraceback(final["traceback"]) if final["traceback"] else None
    return error


def _departed(rank: int, size: int) -> Snapshot:
    return Snapshot(Path(), "", rank, size, 0, False, "", {"left": verdicts.NO_ANSWER})


def _shifted(one: Snapshot, by: float) -> Snapshot:
    """Move the times in a snapshot, which mean nothing on another machine."""
    status = dict(one.status)
    if "time" in status:
        status["time"] += by
    if "waits" in status:
        status["waits"] = [wait | {"began": wait["began"] + by} for wait in status["waits"]]
    return replace(one, status=status)
