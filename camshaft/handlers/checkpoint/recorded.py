"""Where the checkpoints of a handler are, and the record of those that it keeps."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from camshaft.base import Serializable
from camshaft.handlers.checkpoint import record
from camshaft.handlers.checkpoint.claims import Claims
from camshaft.handlers.checkpoint.savers import BaseSaveHandler, DiskSaver, takes_metadata
from camshaft.handlers.checkpoint.writer import check_save_on_rank

logger = logging.getLogger(__name__)


class Recorded(Serializable):
    """Stores checkpoints, and has the record of them as its state.

    Args:
        save_handler: where they go.
        save_on_rank: which rank stores them, unless the save handler knows.
    """

    _state_dict_all_req_keys = ("_saved",)

    def __init__(self, save_handler: BaseSaveHandler | Callable[..., object], save_on_rank: int | str) -> None:
        check_save_on_rank(save_on_rank)
        self.save_handler = save_handler
        self.save_on_rank = save_on_rank
        self._saved: list[record.Item] = []
        self._claims = Claims(self._wait)

    @property
    def save_handler(self) -> BaseSaveHandler | Callable[..., object]:
        """Where checkpoints go; may be exchanged."""
        return self._save_handler

    @save_handler.setter
    def save_handler(self, save_handler: BaseSaveHandler | Callable[..., object]) -> None:
        self._takes_metadata = takes_metadata(save_handler)
        self._save_handler = save_handler

    def reset(self) -> None:
        """Forget what was saved, for a run from 0. The files stay."""
        self._settle()
        self._saved = []
        self._claims.renew()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give the record: pairs of priority and file name, lowest first."""
        return record.record_of(self._settled())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a record, in place of the one so far.

        Raises:
            TypeError: it is not a mapping.
            ValueError: ``_saved`` is missing, or is not a list of pairs of a number and a file name.
        """
        super().load_state_dict(state_dict)
        self._settle()
        self._saved = record.read_items(state_dict["_saved"])
        self._claims.renew()

    def files_there(self) -> set[str]:
        """Name the files of the record that this process finds, or that it cannot look for."""
        saver = self.save_handler
        names = {item.filename for item in self._saved}
        return {name for name in names if not isinstance(saver, DiskSaver) or _may_exist(saver.dirname / name)}

    def forget_but(self, files: set[str]) -> None:
        """Keep only these files in the record; the same on all ranks."""
        gone = [item.filename for item in self._saved if item.filename not in files]
        if gone:
            self._saved = [item for item in self._saved if item.filename in files]
            logger.info("%s were saved before, and are no longer there", gone)

    @property
    def _writer(self) -> int | str:
        """Which rank writes: a ``DiskSaver`` knows."""
        return self.save_handler.save_on_rank if isinstance(self.save_handler, DiskSaver) else self.save_on_rank

    @property
    def _has_work(self) -> bool:
        """Whether this process has anything to write."""
        return not isinstance(self.save_handler, DiskSaver) or self.save_handler.writes

    def _path(self, filename: str) -> Path | None:
        """Give the file that this process writes, if it does so in a place that others can write to as well."""
        if isinstance(self.save_handler, DiskSaver) and self.save_handler.writes:
            return (self.save_handler.dirname / filename).resolve()
        return None

    def _claim(self, filename: str, is_over: bool) -> None:
        """Make sure that a file may be written, before anything is done about it."""
        if path := self._path(filename):
            self._claims.claim(path, is_over)

    def _store(self, checkpoint: Any, filename: str, metadata: Mapping[str, Any]) -> None:
        self.save_handler(checkpoint, filename, *([metadata] if self._takes_metadata else []))

    def _remove(self, filename: str) -> None:
        """Remove what is no longer kept, unless another handler has taken it over."""
        path = self._path(filename)
        if path is not None and not self._claims.release(path):
            return
        if isinstance(self.save_handler, DiskSaver):
            self.save_handler.prune(filename)
        elif isinstance(self.save_handler, BaseSaveHandler):
            self.save_handler.remove(filename)

    def _settled(self) -> list[record.Item]:
        """Give the record when nothing is under way any more."""
        self._settle()
        return self._saved

    def _settle(self) -> None:
        """Wait for what is under way, and raise its error."""

    def _wait(self) -> None:
        """Wait for what is under way, and leave its error to those who began it."""


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # who may not look does not say that it is gone
        return True
