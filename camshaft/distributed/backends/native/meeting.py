"""How ranks that share a store find each other there, whatever earlier processes have left in it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

_OPEN = "camshaft/meeting"
_LONGEST_PAUSE = 0.5
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
    for _ in attempts(deadline):
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
    for _ in attempts(deadline):
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


def attempts(deadline: float) -> Iterator[None]:
    """Give turns with ever longer pauses between them; a wait of the store's own that expires prints a warning.

    Args:
        deadline: when to end, as a time of ``time.monotonic``; the first turn is given in any case.
    """
    begin = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        time.sleep(min(0.001 + (now - begin) / 10, _LONGEST_PAUSE, deadline - now))


def _key(name: str, *what: object) -> str:
    return "/".join(["camshaft", name, *map(str, what)])


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _absent(store: Store, name: str, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([_key(name, rank)])]


def _incomplete(absent: Sequence[int], size: int, where: str) -> DistStoreError:
    ranks = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
    return DistStoreError(f"{size - len(absent)} of {size} ranks came {where}; missing: {ranks}")
