"""Mark functions that will go."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(
    deprecated_in: str, removed_in: str = "", reasons: Iterable[str] = (), raise_exception: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator that marks a function as deprecated, in its docstring and on each call.

    Args:
        deprecated_in: the version from which on it should not be used.
        removed_in: the version in which it will be gone.
        reasons: why, or what to use instead, one sentence each.
        raise_exception: raise the ``DeprecationWarning`` instead of warning with it.

    >>> @deprecated("0.2.0", removed_in="0.4.0", reasons=["Use new()."], raise_exception=True)
    ... def old():
    ...     "Do it the old way."
    >>> old()
    Traceback (most recent call last):
    DeprecationWarning: old is deprecated since version 0.2.0 and will be removed in version 0.4.0. Use new().
    """
    details = (reasons,) if isinstance(reasons, str) else tuple(reasons)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        removal = f" and will be removed in version {removed_in}" if removed_in else ""
        sentence = f"{function.__name__} is deprecated since version {deprecated_in}{removal}."
        message = " ".join((sentence, *details))

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if raise_exception:
                raise DeprecationWarning(message)
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        wrapper.__doc__ = _marked(function.__doc__, deprecated_in, (sentence, *details))
        return wrapper

    return decorate


def _marked(doc: str | None, version: str, lines: Iterable[str]) -> str:
    """Return the docstring with the directive that Sphinx knows at its end."""
    directive = "\n".join([f".. deprecated:: {version}", *(f"    {line}" for line in lines)])
    return f"{inspect.cleandoc(doc)}\n\n{directive}" if doc else directive
