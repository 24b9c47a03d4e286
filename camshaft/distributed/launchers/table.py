"""Lay out what several sources say about the same things."""

from __future__ import annotations

from collections.abc import Mapping


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Lay out one column per source, and one row per thing that any of them says something about.

    >>> print(table({"horovodrun": {"rank": "HOROVOD_RANK=0"}, "environment": {"rank": "RANK=1", "world_size": "3"}}))
                horovodrun      environment
    rank        HOROVOD_RANK=0  RANK=1
    world_size  -               3
    """
    things = list(dict.fromkeys(thing for said in columns.values() for thing in said))
    rows = [["", *columns], *([thing, *(said.get(thing, "-") for said in columns.values())] for thing in things)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
