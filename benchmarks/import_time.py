#!/usr/bin/env python3
"""How long does `import camshaft` take after torch was imported?

python benchmarks/import_time.py --profile
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, installed or not

from benchmarks.measuring import Contender, Spread, importable, interleave, report, verdict

ROOT = Path(__file__).resolve().parent.parent
MILLISECOND = 1e-3
TARGET = 40.0
PEERS = {"pytorch-ignite": "ignite", "lightning": "lightning", "accelerate": "accelerate"}

# Run in a fresh interpreter; prints the seconds of the last import and the packages that it loaded.
PROGRAM = """
import json, sys, time
seconds = []
for module in sys.argv[1:]:
    before = set(sys.modules)
    began = time.perf_counter()
    __import__(module)
    seconds.append(time.perf_counter() - began)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(json.dumps([seconds[-1], sorted(loaded - {name.partition(".")[0] for name in before} - set(sys.argv))]))
"""


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that imports this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not recompile libraries at each start
    return subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True)


def timed_import(*modules: str) -> tuple[float, list[str]]:
    """Import modules in order; return the seconds of the last import and the other packages that it loaded."""
    seconds, loaded = json.loads(fresh("-c", PROGRAM, *modules).stdout.splitlines()[-1])
    return seconds, loaded


def contender(name: str, *modules: str) -> Contender:
    return Contender(name, lambda iterations: sum(timed_import(*modules)[0] for _ in range(iterations)))


def measure(peers: Sequence[str], repetitions: int) -> dict[str, Spread]:
    after_torch = {"camshaft": "camshaft", **{peer: PEERS[peer] for peer in peers}}
    contenders = [contender("torch", "torch")]
    contenders += [contender(name, "torch", module) for name, module in after_torch.items()]
    seconds = interleave(contenders, iterations=1, repetitions=repetitions)
    return {name: Spread.of(sample, MILLISECOND) for name, sample in seconds.items()}


def profile(lines: int) -> str:
    """List the modules that `import camshaft` loads after torch, slowest first, each without its own imports."""
    program = "import torch, sys; print('---', file=sys.stderr, flush=True); import camshaft"
    after_torch = fresh("-X", "importtime", "-c", program).stderr.partition("---\n")[2]
    entries = [line.removeprefix("import time:").split("|") for line in after_torch.splitlines() if "|" in line]
    costs = sorted(((int(own), name.strip()) for own, _, name in entries), reverse=True)
    shown = [f"{own / 1000:8.2f} ms  {name}" for own, name in costs[:lines]]
    return "\n".join([*shown, f"{sum(own for own, _ in costs) / 1000:8.2f} ms  in total, {len(costs)} modules"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.profile:
        print(profile(options.profile), end="\n\n")
    peers, skipped = importable(PEERS)
    spreads = measure(peers, options.repetitions)
    loaded = timed_import("torch", "camshaft")[1]
    reached = verdict(spreads["camshaft"], TARGET)
    line = ["ms, after torch", *map(str, spreads.values())]
    print(f"each in a fresh interpreter; medians of {options.repetitions}, and quartiles")
    print(f"packages other than torch that camshaft loads: {', '.join(loaded) or 'none'}")
    facts = {"target": TARGET, "verdict": reached, "ms": spreads, "loaded": loaded}
    report("import_time", ["import", *spreads], [line], skipped, **facts)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="rounds that are measured (%(default)s)")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=15, metavar="LINES", help="also list the slowest modules (%(const)s)"
    )
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return options


if __name__ == "__main__":
    main()
