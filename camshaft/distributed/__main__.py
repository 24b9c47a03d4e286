"""Print what this process, or each rank of a launcher, sees of its distributed configuration.

python -m camshaft.distributed
torchrun --nproc-per-node 2 -m camshaft.distributed --backend gloo
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from camshaft.distributed.diagnostics.report import Report, inspect, try_backend


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports, and return the exit code: 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m camshaft.distributed",
        description="Print what this process sees: backends, devices, launcher, and its place in the job. Under a "
        "launcher each rank prints its own.",
    )
    parser.add_argument("--backend", help="initialize this backend; rank 0 prints what each rank reports")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that --backend may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank and line")
    options = parser.parse_args(arguments)

    def show(reports: Sequence[Report]) -> None:  # in one write, as the ranks share the output
        sys.stdout.write("".join(f"{report.json() if options.json else report}\n" for report in reports))
        sys.stdout.flush()

    def fail(reason: str) -> NoReturn:
        show([replace(report, error=f"backend {options.backend!r}: {reason}")])
        os._exit(1)  # without waiting for the other ranks, which may not exist

    report = inspect(os.environ)
    if report.error is not None or options.backend is None:
        show([report])
        return 0 if report.error is None else 1
    late = f"not all ranks arrived within {options.timeout:g} s; the launcher must start this command on each of them"
    watchdog = threading.Timer(options.timeout, fail, [late])
    watchdog.daemon = True
    watchdog.start()
    try:
        reports = try_backend(report, options.backend)
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")
    watchdog.cancel()
    show(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
