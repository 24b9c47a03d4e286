#!/usr/bin/env python3
"""Build Horovod for the torch that this Python has, and install it; scripts/environment.py calls this.

    python scripts/build_horovod.py CACHE [PIP-OPTION ...]

Horovod comes as source only, from a time before torch asked for C++20: two lines of it are changed. The build takes
minutes, so the wheel is kept in the folder CACHE, under a digest of what it was built from. It works on the CPU, also
with a torch that knows CUDA: docs/reference/backends.md tells how to build for GPUs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCE = "horovod==0.28.1"
REQUIREMENTS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools", "wheel")  # to build and to run it
PATCHES = (  # file, what stands there, what the build needs
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("cmake/Modules/FindPytorch.cmake", "(torch.version.cuda is not None)", "False"),
    # tests need no speed, and no symbols for a debugger: the build takes half the time without
    ("CMakeLists.txt", 'REPLACE "-O2" "-O3" CMAKE_CXX_', 'REPLACE "-O2 -g" "-O1" CMAKE_CXX_'),
)
VARIABLES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # what Horovod brings along asks for less, which CMake 4 refuses
    "MAKEFLAGS": f"-j{os.cpu_count() or 1}",  # else it is -j8, at 1 GB of memory each
}


def main(cache: str, *pip_options: str) -> None:
    check_compiler()
    pip("install", *pip_options, *REQUIREMENTS, *([] if shutil.which("cmake") else ["cmake"]))
    folder = Path(cache) / digest()
    if not list(folder.glob("*.whl")):
        with tempfile.TemporaryDirectory() as scratch:
            wheel = build(Path(scratch))
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, folder / f"{wheel.name}.part")
            (folder / f"{wheel.name}.part").rename(folder / wheel.name)
    pip("install", *pip_options, *map(str, folder.glob("*.whl")))


def check_compiler() -> None:
    """Say what is missing before anything is downloaded."""
    missing = [] if shutil.which(os.environ.get("CXX", "c++")) else ["a C++ compiler"]
    missing += [] if shutil.which("make") else ["make"]
    missing += [] if Path(sysconfig.get_path("include"), "Python.h").exists() else ["the headers of Python"]
    if missing:
        sys.exit(
            f"Horovod is built from source, which needs {', '.join(missing)} (apt-get install g++ make python3-dev)"
        )


def digest() -> str:
    """Digest all that decides what the wheel is."""
    parts = [
        SOURCE,
        importlib.metadata.version("torch"),
        sys.version,
        sysconfig.get_platform(),
        Path(__file__).read_text(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build(folder: Path) -> Path:
    pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), SOURCE)
    with tarfile.open(only(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder)
    source = only(path.parent for path in folder.glob("*/CMakeLists.txt"))
    for name, old, new in PATCHES:
        text = (source / name).read_text("utf-8")
        if old not in text:
            sys.exit(f"{name} of {SOURCE} does not hold {old!r}")
        (source / name).write_text(text.replace(old, new), "utf-8")
    os.environ.update(VARIABLES)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    return only(folder.glob("*.whl"))


def only(paths: Iterable[Path]) -> Path:
    (path,) = paths
    return path


def pip(command: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--quiet", *arguments], check=True
    )


if __name__ == "__main__":
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # cmake may be there
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))} failed with exit code {error.returncode}")
