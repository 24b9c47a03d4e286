"""torchrun, and ``python -m torch.distributed.launch``, which sets the same variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from camshaft.distributed.launchers import plain
from camshaft.distributed.launchers.launch import Launch
from camshaft.distributed.launchers.variables import integer


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read what torchrun tells its workers; ``None`` when it did not start this process.

    A node is what one torchrun looks after, so two of them on one machine count as two nodes.

    Raises:
        RuntimeError: some of its variables are missing, or a number is wrong.

    >>> environ = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    >>> read(environ).launcher
    'torchrun'
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    # Without any of the three, a worker took them away from a process that it started.
    if (launch := plain.read(environ)) is None:
        return None
    count = "TORCHELASTIC_RESTART_COUNT"
    return replace(launch, launcher="torchrun", restart_count=integer(environ, count) if count in environ else 0)


def record(error: Exception) -> None:
    """Tell torchrun why this process is about to fail; does nothing where torchrun did not start it.

    Its summary then shows this traceback, as if ``record`` of ``torch.distributed.elastic`` decorated the main
    function. It takes the process that failed first for the cause, so it is told before the others can notice.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        errors = import_module("torch.distributed.elastic.multiprocessing.errors")  # 50 ms that no other process needs
        with suppress(OSError):
            errors.get_error_handler().record_exception(error)
