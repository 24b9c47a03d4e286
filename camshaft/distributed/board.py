"""Where the ranks write down, in a store, which collective they are about to begin, and read it of each other.

Two keys of a rank are in use for each group, and one that says where the rank is now; older ones are deleted.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

Said = dict[str, str]
"""What a rank says about a collective: its name, its ranks, its value, the line of the user's."""

_LOOK = 1.0  # seconds between looks at what keeps the others
_PAUSE = 0.05  # seconds, at most, between questions to the store
_FAREWELL = 2.0  # seconds that rank 0, which may hold the store, gives the others to read that it has ended


class Board:
    """What one rank writes and reads.

    Args:
        store: reached by all ranks.
        name: of this run; a store may be older than it.
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = PrefixStore(f"camshaft/board/{name}", store)
        self.rank = rank
        self._all = range(size)
        self._numbers: Counter[str] = Counter()
        self._gave_up: dict[str, Any] | None = None
        self._process = os.getpid()

    @property
    def timeout(self) -> float:
        """Seconds that the others may take, which the store was given with the run."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]  # torch does not declare it
        return timeout.total_seconds()

    def say(self, ranks: Sequence[int], said: Said) -> str:
        """Write down what this rank is about to do with others; gives what :meth:`hear` takes."""
        over = self._name(ranks)
        number = self._numbers[over] = self._numbers[over] + 1
        place = f"{over}/{number}"
        self._gave_up = None
        self._store.set(f"{place}/{self.rank}", json.dumps(said))
        members = None if ranks == self._all else list(ranks)
        self._store.set(f"now/{self.rank}", json.dumps({"place": place, "ranks": members, "said": said}))
        return place

    def hear(self, ranks: Sequence[int], place: str, look: Callable[[float], None]) -> dict[int, Said]:
        """Wait for what the others say, and give it.

        Args:
            ranks: the ranks.
            place: from :meth:`say`.
            look: called once a second, with the seconds that this rank has waited; it may raise.
        """
        keys = [f"{place}/{rank}" for rank in ranks]
        began = last = time.monotonic()
        pause = 1e-4
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
            if time.monotonic() - last > _LOOK:
                last = time.monotonic()
                look(last - began)
        said = {rank: json.loads(text) for rank, text in zip(ranks, self._store.multi_get(keys), strict=True)}
        self._forget(place)
        return said

    def here(self, ranks: Sequence[int], place: str) -> dict[int, Said]:
        """Give what those ranks have said there that have come."""
        come = [rank for rank in ranks if self._store.check([f"{place}/{rank}"])]
        return {rank: json.loads(self._store.get(f"{place}/{rank}")) for rank in come}

    def give_up(self, place: str, said: Said, reason: str) -> None:
        """Tell who comes after all that this rank does not wait any more."""
        self._gave_up = self.now(self.rank)
        self._store.set(f"{place}/{self.rank}", json.dumps({**said, "gave up": reason}))

    def leave(self) -> None:
        """Tell the others that this rank does nothing any more; a child that was forked is no rank."""
        if os.getpid() != self._process:
            return
        try:
            farewell = {"place": "", "ranks": [], **(self._gave_up or {}), "said": None}
            farewell["in vain"] = self._gave_up and self._gave_up["said"]
            self._store.set(f"now/{self.rank}", json.dumps(farewell))
            deadline = time.monotonic() + _FAREWELL
            while self.rank == 0 and not self._is_last() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
        except RuntimeError:  # the rank that holds the store has ended already
            return

    def now(self, rank: int) -> dict[str, Any] | None:
        """Give what a rank said last, ``None`` if it has not said anything."""
        key = f"now/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def stuck(self) -> list[int]:
        """List this rank and those it waits for if these wait for it, for each other, or have ended; else none."""
        first = self._waiting()
        if not self._cannot_go_on(first):
            return []
        time.sleep(_PAUSE)
        # else it was a moment in between: not all of them waited at the same time
        return sorted(first) if self._waiting() == first else []

    def _name(self, ranks: Sequence[int]) -> str:
        return "all" if ranks == self._all else ",".join(map(str, ranks))

    def _forget(self, place: str) -> None:
        """Delete what this rank said the time before, which all have read: they have said more since."""
        over, _, number = place.rpartition("/")
        if number != "1":
            self._store.delete_key(f"{over}/{int(number) - 1}/{self.rank}")

    def _waiting(self) -> dict[int, tuple[str, frozenset[int]]]:
        """Find where this rank waits and for whom, and the same of those, and so on."""
        found: dict[int, tuple[str, frozenset[int]]] = {}
        todo = [self.rank]
        while todo:
            rank = todo.pop()
            if rank not in found:
                found[rank] = self._missing(rank)
                todo.extend(found[rank][1])
        return found

    def _missing(self, rank: int) -> tuple[str, frozenset[int]]:
        now = self.now(rank)
        if now is None:
            return "", frozenset()
        place, members = now["place"], self._all if now["ranks"] is None else now["ranks"]
        has_ended = now["said"] is None  # and goes on no more, not even if those come for whom it waited in vain
        if not has_ended and self._store.check([f"{place}/{member}" for member in members]):
            return place, frozenset()
        missing = {member for member in members if not self._store.check([f"{place}/{member}"])}
        return place, frozenset(missing | {rank} if has_ended else missing)

    def _is_last(self) -> bool:
        """Say whether all ranks have ended."""
        found = (self.now(rank) for rank in self._all)
        return all(now is not None and now["said"] is None for now in found)

    def _cannot_go_on(self, waiting: dict[int, tuple[str, frozenset[int]]]) -> bool:
        """Say whether this rank remains when all go on that can, then those who waited for them, and so on."""
        left = {rank: set(missing) for rank, (_, missing) in waiting.items()}
        while free := [rank for rank, missing in left.items() if not missing & left.keys()]:
            for rank in free:
                del left[rank]
        return self.rank in left
