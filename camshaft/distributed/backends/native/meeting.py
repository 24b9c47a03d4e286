"""How ranks that share a store find each other there, whatever earlier processes have left in it, and who has left."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Thread

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

_OPEN = "camshaft/meeting"
_LONGEST_PAUSE = 0.5
_PATIENCE = 2.0  # seconds for a store that does not answer, as its machine is gone perhaps
_LENGTH = 200  # characters of an error that the other ranks are told
REPORT_AFTER = 10.0  # seconds until the log names the ranks that are missing
logger = logging.getLogger("camshaft.distributed.utils")
_last = ""  # the meeting that this process was at


class Left(Exception):
    """The store was that of this process's last meeting, and rank 0 has closed it meanwhile: it will open the next."""


def meet(store: Store, rank: int, size: int, deadline: float, where: str) -> str:
    """Wait for all ranks, and give them a name that nobody has used before.

    A store may outlive the processes that used it: a file after a crash, torchrun's when it starts the workers again;
    and of the numbers that they are told then, none is both new and the same on all nodes. So rank 0 opens a meeting
    under a name that is used once. The others come to the meeting that they find, each with a mark of its own. One
    whose mark is not called there was at a meeting of the dead, and looks for the next.

    Args:
        store: what all ranks reach.
        rank: the number of this process.
        size: the number of processes.
        deadline: how long to wait, as a time of ``time.monotonic``.
        where: the store and the time limit as users know them, for the error: ``"to FILE within 5 s"``.

    Raises:
        DistStoreError: not all ranks came; it names those that did not.
        Left: this process was too early at the next meeting.
    """
    global _last
    _last = _open(store, size, deadline, where) if rank == 0 else _join(store, rank, size, deadline, where)
    return _last


def _open(store: Store, size: int, deadline: float, where: str) -> str:
    """Open a meeting, wait for the others, and call those who came: what rank 0 does."""
    name = uuid.uuid4().hex
    store.set(_OPEN, name)
    awaited = list(range(1, size))

    def report() -> None:
        missing = _list(_absent(store, name, range(1, size)))
        logger.warning("rank 0 has waited %g s for ranks that have not reached initialize: %s", REPORT_AFTER, missing)

    for _ in attempts(deadline, report):
        while awaited and store.check([_key(name, awaited[-1])]):
            awaited.pop()
        if not awaited:
            break
    absent = _absent(store, name, awaited)
    marks = store.multi_get([_key(name, rank) for rank in range(1, size) if rank not in absent])
    store.set(_key(name, "called"), json.dumps({"marks": [mark.decode() for mark in marks], "absent": absent}))
    if absent:
        for _ in attempts(time.monotonic() + 2 * _LONGEST_PAUSE):  # the store may go away with this process
            if store.add(_key(name, "told"), 0) == len(marks):
                break
        raise _incomplete(absent, size, where)
    return name


def _join(store: Store, rank: int, size: int, deadline: float, where: str) -> str:
    """Come to the meeting that is open, and to the next one if nobody calls: what the other ranks do."""
    name, mark = "", uuid.uuid4().hex

    def report() -> None:
        if not name or not _absent(store, name, range(1, size)):  # else rank 0 is there, and reports who is not
            report_first_missing(rank)

    for _ in attempts(deadline, report):
        try:
            if (found := _read(store, _OPEN)) != name:
                name = found
                store.set(_key(name, rank), mark)
            answer = json.loads(_read(store, _key(name, "called")) or "{}")
        except RuntimeError as error:
            if _last and name in ("", _last):
                raise Left from error
            raise
        if mark in answer.get("marks", ()):
            if answer["absent"]:
                store.add(_key(name, "told"), 1)
                raise _incomplete(answer["absent"], size, where)
            return name
    if name and (absent := _absent(store, name, range(1, size))):
        raise _incomplete(absent, size, where)
    raise DistStoreError(f"rank 0 did not come {where}, or it met another process as rank {rank}")


def report_first_missing(rank: int) -> None:
    """Log that rank 0 has not joined yet."""
    logger.warning("rank %d has waited %g s for rank 0, which has not reached initialize", rank, REPORT_AFTER)


class Attendance:
    """Which ranks have left a run, published in its store: the others see no more than a closed connection.

    A rank leaves when its process group is closed, at the latest when Python exits.

    Args:
        store: of this run alone.
        rank: of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._process = os.getpid()
        atexit.register(self._leave_at_exit)

    def leave(self, error: BaseException | None) -> None:
        """Publish that this rank takes part in nothing more, and which error made it leave."""
        self._leave(_how(error))

    def left(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return how each of the ranks that have left did so, in the order in which they left."""
        found: dict[int, tuple[int, str]] = {}

        def read() -> None:
            try:
                for rank in ranks:
                    if rank != self._rank and (text := _read(self._store, f"left/{rank}")):
                        found[rank] = tuple(json.loads(text))
            except DistNetworkError:
                if self._rank != 0 and 0 in ranks:
                    found[0] = (0, "or its launcher has left the run: the store is unreachable")

        _within_patience(read)
        return {rank: how for rank, (_, how) in sorted(found.items(), key=lambda item: item[1])}

    def _leave(self, how: str) -> None:
        atexit.unregister(self._leave_at_exit)
        if os.getpid() == self._process:  # a forked child is not a rank
            _within_patience(lambda: self._publish(how))

    def _publish(self, how: str) -> None:
        number = self._store.add("left", 1)
        self._store.set(f"left/{self._rank}", json.dumps((number, how)))
        self._store.add("left", 0)  # whose answer says that the store has the rest too

    def _leave_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # which Python does not set for SystemExit
        self._leave("has exited: it returned, or called sys.exit()" if error is None else _how(error))


def _how(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "has left the run without an error"
    text = " ".join(str(error).split())
    return f"has failed with {type(error).__name__}: {text[:_LENGTH]}{'...' * (len(text) > _LENGTH)}"


def _within_patience(ask: Callable[[], None]) -> None:
    """Ask the store, but wait no longer than a moment: who serves it may have gone."""

    def run() -> None:
        with suppress(RuntimeError):
            ask()

    thread = Thread(target=run, name="camshaft-attendance", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start no threads in atexit handlers
        run()
    else:
        thread.join(_PATIENCE)


def attempts(deadline: float, report: Callable[[], None] | None = None) -> Iterator[None]:
    """Yield with ever longer pauses in between; a wait of the store's own that expires prints a warning.

    Args:
        deadline: when to end, as a time of ``time.monotonic``; there is one attempt in any case.
        report: called once if the attempts take long.
    """
    begin = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        if report is not None and now - begin >= REPORT_AFTER:
            report()
            report = None
        time.sleep(min(0.001 + (now - begin) / 10, _LONGEST_PAUSE, deadline - now))


def _key(name: str, *what: object) -> str:
    return "/".join(["camshaft", name, *map(str, what)])


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _absent(store: Store, name: str, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([_key(name, rank)])]


def _incomplete(absent: Sequence[int], size: int, where: str) -> DistStoreError:
    return DistStoreError(f"{size - len(absent)} of {size} ranks came {where}; missing: {_list(absent)}")


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:10])) + (", ..." if len(ranks) > 10 else "")
