"""Read numbers from environment variables, remembering which variable set each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from camshaft.distributed.topology import Launch, complete
from camshaft.errors import table

# int() also accepts underscores and digits of other scripts
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)


class Number(NamedTuple):
    """A number, and the variable that set it: ``RANK=1``."""

    value: int
    source: str


def integer(environ: Mapping[str, str], name: str) -> int:
    """Return the value of a variable as an integer.

    Raises:
        RuntimeError: the value is not an integer.
    """
    text = environ[name].strip()
    if not _INTEGER.fullmatch(text):
        raise RuntimeError(f"environment variable {name} must be an integer, got {environ[name]!r}")
    return int(text)


def numbers(environ: Mapping[str, str], names: Mapping[str, tuple[str, ...]]) -> dict[str, Number]:
    """Return for each number the value of the first of its variables that is set, omitting numbers without one.

    >>> numbers({"PMI_RANK": "1"}, {"rank": ("PMIX_RANK", "PMI_RANK"), "world_size": ("PMI_SIZE",)})
    {'rank': Number(value=1, source='PMI_RANK=1')}
    """
    return {
        number: Number(integer(environ, name), f"{name}={environ[name]}")
        for number, candidates in names.items()
        if (name := next((name for name in candidates if name in environ), None)) is not None
    }


def read_launch(
    launcher: str,
    environ: Mapping[str, str],
    names: Mapping[str, tuple[str, ...]],
    required: tuple[str, ...] = ("rank", "world_size"),
    **fields: Any,
) -> Launch | None:
    """Return what a launcher's variables say, or ``None`` if none of the required ones is set.

    Args:
        launcher: name of the launcher.
        environ: environment variables.
        names: for each number of the topology, the variables that may set it.
        required: numbers that are set by that launcher in any case.
        fields: other fields of the launch than the address, which is in ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        RuntimeError: some required variables are missing, or a value is invalid.

    >>> names = {"rank": ("PMI_RANK",), "world_size": ("PMI_SIZE",)}
    >>> read_launch("mpich", {"PMI_RANK": "0", "PMI_SIZE": "1"}, names).topology.num_nodes
    1
    >>> read_launch("mpich", {"PMI_RANK": "0"}, names)
    Traceback (most recent call last):
    RuntimeError: the environment has PMI_RANK=0 but not PMI_SIZE: set all of PMI_RANK, PMI_SIZE, or none
    """
    found = numbers(environ, names)
    present = [found[number].source for number in required if number in found]
    if not present:
        return None
    if missing := [names[number][0] for number in required if number not in found]:
        expected = ", ".join(names[number][0] for number in required)
        raise RuntimeError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}: set all of {expected}, or none"
        )
    address = {"address": environ.get("MASTER_ADDR") or None, "master_port": _port(environ)}
    return build(launcher, found, **address, **fields)


def build(launcher: str, found: Mapping[str, Number], **fields: Any) -> Launch:
    """Return a launch with these numbers.

    Raises:
        RuntimeError: the numbers contradict each other.
    """
    sources = {name: number.source for name, number in found.items()}
    try:
        topology, assumed = complete({name: number.value for name, number in found.items()})
    except ValueError as error:
        raise RuntimeError(f"the environment is contradictory: {error}\n{table({launcher: sources})}") from error
    return Launch(launcher, topology, assumed=assumed, sources=sources, **fields)


def _port(environ: Mapping[str, str]) -> int | None:
    if not environ.get("MASTER_PORT"):
        return None
    port = integer(environ, "MASTER_PORT")
    if not 0 <= port <= 65535:
        raise RuntimeError(f"environment variable MASTER_PORT must be in [0, 65535], got {port}")
    return port
