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

from camshaft.distributed.report import Report, look, try_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports; give 1 if something is wrong."""
    options = _parser().parse_args(arguments)
    report = look(os.environ)
    if report.error is not None or options.backend is None:
        _print([report], options.json)
        return 0 if report.error is None else 1

    def fail(reason: str) -> NoReturn:
        _print([replace(report, error=f"backend {options.backend!r}: {reason}")], options.json)
        os._exit(1)  # the other ranks may not be there, so this one waits for nobody

    late = (
        f"not all ranks were there within {options.timeout:g} s; the launcher must start this command on each of them"
    )
    watchdog = threading.Timer(options.timeout, fail, [late])
    watchdog.daemon = True
    watchdog.start()
    try:
        reports = try_out(report, options.backend)
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")
    watchdog.cancel()
    _print(reports, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m camshaft.distributed",
        description="Print what this process sees: backends, devices, launcher, and its place in the run. Under a "
        "launcher each rank prints its own.",
    )
    parser.add_argument("--backend", help="begin a run with this backend; rank 0 prints what each rank reports")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that --backend may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank and line")
    return parser


def _print(reports: Sequence[Report], as_json: bool) -> None:
    """Write all at once, as ranks share the output."""
    sys.stdout.write("".join(f"{report.json() if as_json else report}\n" for report in reports))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
