#!/usr/bin/env python3
"""Run a command in one of the project's virtual environments, which is built first if need be.

    python3 scripts/environment.py dev pytest tests/engine

Without a command, only the environment's folder is printed. It is `.venv` (`.venv-NAME` for the others) in
the clone, with camshaft installed in editable mode. With CAMSHAFT_ENV_DIR set, it lies in that folder instead
and can be shared by many clones: it then holds only what camshaft needs, and the clone is put on PYTHONPATH.

`torch-VERSION` is `dev` with that version of torch, next to the libraries of the extra `compat`.
"""

from __future__ import annotations

import ast
import configparser
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name: (the extras of setup.cfg that it holds, the files with the versions in constraints/)
ENVIRONMENTS = {
    "dev": (("dev",), ("dev",)),
    "docs": (("docs",), ("dev", "docs")),
    "bench": (("benchmarks",), ("dev",)),
    "openmpi": (("test", "openmpi"), ("dev",)),
    "xla": (("test", "xla"), ("xla",)),
    "horovod": (("test",), ("horovod",)),
    "loggers": (("test", "loggers"), ("loggers",)),
    "clients": (("test", "examples", "clients"), ("dev", "clients")),
    "ray": (("test", "examples", "ray"), ("dev", "ray")),
}
OTHER_TORCH = re.compile(r"torch-(\d+\.\d+\.\d+)")
CHOSEN_BY_TORCH = ("torch", "torchvision", "sympy")  # each torch needs versions of its own
SCRIPTS = {
    "clients": "scripts/fetch_clients.py",
    "horovod": "scripts/build_horovod.py",
}  # what builds and installs more, for environments that need it
MARKER = "camshaft-environment"  # the file in a folder of ours that says what the folder was built from
DAYS_KEPT = 7  # a shared environment that nobody used for so long goes away


def main(name: str, *command: str) -> None:
    shared = os.environ.get("CAMSHAFT_ENV_DIR")
    folder = shared_folder(Path(shared), name) if shared else local_folder(name)
    if not is_ready(folder, name):
        with locked(folder):
            if not is_ready(folder, name):  # somebody else may have built it while we waited
                build(folder, name, shared=bool(shared))
    if command:
        run_inside(folder, command, shared=bool(shared))
    print(folder)


def local_folder(name: str) -> Path:
    return ROOT / (".venv" if name == "dev" else f".venv-{name}")


def shared_folder(parent: Path, name: str) -> Path:
    return parent.expanduser().resolve() / f"{name}-{fingerprint(name)[:16]}"


def fingerprint(name: str, folder: Path | None = None) -> str:
    """Return a digest of what decides what the environment contains; in a clone, also of where it is."""
    parts = [name, sys.version, sys.base_prefix, str(folder), *requirements(name), constraints(name)]
    if name in SCRIPTS:  # without its comments
        parts.append(ast.dump(ast.parse((ROOT / SCRIPTS[name]).read_text("utf-8"))))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_ready(folder: Path, name: str) -> bool:
    """Tell whether the environment was built to the end, from what the files say today."""
    marker = folder / MARKER
    if not marker.is_file() or marker.read_text("utf-8") != fingerprint(name, folder):
        return False
    marker.touch()
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build the folder; a process that dies lets go of the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(folder: Path, name: str, *, shared: bool) -> None:
    """Build the environment; the marker is completed last, so that a half-built one is never used."""
    started = time.monotonic()
    report(f"building {folder} with Python {sys.version.split()[0]}")
    make_room(folder)
    venv.create(folder, symlinks=True, with_pip=True)
    pins = folder / "constraints.txt"
    pins.write_text(constraints(name), "utf-8")
    pip_install(folder, "--constraint", str(pins), "setuptools", *requirements(name))
    if not shared:
        pip_install(folder, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if name in SCRIPTS:
        run_script(folder, ROOT / SCRIPTS[name], "--constraint", str(pins))
    (folder / MARKER).write_text(fingerprint(name, folder), "utf-8")
    if shared:
        remove_unused(folder.parent)
    report(f"built in {time.monotonic() - started:.0f} s")


def make_room(folder: Path) -> None:
    """Remove an older environment, but never a folder that somebody else made."""
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("this Python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)")
    if folder.exists() and not (folder / MARKER).exists():
        sys.exit(f"{folder} is not from this script: remove it, or set CAMSHAFT_ENV_DIR to another place")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / MARKER).touch()


def is_known(name: str) -> bool:
    return name in ENVIRONMENTS or OTHER_TORCH.fullmatch(name) is not None


def constraints(name: str) -> str:
    """Return the versions that the environment is built with, as lines for pip."""
    other = OTHER_TORCH.fullmatch(name)
    files = ("dev",) if other else ENVIRONMENTS[name][1]
    text = "".join((ROOT / "constraints" / f"{file}.txt").read_text("utf-8") for file in files)
    if other is None:
        return text
    kept = [line for line in text.splitlines() if line.partition("==")[0] not in CHOSEN_BY_TORCH]
    return "\n".join([f"torch=={other[1]}", *kept, ""])


def requirements(name: str) -> list[str]:
    """List what camshaft and the extras of this environment need, as setup.cfg says."""
    extras = ("dev", "compat") if OTHER_TORCH.fullmatch(name) else ENVIRONMENTS[name][0]
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    optional = config["options.extras_require"]
    lists = [config["options"]["install_requires"], *(optional[extra] for extra in extras)]
    return [line for text in lists for line in text.splitlines() if line]


def pip_install(folder: Path, *arguments: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    # our versions are complete: what the machine's own configuration of pip constrains could only contradict them
    environ = os.environ | {"PIP_CONSTRAINT": os.devnull}
    subprocess.run([*pip, *arguments], env=environ, stdout=sys.stderr, check=True)  # stdout is for the folder's name


def run_script(folder: Path, script: Path, *arguments: str) -> None:
    """Run a script of ours in the environment; what it keeps for the next one lies beside it."""
    kept = folder.parent / f".venv-{script.stem}"
    subprocess.run([str(folder / "bin" / "python"), str(script), str(kept), *arguments], check=True)


def remove_unused(parent: Path) -> None:
    oldest = time.time() - DAYS_KEPT * 86400
    for marker in parent.glob(f"*-*/{MARKER}"):
        if marker.stat().st_mtime < oldest:
            shutil.rmtree(marker.parent, ignore_errors=True)


def run_inside(folder: Path, command: tuple[str, ...], *, shared: bool) -> None:
    """Become the command, with the environment activated for it."""
    # the tests start Python hundreds of times, and each would compile all that it imports
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["VIRTUAL_ENV"] = str(folder)
    os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    if shared:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execvp(command[0], command)


def report(message: str) -> None:
    print(f"environment: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells that the Python found is too old
        version = sys.version.split()[0]
        sys.exit(f"Python 3.10 or newer is needed, this is {version}: try make PYTHON=python3.12, say")
    if len(sys.argv) < 2 or not is_known(sys.argv[1]):
        sys.exit(f"usage: environment.py {{{','.join(ENVIRONMENTS)},torch-VERSION}} [COMMAND ...]")
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"environment: {' '.join(error.cmd)} failed with exit code {error.returncode}")
