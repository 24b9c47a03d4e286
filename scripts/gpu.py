#!/usr/bin/env python3
"""Run the tests or the benchmarks on the GPUs of this machine. Requires only torch and pytest, and no network.

python scripts/gpu.py test                    # further arguments are passed to pytest: -x -k handlers
python scripts/gpu.py bench                   # takes at most eight minutes
python scripts/gpu.py test --device cpu       # dry run without a GPU, with tiny sizes
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LATEST = 360.0  # seconds after which no further benchmark is started

sys.path.insert(0, str(ROOT))  # use this clone, whether installed or not


def test(arguments: Sequence[str]) -> int:
    """Run tests/gpu without the project's pytest settings, which require more packages."""
    import pytest

    tests = ROOT / "tests" / "gpu"
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(tests), "--import-mode", "importlib"]
    options += ["-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider", "-ra", "--durations", "5"]
    options += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]  # markers are declared in those settings
    # nccl waits for ranks that did not call it, and cannot be interrupted by a signal
    options += ["-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true"]
    return int(pytest.main([*options, str(tests), *arguments]))


def bench(on_gpu: bool) -> int:
    """Run the benchmarks one after another; the last line of output contains all results as JSON."""
    import torch

    from benchmarks.measuring import machine

    began, failures = perf_counter(), 0
    results: list[dict[str, Any]] = []
    for name, options in benchmarks(on_gpu):
        command = f"{name}.py {options}"
        print(f"\n{command}", flush=True)
        if perf_counter() - began > LATEST:
            print(f"not run, as {LATEST:.0f} s have passed", flush=True)
            results.append({"benchmark": name, "arguments": options, "skipped": "no time left"})
            continue
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                import_module(f"benchmarks.{name}").main(options.split())
        except Exception as error:  # run the other benchmarks anyway
            traceback.print_exc()
            failures += 1
            results.append({"benchmark": name, "arguments": options, "error": f"{type(error).__name__}: {error}"})
        else:
            *shown, result = printed.getvalue().splitlines()
            print(*shown, sep="\n", flush=True)
            results.append({"arguments": options, **json.loads(result)})
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    seconds = round(perf_counter() - began)
    print(json.dumps({"benchmark": "gpu", "machine": machine(), "device": device, "s": seconds, "results": results}))
    return 1 if failures else 0


def benchmarks(on_gpu: bool) -> list[tuple[str, str]]:
    """Return the names of the benchmarks, and their arguments."""
    rounds = "--repetitions 8 --iterations 20 --seconds 45" if on_gpu else "--repetitions 1 --iterations 1"
    images = "--model resnet50 " + ("--size 224 --batch_size 128" if on_gpu else "--size 32 --batch_size 2 --no_amp")
    tokens = "--model transformer " + ("--size 512 --batch_size 32" if on_gpu else "--size 8 --batch_size 2 --layers 1")
    compiled = f"{images} --compile" if on_gpu else "--model small --batch_size 2 --compile eager"
    return [
        ("networks", f"{images} {rounds}"),
        ("networks", f"{tokens} {rounds}"),
        ("checkpoint", "--sizes 0.5 --repetitions 5" if on_gpu else "--sizes 0.001 --repetitions 1"),
        ("networks", f"{rounds} {compiled}"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("test", "bench"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    options, others = parser.parse_known_args(arguments)
    if others and options.what == "bench":
        parser.error(f"bench takes no arguments but --device, got {others}")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch detects GPUs, in this process and all ranks
    import torch

    if torch.cuda.is_available() != (options.device == "cuda"):
        parser.error("torch found no GPU; use --device cpu for a dry run on the CPU")
    return test(others) if options.what == "test" else bench(options.device == "cuda")


if __name__ == "__main__":
    sys.exit(main())
