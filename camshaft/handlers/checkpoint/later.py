"""Saving while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from camshaft.engine.engine import outermost_engine
from camshaft.engine.events import Events, FailureEvents, RemovableEventHandle
from camshaft.handlers.checkpoint.background import Background
from camshaft.handlers.checkpoint.staging import Staging

logger = logging.getLogger(__name__)
_BUSY = ("wait", "skip")
_ENDS = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT


class Later:
    """Saves copies of states in the background, one at a time, and tells the engine how it ended.

    As long as a save is under way, the engine that runs looks after it at each iteration, and before its run ends waits
    for it. Where an engine runs in a handler of another, as an evaluator does, that is the outer one.

    Args:
        when_busy: ``"wait"`` for the save under way before the next one begins, or ``"skip"`` the next one.

    Raises:
        ValueError: ``when_busy`` is something else.
    """

    def __init__(self, when_busy: str) -> None:
        if when_busy not in _BUSY:
            raise ValueError(f"when_busy must be 'wait' or 'skip', got {when_busy!r}")
        self.skips = when_busy == "skip"
        self._staging = Staging()
        self._background = Background()
        self._handles: list[RemovableEventHandle] = []

    def is_busy(self, may_skip: bool) -> bool:
        """Say whether the next save is to be skipped; if not, wait until it can begin."""
        if self.skips and may_skip and not self._background.is_over:
            logger.info("nothing is saved: the save before is still under way")
            return True
        self.settle()
        return False

    def save(self, checkpoint: Any, save: Callable[[Any], None], then: Callable[[], None]) -> None:
        """Copy a checkpoint, and begin to save the copy.

        Args:
            checkpoint: what to save.
            save: called in another thread, with the copy.
            then: called in this thread when it is saved.
        """
        copied, finish = self._staging.copy(checkpoint)

        def work() -> None:
            finish()
            save(copied)

        self._background.start(work, then=then)
        engine = outermost_engine()
        if engine is None:
            return  # whoever asks for what was saved waits
        if engine.last_event_name in _ENDS:
            self.settle()
            return
        self._handles = [
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._look),
            engine.add_event_handler(_ENDS, self.settle),
            engine.add_event_handler(FailureEvents.ERROR_MET, self._wait),
        ]

    def settle(self) -> None:
        """Wait for the save under way, if there is one, and raise its error."""
        if not self._background.is_settled:
            self._leave()
            self._background.settle()

    def wait(self) -> None:
        """Wait for the save under way, if there is one; its error is raised later."""
        self._background.wait()

    def _look(self) -> None:
        if self._background.is_over:
            self.settle()

    def _wait(self) -> None:
        """Wait for the save, whose own error is in the log: the run fails with another."""
        self._leave()
        self._background.wait()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
