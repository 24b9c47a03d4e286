"""Run code that was written for PyTorch-Ignite, unmodified.

python -m camshaft.as_ignite train.py ARGS
torchrun --nproc-per-node 2 -m camshaft.as_ignite train.py ARGS

In notebooks, and in scripts that are started in another way, ``import camshaft.as_ignite`` does the same if it is the
first import. From then on, ``ignite.engine``, ``ignite.handlers``, ``ignite.distributed`` and so on are the modules of
camshaft with these names, for other packages, too, and in the processes that multiprocessing starts. Modules that
camshaft does not have, above all ``ignite.metrics``, are those of the installed pytorch-ignite, and run on camshaft's
engine.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from camshaft.distributed.environments import detect
from camshaft.version import __version__

_IGNITE = "ignite"
_SHARED = ("base", "contrib.engines", "contrib.handlers", "distributed", "engine", "exceptions", "handlers", "utils")
_SCRIPT = "CAMSHAFT_AS_IGNITE"  # what is run, for the processes that it starts
_MODULE = "-m "  # before the name of a module
_USAGE = "usage: python -m camshaft.as_ignite [-m MODULE | SCRIPT] [ARGS ...]"


class _Finder(MetaPathFinder):
    """Finds modules of camshaft under the names that PyTorch-Ignite gives them.

    Args:
        folder: of the installed package.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _IGNITE or not any(f"{name}.".startswith(f"{one}.") for one in _SHARED):
            return None
        theirs = PathFinder.find_spec(fullname, [os.path.join(self._folder, *name.split(".")[:-1])])
        if name == "utils" and theirs is not None:
            theirs.loader = _Utils(fullname, str(theirs.origin))
            return theirs
        ours = name.removeprefix("contrib.") if name.startswith("contrib.handlers") else name
        if (found := find_spec(f"camshaft.{ours}")) is not None:
            return ModuleSpec(fullname, _Alias(found.name), is_package=found.submodule_search_locations is not None)
        return theirs  # such as the logger of a service, which is a subclass of one of camshaft's here


class _Alias(Loader):
    """Loads a module of camshaft, as it is, under another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has just replaced


class _Utils(SourceFileLoader):
    """Loads ``ignite.utils``, whose private functions the metrics use, with camshaft's public ones in it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        ours = import_module("camshaft.utils")
        vars(module).update({name: getattr(ours, name) for name in ours.__all__})


def _install() -> None:
    """Make ``import ignite`` find camshaft in this process.

    Raises:
        ImportError: pytorch-ignite is not installed, or was imported before.
    """
    if any(str(type(finder)) == str(_Finder) for finder in sys.meta_path):  # also before this module was reloaded
        return
    if _IGNITE in sys.modules:
        users = sorted({module.__name__ for module in tuple(sys.modules.values()) if _uses_ignite(module)})
        raise ImportError(
            f"ignite was imported before camshaft.as_ignite, by {', '.join(users) or 'a module that is gone'}: make "
            "'import camshaft.as_ignite' the first import, or run 'python -m camshaft.as_ignite SCRIPT'"
        )
    spec = find_spec(_IGNITE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "camshaft.as_ignite takes ignite.metrics from PyTorch-Ignite, which is not installed: pip install "
            "pytorch-ignite"
        )
    sys.meta_path.insert(0, _Finder(spec.submodule_search_locations[0]))
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        """Make a process that does not run the main module again import this one: it unpickles the function."""
        data: dict[str, Any] = prepare(name)
        return data if data.get("init_main_from_name") == __name__ else {**data, "camshaft": _install}

    spawn.get_preparation_data = get_preparation_data


def _uses_ignite(module: ModuleType) -> bool:
    def is_of_ignite(value: Any) -> bool:
        where = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        return isinstance(where, str) and where.partition(".")[0] == _IGNITE

    values = tuple(getattr(module, "__dict__", {}).values())
    # by type(), as a proxy may compute its __class__
    names = (value for value in values if issubclass(type(value), (ModuleType, FunctionType, type)))
    return not is_of_ignite(module) and any(map(is_of_ignite, names))


class _Spec(ModuleSpec):
    """The specification of the main module: by its name, processes that a script starts come here, too.

    Args:
        spec: of this module.
        package: that the script is in.
    """

    def __init__(self, spec: ModuleSpec, package: str | None) -> None:
        super().__init__(spec.name, spec.loader, origin=spec.origin)
        self._package = package or ""

    @property
    def parent(self) -> str:
        return self._package


def _run(namespace: dict[str, Any]) -> None:
    """Run a script in the namespace of the main module, as ``python SCRIPT`` does."""
    is_first = namespace["__name__"] == "__main__"
    if is_first:
        os.environ[_SCRIPT] = _taken_from_arguments()
    script = os.environ[_SCRIPT]
    path, package, code = _compiled(script)
    if is_first:
        sys.argv[0] = path if script.startswith(_MODULE) else sys.argv[0]
        atexit.register(_report, script.removeprefix(_MODULE), os.getpid())
    elif script.startswith(_MODULE) and os.path.basename(path) == "__main__.py":
        return  # which multiprocessing does not run again either
    kept = {name: namespace[name] for name in ("__name__", "__builtins__", "__loader__")}
    kept["__spec__"] = _Spec(namespace["__spec__"], package)
    namespace.clear()
    namespace |= {**kept, "__file__": path, "__package__": package, "__doc__": None, "__cached__": None}
    exec(code, namespace)


def _taken_from_arguments() -> str:
    """Take the path of the script, or ``-m`` and the module, off the command line."""
    is_module = sys.argv[1:2] == [_MODULE.strip()]
    if is_module:
        del sys.argv[1]
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.stderr.write(f"{_USAGE}\n")
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) and not is_module else 2)
    del sys.argv[0]
    if is_module:
        return f"{_MODULE}{sys.argv[0]}"
    if not getattr(sys.flags, "safe_path", False):  # else there is no entry for the script
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    if (home := str(Path(__file__).resolve().parents[1])) not in sys.path:  # it was found in the working directory
        sys.path.append(home)
    return os.path.abspath(sys.argv[0])


def _compiled(script: str) -> tuple[str, str | None, CodeType]:
    """Return the file of a script or a module, the package it is in, and its code."""
    if not script.startswith(_MODULE):
        return script, None, compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    script = script.removeprefix(_MODULE)
    spec = find_spec(script)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{script}.__main__")
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]  # as runpy asks
    if spec is None or code is None:
        raise ImportError(f"there is no module {script!r} to run")
    return str(spec.origin), spec.parent, code


def _report(script: str, process: int) -> None:
    """Report once per job what ran on what."""
    launch = None
    with suppress(RuntimeError):  # contradictory variables do not matter here
        launch = detect(os.environ)
    if os.getpid() != process or (launch is not None and launch.topology.rank > 0):
        return
    if _IGNITE not in sys.modules:
        text = (
            f"{script} has not imported ignite; what it started with another python command did not run on camshaft: "
            "put '-m camshaft.as_ignite' into that command"
        )
    else:
        loggers = {
            module.__name__ for name, module in tuple(sys.modules.items()) if name.startswith("ignite.handlers.")
        }
        theirs = ["ignite.metrics", *sorted(name for name in loggers if name.startswith("ignite."))]
        text = f"{script} ran on camshaft {__version__}, with {', '.join(theirs)} of pytorch-ignite "
        text += version("pytorch-ignite")
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")


if __name__ in ("__main__", "__mp_main__"):
    import_module("camshaft.as_ignite")._run(globals())
else:
    _install()
