"""Guards take a snapshot before a test and report what the test has left behind.

A guard is a generator. The first `next` takes the snapshot. The second restores it as far as possible, and yields a
message, or None if nothing was left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.limits import SOON

ROOT = Path(__file__).resolve().parent.parent
GRACE = SOON
IGNORED = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")  # set by pytest and torch
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # used by the whole session

Guard = Iterator[str | None]


def environment_variables() -> Guard:
    before = variables()
    yield None
    after = variables()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    yield f"environment variables changed: {changed}" if changed else None


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(IGNORED)}


def working_directory() -> Guard:
    before = os.getcwd()
    yield None
    after = os.getcwd()
    os.chdir(before)
    yield f"the working directory changed to {after}" if after != before else None


def threads() -> Guard:
    before = set(threading.enumerate())
    yield None
    left = outlasting(lambda: [thread.name for thread in set(threading.enumerate()) - before if is_counted(thread)])
    yield f"threads still run: {sorted(left)}" if left else None


def is_counted(thread: threading.Thread) -> bool:
    """Return whether a thread counts; the monitor thread of tqdm, which never ends, does not."""
    return type(thread).__name__ != "TMonitor"


def child_processes() -> Guard:
    before = children()
    yield None
    left = outlasting(lambda: children() - before)
    yield f"child processes still run: {[command(pid) for pid in sorted(left)]}" if left else None


def children() -> set[int]:
    """Return the running children of this process; without /proc, only those of multiprocessing."""
    pids = {process.pid for process in multiprocessing.active_children() if process.pid}
    for file in Path("/proc/self/task").glob("*/children"):
        pids.update(pid for pid in map(int, content(file).split()) if is_running(pid))
    return {pid for pid in pids if not any(helper in command(pid) for helper in HELPERS)}


def is_running(pid: int) -> bool:
    """Return whether a process is running, and not a zombie."""
    return content(Path(f"/proc/{pid}/stat")).rpartition(") ")[2][:1] not in ("", "Z", "X")


def command(pid: int) -> str:
    return content(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip() or f"process {pid}"


def content(path: Path) -> str:
    """Read a file under /proc, or return an empty string if its process or thread has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def open_files() -> Guard:
    before = files_held()
    yield None
    left = sorted(files_held() - before)
    yield f"files still open: {left}" if left else None


def files_held() -> set[str]:
    """Return the open files in the repository and in the folder for temporary files, but not of an environment."""
    places, environment = (f"{ROOT}{os.sep}", f"{tempfile.gettempdir()}{os.sep}"), f"{sys.prefix}{os.sep}"
    paths = (link_target(f"/proc/self/fd/{name}") for name in list_folder("/proc/self/fd"))
    ours = (path for path in paths if path.startswith(places) and not path.startswith(environment))
    return {path for path in ours if not path.endswith(" (deleted)")}


def link_target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the descriptor used to list the folder
        return ""


def files_in_the_repository() -> Guard:
    """Report new files, except those that git ignores: other commands create them meanwhile."""
    before = list_folder(str(ROOT))
    yield None
    left = {name for name in list_folder(str(ROOT)) - before if not name.startswith(".")}
    if left:
        ask = ["git", "-C", str(ROOT), "check-ignore", "--", *left]
        with suppress(OSError):  # without git
            left.difference_update(subprocess.run(ask, capture_output=True, text=True).stdout.splitlines())
    yield f"files left in {ROOT}: {sorted(left)}" if left else None


def list_folder(folder: str) -> set[str]:
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()


def process_group() -> Guard:
    before = group_exists()
    yield None
    left = group_exists() and not before
    if left:
        torch.distributed.destroy_process_group()
    yield "a torch.distributed process group still exists" if left else None


def group_exists() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def root_logger() -> Guard:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield None
    added = [handler for handler in root.handlers if handler not in before]
    complaint = f"the root logger has new handlers {added}" if added else None
    if root.level != level:
        complaint = f"the level of the root logger changed from {level} to {root.level}"
    root.handlers[:] = before
    root.setLevel(level)
    yield complaint


def torch_settings() -> Guard:
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    yield None
    changed = []
    for name, (read, restore) in SETTINGS.items():
        if (now := read()) != before[name]:
            changed.append(f"{name} from {before[name]} to {now}")
            restore(before[name])
    yield f"settings of torch changed: {', '.join(changed)}" if changed else None


Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # a getter and a setter


def setting(owner: Any, name: str) -> Setting:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


SETTINGS: dict[str, Setting] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic_algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "cudnn.deterministic": setting(torch.backends.cudnn, "deterministic"),
    "cudnn.benchmark": setting(torch.backends.cudnn, "benchmark"),
}


def random_state() -> Guard:
    """Restore the random states without a message, because tests may seed."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield None
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])
    yield None


def outlasting(look: Callable[[], Any]) -> Any:
    """Call a function until it returns nothing or GRACE is over; return the last result."""
    deadline = time.monotonic() + GRACE
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


GUARDS: tuple[Callable[[], Guard], ...] = (
    environment_variables,
    working_directory,
    threads,
    child_processes,
    open_files,
    files_in_the_repository,
    process_group,
    root_logger,
    torch_settings,
    random_state,
)
