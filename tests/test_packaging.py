"""`pip install` installs all modules and the type marker, with the right metadata and torch as the only requirement."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from camshaft import handlers
from camshaft.version import __version__
from scripts import environment

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Build a wheel from a copy of the sources, because a build leaves files next to them."""
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


def test_the_wheel_contains_only_the_package(wheel: ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "camshaft").rglob("*.py")}
    assert held == modules | {"camshaft/py.typed"}


def test_the_version_comes_from_the_package(metadata: Message) -> None:
    assert metadata["Version"] == __version__


def test_torch_is_the_only_requirement(metadata: Message) -> None:
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert needs == ["torch>=2.9"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_ci_tests_the_oldest_torch_that_is_allowed(metadata: Message) -> None:
    (oldest,) = re.findall(r"(?m)^OLDEST=(\S+)", (ROOT / ".ci" / "run").read_text("utf-8"))
    assert f"torch>={oldest.removesuffix('.0')}" in metadata.get_all("Requires-Dist", [])


def test_the_license_is_in_the_wheel(wheel: ZipFile, metadata: Message) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata["License-Expression"] == "Apache-2.0"


# extras that do not install everywhere, or are not for users; `all` does not include them
SEPARATE = {
    *("benchmarks", "clients", "compat", "dev", "docs", "examples", "loggers", "mpi", "openmpi", "ray", "test", "xla"),
}


@pytest.fixture(scope="module")
def extras(metadata: Message) -> dict[str, set[str]]:
    """Return the libraries of each extra."""
    needs: dict[str, set[str]] = {extra: set() for extra in metadata.get_all("Provides-Extra", [])}
    for need in metadata.get_all("Requires-Dist", []):
        library, _, condition = need.partition("; extra == ")
        if condition:
            needs[condition.strip('"')].add(library)
    return needs


def test_all_contains_every_extra_that_can_be_installed_together(extras: dict[str, set[str]]) -> None:
    covered = extras.keys() - SEPARATE - {"all"}
    assert covered >= {"metrics", "progress", "safetensors", "tensorboard"}
    assert extras["all"] == set().union(*(extras[extra] for extra in covered))


def test_the_libraries_of_all_extras_have_constraints(extras: dict[str, set[str]]) -> None:
    pinned = {
        canonical(line.partition("==")[0])
        for file in ROOT.glob("constraints/*.txt")
        for line in file.read_text().splitlines()
        if "==" in line
    }
    assert {canonical(library) for library in set().union(*extras.values())} <= pinned


def canonical(need: str) -> str:
    """Return the normalized name of a requirement, without versions."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", need)[0]).lower()


def test_the_version_is_in_one_place() -> None:
    here = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    files = [file for pattern in ("setup.*", "*.toml", "*.yml", "camshaft/**/*.py") for file in ROOT.glob(pattern)]
    found = [file for file in files if here.search(file.read_text("utf-8"))]
    assert found == [ROOT / "camshaft" / "version.py"]


def test_the_citation_has_this_version_or_none() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"(?m)^version: *(.*)$", citation) in ([], [__version__])
    assert re.search(r"(?m)^license: Apache-2.0$", citation)


def test_the_changelog_starts_with_this_version_and_names_all_handlers() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"(?m)^## (\S+)", changelog)
    assert sections[0] == __version__
    words = set(re.findall(r"[\w./-]*\w", changelog))
    assert {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.py")} <= words
    for name in handlers.__all__:  # the package is enough for a family of handlers
        module = ".".join(getattr(handlers, name).__module__.split(".")[:3])
        assert words & {name, module}, f"{name} is not in CHANGELOG.md"


# --- python -m build -----------------------------------------------------------------------------------------

PLACE = "import sysconfig; print(sysconfig.get_path('purelib'))"
# some tests, to be run without the sources next to them
TESTS = ["tests/test_base.py", "tests/test_tree.py", "tests/engine/test_events.py"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source distribution and from it a wheel, like `python -m build`; return the folder with both."""
    folder = tmp_path_factory.mktemp("built")
    made = {"build", "dist", "data", "runs", "site"}

    def ignored(directory: str, names: list[str]) -> set[str]:
        at_root = {name for name in names if name in made or name.startswith(".")} if Path(directory) == ROOT else set()
        return at_root | {name for name in names if name == "__pycache__" or name.endswith(".egg-info")}

    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    done = subprocess.run([*build, str(folder / "source")], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "dist"


@pytest.fixture(scope="module")
def unpacked(built: Path) -> Path:
    """Unpack the source distribution and return the folder."""
    (archive,) = built.glob("*.tar.gz")
    assert archive.name == f"camshaft-{__version__}.tar.gz"
    shutil.unpack_archive(archive, built.parent / "unpacked")
    return built.parent / "unpacked" / f"camshaft-{__version__}"


@pytest.mark.jobs
def test_the_wheel_built_from_the_source_distribution_is_complete(built: Path, wheel: ZipFile) -> None:
    (other,) = built.glob("*.whl")
    names = set(ZipFile(other).namelist())
    assert names == set(wheel.namelist())
    assert "camshaft/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "docs", "examples", "benchmarks"))]


@pytest.mark.jobs
def test_the_source_distribution_contains_tests_pages_and_examples(built: Path, unpacked: Path) -> None:
    source = built.parent / "source"
    for folder in ("camshaft", "tests", "docs", "examples", "benchmarks", "constraints", "scripts"):
        here, there = files_in(source / folder), files_in(unpacked / folder)
        assert here == there, f"{folder} differs"
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile"):
        assert (unpacked / name).read_bytes() == (source / name).read_bytes()


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"}


@pytest.mark.jobs
def test_it_installs_in_an_empty_environment_and_passes_its_tests_there(
    built: Path, unpacked: Path, tmp_path: Path
) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    # torch and pytest can be imported from this environment; editable installations cannot
    inside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    place = subprocess.run([python, "-c", PLACE], env=inside, check=True, capture_output=True, text=True).stdout.strip()
    (Path(place) / "torch_and_pytest.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    shutil.copytree(unpacked / "tests", tmp_path / "run" / "tests")
    shutil.copy(unpacked / "pyproject.toml", tmp_path / "run")
    found = subprocess.run(
        [python, "-c", "import camshaft; print(camshaft.__version__, camshaft.__file__)"],
        cwd=tmp_path / "run", env=inside, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert found == [__version__, str(Path(place, "camshaft", "__init__.py"))]
    run = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(run, cwd=tmp_path / "run", env=inside, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_environments_take_a_build_of_torch_from_the_index_that_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (pin,) = re.findall(r"(?m)^torch==(\S+)", environment.constraints("dev"))
    for version in (pin, f"{pin}+cpu"):
        with ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            folder = f"torch-{version}.dist-info"
            wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    pins = ("--constraint", str(ROOT / "constraints" / "dev.txt"))
    environment.pip_install(Path(sys.prefix), "--dry-run", "--ignore-installed", "--no-deps", *pins, "torch")
    assert f"Would install torch-{pin}+cpu" in capfd.readouterr().err
