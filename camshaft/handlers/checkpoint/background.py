"""Work in the background, one piece at a time, whose errors come back to who began it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import copy_context
from threading import Thread

logger = logging.getLogger(__name__)


class Background:
    """Does one piece of work in a thread; at its exit the process waits for it.

    >>> background, said = Background(), []
    >>> background.start(lambda: said.append("work"), then=lambda: said.append("then"))
    >>> background.settle()
    >>> said
    ['work', 'then']
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._then: Callable[[], None] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, and nothing waits to be told."""
        return self._thread is None

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way; asks without waiting."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Begin a piece of work, when there is none; ``then`` is called by :meth:`settle` if it succeeds."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                # Whoever began it may never ask again.
                logger.exception("saving in the background failed")
                self._error = error

        self._error, self._then = None, then
        context = copy_context()  # the rank of this thread is that of the work
        self._thread = Thread(target=context.run, args=(run,), name="camshaft-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the work, if there is any."""
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> None:
        """Wait for the end of the work, if there is any, and raise its error."""
        if self._thread is None:
            return
        self._thread.join()
        then, error = self._then, self._error
        self._thread = self._then = self._error = None
        if error is not None:
            raise error
        if then is not None:
            then()
