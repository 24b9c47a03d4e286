#!/usr/bin/env python3
"""Run a command in one of the project's virtual environments; build the environment first if necessary.

    python3 scripts/environment.py dev pytest tests/engine

Without a command, print the environment's folder. It is `.venv` (`.venv-NAME` for the others) in the clone, with
camshaft installed in editable mode. If CAMSHAFT_ENV_DIR is set, environments are created in that folder and shared by
all clones: they then contain only the dependencies of camshaft, and the clone is added to PYTHONPATH.

`torch-VERSION` is `dev` with that version of torch, next to the libraries of the extra `compat`.
"""

from __future__ import annotations

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
# name: (extras of setup.cfg, file with the versions)
ENVIRONMENTS = {
    "dev": (("dev",), "constraints.txt"),
    "docs": (("docs",), "constraints.txt"),
    "bench": (("benchmarks",), "constraints.txt"),
    "openmpi": (("test", "openmpi"), "constraints.txt"),
    "xla": (("test", "xla"), "constraints-xla.txt"),
    "horovod": (("test",), "constraints-horovod.txt"),
    "loggers": (("test", "loggers"), "constraints-loggers.txt"),
}
OTHER_TORCH = re.compile(r"torch-(\d+\.\d+\.\d+)")
CHOSEN_BY_TORCH = ("torch", "torchvision", "sympy")  # each version of torch requires its own
SCRIPTS = {"horovod": "scripts/build_horovod.py"}  # run after pip, for environments that need more than packages
MARKER = "camshaft-environment"  # file in each environment; contains the fingerprint of what it was built from
DAYS_KEPT = 7  # shared environments unused for longer are removed


def main(name: str, *command: str) -> None:
    shared = os.environ.get("CAMSHAFT_ENV_DIR")
    folder = shared_folder(Path(shared), name) if shared else local_folder(name)
    if not is_ready(folder, name):
        with locked(folder):
            if not is_ready(folder, name):  # another process may have built it in the meantime
                build(folder, name, shared=bool(shared))
    if command:
        run_inside(folder, command, shared=bool(shared))
    print(folder)


def local_folder(name: str) -> Path:
    return ROOT / (".venv" if name == "dev" else f".venv-{name}")


def shared_folder(parent: Path, name: str) -> Path:
    return parent.expanduser().resolve() / f"{name}-{fingerprint(name)[:16]}"


def fingerprint(name: str, folder: Path | None = None) -> str:
    """Return a digest of everything that determines the contents of the environment, including the folder if given."""
    files = [Path(__file__), *([ROOT / SCRIPTS[name]] if name in SCRIPTS else [])]
    parts = [name, sys.version, sys.base_prefix, str(folder), *requirements(name), constraints(name)]
    parts += [file.read_text("utf-8") for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_ready(folder: Path, name: str) -> bool:
    """Return True if the environment was built completely, from the current requirements."""
    marker = folder / MARKER
    if not marker.is_file() or marker.read_text("utf-8") != fingerprint(name, folder):
        return False
    marker.touch()
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allow one process at a time to build the folder; the lock of a process that dies is released."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(folder: Path, name: str, *, shared: bool) -> None:
    """Build the environment; write the marker last, so that an incomplete environment is never used."""
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
    """Remove an outdated environment, but never a folder that this script did not create."""
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("this Python cannot create virtual environments (Debian, Ubuntu: apt-get install python3-venv)")
    if folder.exists() and not (folder / MARKER).exists():
        sys.exit(f"{folder} was not created by this script: remove it, or set CAMSHAFT_ENV_DIR to another folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / MARKER).touch()


def is_known(name: str) -> bool:
    return name in ENVIRONMENTS or OTHER_TORCH.fullmatch(name) is not None


def constraints(name: str) -> str:
    """Return the versions that the environment is built with, as lines for pip."""
    other = OTHER_TORCH.fullmatch(name)
    text = (ROOT / ("constraints.txt" if other else ENVIRONMENTS[name][1])).read_text("utf-8")
    if other is None:
        return text
    kept = [line for line in text.splitlines() if line.partition("==")[0] not in CHOSEN_BY_TORCH]
    return "\n".join([f"torch=={other[1]}", *kept, ""])


def requirements(name: str) -> list[str]:
    """Return the requirements of camshaft and of the extras of this environment, from setup.cfg."""
    extras = ("dev", "compat") if OTHER_TORCH.fullmatch(name) else ENVIRONMENTS[name][0]
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    optional = config["options.extras_require"]
    lists = [config["options"]["install_requires"], *(optional[extra] for extra in extras)]
    return [line for text in lists for line in text.splitlines() if line]


def pip_install(folder: Path, *arguments: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # the constraints are complete; those of the machine's pip configuration could only conflict with them
    subprocess.run([*pip, *arguments], env=os.environ | {"PIP_CONSTRAINT": os.devnull}, check=True)


def run_script(folder: Path, script: Path, *arguments: str) -> None:
    """Run one of the scripts in the environment; its cache is next to the environment."""
    kept = folder.parent / f".venv-{script.stem}"
    subprocess.run([str(folder / "bin" / "python"), str(script), str(kept), *arguments], check=True)


def remove_unused(parent: Path) -> None:
    oldest = time.time() - DAYS_KEPT * 86400
    for marker in parent.glob(f"*-*/{MARKER}"):
        if marker.stat().st_mtime < oldest:
            shutil.rmtree(marker.parent, ignore_errors=True)


def run_inside(folder: Path, command: tuple[str, ...], *, shared: bool) -> None:
    """Replace this process with the command, in the activated environment."""
    # tests start Python hundreds of times; without bytecode files, each start would compile every import
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["VIRTUAL_ENV"] = str(folder)
    os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    if shared:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execvp(command[0], command)


def report(message: str) -> None:
    print(f"environment: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - reports that the Python found is too old
        version = sys.version.split()[0]
        sys.exit(f"Python 3.10 or newer is required, got {version}: try, for example, make PYTHON=python3.12")
    if len(sys.argv) < 2 or not is_known(sys.argv[1]):
        sys.exit(f"usage: environment.py {{{','.join(ENVIRONMENTS)},torch-VERSION}} [COMMAND ...]")
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"environment: {' '.join(error.cmd)} failed with exit code {error.returncode}")
