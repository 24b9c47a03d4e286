"""The watcher of a job: one thread per process through which ranks learn of each other outside of collectives.

Once a second it writes the status of its rank into the flight record, and reads the records of the ranks on its node.
The lowest of them, the leader, also reads what ranks have announced in the store of the job, with one request, for the
others to read in its record. What a rank announces, it appends to the store itself.

The leader also judges: if a rank has failed or nobody can proceed, it announces a verdict, and every rank raises it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Event, Lock, Thread, get_ident, main_thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from camshaft import activity
from camshaft.activity import summary
from camshaft.distributed.backend import Backend, Resource
from camshaft.distributed.connections import connections_to, fail_if_silent, is_local, server_of
from camshaft.distributed.coordination import diagnosis
from camshaft.distributed.coordination.waiting import store_at
from camshaft.distributed.record import STACKS, Entry, Record, Snapshot, find, read, remove
from camshaft.errors import MismatchError, RankDivergenceError, RankFailedError, RemoteTraceback, annotate

PERIOD = 1.0  # seconds between two rounds
URGENT = 0.05  # the same while this rank waits to learn why an operation failed
PATIENCE = 3.0  # seconds that a rank waits in a collective before its node asks why
_SURE = 1.0  # the same in a job in which values did not belong together
COMPARISON = 2.0  # seconds between two comparisons of calls that blocked nobody
ANSWER = 4.0  # seconds that another node has to answer; then a rank is judged without it
LOST = 60.0  # seconds without any answer after which a node is taken for lost: an extension may hold the GIL as long
UNREACHABLE = 15.0  # the same for the host of the store, whose kernel answers; torchrun waits as long for a heartbeat
SHARING = 10.0  # seconds between two exchanges of shared values among nodes
AGAIN = 600.0  # seconds until a rank that still waits is reported again
_SILENCE = 5.0  # seconds without a packet from the host of the store after which a request fails
_SEARCH = 10.0  # seconds between two searches for records of more ranks than are known to be on this node
_LONGEST_BREAK = 60.0  # seconds between two questions of the same rank
_LEARNING = 6.0  # seconds that a rank waits to learn why an operation failed
_TELLING = 2.0  # seconds that a rank that leaves has to publish how
_ENDING = 5.0  # seconds that its thread has to end, which holds the store
_ANSWERING = 0.5  # seconds that a process has to write its stacks
_ORPHANED = 30.0  # seconds that a rank has to end once its torchrun was killed; torchrun itself allows as many
_DUMP = getattr(signal, "SIGRTMAX", 1) - 1  # a signal that nobody uses
_KEPT = 50  # announcements that a record repeats
_MOST_NOTES, _LONGEST_TRACEBACK = 3, 8000
_FINAL = ("failure/", "verdict")
_NO_ANSWER = "does not answer, nor does its node"
_BESIDE_STORE = "beside store"  # topic of a rank on the host of the store
_IS_SILENT = re.compile("timed out|no route to host|unreachable|host is down", re.IGNORECASE)  # else, it has answered
_UNEXPLAINED = "camshaft_unexplained"  # attribute of an error for which this rank has waited without learning more
OUR_OWN = (RankDivergenceError, RankFailedError, NotImplementedError)
_LOST = re.compile("connection|socket|peer|timed? ?out|broken pipe|closed|abort|nccl|released|left", re.IGNORECASE)
_LIBRARIES = tuple(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (activity, torch))

Callback: TypeAlias = Callable[[], float]
"""Runs on the watcher's thread and returns the seconds until it wants to run again; infinity for never."""

Exchange: TypeAlias = Callable[[dict[int, Any]], Any]
"""Runs on the watcher's thread; gets the values of the ranks, and returns that of this rank, to be written as JSON."""

logger = logging.getLogger("camshaft.distributed")


class Watcher(Resource):
    """Learns what other ranks announce, and whether this one can still proceed.

    If the store is lost, all callbacks are called once more, and their own requests to the store fail.

    Args:
        backend: of the job.
        record: of this rank; ``None`` if there is no space for it, then nothing is known of the ranks of this node.
        report_after: seconds that a rank waits in a collective until the log names the ranks that have not arrived.
        agent: process id of the torchrun that started this process, if any; this process ends if torchrun has ended.

    Attributes:
        has_connected: set once the record names the job, so that the other ranks find it, even if this one then dies.
        is_everywhere: whether every rank has a watcher, as in a job that is initialized; of a group that was adopted,
            some ranks may never use this package.
    """

    def __init__(
        self, backend: Backend, record: Record | None, report_after: float = 60.0, agent: int | None = None
    ) -> None:
        self._backend, self._record, self._report_after = backend, record, report_after
        self._rank, self._size = backend.topology.rank, backend.topology.world_size
        self._main = main_thread().ident or get_ident()
        self._agent, self._end_at = agent, math.inf
        self._store: Store | None = None
        self._is_lost = self._is_closed = self._is_beside_store = False
        self._silent_since = math.inf  # while the host of the store does not answer
        self._is_blocked = False  # while the process that serves it does not
        self._question: Thread | None = None  # to that process
        self.has_connected, self.is_everywhere = Event(), False
        self._callbacks: dict[str, Callback] = {}
        self._exchanges: dict[str, Exchange] = {}
        self._place = ""  # of this node's values in the store
        self._values: dict[str, dict[int, Any]] = {}  # of other nodes, by name and rank
        self._next_sharing = 0.0
        self._news: dict[str, Any] = {}  # by topic, in the order of their announcement
        self._num_read = 0  # entries of the store's list
        self._listed: set[str] = set()  # topics of these entries
        self._answered: set[str] = set()  # queries
        self._outgoing: deque[tuple[str, Any]] = deque()
        self._status: dict[str, Any] = {}
        self._left: str | None = None
        self._failure: dict[str, Any] | None = None
        # what the last rounds have found, since when, and whether from calls that differ, which nothing disproves
        self._suspicion: tuple[str, float, bool] | None = None
        self._query: tuple[str, float] | None = None
        self._elsewhere: tuple[dict[int, Snapshot], float] = {}, 0.0  # what other nodes answered last, and when
        self._silent: dict[int, float] = {}  # ranks that have not answered, and since when
        self._next_query = self._next_report = self._next_comparison = 0.0
        self._last_report: diagnosis.Report | None = None  # while this rank waits, and until an error is explained
        self._complete_since = 0.0  # when all ranks that this one waits for had arrived
        self._num_waits = 0  # for an explanation, on other threads
        self._has_mismatch = False  # the error to be explained is one of values that do not belong together
        self._has_told, self._has_verdict = Event(), Event()
        self._failed_level = logging.WARNING
        self._lock = Lock()
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._sleeper = select.poll()
        self._sleeper.register(self._woken, select.POLLIN)
        self._foreign: set[Path] = set()  # records of other jobs
        self._paths: list[Path] = []  # records of this job
        self._next_search = 0.0
        self._siblings: dict[int, int] = {}  # rank -> descriptor that is readable once the process has ended
        self._thread = Thread(target=self._run, name="camshaft-watcher", daemon=True)

    @classmethod
    def of(
        cls, backend: Backend, record: Record | None = None, report_after: float = 60.0, agent: int | None = None
    ) -> Watcher:
        """Return the watcher of a job, which is started on first use."""
        job = backend.job
        if not job.has(Watcher):
            watcher = job.resource(Watcher, backend, record, report_after, agent)
            activity.explainers.append(watcher.explained)
            watcher._thread.start()
        return job.resource(Watcher)

    # --- announcements ---------------------------------------------------------------------------------------

    def watch(self, topic: str, callback: Callback) -> None:
        """Call back once a topic has been announced, by any rank, also if that was before."""
        self._callbacks[topic] = callback
        if topic in self._news:
            self._wake()

    def forget(self, topic: str) -> None:
        """Do not call back any more; a call that is in progress ends first."""
        with self._lock:
            self._callbacks.pop(topic, None)

    def announce(self, topic: str, content: Any = None) -> None:
        """Announce a topic to all ranks, including this one, which learns of it at once."""
        if topic not in self._news:
            self._news[topic] = content
            self._outgoing.append((topic, content))
        self._has_told.clear()
        self._wake()

    def share(self, name: str, exchange: Exchange) -> None:
        """Exchange a value with the other ranks in each round, until :meth:`unshare`.

        Rank 0 gets the values of all ranks, those of other nodes up to 20 s late; the others get those of their node.
        """
        self._exchanges[name] = exchange

    def unshare(self, name: str) -> None:
        """Share a value no longer."""
        self._exchanges.pop(name, None)

    # --- failures --------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> BaseException:
        """Publish that an error ends this rank, before anything else; return the error to raise.

        It is another one if this rank only fails because another one has failed before.
        """
        found = self.explained(error)
        if found is not error and found.__traceback__ is None:
            found = found.with_traceback(error.__traceback__)
        if found is error and self._backend.job.verdict is None and self._failure is None and self._left is None:
            self._failure = _failure(error, self._rank)
            self.announce(f"failure/{self._rank}", self._failure)
            self._has_told.wait(_TELLING)
            if self._rank == 0 and len(self._local()) < self._size:
                time.sleep(2 * PERIOD)  # the store may end with this process: let the other nodes read it
        return found

    def explained(self, error: BaseException) -> BaseException:
        """Return the verdict in place of an error of a library that only reports a closed connection."""
        job = self._backend.job
        self._has_mismatch = isinstance(error, MismatchError)
        if not (isinstance(error, RuntimeError) or self._has_mismatch) or isinstance(error, OUR_OWN) or self._is_closed:
            return error
        is_lost = isinstance(error, dist.DistError) or _LOST.search(str(error))
        if job.verdict is None and (self._has_mismatch or is_lost) and _UNEXPLAINED not in vars(error):
            until = time.monotonic() + _LEARNING
            self._num_waits += 1
            self._wake()
            while time.monotonic() < until and (not self._has_mismatch or self._may_differ()):
                if self._has_verdict.wait(URGENT):
                    break
            self._num_waits -= 1
            if job.verdict is None:
                vars(error)[_UNEXPLAINED] = True  # it is explained at several places on its way up
                if self._last_report is not None:
                    annotate(error, self._last_report.text)
        return error if job.verdict is None else job.verdict()

    def _may_differ(self) -> bool:
        """Return whether other ranks may be in another call than this one; False only if that is certain."""
        local = self._local()
        running = [entry for entry in local[self._rank].entries if entry.ended is None] if self._rank in local else []
        return bool(running) and not (
            len(local) == self._size and all(diagnosis.has_made(one, running[-1]) for one in local.values())
        )

    def leave(self, how: str) -> None:
        """Publish how this rank leaves the job."""
        if self._left is None and self._thread.is_alive():
            self._left = how
            self._has_told.clear()
            self._wake()
            self._has_told.wait(_TELLING)

    def close(self) -> None:
        """Publish that this rank has left the job, and end the thread."""
        if self._is_closed:
            return
        with suppress(ValueError):
            activity.explainers.remove(self.explained)
        error = sys.exc_info()[1]
        self.leave("has left the run without an error" if error is None else f"has left with {summary(error)}")
        self._is_closed = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(_ENDING)
        if not self._thread.is_alive():
            self._disconnect()
        others = [other for rank, other in self._local().items() if rank != self._rank]
        has_failed = self._failure is not None or self._backend.job.verdict is not None
        is_last = not has_failed and all(not other.is_alive or other.status.get("left") for other in others)
        if self._record is not None:
            self._record.close(keep=not is_last)  # of a job that failed the records are kept, for --inspect
        for other in others if is_last else ():
            remove(other.path)

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = 0.0
        if self._record is not None and hasattr(signal, "SIGRTMAX"):
            # It stays open and registered as long as the process lives: without, the signal would end the process.
            self._stacks = self._record.path.with_suffix(STACKS).open("w")
            faulthandler.register(_DUMP, self._stacks)
            if not faulthandler.is_enabled():  # else, the stack of a crash goes to where the user wants it
                faulthandler.enable(self._stacks)
        self._connect()
        self.has_connected.set()
        while not self._is_closed:
            now = time.monotonic()
            if now >= due:
                try:
                    self.look(now)
                except dist.DistError as error:
                    self._lose_store(error)
                except Exception:  # the job must not end because nobody watches it
                    if self._is_closed:
                        break
                    level, self._failed_level = self._failed_level, logging.DEBUG  # log it once
                    logger.log(level, "the watcher of rank %d could not look", self._rank, exc_info=True)
                is_leaving = self._left is not None and not self._has_told.is_set()
                due = now + (URGENT if self._num_waits or is_leaving else PERIOD)
            pause = due - time.monotonic()
            with self._lock:
                for topic in [topic for topic in self._callbacks if topic in self._news or self._is_lost]:
                    pause = min(pause, self._callbacks[topic]())
            if self._sleep(pause):
                due = 0.0
        self._disconnect()

    def look(self, now: float) -> None:
        """Read what is new, judge, and write the status of this rank: one round."""
        local = self._local(with_entries=False)
        for rank, one in local.items():
            for topic, content in one.status.get("news", ()):
                self._news.setdefault(topic, content)
            if rank != self._rank and rank not in self._siblings and _is_here(one) and hasattr(os, "pidfd_open"):
                with suppress(OSError):  # the process is in another namespace, or has ended
                    self._siblings[rank] = os.pidfd_open(one.pid)
                    self._sleeper.register(self._siblings[rank], select.POLLIN)
        able = [rank for rank, one in local.items() if _is_here(one) and now - one.status.get("time", now) < ANSWER]
        leads = self._rank == min(able, default=self._rank)
        may_block = len(able) < sum(map(_is_here, local.values())) or self._question is not None
        self._is_blocked = may_block and not self._is_answered()
        concerned = [one for one in local.values() if leads or one.rank == self._rank]
        if any(self._may_wait(one, now) for one in concerned) or (leads and now >= self._next_comparison):
            local = self._local()
        is_orphan = self._agent is not None and os.getppid() != self._agent
        has_ended = is_orphan or any(not one.is_alive or (leads and one.status.get("left")) for one in local.values())
        if has_ended and self._store is not None:
            is_served = _is_served(self._store)
            if is_served is False or (is_served is None and self._is_beside_store):
                self._is_lost = True  # torch would print a stack where it finds this out
        if is_orphan:
            self._end_without_agent(now)
        has_other_nodes = self._backend.topology.local_world_size < self._size
        if leads and has_other_nodes and self._is_beside_store and _BESIDE_STORE not in self._news:
            self.announce(_BESIDE_STORE, self._rank)
        if self._backend.job.verdict is None or self._outgoing or self._left is not None:
            self._exchange(leads)
        if self._left is None:
            if leads:
                self._answer()
                self._judge(local, now)
            self._obey()
            self._report(local, now)
        status = diagnosis.describe(self._main, self._status)
        news = [item for item in self._news.items() if not item[0].startswith("query/")][-_KEPT:]
        self._status = {**status, "news": news, "left": self._left, "failure": self._failure}
        self._status["has_error"] = self._num_waits > 0
        self._status["has_mismatch"] = self._num_waits > 0 and self._has_mismatch
        self._status["shared"] = self._shared(local, leads, now)
        if self._record is not None:
            self._record.write_status(self._status)
        is_current = (self._status["left"], self._status["failure"]) == (self._left, self._failure)
        if is_current and not self._outgoing and not self._must_stay():  # else, it has left or failed in this round
            self._has_told.set()

    @property
    def _usable_store(self) -> Store | None:
        return None if self._is_lost or self._is_blocked else self._store

    def _is_answered(self) -> bool:
        """Return whether the store answers: a thread of its own asks, as nothing ends a wait for a stopped process."""
        store = self._store
        if store is None:
            return True
        if self._question is None:
            self._question = Thread(target=_ask, args=(store,), name="camshaft-question", daemon=True)
            self._question.start()
        self._question.join(_ANSWERING)
        if self._question.is_alive():
            return False
        self._question = None
        return True

    def _must_stay(self) -> bool:
        """Return True if this rank leaves, and the store with it, before all others know the name of the job."""
        store = self._usable_store
        if self._left is None or self._rank != 0 or not self.is_everywhere or store is None:
            return False
        try:
            return store.add("connected", 0) < self._size
        except dist.DistError as error:
            self._lose_store(error)
            return False

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, or closed
            self._wakes.send(b"x")

    def _sleep(self, seconds: float) -> bool:
        """Sleep; return True at once if this thread was woken, or a process on this node has ended."""
        ready = {descriptor for descriptor, _ in self._sleeper.poll(max(0.0, seconds) * 1000)}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        for rank in [rank for rank, descriptor in self._siblings.items() if descriptor in ready]:
            self._sleeper.unregister(descriptor := self._siblings.pop(rank))
            os.close(descriptor)
        return bool(ready)

    def _disconnect(self) -> None:
        """Close what only the thread uses, once it has ended: it would read from what then opens with these numbers."""
        self._store = None
        self._woken.close()
        self._wakes.close()
        while self._siblings:
            os.close(self._siblings.popitem()[1])

    def _connect(self) -> None:
        """Open a connection of this thread's own, and learn the name of the job; again after the host was silent."""
        store = store_at(self._backend, f"camshaft/{self._backend.job.number}/watcher")
        if store is None:
            return
        try:
            if server_of(store) is not None:
                others = connections_to(store)
                store = store.clone()  # type: ignore[attr-defined]  # torch's stubs
                opened = list(connections_to(store) - others)
                # Without its own network, this host does not even reach itself, which says nothing about the store.
                self._is_beside_store = any(map(is_local, opened))
                if len(opened) == 1 and not self._is_beside_store:  # else, another thread has opened one meanwhile
                    fail_if_silent(opened[0], _SILENCE)
            name = store.compare_set("job", "", uuid.uuid4().hex).decode()
            if self._record is not None:
                self._record.job = name
            if not self.has_connected.is_set():
                store.add("connected", 1)
        except RuntimeError as error:  # of torch
            self._lose_store(error)
        else:
            self._store = store

    def _local(self, with_entries: bool = True) -> dict[int, Snapshot]:
        """Return what the records of this node say, by rank."""
        if self._record is None:
            return {}
        local = {}
        for path in self._candidates(self._record):
            if (one := read(path, with_entries)) is not None:
                if one.job == self._record.job:
                    local[one.rank] = one
                elif one.job:
                    self._foreign.add(path)
        self._paths = [one.path for one in local.values()]
        return local

    def _candidates(self, record: Record) -> list[Path]:
        """Return the paths to read; the folders are searched rarely, as those for temporary files may be large."""
        if not record.job:
            return [record.path]
        now, num_known = time.monotonic(), len(self._paths)
        is_urgent = self._num_waits > 0 or self._is_closed  # without the store, only the records tell who has left
        num_expected = self._size if is_urgent else self._backend.topology.local_world_size
        if num_known < self._size and (num_known < num_expected or now >= self._next_search):
            self._next_search = now + _SEARCH
            return [path for path in find() if path not in self._foreign]
        return self._paths

    def _exchange(self, leads: bool) -> None:
        """Append what this rank announces to the list in the store; a leader also reads that list."""
        if self._silent_since < math.inf and not self._is_lost:
            self._reconnect()
        store = self._usable_store
        if store is None:
            if self._silent_since == math.inf and not self._is_blocked:
                self._outgoing.clear()
            return
        try:
            while (self._outgoing or leads) and store.check([str(self._num_read)]):
                self._take(store.get(str(self._num_read)))
            while self._outgoing:
                topic, content = self._outgoing[0]
                if topic in self._listed:
                    self._outgoing.popleft()
                else:
                    self._take(store.compare_set(str(self._num_read), "", json.dumps([topic, content])))
            if self._left is not None and "left" not in self._listed:
                store.set(f"left/{self._rank}", self._left)
                self._listed.add("left")
        except dist.DistError as error:  # the process that serves the store has ended
            self._lose_store(error)

    def _lose_store(self, error: Exception) -> None:
        logger.info("rank %d lost the store of the job: %s", self._rank, error)
        if _IS_SILENT.search(str(error)) and not self._is_beside_store:
            self._store, self._silent_since = None, time.monotonic() - _SILENCE
        else:
            self._is_lost = True
            self._outgoing.clear()

    def _reconnect(self) -> None:
        """Connect to the store again if its host answers again."""
        if (store := store_at(self._backend, "")) is not None and (is_served := _is_served(store)) is not None:
            self._silent_since, self._is_lost = math.inf, not is_served
            if is_served:
                self._connect()

    def _take(self, entry: bytes) -> None:
        topic, content = json.loads(entry)
        self._num_read += 1
        self._listed.add(topic)
        self._news[topic] = content  # that of the first of those who announced it

    def _shared(self, local: dict[int, Snapshot], leads: bool, now: float) -> dict[str, Any]:
        """Return the values of this rank, by name."""
        if not self._exchanges:
            return {}
        near = {rank: one.status.get("shared", {}) for rank, one in local.items() if _is_here(one)}
        if leads and len(local) < self._size and now >= self._next_sharing:
            self._next_sharing = now + SHARING
            self._share_with_nodes(near)
        shared = {}
        for name, exchange in tuple(self._exchanges.items()):
            known = {rank: values[name] for rank, values in near.items() if name in values}
            value = exchange(self._values.get(name, {}) | known)
            if value is not None:
                shared[name] = value
        return shared

    def _share_with_nodes(self, near: dict[int, dict[str, Any]]) -> None:
        """Write the values of this node into the store, under one key; rank 0 also reads those of the others."""
        if self._usable_store is None:
            return
        store = PrefixStore("shared", self._usable_store)
        self._place = self._place or str(store.add("nodes", 1))
        store.set(self._place, json.dumps(list(near.items())))
        if self._rank != 0:
            return
        places = [str(number) for number in range(1, 1 + store.add("nodes", 0))]
        if store.check(places):  # one is counted before it is written
            self._values = {}
            for rank, values in (item for found in store.multi_get(places) for item in json.loads(found)):
                for name, value in values.items():
                    self._values.setdefault(name, {})[rank] = value

    # --- judging ---------------------------------------------------------------------------------------------

    def _judge(self, local: dict[int, Snapshot], now: float) -> None:
        """Announce a verdict if a rank of this node has disappeared, or waits for what cannot happen."""
        if any(topic.startswith(_FINAL) for topic in self._news):
            return
        is_lost = any(map(_is_gone, local.values()))
        waits = {rank: diagnosis.waited(one, now) for rank, one in local.items()}
        waiting = [rank for rank, seconds in waits.items() if seconds > PATIENCE or local[rank].status.get("has_error")]
        if not is_lost and not waiting:
            self._next_query = 0.0
            if now < self._next_comparison:
                self._suspicion = None
                return
        self._next_comparison = now + COMPARISON
        ranks = local
        if waiting and not is_lost and len(local) < self._size and self._usable_store is not None:
            gathered = self._gather(local, now, max(waits.values()))
            if gathered is None:
                return
            ranks = gathered
        elif waiting and now - self._silent_since > UNREACHABLE:
            beside: int = self._news.get(_BESIDE_STORE, self._rank)
            if beside not in (self._rank, *local):
                ranks = local | {beside: self._departed(beside, _NO_ANSWER)}
        kind, text = _judgement(list(ranks.values()), waiting or [self._rank], now, is_lost)
        # Why calls differ, such as a run that has ended early, a status shows up to a second later than the calls.
        known, since, is_proven = self._suspicion or (None, now, False)
        if text is None and is_proven and not waiting:  # the records have forgotten it by now
            kind, text = "diverged", known
        since = since if text == known else now
        written = [one.status.get("time", now) for one in ranks.values() if _is_here(one)]
        is_certain = is_lost or ranks is not local or since < min((t for t in written if now - t < ANSWER), default=now)
        self._suspicion = None if text is None else (text, since, not waiting)
        if text is not None and is_certain:
            self._give_verdict(kind, text)
        elif text is not None:
            self._next_comparison = now  # look again in the next round

    def _end_without_agent(self, now: float) -> None:
        """Announce that torchrun has ended before its workers; if this process is still running later, end it."""
        self._end_at = min(self._end_at, now + _ORPHANED)
        if now >= self._end_at:
            logger.error("rank %d exits: torchrun has ended %g s ago, and this process has not", self._rank, _ORPHANED)
            os._exit(1)  # the main thread may never return to Python
        is_stopping = any(topic in self._callbacks for topic in tuple(self._news))  # a checkpoint may be in progress
        if not is_stopping and not any(topic.startswith(_FINAL) for topic in self._news):
            text = f"torchrun (process {self._agent}), which had started rank {self._rank}, was killed"
            self._give_verdict("failed", text)

    def _give_verdict(self, kind: str, text: str) -> None:
        self.announce("verdict", {"kind": kind, "text": text, "traceback": "", "time": time.time()})
        logger.error("%s", text)

    def _may_wait(self, one: Snapshot, now: float) -> bool:
        """Return False if a rank certainly does not wait for others, so that its collectives need not be read."""
        if _is_gone(one) or one.status.get("has_error"):
            return True
        idle_for: float = one.status.get("idle_for", 0.0)
        return max(idle_for, now - one.running_since) > min(PATIENCE, self._report_after)

    def _obey(self) -> None:
        """Make this rank raise what was announced."""
        job = self._backend.job
        final = [content for topic, content in self._news.items() if topic.startswith(_FINAL)]
        if not final or job.verdict is not None or self._failure is not None:
            return
        first = min(final, key=itemgetter("time"))
        job.verdict = partial(_error, first)
        self._has_verdict.set()
        self._backend.release()
        for engine in tuple(activity.running):
            engine._raise_soon(job.verdict())

    def _gather(self, local: dict[int, Snapshot], now: float, waited: float) -> dict[int, Snapshot] | None:
        """Ask the other nodes for their records; return those of all ranks once they have answered, or have not."""
        assert self._store is not None
        if self._query is None:
            if now >= self._next_query:
                self._next_query = now + min(waited, _LONGEST_BREAK)
                self._query = f"query/{sum(topic.startswith('query/') for topic in self._news)}", now
                self.announce(self._query[0], self._rank)
            return None
        topic, asked = self._query
        if self._news[topic] != self._rank:  # another node has asked at the same time, and judges
            self._query = None
            return None
        store = PrefixStore(topic, self._store)
        keys = [str(number) for number in range(1, 1 + store.add("answers", 0))]
        answers = [store.get(key) for key in keys if store.check([key])]  # one is counted before it is written
        found = {one.rank: one for answer in answers for one in _from_json(answer, now)}
        missing = [rank for rank in range(self._size) if rank not in found and rank not in local]
        if missing and now - asked < ANSWER:
            return None
        self._query = None
        self._silent = {rank: self._silent.get(rank, asked) for rank in missing}
        for rank, since in self._silent.items():
            if self._store.check([f"left/{rank}"]):
                how = self._store.get(f"left/{rank}").decode()
            elif now - since > LOST:
                how = _NO_ANSWER
            else:
                continue
            found[rank] = self._departed(rank, how)
        self._elsewhere = found, now
        return found | local

    def _departed(self, rank: int, how: str) -> Snapshot:
        return Snapshot(Path(), "", rank, self._size, 0, False, "", {"left": how}, ())

    def _answer(self) -> None:
        """Answer the queries of other leaders with the records of this node."""
        for topic in [topic for topic in self._news if topic.startswith("query/") and topic not in self._answered]:
            self._answered.add(topic)
            if self._usable_store is not None and self._news[topic] != self._rank:
                store = PrefixStore(topic, self._usable_store)
                store.set(str(store.add("answers", 1)), _to_json(self._local(), time.monotonic()))

    def _report(self, local: dict[int, Snapshot], now: float) -> None:
        """Log what this rank waits for, if it is the first on this node that has waited for long."""
        own = local.get(self._rank)
        waited = 0.0 if own is None else diagnosis.waited(own, now)
        if waited < min(PATIENCE, self._report_after):
            self._next_report, self._complete_since = 0.0, now  # the next wait is another one
            if not self._num_waits:
                self._last_report = None
            return
        elsewhere, asked = self._elsewhere
        known = {rank: _shifted(one, now - asked) for rank, one in elsewhere.items()} | local
        last, report = self._last_report, diagnosis.hang_report(list(known.values()), self._rank, now)
        self._last_report = report
        if last is not None and report is not None and last.call != report.call:  # nobody looked between the two waits
            self._next_report = 0.0
        if report is None or report.missing:
            self._complete_since = now
        is_first = all(
            diagnosis.waited(one, now) < self._report_after for rank, one in local.items() if rank < self._rank
        )
        if report is None or waited < self._report_after or now < self._next_report or not is_first:
            return
        if not report.missing and now - self._complete_since < self._report_after:
            return  # the last rank has arrived, and the operation may take a while
        self._next_report = now + AGAIN
        text = "\n".join([report.text, *map(_dumped, local.values())])
        logger.log(logging.WARNING if report.is_alarm else logging.INFO, "%s", text.rstrip())


def _failure(error: BaseException, rank: int) -> dict[str, Any]:
    """Describe an error for the other ranks."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    lines = [f"at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}"] if own else []
    what, where = summary(error), ", ".join([*getattr(error, "__notes__", ())[:_MOST_NOTES], *lines])
    return {
        "kind": "failed",
        "rank": rank,
        "time": time.time(),
        "error": what,
        "where": where,
        "text": f"rank {rank} failed first: {what}, {where}",
        "traceback": "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
    }


def _judgement(ranks: list[Snapshot], waiting: list[int], now: float, is_lost: bool) -> tuple[str, str | None]:
    """Return why the job cannot proceed, if that is certain: the kind of verdict, and its text."""
    with_error = [one.rank for one in ranks if one.rank in waiting and one.status.get("has_error")]
    patience = 0.0 if with_error else PATIENCE
    differing = diagnosis.mismatch(ranks, now) if is_lost or with_error else None
    # Where a connection was lost, an error that ended a run may still be on its way to the end of its process, unless
    # it is known that the rank has met the others in another call since.
    is_certain = not with_error or differing is not None
    stopped = [
        one if is_certain or one.status.get("left") else replace(one, status=one.status | {"ended": []})
        for one in ranks
    ]
    if text := diagnosis.stopped(stopped, now, patience) or differing:
        return "diverged", text
    for rank in waiting:
        if cause := diagnosis.departed(ranks, rank, now, patience):
            return "failed", cause[1]
    if lost := [one for one in ranks if one.status.get("left") == _NO_ANSWER]:
        return "failed", f"{diagnosis.end_text(lost[0])}; rank {waiting[0]} waits"
    for rank in with_error:
        if gone := [one for one in ranks if one.status.get("left") and one.rank != rank]:
            return "failed", f"{diagnosis.end_text(gone[0])}; rank {rank} lost its connection"
    has_mismatch = any(one.status.get("has_mismatch") for one in ranks)  # so there is a cause to be found
    return "diverged", diagnosis.divergence(ranks, now, _SURE if has_mismatch else PATIENCE)


def _is_here(one: Snapshot) -> bool:
    return one.is_alive and not one.status.get("left")


def _is_gone(one: Snapshot) -> bool:
    return not one.is_alive and not one.status.get("left")


def _dumped(one: Snapshot) -> str:
    """Return the stack of a process whose watcher cannot run as an extension holds the GIL, otherwise nothing."""
    path = one.path.with_suffix(STACKS)
    if not diagnosis.is_stale(one, time.monotonic()) or not path.exists():
        return ""
    with suppress(OSError):  # it may have ended
        os.kill(one.pid, _DUMP)  # faulthandler answers, without Python
        time.sleep(_ANSWERING)
        return f"the stack of rank {one.rank}:\n{path.read_text()}"
    return ""


def _error(final: dict[str, Any]) -> RuntimeError:
    """Return a new error for a verdict or a failure."""
    if final["kind"] == "diverged":
        return RankDivergenceError(final["text"])
    error = RankFailedError(final["text"])
    error.__cause__ = RemoteTraceback(final["traceback"]) if final["traceback"] else None
    return error


def _ask(store: Store) -> None:
    with suppress(RuntimeError):  # it is lost, which the next request will find out
        store.check(["job"])


def _is_served(store: Store) -> bool | None:
    """Return whether the process that serves a store still does; ``None`` if its host does not answer."""
    if (server := server_of(store)) is None:
        return True
    try:
        socket.create_connection((server.host, server.port), _TELLING).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except OSError:  # it timed out, for example, or the name of the host could not be resolved
        return None
    return True


def _to_json(snapshots: dict[int, Snapshot], now: float) -> str:
    """Return snapshots as text, with ages in place of times, which mean nothing on another machine."""
    return json.dumps([asdict(_shifted(one, -now)) for one in snapshots.values()], default=str)


def _from_json(text: bytes, now: float) -> list[Snapshot]:
    found = [
        Snapshot(**{**one, "entries": tuple(Entry(**entry) for entry in one["entries"])}) for one in json.loads(text)
    ]
    return [_shifted(one, now) for one in found]


def _shifted(one: Snapshot, by: float) -> Snapshot:
    """Move the times in a snapshot."""
    entries = tuple(
        replace(entry, began=entry.began + by, ended=None if entry.ended is None else entry.ended + by)
        for entry in one.entries
    )
    times: dict[str, Any] = {name: one.status[name] + by for name in ("time", "since") if name in one.status}
    times["ended"] = [end | {"time": end["time"] + by} for end in one.status.get("ended", ())]
    return replace(one, entries=entries, status=one.status | times)
