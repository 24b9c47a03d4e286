"""Expand the way in which Slurm writes lists of hosts: ``node[1-3,7],login``."""

from __future__ import annotations

import itertools
import re

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[\]]*\])")


def expand(nodelist: str) -> list[str]:
    """List the hosts, in the order in which they stand there.

    Args:
        nodelist: entries separated by commas; an entry holds any number of groups in brackets, of numbers and
            ranges. A range is padded with zeros to the width of its first number.

    Raises:
        ValueError: it is not such a list.

    >>> expand("node[098-100,7],login")
    ['node098', 'node099', 'node100', 'node7', 'login']
    >>> expand("rack[1-2]n[1-2]")
    ['rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']
    """
    entries = _COMMA_OUTSIDE_BRACKETS.split("".join(nodelist.split()))
    return [host for entry in entries if entry not in ("", "[]") for host in _hosts(entry, nodelist)]


def _hosts(entry: str, nodelist: str) -> list[str]:
    """Expand one entry, the last group fastest."""
    parts = _GROUP.split(entry)  # text, group, text, group, ..., text
    if any("[" in text or "]" in text for text in parts[::2]):
        raise ValueError(f"a bracket in the list of hosts {nodelist!r} has no partner")
    choices = [_numbers(part, nodelist) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(group: str, nodelist: str) -> list[str]:
    """Expand what stands in brackets; a number that comes twice counts once."""
    return list(dict.fromkeys(number for part in group.split(",") for number in _range(part, nodelist)))


def _range(part: str, nodelist: str) -> list[str]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise ValueError(f"numbers or ranges are expected in the brackets of {nodelist!r}, got {part!r}")
    first, last = found[1], found[2] or found[1]
    if int(first) > int(last):
        raise ValueError(f"the range {part!r} in {nodelist!r} ends before it begins")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
