"""Every check that every backend passes, at any number of ranks."""

from __future__ import annotations

import camshaft.distributed as idist
from tests.distributed import (
    check_broadcasts,
    check_exchanges,
    check_gathers,
    check_groups,
    check_handlers,
    check_messages,
    check_ranks,
    check_reductions,
    check_training,
)
from tests.distributed.checking import CHECKS

__all__ = ["CHECKS", "MODULES", "lack_of"]

MODULES = (
    check_reductions,
    check_gathers,
    check_broadcasts,
    check_groups,
    check_exchanges,
    check_messages,
    check_ranks,
    check_training,
    check_handlers,
)


def lack_of(name: str) -> str | None:
    """Run a check on this rank; give what the backend says if it lacks what the check needs, ``None`` otherwise.

    A backend that lacks something says so on all ranks before anything is sent, and names one that has it.
    """
    try:
        CHECKS[name]()
    except NotImplementedError as error:
        lack = str(error)
        if f"backend {idist.backend()!r} does not support " not in lack or "gloo" not in lack:
            raise
        return lack
    return None
