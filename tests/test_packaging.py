"""What `pip install` gives: every module, the type marker, the right metadata, and torch as the only need."""

from __future__ import annotations

import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from camshaft.version import __version__

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Build a wheel from a copy of the sources, because a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "camshaft", source / "camshaft", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    return ZipFile(next(folder.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "camshaft").rglob("*.py")}
    assert held == modules | {"camshaft/py.typed"}


def test_the_version_comes_from_the_package(metadata: Message) -> None:
    assert metadata["Version"] == __version__


def test_torch_is_all_that_is_needed(metadata: Message) -> None:
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert needs == ["torch>=2.6"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_licence_is_in_the_wheel(wheel: ZipFile, metadata: Message) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata["License-Expression"] == "Apache-2.0"


def test_every_extra_of_a_handler_is_in_all(metadata: Message) -> None:
    needs: dict[str, set[str]] = {}
    for need in metadata.get_all("Requires-Dist", []):
        library, _, condition = need.partition("; extra == ")
        needs.setdefault(condition.strip('"'), set()).add(library)
    for extra in ("clearml", "metrics", "mlflow", "plot", "progress", "tensorboard", "wandb"):
        assert needs[extra] <= needs["all"]
