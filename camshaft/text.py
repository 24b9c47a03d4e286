"""Format values as text: numbers and tensors for log lines, and tables for terminals and files."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from numbers import Number, Real
from typing import Any, NamedTuple

import torch

BOLD, RED, GREEN, YELLOW = "1", "31", "32", "33"  # styles, by their numbers in ANSI escape codes

_MOST_ELEMENTS = 10
_MOST_RANKS = 8  # in a list; more are shortened to spans
_USUAL_WIDTH = 80
_NARROWEST = 8  # characters of a column that is wrapped


class Look(NamedTuple):
    """How text is shown: by default as in a file, whose lines are not wrapped.

    Attributes:
        width: characters that fit in a line; ``None`` for any number.
        has_colors: whether ANSI escape codes may be used.
    """

    width: int | None = None
    has_colors: bool = False

    @classmethod
    def of(cls, stream: Any) -> Look:
        """Return the look of a terminal if ``stream`` is one.

        The environment decides about colors as it does for Python's own output: ``PYTHON_COLORS=0`` or ``1`` comes
        first, then ``NO_COLOR``, ``FORCE_COLOR``, and ``TERM=dumb``.
        """
        is_terminal = getattr(stream, "isatty", bool)()
        has_colors = is_terminal and os.environ.get("TERM") != "dumb"
        if (wish := os.environ.get("PYTHON_COLORS")) in ("0", "1"):
            has_colors = wish == "1"
        elif os.environ.get("NO_COLOR"):
            has_colors = False
        elif os.environ.get("FORCE_COLOR"):
            has_colors = True
        return cls(_columns(stream) if is_terminal else None, has_colors)

    def styled(self, text: str, style: str | None) -> str:
        """Return text in a style, or unchanged if there are no colors.

        >>> Look().styled("error", RED), Look(has_colors=True).styled("error", RED)
        ('error', '\\x1b[31merror\\x1b[0m')
        """
        return f"\x1b[{style}m{text}\x1b[0m" if style and self.has_colors else text


_FILE = Look()


def _columns(terminal: Any) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _USUAL_WIDTH
    except (AttributeError, OSError):  # such as the one of an IDE
        return _USUAL_WIDTH


def table(columns: Mapping[str, Mapping[str, str]], look: Look = _FILE, styles: Mapping[str, str] | None = None) -> str:
    """Return a table with a column per mapping, and a row per key of any of them; see :func:`aligned`.

    >>> print(
    ...     table(
    ...         {
    ...             "horovodrun": {"rank": "HOROVOD_RANK=0"},
    ...             "environment": {"rank": "RANK=1", "world_size": "3"},
    ...         }
    ...     )
    ... )
                horovodrun      environment
    rank        HOROVOD_RANK=0  RANK=1
    world_size  -               3
    """
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    rows = [["", *columns], *([key, *(column.get(key, "-") for column in columns.values())] for key in keys)]
    return aligned(rows, look, styles)


def aligned(rows: Sequence[Sequence[str]], look: Look = _FILE, styles: Mapping[str, str] | None = None) -> str:
    """Return rows of cells as text, with columns of the same width.

    Args:
        rows: the cells; the first row are the headings, which are left out if all of them are empty.
        look: if it has a width, the widest columns are made narrower until a row fits, and their cells are wrapped, so
            that nothing is lost.
        styles: styles of cells, by their text or by the heading of their column.

    >>> print(aligned([["line", "state"], ["train.py:12 in train_model", "waits"]], Look(width=20)))
    line           state
    train.py:12    waits
    in
    train_model
    """
    headings, styles = rows[0], styles or {}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while look.width and sum(widths) + 2 * (len(widths) - 1) > look.width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows if any(headings) else rows[1:]:
        cells = [
            [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        styles_here = [
            BOLD if row is headings else styles.get(cell, "" if cell == "-" else styles.get(heading))
            for cell, heading in zip(row, headings, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (
                look.styled(part, part and style) + " " * (width - len(part))
                for part, style, width in zip(parts, styles_here, widths, strict=True)
            )
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural.

    >>> counted(1, "epoch"), counted(0, "epoch"), counted(2, "batch"), counted(1000, "process")
    ('1 epoch', '0 epochs', '2 batches', '1000 processes')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith(('tch', 's')) else 's'}"


def to_str_list(data: Any) -> list[str]:
    """Format ``data`` as a flat list of texts.

    Numbers and 0-d tensors have 4 decimals; 1-d tensors are in brackets, truncated after 10 elements; tensors of more
    dimensions are shown by their shape. Items of a mapping are prefixed with ``key: ``. A sequence becomes one text,
    joined by commas; mappings inside a value become entries of their own, before it. ``None`` and empty values leave
    the bare ``key: ``, or nothing without a key. Strings and all other values are dropped.

    >>> to_str_list({"loss": 0.25, "size": (2, 3), "weight": torch.ones(2, 3), "name": "run"})
    ['loss: 0.2500', 'size: 2.0000, 3.0000', 'weight: Shape[2, 3]']
    """
    texts: list[str] = []
    if isinstance(data, Mapping):
        for key, value in data.items():
            texts += _entries(value, prefix=f"{key}: ")
        return texts
    return _entries(data, prefix="")


def _entries(value: Any, prefix: str) -> list[str]:
    """Return the entries of mappings inside ``value``, then that of ``value`` itself, if any."""
    nested: list[str] = []
    own = ", ".join(_own_texts(value, nested))
    has_entry = own or (prefix and (value is None or _is_container(value)))
    return [*nested, prefix + own] if has_entry else nested


def _own_texts(value: Any, nested: list[str]) -> Iterator[str]:
    """Yield the texts of ``value``; add those of mappings in it to ``nested`` instead."""
    if isinstance(value, Real):
        yield f"{float(value):.4f}"  # Fraction has no float format before Python 3.12
    elif isinstance(value, Number):
        yield f"{value:.4f}"
    elif isinstance(value, torch.Tensor):
        yield _tensor_text(value)
    elif isinstance(value, Mapping):
        nested += to_str_list(value)
    elif _is_container(value):
        for item in value:
            yield from _own_texts(item, nested)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes))


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.ndim == 0:
        return f"{tensor.item():.4f}"
    if tensor.ndim > 1:
        return f"Shape{list(tensor.shape)}"
    texts = [f"{number:.4f}" for number in tensor[:_MOST_ELEMENTS].tolist()]
    return f"[{', '.join(texts + ['...'] * (len(tensor) > _MOST_ELEMENTS))}]"


def spans(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order, with runs of them shortened.

    >>> spans([5, 0, 1, 2])
    '0-2, 5'
    """
    texts = []
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(texts)


def shortened_ranks(ranks: Iterable[int]) -> str:
    """Return a list of ranks as text, which stays short for many of them.

    >>> shortened_ranks([0, 1]), shortened_ranks(range(1024))
    ('[0, 1]', '[0-1023]')
    """
    listed = sorted(ranks)
    return str(listed) if len(listed) <= _MOST_RANKS else f"[{spans(listed)}]"
