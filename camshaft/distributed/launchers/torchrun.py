"""torchrun, and ``python -m torch.distributed.launch``, which sets the same variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
    return replace(
        launch,
        launcher="torchrun",
        restart_count=integer(environ, count) if count in environ else 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
