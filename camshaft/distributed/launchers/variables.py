"""Read numbers and addresses from the variables of an environment, and say which variable was wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
RENDEZVOUS = (*PLACE, "MASTER_ADDR", "MASTER_PORT")
_LEAST = ("rank", "world_size")

# int() also takes underscores and digits of other scripts, which nobody means here.
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)


class Number(NamedTuple):
    """A number, and the variable that said it: ``RANK=1``."""

    value: int
    source: str


def integer(environ: Mapping[str, str], name: str) -> int:
    """Read a whole number.

    Raises:
        RuntimeError: the variable holds something else.

    >>> integer({"RANK": "1"}, "RANK")
    1
    """
    text = environ[name].strip()
    if not _INTEGER.fullmatch(text):
        raise RuntimeError(f"the environment variable {name} must be a whole number, got {environ[name]!r}")
    return int(text)


def numbers(environ: Mapping[str, str], names: Mapping[str, tuple[str, ...]]) -> dict[str, Number]:
    """Read the first variable that is set of those that may say each thing; leave out what none says.

    >>> numbers({"PMI_RANK": "1"}, {"rank": ("PMIX_RANK", "PMI_RANK"), "world_size": ("PMI_SIZE",)})
    {'rank': Number(value=1, source='PMI_RANK=1')}
    """
    first = {what: next((name for name in some if name in environ), None) for what, some in names.items()}
    return {
        what: Number(integer(environ, name), f"{name}={environ[name]}")
        for what, name in first.items()
        if name is not None
    }


def place(environ: Mapping[str, str], names: Mapping[str, tuple[str, ...]]) -> dict[str, Number]:
    """Read the numbers of a launcher that sets at least the rank and the world size; nothing if it sets neither.

    Raises:
        RuntimeError: it sets one and not the other, or one is no number.

    >>> place({"PMI_RANK": "1"}, {"rank": ("PMI_RANK",), "world_size": ("PMI_SIZE",)})
    Traceback (most recent call last):
    RuntimeError: the environment has PMI_RANK=1 but not PMI_SIZE: it must have both, or neither
    """
    said = numbers(environ, names)
    known, unknown = [what for what in _LEAST if what in said], [what for what in _LEAST if what not in said]
    if known and unknown:
        source, missing = said[known[0]].source, names[unknown[0]][0]
        raise RuntimeError(f"the environment has {source} but not {missing}: it must have both, or neither")
    return said if known else {}


def given(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    """Tell which of the variables are set.

    >>> given({"RANK": "1"}, PLACE)
    ['RANK']
    """
    return [name for name in names if name in environ]


def master_addr(environ: Mapping[str, str]) -> str | None:
    """Read ``MASTER_ADDR``; unset and empty are the same."""
    return environ.get("MASTER_ADDR") or None


def master_port(environ: Mapping[str, str]) -> int | None:
    """Read ``MASTER_PORT``; unset and empty are the same.

    Raises:
        RuntimeError: it is no number in ``[0, 65535]``.
    """
    if not environ.get("MASTER_PORT"):
        return None
    port = integer(environ, "MASTER_PORT")
    if not 0 <= port <= 65535:
        raise RuntimeError(f"the environment variable MASTER_PORT must be in [0, 65535], got {port}")
    return port
