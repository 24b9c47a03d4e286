"""The folder tree is the architecture: check which modules import which."""

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
    "camshaft.activity",
    "camshaft.arguments",
    "camshaft.base",
    "camshaft.base.mixins",
    "camshaft.errors",
    "camshaft.files",
    "camshaft.interop",
    "camshaft.metrics",
    "camshaft.seeding",
    "camshaft.dtensors",
    "camshaft.text",
    "camshaft.tree",
    "camshaft.types",
    "camshaft.version",
)
ENGINE = ("camshaft.engine", "camshaft.engine.*")
ABOVE_THE_CORE = (
    "camshaft.engine",
    *(f"camshaft.engine.{name}" for name in ("deterministic", "metrics", "supervised")),
)
DISTRIBUTED = ("camshaft.distributed", "camshaft.distributed.*")
HANDLERS = ("camshaft.handlers", "camshaft.handlers.*")
CONTRIB = ("camshaft.contrib", "camshaft.contrib.*")


def inside(*names: str) -> tuple[str, ...]:
    """Return names of modules in `distributed`."""
    return tuple(f"camshaft.distributed.{name}" for name in names)


CONTRACT = (*inside("backends.contract", "topology"), *LEAVES)
ENVIRONMENTS, LAUNCH = inside("environments"), inside("launch", "launch.*")
VALUES, FAILURES = inside("collectives.values"), inside("failures", "failures.*")
ALONE, STORE = inside("failures.alone"), inside("failures.store")
# others tell the rest of it what they call and where they wait, and ask `failures` itself
BEHIND_FAILURES = tuple(
    f"camshaft.distributed.failures.{name}"
    for name in ("board", "hang_reports", "once", "record", "status", "verdicts", "watcher")
)
COLLECTIVES, AGREEMENT, MODELS = (inside(name, f"{name}.*") for name in ("collectives", "agreement", "models"))
JOB = inside("job", "ranks")
PUBLIC = ("camshaft.distributed", *inside("auto", "comp_models", "data", "launcher", "utils", "__main__"))
DATA = ("camshaft.data", "camshaft.data.*")

# allowed imports inside `distributed`, from the bottom up
IN_DISTRIBUTED: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (inside("topology"), (), ()),
    (inside("backends.contract"), CONTRACT, ()),
    (inside("backends.registry"), CONTRACT, ()),
    (ENVIRONMENTS, (*inside("topology"), *LEAVES), ()),
    (VALUES, CONTRACT, ()),
    (ALONE, (*inside("failures.trace"), *CONTRACT), ()),
    (STORE, (*ALONE, *CONTRACT), ()),
    (inside("connections", "cores"), (), ()),
    (inside("failures.record", "failures.trace"), LEAVES, ()),
    (inside("failures.debug"), (*FAILURES, *VALUES, *CONTRACT), ()),
    (FAILURES, (*FAILURES, *inside("connections"), *CONTRACT), inside("failures.debug")),
    (
        inside("job"),
        (*inside("cores", "environments", "backends.registry", "backends.serial"), *FAILURES, *CONTRACT),
        BEHIND_FAILURES,
    ),
    (inside("collectives.call"), (*FAILURES, *VALUES, *CONTRACT), BEHIND_FAILURES),
    (inside("ranks"), (*inside("collectives.call", "job"), *ALONE, *STORE, *CONTRACT), ()),
    (COLLECTIVES, (*COLLECTIVES, *inside("job"), *VALUES, *ALONE, *STORE, *CONTRACT), ()),
    (AGREEMENT, (*AGREEMENT, *COLLECTIVES, *JOB, *FAILURES, *CONTRACT), BEHIND_FAILURES),
    (MODELS, (*MODELS, *COLLECTIVES, *JOB, *FAILURES, *ENVIRONMENTS, *CONTRACT), BEHIND_FAILURES),
    (
        LAUNCH,
        (*LAUNCH, *JOB, *FAILURES, *ENVIRONMENTS, *inside("cores", "backends.registry"), *CONTRACT),
        BEHIND_FAILURES,
    ),
    (PUBLIC, (*DISTRIBUTED, *DATA, *LEAVES), BEHIND_FAILURES),
)

# modules, what they may import of camshaft, and exceptions from that; the first match applies
RULES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("camshaft", "camshaft.__main__", "camshaft.as_ignite"), ("camshaft", "camshaft.*"), ()),
    (("camshaft.migrate",), ("camshaft", "camshaft.*", "libcst", "libcst.*"), ()),
    (LEAVES, LEAVES, ()),
    (("camshaft.exceptions",), LEAVES, ()),
    (("camshaft.utils",), (*DISTRIBUTED, *LEAVES), ()),
    (ABOVE_THE_CORE, (*ENGINE, *DISTRIBUTED, *LEAVES), ()),
    (ENGINE, (*ENGINE, *LEAVES), ABOVE_THE_CORE),
    *IN_DISTRIBUTED,
    (DATA, (*DATA, *AGREEMENT, *JOB, *CONTRACT), ()),
    (DISTRIBUTED, (*DISTRIBUTED, *LEAVES), (*ENVIRONMENTS, *LAUNCH, *MODELS, *AGREEMENT, *BEHIND_FAILURES)),
    (HANDLERS, (*HANDLERS, *ENGINE, *DATA, *DISTRIBUTED, *LEAVES), BEHIND_FAILURES),
    (("camshaft.checkpoint",), HANDLERS, ()),
    (CONTRIB, (*CONTRIB, *HANDLERS, *ENGINE, *DISTRIBUTED, *LEAVES), ()),
)

# optional libraries, and the parts of torch that need one of them, or take long to import
OPTIONAL = (
    "apex",
    "clearml",
    "mlflow",
    "mpi4py",
    "numpy",
    "tensorboardX",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "torch_xla",
    "tqdm",
    "wandb",
)


@dataclass(frozen=True)
class Import:
    """An import statement: the imported modules and its context."""

    module: str
    line: int
    in_function: bool
    for_types: bool  # under `if TYPE_CHECKING:`


def test_only_the_engine_uses_what_is_private_to_it() -> None:
    uses = re.compile(r"\b(?:engine|trainer|evaluator)\._[a-z]")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in (ROOT / "camshaft").rglob("*.py")
        if file.parent.name != "engine"
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if uses.search(line)
    ]
    assert not found, found


def fits(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, modules: frozenset[str]) -> Iterator[Import]:
    """Yield all imports; `from package import name` imports the module `package.name` if it exists."""

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
    """Return the violations of the rules in all modules under `root`."""
    paths = {name_of(path, root): path for path in sorted(root.glob("camshaft/**/*.py"))}
    return [
        f"{path.relative_to(root)}:{line} {message}"
        for module, path in paths.items()
        for line, message in messages(module, path.read_text("utf-8"), frozenset(paths))
    ]


def messages(module: str, source: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    deferred = "annotations" in {alias.name for node in tree.body for alias in future(node)}
    if not deferred and any(isinstance(node, ANNOTATED) for node in ast.walk(tree)):
        yield 1, "does not start with `from __future__ import annotations`"
    rule = next(((allowed, denied) for who, allowed, denied in RULES if fits(module, who)), None)
    if rule is None:
        yield 1, "is not in any layer; add it to the rules"
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
        return "imports must be absolute"
    if ours and (fits(found.module, denied) or not fits(found.module, allowed)):
        return "imports a higher layer"
    if within(found.module, OPTIONAL):
        return None if found.in_function or found.for_types else "it is optional: import it where it is used"
    if found.in_function:
        return "only optional libraries may be imported in a function"
    libraries = {"torch", *sys.stdlib_module_names}
    if found.for_types or fits(found.module, allowed) or found.module.split(".")[0] in libraries:
        return None
    return "the core may import only torch"


def test_the_package_follows_the_rules() -> None:
    found = violations(ROOT)
    assert not found, "\n".join(found)


# each may import those after it
IN_ENGINE = ("engine", "loop", "plan", "sources", "progress", "dispatch", "events", "state")


def test_the_modules_of_the_engine_import_each_other_in_one_direction() -> None:
    modules = [f"camshaft.engine.{name}" for name in IN_ENGINE]
    for number, name in enumerate(IN_ENGINE):
        tree = ast.parse((ROOT / "camshaft" / "engine" / f"{name}.py").read_text("utf-8"))
        found = {one.module for one in imports(tree, frozenset(modules)) if not one.for_types}
        assert not found.intersection(modules[:number]), name


# variables that launchers set to describe the place of a process
PLACE = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|(SLURM|OMPI|PMIX?|MPI)_\w+|HOROVOD_(RANK|SIZE|HOSTNAME|LOCAL_\w+|CROSS_\w+)"
)


def test_only_environments_read_the_variables_of_launchers() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in sorted(ROOT.glob("camshaft/**/*.py"))
        # mpi compares its world size with the variables of other MPI launchers
        if not fits(name_of(path, ROOT), (*ENVIRONMENTS, "camshaft.distributed.backends.mpi"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACE.fullmatch(node.value)
    ]
    assert not found, "\n".join(found)


FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("tree.py", "from camshaft.engine.state import State", "imports a higher layer"),
        ("tree.py", "from camshaft import engine", "imports a higher layer"),
        ("tree.py", "import camshaft", "imports a higher layer"),
        ("engine/loop.py", "from camshaft.distributed import get_rank", "imports a higher layer"),
        ("engine/loop.py", "from camshaft.engine import Engine", "imports a higher layer"),
        ("engine/loop.py", "import camshaft.engine.supervised", "imports a higher layer"),
        ("engine/loop.py", "import camshaft.engine.metrics", "imports a higher layer"),
        ("engine/loop.py", "if TYPE_CHECKING:\n    import camshaft.handlers", "imports a higher layer"),
        ("distributed/ranks.py", "from camshaft.engine.state import State", "imports a higher layer"),
        ("distributed/ranks.py", "from camshaft.distributed.environments import detect", "imports a higher layer"),
        ("distributed/environments.py", "import camshaft.distributed.backends.registry", "imports a higher layer"),
        ("distributed/launch/spawn.py", "import camshaft.distributed.backends.xla", "imports a higher layer"),
        ("distributed/backends/registry.py", "from camshaft.distributed.job import current", "imports a higher layer"),
        ("distributed/backends/contract.py", "from camshaft.distributed.job import current", "imports a higher layer"),
        ("distributed/models/auto.py", "from camshaft.distributed.backends.serial import S", "imports a higher layer"),
        ("engine/loop.py", "from . import state", "imports must be absolute"),
        ("engine/loop.py", "def f():\n    from camshaft.engine.state import State", "in a function"),
        ("engine/loop.py", "class A:\n    def f(self):\n        import json", "in a function"),
        ("engine/loop.py", "import numpy as np", "it is optional"),
        ("engine/loop.py", "try:\n    from tqdm import auto\nexcept ImportError: ...", "it is optional"),
        ("engine/loop.py", "from torch.utils import tensorboard", "it is optional"),
        ("engine/loop.py", "import packaging.version", "the core may import only torch"),
        ("novelty.py", "x = 1", "is not in any layer"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_reported(tmp_path: Path, file: str, source: str, message: str) -> None:
    package = tmp_path / "camshaft"
    for name in ("__init__.py", "engine/__init__.py", "engine/state.py", "distributed/__init__.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / file).write_text(FUTURE + source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert file in found[0]
    assert message in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from camshaft.engine import Engine"),
        ("engine/__init__.py", "from camshaft.engine.supervised import create_supervised_trainer"),
        ("engine/supervised.py", "from camshaft.distributed import get_rank\nimport camshaft.engine.loop"),
        ("engine/loop.py", "from camshaft import tree\nimport math, torch.nn"),
        ("engine/loop.py", "def f():\n    import numpy\n    from torch.utils import tensorboard"),
        ("migrate.py", "import libcst\nfrom libcst import matchers"),
        ("engine/loop.py", "if TYPE_CHECKING:\n    import numpy, typing_extensions"),
        (
            "handlers/timing.py",
            "from camshaft.engine import Engine\nfrom camshaft.distributed import get_rank",
        ),
    ],
)
def test_allowed_imports_are_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / "camshaft" / file
    path.parent.mkdir(parents=True)
    (tmp_path / "camshaft" / "tree.py").touch()
    path.write_text(FUTURE + source)
    assert violations(tmp_path) == []


def test_a_module_without_deferred_annotations_is_reported(tmp_path: Path) -> None:
    (tmp_path / "camshaft").mkdir()
    (tmp_path / "camshaft" / "tree.py").write_text("x: int = 1\n")
    assert len(violations(tmp_path)) == 1
