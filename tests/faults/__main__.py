"""Run faults under launchers, and print the table of the documentation.

python -m tests.faults --launcher spawn --launcher torchrun --fault step --debug both --output /tmp/faults
"""

from __future__ import annotations

import argparse
import pickle
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.faults.jobs import FAULTS, LAUNCHERS, Case, run_all, slurm, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", action="append", choices=[*LAUNCHERS, "srun"], help="default: all")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="default: all")
    parser.add_argument("--debug", choices=["off", "on", "both"], default="off")
    parser.add_argument("--rank", type=int, default=1, choices=[0, 1], help="the rank that fails (default: 1)")
    parser.add_argument("--at_once", type=int, default=1, help="jobs to run at once (default: 1)")
    parser.add_argument("--case", action="append", help="instead: a case by its full name, such as step-spawn-rank1")
    parser.add_argument("--output", type=Path, help="folder for the output of each job")
    config = parser.parse_args()
    launchers = dict(LAUNCHERS)
    names = config.launcher or [*LAUNCHERS, "srun"]  # those with hosts and Slurm require root
    modes = {"off": [False], "on": [True], "both": [False, True]}[config.debug]
    cases = [
        Case(FAULTS[fault], launcher, is_debug, config.rank)
        for fault in config.fault or FAULTS
        for launcher in names
        if launcher in FAULTS[fault].launchers
        for is_debug in modes
    ]
    if config.case:
        cases = [Case.named(name) for name in config.case]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs end with this process
    outcomes = []
    with ExitStack() as stack:
        if any(case.launcher == "srun" for case in cases):
            launchers["srun"] = stack.enter_context(slurm())
        for outcome in run_all(cases, launchers, config.at_once):
            outcomes.append(outcome)
            print(outcome.report().partition("\n")[0], file=sys.stderr, flush=True)
            if config.output is not None:
                config.output.mkdir(parents=True, exist_ok=True)
                (config.output / f"{outcome.case}.txt").write_text(outcome.report())
                (config.output / f"{outcome.case}.new").write_bytes(pickle.dumps(outcome))
                (config.output / f"{outcome.case}.new").rename(config.output / f"{outcome.case}.pickle")
    print(table(outcomes))


if __name__ == "__main__":
    main()
