"""When a rank ends its process the others learn which one, also if it was rank 0, with or without debug mode."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.limits import HANG
from tests.torchrun.launching import free_port

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from datetime import timedelta
import camshaft.distributed as idist
from camshaft.distributed.failures import watcher

watcher._LEARNING = 900.0  # for the watcher, which may stand still
rank, who, how, debug, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "debug", sys.argv[5]
idist.initialize("gloo", debug=debug, init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=900))
if rank == who and how == "raise":
    raise LookupError("the cause")
if rank == who and how == "exit with a code":
    sys.exit(3)
if rank == who and how == "finalize":
    idist.finalize()
elif rank != who or how != "return":
    idist.all_reduce(1)
"""


def run(who: int, how: str, mode: str) -> tuple[list[str], list[int]]:
    """Run two ranks, of which one ends; return what both wrote to standard error, and their exit codes."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            command = [sys.executable, "-c", PROGRAM, str(rank), str(who), how, mode, address]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            processes.append(process)
        return [process.communicate(timeout=HANG)[1] for process in processes], [one.returncode for one in processes]


@pytest.mark.parametrize(
    ("who", "how", "mode", "text"),
    [
        (0, "raise", "plain", "failed first: LookupError: the cause"),
        (1, "raise", "debug", "failed first: LookupError: the cause"),
        (0, "return", "debug", "has exited: it returned, or called sys.exit\\(\\)"),
        (1, "exit with a code", "plain", "has exited: it returned, or called sys.exit\\(\\)"),
        (0, "finalize", "plain", "has left the run without an error"),
        (1, "finalize", "debug", "has left the run without an error"),
    ],
)
def test_a_rank_that_ends_is_named(who: int, how: str, mode: str, text: str) -> None:
    """Long before the run's timeout; rank 0 serves the store."""
    texts, codes = run(who, how, mode)
    assert re.search(f"RankFailedError: rank {who} {text}", texts[1 - who]), texts[1 - who]
    assert "which rank" not in texts[1 - who]
    assert "".join(texts).count("Traceback (most recent call last)") == 1  # by the rank that failed if it can
    assert how != "raise" or "LookupError: the cause\n" in texts[who]
    assert codes[who] == {"raise": 1, "exit with a code": 3}.get(how, 0)
