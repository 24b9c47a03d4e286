#!/usr/bin/env python3
"""Install what `make test-clients` runs and requirements cannot name; scripts/environment.py calls this.

    python scripts/fetch_clients.py CACHE [PIP-OPTION ...]

ptan asks for one older version of torch, but works with newer ones. PyTorch-Ignite's examples are in its source
distribution only; they go to the environment's folder share/, with their licence (BSD-3-Clause).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCE = "pytorch-ignite==0.5.5"
SHA256 = "2c14de75c939a3cc06d2e7de00b1e0a261917ef9bd874dac2e69d789dfa9cc64"


def main(cache: str, *pip_options: str) -> None:
    pip("install", *pip_options, "stable-baselines3")  # which ptan imports
    pip("install", *pip_options, "--no-deps", "ptan")
    with tempfile.TemporaryDirectory() as scratch:
        pip("download", "--no-deps", "--no-binary", "pytorch-ignite", "--dest", scratch, SOURCE)
        (path,) = Path(scratch).iterdir()
        if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
            sys.exit(f"the package index has another {path.name} than the one that was tested")
        with tarfile.open(path) as archive:
            wanted = [member for member in archive if member.name.split("/")[1] in ("LICENSE", "examples")]
            archive.extractall(Path(sys.prefix) / "share", wanted)


def pip(command: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--quiet", *arguments], check=True
    )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))} failed with exit code {error.returncode}")
