"""The folder tree is the architecture: who may import whom, checked by reading the imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ANNOTATED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AnnAssign)

LEAVES = (
    "camshaft.base",
    "camshaft.base.mixins",
    "camshaft.contrib",
    "camshaft.errors",
    "camshaft.files",
    "camshaft.metrics",
    "camshaft.seeding",
    "camshaft.text",
    "camshaft.tree",
    "camshaft.types",
    "camshaft.version",
)
ENGINE = ("camshaft.engine", "camshaft.engine.*")
ABOVE_THE_CORE = ("camshaft.engine", "camshaft.engine.supervised*", "camshaft.engine.deterministic*")
DISTRIBUTED = ("camshaft.distributed", "camshaft.distributed.*")
HANDLERS = ("camshaft.handlers", "camshaft.handlers.*")


def inside(*names: str) -> tuple[str, ...]:
    """Modules of `distributed`."""
    return tuple(f"camshaft.distributed.{name}" for name in names)


CONTRACT = (*inside("backend", "topology"), *LEAVES)
ENVIRONMENTS, LAUNCH = inside("environments"), inside("launch", "launch.*")
VALUES, WATCHER = inside("values"), inside("coordination.watcher")
WAITING, CHECK = inside("coordination.waiting"), inside("coordination.collective_check")

# who may import whom inside `distributed`, from the bottom up
IN_DISTRIBUTED: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (inside("topology"), (), ()),
    (inside("backend"), CONTRACT, ()),
    (inside("registry"), inside("backend", "topology"), ()),
    (ENVIRONMENTS, (*inside("topology"), *LEAVES), ()),
    (LAUNCH, (*DISTRIBUTED, *LEAVES), inside("backends.*")),
    ((*VALUES, *WATCHER, *WAITING), CONTRACT, ()),
    (CHECK, (*VALUES, *WAITING, *CONTRACT), ()),
    (inside("run"), (*inside("registry", "environments", "backends.serial"), *CHECK, *CONTRACT), ()),
    (inside("groups"), (*CHECK, *WAITING, *CONTRACT), ()),
    (inside("ranks"), (*inside("groups", "run"), *WAITING, *CONTRACT), ()),
    (inside("collectives", "point_to_point"), (*inside("groups", "run"), *VALUES, *WAITING, *CONTRACT), ()),
    (
        inside("coordination", "coordination.*"),
        (*inside("coordination.*", "collectives", "run"), *CONTRACT),
        (),
    ),
    (
        inside("data", "data.*", "auto", "__main__"),
        (*DISTRIBUTED, *LEAVES),
        (*inside("backends.*"), *LAUNCH),
    ),
)

# modules, what they may import of camshaft, and what of that they may not after all; the first fit counts
RULES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("camshaft", "camshaft.__main__"), ("camshaft", "camshaft.*"), ()),
    (LEAVES, LEAVES, ()),
    (("camshaft.exceptions",), LEAVES, ()),
    (("camshaft.utils",), (*DISTRIBUTED, *LEAVES), ()),
    (ABOVE_THE_CORE, (*ENGINE, *DISTRIBUTED, *LEAVES), ()),
    (ENGINE, (*ENGINE, *LEAVES), ABOVE_THE_CORE),
    *IN_DISTRIBUTED,
    (("camshaft.distributed", *inside("launcher", "utils")), (*DISTRIBUTED, *LEAVES), ()),
    (DISTRIBUTED, (*DISTRIBUTED, *LEAVES), (*ENVIRONMENTS, *LAUNCH)),
    (HANDLERS, (*HANDLERS, *ENGINE, *DISTRIBUTED, *LEAVES), ()),
)

# libraries that a user may or may not have, and the parts of torch that need one of them
OPTIONAL = (
    "apex",
    "clearml",
    "mlflow",
    "mpi4py",
    "numpy",
    "tensorboardX",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "torch_xla",
    "tqdm",
    "wandb",
)


@dataclass(frozen=True)
class Import:
    """An import statement: what it names, and where it stands."""

    module: str
    line: int
    in_function: bool
    for_types: bool  # under `if TYPE_CHECKING:`


def fits(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, modules: frozenset[str]) -> Iterator[Import]:
    """Find all imports; `from package import name` names the module `package.name` where there is one."""

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        for name in named(node, modules):
            yield Import(name, getattr(node, "lineno", 0), in_function, for_types)
        in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for_types |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, in_function, for_types)

    return visit(tree, False, False)


def named(node: ast.AST, modules: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = "." * node.level + (node.module or "")
        inside = [f"{package}.{alias.name}" for alias in node.names]
        return [name if name in modules or name in OPTIONAL else package for name in inside]
    return []


def violations(root: Path) -> list[str]:
    """Read every module under `root` and list what breaks a rule."""
    paths = {name_of(path, root): path for path in sorted(root.glob("camshaft/**/*.py"))}
    return [
        f"{path.relative_to(root)}:{line} {complaint}"
        for module, path in paths.items()
        for line, complaint in complaints(module, path.read_text("utf-8"), frozenset(paths))
    ]


def complaints(module: str, source: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    deferred = "annotations" in {alias.name for node in tree.body for alias in future(node)}
    if not deferred and any(isinstance(node, ANNOTATED) for node in ast.walk(tree)):
        yield 1, "does not begin with `from __future__ import annotations`"
    rule = next(((allowed, denied) for who, allowed, denied in RULES if fits(module, who)), None)
    if rule is None:
        yield 1, "is in no layer; add it to the rules"
        return
    for found in imports(tree, modules):
        if reason := forbidden(found, *rule):
            yield found.line, f"imports {found.module}: {reason}"


def future(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) and node.module == "__future__" else []


def forbidden(found: Import, allowed: tuple[str, ...], denied: tuple[str, ...]) -> str | None:
    """Return why an import violates the rules, or None."""
    ours = within(found.module, ("camshaft",))
    if found.module.startswith("."):
        return "imports are absolute"
    if ours and (fits(found.module, denied) or not fits(found.module, allowed)):
        return "arrows point down only"
    if within(found.module, OPTIONAL):
        return None if found.in_function or found.for_types else "it is optional, so import it where it is used"
    if found.in_function:
        return "only an optional library is imported in a function"
    if ours or found.for_types or found.module.split(".")[0] in {"torch", *sys.stdlib_module_names}:
        return None
    return "the core needs torch alone"


def test_the_package_keeps_the_rules() -> None:
    found = violations(ROOT)
    assert not found, "\n".join(found)


# what launchers set to tell a process its place
PLACE = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|(SLURM|OMPI|PMIX?|MPI)_\w+|HOROVOD_(RANK|SIZE|HOSTNAME|LOCAL_\w+|CROSS_\w+)"
)


def test_only_environments_name_the_variables_that_contain_a_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in sorted(ROOT.glob("camshaft/**/*.py"))
        # mpi compares the size of its world with what the launcher of another MPI library has set
        if not fits(name_of(path, ROOT), (*ENVIRONMENTS, "camshaft.distributed.backends.mpi.*"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACE.fullmatch(node.value)
    ]
    assert not found, "\n".join(found)


FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("tree.py", "from camshaft.engine.state import State", "arrows point down only"),
        ("tree.py", "from camshaft import engine", "arrows point down only"),
        ("tree.py", "import camshaft", "arrows point down only"),
        ("engine/loop.py", "from camshaft.distributed import get_rank", "arrows point down only"),
        ("engine/loop.py", "from camshaft.engine import Engine", "arrows point down only"),
        ("engine/loop.py", "import camshaft.engine.supervised", "arrows point down only"),
        ("engine/loop.py", "if TYPE_CHECKING:\n    import camshaft.handlers", "arrows point down only"),
        ("distributed/ranks.py", "from camshaft.engine.state import State", "arrows point down only"),
        ("distributed/ranks.py", "from camshaft.distributed.environments import detect", "arrows point down only"),
        ("distributed/environments.py", "import camshaft.distributed.registry", "arrows point down only"),
        ("distributed/launch/xla.py", "import camshaft.distributed.backends.xla", "arrows point down only"),
        ("distributed/registry.py", "from camshaft.distributed.run import current", "arrows point down only"),
        ("distributed/backend.py", "from camshaft.distributed.run import current", "arrows point down only"),
        ("distributed/auto.py", "from camshaft.distributed.backends.serial import S", "arrows point down only"),
        ("engine/loop.py", "from . import state", "imports are absolute"),
        ("engine/loop.py", "def f():\n    from camshaft.engine.state import State", "in a function"),
        ("engine/loop.py", "class A:\n    def f(self):\n        import json", "in a function"),
        ("engine/loop.py", "import numpy as np", "it is optional"),
        ("engine/loop.py", "try:\n    from tqdm import auto\nexcept ImportError: ...", "it is optional"),
        ("engine/loop.py", "from torch.utils import tensorboard", "it is optional"),
        ("engine/loop.py", "import packaging.version", "the core needs torch alone"),
        ("novelty.py", "x = 1", "is in no layer"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    package = tmp_path / "camshaft"
    for name in ("__init__.py", "engine/__init__.py", "engine/state.py", "distributed/__init__.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / file).write_text(FUTURE + source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert file in found[0]
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from camshaft.engine import Engine"),
        ("engine/__init__.py", "from camshaft.engine.supervised import create_supervised_trainer"),
        ("engine/supervised.py", "from camshaft.distributed import get_rank\nimport camshaft.engine.loop"),
        ("engine/loop.py", "from camshaft import tree\nimport math, torch.nn"),
        ("engine/loop.py", "def f():\n    import numpy\n    from torch.utils import tensorboard"),
        ("engine/loop.py", "if TYPE_CHECKING:\n    import numpy, typing_extensions"),
        (
            "handlers/timing.py",
            "from camshaft.engine import Engine\nfrom camshaft.distributed import get_rank",
        ),
    ],
)
def test_what_is_allowed_is_not_complained_about(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / "camshaft" / file
    path.parent.mkdir(parents=True)
    (tmp_path / "camshaft" / "tree.py").touch()
    path.write_text(FUTURE + source)
    assert violations(tmp_path) == []


def test_a_module_without_deferred_annotations_is_found(tmp_path: Path) -> None:
    (tmp_path / "camshaft").mkdir()
    (tmp_path / "camshaft" / "tree.py").write_text("x: int = 1\n")
    assert len(violations(tmp_path)) == 1
