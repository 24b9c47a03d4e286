#!/usr/bin/env python3
"""Build Horovod for the installed torch, and install it; called by scripts/environment.py.

    python scripts/build_horovod.py CACHE [PIP-OPTION ...]

Horovod is available as source only, and predates the C++20 requirement of torch, so two lines are patched. The build
takes minutes; the wheel is cached in CACHE, under a digest of what it was built from. It supports the CPU only, even if
torch was built with CUDA; docs/reference/backends.md describes how to build for GPUs.
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
REQUIREMENTS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools", "wheel")  # to build and run it
PATCHES = (  # file, original text, replacement
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("cmake/Modules/FindPytorch.cmake", "(torch.version.cuda is not None)", "False"),
    # tests need neither speed nor debug symbols; without them, the build takes half the time
    ("CMakeLists.txt", 'REPLACE "-O2" "-O3" CMAKE_CXX_', 'REPLACE "-O2 -g" "-O1" CMAKE_CXX_'),
)
VARIABLES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Horovod's dependencies declare an older version, which CMake 4 rejects
    "MAKEFLAGS": f"-j{os.cpu_count() or 1}",  # the default is -j8, and each job takes 1 GB of memory
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
    """Exit with an error if a build tool is missing, before anything is downloaded."""
    missing = [] if shutil.which(os.environ.get("CXX", "c++")) else ["a C++ compiler"]
    missing += [] if shutil.which("make") else ["make"]
    missing += [] if Path(sysconfig.get_path("include"), "Python.h").exists() else ["the headers of Python"]
    if missing:
        sys.exit(
            f"Horovod is built from source, which needs {', '.join(missing)} (apt-get install g++ make python3-dev)"
        )


def digest() -> str:
    """Return a digest of everything that determines the contents of the wheel."""
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
            sys.exit(f"{name} of {SOURCE} does not contain {old!r}")
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
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # may contain cmake
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))} failed with exit code {error.returncode}")
