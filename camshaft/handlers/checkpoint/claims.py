"""Which handler of this process saves to which file, so that two with the same names do not take each other's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from weakref import WeakMethod, WeakValueDictionary

_owners: WeakValueDictionary[Path, Claims] = WeakValueDictionary()
_moments = count()


class Claims:
    """The files that a handler has saved.

    What another handler saved before this one was made may be taken over: so a run is resumed. What it has saved
    since is not to be touched. Paths are absolute, and without links.

    Args:
        wait: a method of the handler that waits until what it saves is on the disk.

    >>> first, second = Claims(), Claims()
    >>> first.take(Path("model_10.pt"))
    >>> second.is_free(Path("model_10.pt")), Claims().is_free(Path("model_10.pt"))
    (False, True)
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = None if wait is None else WeakMethod(wait)
        self._claimed: dict[Path, int] = {}
        self.renew()

    def renew(self) -> None:
        """Take over all that there is now."""
        self._since = next(_moments)

    def is_free(self, path: Path) -> bool:
        """Say whether no other handler that is still there has saved this file meanwhile."""
        owner = _owners.get(path)
        return owner is None or owner is self or owner._claimed.get(path, 0) < self._since

    def claim(self, path: Path, is_over: bool) -> None:
        """Note that this handler saves a file.

        Args:
            path: of the file.
            is_over: whether the run is over, so that an error would come too late and cost what is to be saved.

        Raises:
            ValueError: another handler has saved it, and the run goes on.
        """
        if not self.is_free(path):
            problem = (
                f"two handlers save to '{path}', where one would overwrite and remove what is the other's: give one of "
                "them another filename_prefix, score_name or directory, or use one handler for both events"
            )
            if not is_over:
                raise ValueError(problem)
            warnings.warn(f"{problem}. The run is over, so the file is overwritten", stacklevel=4)
        self.take(path)

    def take(self, path: Path) -> None:
        """Make a file this handler's, once nobody else is saving it."""
        owner = _owners.get(path)
        if owner is not None and owner is not self and owner._wait is not None and (wait := owner._wait()):
            wait()
        _owners[path] = self
        self._claimed[path] = next(_moments)

    def release(self, path: Path) -> bool:
        """Give up a file, and say whether it may be removed."""
        is_free = self.is_free(path)
        if _owners.get(path) is self:
            del _owners[path]
        self._claimed.pop(path, None)
        return is_free
