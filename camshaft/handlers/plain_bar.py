"""Progress where the output is no terminal: whole lines, few of them, instead of one that is drawn again and again."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

SECONDS = 10.0  # between two lines


def is_terminal(file: Any) -> bool:
    """Say whether a line can be drawn again there."""
    asks = getattr(file, "isatty", None)
    return asks is not None and bool(asks())


@lru_cache
def in_lines(bar_class: Any) -> Any:
    """Make a class of bars that write a line for each redraw, and one at the end.

    Bars of notebooks draw in a place of their own, whatever the output is; their class comes back as it is.
    """
    if any("notebook" in base.__module__ for base in bar_class.__mro__):
        return bar_class

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        self.first, self.shown = options.get("initial"), None
        bar_class.__init__(self, *args, **options)

    def display(self: Any, msg: str | None = None, pos: int | None = None) -> bool:
        now = (self.n, self.postfix)
        if msg is None and now != self.shown and self.n != self.first:  # no line for the beginning
            self.shown = now
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False

    def clear(self: Any, *args: Any, **options: Any) -> None:
        """Leave the lines where they are."""

    def close(self: Any) -> None:
        if not self.disable:
            self.first = None
            self.display()
            self.leave = False  # else another line ends
        bar_class.close(self)

    methods = (__init__, display, clear, close)
    return type("Lines", (bar_class,), {method.__name__: method for method in methods})
