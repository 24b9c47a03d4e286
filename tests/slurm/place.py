"""Print the place of each rank, one line of JSON per rank.

srun ... python -m tests.slurm.place [--spawn N] [--meet FOLDER] [ARGUMENTS OF INITIALIZE AS JSON]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
from pathlib import Path

import camshaft.distributed as idist
from tests.limits import HANG, TIMEOUT, wait_until


def print_place(local_rank: int | None = None, meet: str | None = None) -> None:
    """Print the place of this rank, which takes two collectives."""
    if meet is not None:
        wait_for_other_step(Path(meet))
    place = {
        "rank": idist.get_rank(),
        "world_size": idist.get_world_size(),
        "local_rank": idist.get_local_rank(),
        "nproc_per_node": idist.get_nproc_per_node(),
        "node_rank": idist.get_node_rank(),
        "nnodes": idist.get_nnodes(),
        "backend": idist.backend(),
        "model_name": idist.model_name(),
        "ranks": idist.all_gather(idist.get_rank()),
        "hosts": idist.all_gather(idist.hostname()),
        "step": os.environ.get("SLURM_STEP_ID"),
    }
    print(f"{json.dumps(place)}\n", end="", flush=True)


def wait_for_other_step(folder: Path) -> None:
    """Wait until a second step has started."""
    (folder / os.environ["SLURM_STEP_ID"]).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawn", type=int)
    parser.add_argument("--meet")
    parser.add_argument("options", nargs="?", default="{}", type=json.loads)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(HANG, exit=True)
    if arguments.spawn is not None:
        idist.spawn("gloo", print_place, (), nproc_per_node=arguments.spawn, timeout=TIMEOUT)
        return
    idist.initialize("gloo", timeout=TIMEOUT, **arguments.options)
    print_place(meet=arguments.meet)
    idist.finalize()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
