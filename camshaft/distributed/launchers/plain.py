"""Variables that someone set by hand, under the names that torch.distributed reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from camshaft.distributed.launchers.launch import Launch, build
from camshaft.distributed.launchers.variables import PLACE, given, master_addr, master_port, numbers

_NAMES = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("GROUP_RANK",),
    "num_nodes": ("GROUP_WORLD_SIZE",),
}


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, and what else torchrun would set; ``None`` without them.

    Raises:
        RuntimeError: only some of the three are set, or a number is wrong.

    >>> read({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).topology.rank
    1
    """
    present = given(environ, PLACE)
    if not present:
        return None
    if missing := [name for name in PLACE if name not in present]:
        shown = ", ".join(f"{name}={environ[name]}" for name in present)
        raise RuntimeError(
            f"the environment has {shown} but not {', '.join(missing)}: set all of {', '.join(PLACE)} or none, "
            f"or start with torchrun"
        )
    said = numbers(environ, _NAMES)
    return build(
        "environment",
        said,
        address=master_addr(environ),
        master_port=master_port(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def read_beside(launcher: str, environ: Mapping[str, str], needed: tuple[str, ...]) -> Launch | None:
    """Read what was set by hand beside a launcher; if only some of the needed variables are set, warn that none counts.

    Raises:
        RuntimeError: a number is wrong.
    """
    present = given(environ, needed)
    if len(present) == len(needed):
        return read(environ)
    if present:
        missing = ", ".join(name for name in needed if name not in present)
        warnings.warn(
            f"{launcher} started this process, so {', '.join(present)} in the environment is ignored for lack of "
            f"{missing}; set all of them, or none",
            stacklevel=2,
        )
    return None
