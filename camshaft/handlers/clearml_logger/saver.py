"""Checkpoints for ClearML."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from camshaft.distributed import broadcast, get_rank
from camshaft.handlers.checkpoint import DiskSaver
from camshaft.handlers.clearml_logger.logger import ClearMLLogger
from camshaft.handlers.utils import load_optional
from camshaft.types import PathLike


class ClearMLSaver(DiskSaver):
    """Saves to files of a directory, and uploads each as a model of a task of ClearML, from rank 0.

    The models are called ``<basename>_<slot>``: a checkpoint takes the slot of one that was removed.

    Args:
        logger: whose task it is; by default the current one.
        output_uri: where ClearML uploads to.
        dirname: the directory; by default a temporary one, which all ranks are told.
        args: for :class:`DiskSaver`.
        kwargs: for :class:`DiskSaver`; ``atomic`` is off by default.

    Raises:
        TypeError: ``logger`` is no :class:`ClearMLLogger`.
        RuntimeError: there is no task.

    >>> from camshaft.handlers import Checkpoint, ClearMLLogger
    >>> from camshaft.handlers.clearml_logger import ClearMLSaver
    >>> logger = ClearMLLogger(project_name="digits")  # doctest: +SKIP
    >>> saver = ClearMLSaver(logger, dirname="checkpoints")  # doctest: +SKIP
    >>> checkpoint = Checkpoint({"model": model}, saver, n_saved=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        logger: ClearMLLogger | None = None,
        output_uri: str | None = None,
        dirname: PathLike | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if logger is not None and not isinstance(logger, ClearMLLogger):
            raise TypeError(f"logger must be a ClearMLLogger, got {type(logger).__name__}")
        clearml = load_optional("clearml", extra="clearml", needed_by="ClearMLSaver")
        self._task: Any = None
        self._slots: dict[str, list[str | None]] = {}
        self._models: dict[tuple[str, int], Any] = {}
        if get_rank() == 0:
            self._task = clearml.Task.current_task() if logger is None else logger.get_task()
            if self._task is None:
                raise RuntimeError("there is no task of ClearML: make a ClearMLLogger first, or call Task.init()")
            if output_uri is not None:
                self._task.output_uri = output_uri
        options = kwargs if args else {"atomic": False, **kwargs}
        super().__init__(_shared_folder() if dirname is None else dirname, *args, **options)

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint, and upload it in the background; its metadata become the comment of the model."""
        super().__call__(checkpoint, filename, metadata)
        if get_rank() != 0:
            return
        if metadata is None:
            warnings.warn("no metadata were given, so the model is called 'checkpoint'", stacklevel=2)
        told = {"filename": filename, **(metadata or {})}
        basename = told.get("basename", "checkpoint")
        self._upload(basename, self._slot_for(basename, filename), told)

    def get_local_copy(self, filename: str) -> str | None:
        """Give the path of a checkpoint on this machine, downloaded if need be; only on rank 0.

        Returns:
            The path; ``None`` if nobody knows the checkpoint, and on the other ranks.
        """
        if get_rank() != 0:
            return None
        local = self.dirname / filename
        if local.exists() or self._task.is_offline():
            return str(local) if local.exists() else None
        for model in reversed(self._task.get_models()["output"]):
            if str(model.url).endswith(f"/{filename}"):
                return str(model.get_local_copy())
        return None

    def remove(self, filename: str) -> None:
        """Delete the file, and free its slot; only on rank 0."""
        if get_rank() == 0:
            super().remove(filename)
            for slots in self._slots.values():
                slots[:] = [None if held == filename else held for held in slots]

    def _slot_for(self, basename: str, filename: str) -> int:
        """Find the slot of a file, else the first that is free, else another."""
        slots = self._slots.setdefault(basename, [])
        slot = next((slots.index(one) for one in (filename, None) if one in slots), len(slots))
        slots[slot : slot + 1] = [filename]
        return slot

    def _upload(self, basename: str, slot: int, told: Mapping[str, Any]) -> None:
        """Upload a file, or keep it for later where there is no server."""
        name, path = f"{basename}_{slot}", self.dirname / told["filename"]
        if self._task.is_offline():  # where models of ClearML 2.1 fail
            self._task.upload_artifact(name, str(path), metadata={key: str(value) for key, value in told.items()})
            return
        if (basename, slot) not in self._models:
            model_class = import_module("clearml").OutputModel
            self._models[basename, slot] = model_class(task=self._task, name=name, framework="PyTorch")
        model = self._models[basename, slot]
        model.update_weights(str(path), target_filename=path.name, auto_delete_file=False, update_comment=False)
        model.comment = "\n".join(f"{key}: {value}" for key, value in told.items())


def _shared_folder() -> str:
    folder = ""
    if get_rank() == 0:
        folder = tempfile.mkdtemp(prefix="camshaft_checkpoints_")
        warnings.warn(f"dirname is not given: checkpoints are saved to the temporary folder {folder}", stacklevel=3)
    shared: str = broadcast(folder, src=0)
    return shared
