"""Port scripts and notebooks from PyTorch-Ignite: ``python -m camshaft.migrate [--write] PATHS``.

LibCST rewrites the imports and the uses of what they bind, and keeps comments and formatting. Imports of
``ignite.metrics``, and of names that camshaft does not have, are left unchanged. What behaves differently is reported
line by line, and what is left to change also in files whose imports have been rewritten. So are libraries that import
PyTorch-Ignite, and names in YAML files.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from camshaft.files import write_atomically
from camshaft.text import BOLD, CYAN, GREEN, RED, Look, counted

try:
    import libcst as cst
    from libcst import matchers as m
    from libcst import metadata
    from libcst.helpers import get_full_name_for_node
except ModuleNotFoundError as error:
    needed = f"camshaft.migrate needs {error.name!r}: pip install 'camshaft[migrate]'"
    if __name__ == "__main__":
        sys.stderr.write(f"{needed}\n")
        sys.exit(2)
    raise ModuleNotFoundError(needed, name=error.name) from error

PAGE = "docs/reference/pytorch-ignite.md"
_SUFFIXES = (".py", ".ipynb", ".yaml", ".yml")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "venv")
_STRING = r'"(?:[^"\\]|\\.)*"'  # of JSON
_SOURCE = re.compile(rf'"source"\s*:\s*(\[\s*(?:{_STRING}\s*,?\s*)*\]|{_STRING})')
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun|python3?|writefile\s.*\.py)\b")


# --- what behaves differently ---------------------------------------------------------------------------------------


def _keywords(call: cst.Call) -> dict[str, str]:
    """Return the keyword arguments of a call, with the code of their values."""
    return {one.keyword.value: _code(one.value) for one in call.args if one.keyword}


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _enables(name: str) -> Callable[[cst.Call], bool]:
    """Return a condition: the call passes a keyword whose value is not ``None`` or ``False``."""
    return lambda call: _keywords(call).get(name, "None") not in ("None", "False")


def _passes(name: str) -> Callable[[cst.Call], bool]:
    """Return a condition: the call passes a keyword, whatever its value."""
    return lambda call: name in _keywords(call)


def _is_resuming(call: cst.Call) -> bool:
    """Return whether a call loads a training state: by ``load_objects``, or into what is named like an engine."""
    into = _code(call.func).rpartition(".load_state_dict")[0]
    return not into or bool(re.search("trainer|engine", into, re.IGNORECASE))


@dataclass(frozen=True)
class Rule:
    """A difference that affects calls of certain functions or classes.

    Attributes:
        names: their names, without the module, separated by blanks; names of methods, and of functions of ``os``,
            begin with a dot.
        section: section of the migration page.
        text: what behaves differently, and why.
        applies: returns whether a call is affected.
        is_change: whether the script may have to change, also after its imports have been rewritten.
    """

    names: str
    section: str
    text: str
    applies: Callable[[cst.Call], bool] = lambda call: True
    is_change: bool = False


_change = partial(Rule, is_change=True)

RULES = (
    Rule("auto_dataloader", "data",
        "with several ranks, batches differ: a rank reads blocks of samples, each sample once per epoch, where "
        "PyTorch-Ignite distributes them in strides, padded. At the end of an epoch, ranks may have batches of "
        "different sizes: nothing to do with create_supervised_trainer; a step of your own multiplies a mean loss by "
        "engine.batch_share"),
    Rule("DistributedProxySampler", "data",
        "the order is the same as in PyTorch-Ignite, but the global random state does not change"),
    Rule(".set_epoch", "data",
        "the engine itself calls set_epoch on the samplers of its loader; a number set in EPOCH_STARTED is kept"),
    Rule("DeterministicEngine", "data",
        "batches after terminate_epoch, or with persistent workers, differ from those of PyTorch-Ignite: each pass is "
        "seeded with its number, so that a resumed run has the same batches; set the same seed before it"),
    Rule("create_supervised_trainer", "data",
        "deterministic=True: batches after terminate_epoch, or with persistent workers, differ from those of "
        "PyTorch-Ignite, because each pass is seeded with its number",
        _enables("deterministic")),
    Rule("create_supervised_trainer supervised_training_step supervised_training_step_amp", "training",
        "gradient_accumulation_steps: the optimizer also steps for the last, partial window of an epoch, whose "
        "gradients were lost or leaked into the next epoch",
        _enables("gradient_accumulation_steps")),
    Rule("create_supervised_trainer create_supervised_evaluator", "training",
        "amp_mode='amp' on a CPU computes in bfloat16, whereas PyTorch-Ignite warned and stayed in float32",
        _enables("amp_mode")),
    Rule(".register_events", "training",
        "event_to_attr: the counter belongs to this engine, and no longer appears on every other state",
        _enables("event_to_attr")),
    Rule("ModelCheckpoint DiskSaver", "checkpoints",
        "a directory that contains checkpoints is rejected without require_empty=False, and saving adds the hidden "
        "folder .manifest: list checkpoints with glob('*.pt')",
        lambda call: "require_empty" not in _keywords(call)),
    _change("ModelCheckpoint", "checkpoints",
        "save_interval= does not exist: attach the handler to an event with a filter, such as "
        "Events.ITERATION_COMPLETED(every=100)",
        _passes("save_interval")),
    _change("ModelCheckpoint", "checkpoints",
        "save_as_state_dict= does not exist: remove it, as only states are saved",
        _passes("save_as_state_dict")),
    _change(".listdir .iterdir", "checkpoints",
        "in a directory of checkpoints, the hidden folder .manifest is listed, too: use glob('*.pt')"),
    _change("load_objects", "loading-the-checkpoint-of-a-running-job",
        "checkpoints of PyTorch-Ignite load, except for the states of LRScheduler, ReduceLROnPlateauScheduler, "
        "ConcatScheduler, and warm-ups, which count calls differently; run returns at once if the loaded state has "
        "reached its target"),
    _change("load_objects .load_objects .load_state_dict", "loading-the-checkpoint-of-a-running-job",
        "once the job has saved with camshaft, resume_latest() of the Checkpoint that saves replaces this: it loads "
        "the newest complete checkpoint, the same on all ranks, and prunes those of earlier runs, which a handler "
        "otherwise does not know",
        _is_resuming),
    _change("LRScheduler ReduceLROnPlateauScheduler ConcatScheduler create_lr_scheduler_with_warmup",
        "schedules-of-a-running-job",
        "its state in a checkpoint of PyTorch-Ignite is rejected, because it counts calls differently: leave it out, "
        "and repeat its calls (ReduceLROnPlateauScheduler: finish the job first)"),
    Rule("EMAHandler", "handlers",
        "momentum_warmup and warmup_iters must be given together: one alone was silently ignored",
        lambda call: len({"momentum_warmup", "warmup_iters"}.intersection(_keywords(call))) == 1),
    Rule("EarlyStopping", "handlers",
        "threshold_mode='rel': the margin is a fraction of the absolute score, also for scores below zero",
        lambda call: _keywords(call).get("threshold_mode", "")[1:-1] == "rel"),
    Rule("FastaiLRFinder", "handlers",
        "a search takes exactly num_iter iterations and restores the random state, so suggestions and later losses "
        "may differ slightly"),
    Rule("BasicTimeProfiler HandlersTimeProfiler", "handlers",
        "times belong to the event and the iteration in which they were measured; calls that a filter rejects are not "
        "counted"),
    Rule("ProgressBar", "loggers",
        "where the output is not a terminal, whole lines are printed, at most one every ten seconds: carriage returns "
        "make a log file unreadable"),
    Rule("TensorboardLogger setup_tb_logging", "loggers",
        "uses torch's writer, which needs tensorboard; tensorboardX, whose flush loses points, is used only if "
        "tensorboard is missing"),
    _change("OutputHandler .attach_output_handler", "loggers",
        "another_engine= does not exist: pass global_step_transform=global_step_from_engine(engine), a function of "
        "camshaft.handlers",
        _passes("another_engine")),
    Rule("ClearMLLogger setup_clearml_logging", "loggers",
        "does not upload the file of each torch.save, which included temporary ones: use ClearMLSaver"),
    Rule("MLflowLogger setup_mlflow_logging", "loggers",
        "sends in the background, so that a slow server delays nothing"),
    _change("VisdomLogger setup_visdom_logging", "not-included",
        "is not included: use TensorboardLogger, setup_tb_logging"),
    _change("NeptuneLogger NeptuneSaver PolyaxonLogger setup_neptune_logging setup_plx_logging", "not-included",
        "is not included: use WandBLogger, MLflowLogger, or ClearMLLogger, and their setup functions"),
    _change("AveragePrecision CohenKappa EpochMetric MatthewsCorrCoef PrecisionRecallCurve ROC_AUC RocCurve "
        "MedianAbsoluteError MedianAbsolutePercentageError MedianRelativeAbsoluteError", "metrics",
        "is rejected in a job of several ranks, because it gathers samples as if every rank had the same number: use "
        "camshaft.handlers.attach_metrics with a metric of torchmetrics"),
    Rule("RunningAverage", "metrics",
        "works; camshaft.handlers.RunningAverage can replace it, and does not wait for the GPU in each iteration, but "
        "does not average over ranks"),
    Rule("setup_common_training_handlers setup_common_distrib_training_handlers", "handlers",
        "output_names: each rank has its own running averages, because averaging over ranks would make them wait for "
        "each other in each iteration",
        _enables("output_names")),
    Rule("show_config Parallel EarlyStopping", "loggers",
        "configures no logging: camshaft.utils.setup_logger('camshaft') shows its records, and those of "
        "auto_dataloader and auto_model"),
)  # fmt: skip
_RULES_OF: dict[str, list[Rule]] = {
    name: [rule for rule in RULES if name in rule.names.split()] for one in RULES for name in one.names.split()
}
_NAMES = re.compile("ignite|camshaft")
_MODULE = re.compile(r"ignite(\.(?!metrics)\w+)*")
_MODULE_IN_TEXT = re.compile(r"(?<![\w.-])ignite(\.\w+)+")
_IMPORTS_IGNITE = re.compile(rb"^[ \t]*(?:from|import)[ \t]+ignite\b|import\w*\(\s*[\"']ignite\b", re.MULTILINE)
_VERSION = "__version__ becomes that of camshaft: change code that compares it, and text that names PyTorch-Ignite"
_PRIVATE = ("_allowed_events", "_event_handlers", "_fire_event", "_internal_run", "_run_once_on_dataset")


@dataclass(frozen=True, order=True)
class Note:
    """A line that may have to change, or that behaves differently, with its number in the source before rewriting."""

    line: int
    text: str
    section: str
    is_change: bool = True


# --- what moves where -----------------------------------------------------------------------------------------------


@cache
def moved(path: str) -> str | None:
    """Return the camshaft name of a PyTorch-Ignite module, or of a name in it; ``None`` if camshaft does not have it.

    >>> (
    ...     moved("ignite.contrib.handlers.tqdm_logger"),
    ...     moved("ignite.handlers.EarlyStopping"),
    ...     moved("ignite.metrics"),
    ... )
    ('camshaft.handlers.tqdm_logger', 'camshaft.handlers.EarlyStopping', None)
    """
    _, *parts = path.split(".")
    if parts[:2] == ["contrib", "handlers"]:
        del parts[0]
    found: Any = import_module("camshaft")
    for part in parts:
        if not isinstance(found, ModuleType):
            break  # an attribute of a class
        if part.startswith("_") and part != "__version__":
            return None
        try:
            module = f"{found.__name__}.{part}"
            found = getattr(found, part) if hasattr(found, part) else import_module(module)
        except ImportError:
            return None
        if isinstance(found, ModuleType) and found.__name__ != module:
            return None  # a module that happens to be imported there
    return ".".join(("camshaft", *parts))


# --- sources --------------------------------------------------------------------------------------------------------


def migrate(source: str) -> tuple[str, list[Note]]:
    """Rewrite the imports of a source.

    Args:
        source: Python code, or the code of a notebook's cell.

    Returns:
        The new source, and notes on what behaves differently.

    Raises:
        SyntaxError: the source is not valid.

    >>> new, notes = migrate(
    ...     "from ignite import distributed as idist, metrics  # both\\nidist.show_config()\\n"
    ... )
    >>> print(new, end="")
    from camshaft import distributed as idist  # both
    from ignite import metrics
    idist.show_config()
    >>> [(note.line, note.section) for note in notes]
    [(2, 'loggers')]
    """
    if not _NAMES.search(source):
        return source, []
    libraries = _of_libraries(_parse(source))
    try:
        # What the parser returns has no duplicates, and a copy of a deep tree would exceed the limit of recursion.
        tree = metadata.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        if tree.module.code != source:
            raise SyntaxError("LibCST does not keep its formatting, such as a form feed")
        migration = _Migration()
        return tree.visit(migration).code, sorted({*migration.notes, *libraries})
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise SyntaxError(f"cannot be parsed: {error}") from error


def _parse(source: str | bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        if isinstance(error, SyntaxError):
            raise
        raise SyntaxError(f"cannot be parsed: {error}") from error


class _Migration(cst.CSTTransformer):
    """Replaces imports and the uses of what they bind, and collects notes on what it visits."""

    METADATA_DEPENDENCIES = (metadata.ParentNodeProvider, metadata.PositionProvider, metadata.ScopeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self._concerns_us = False  # whether the source imports PyTorch-Ignite or camshaft
        self._new_names: dict[cst.CSTNode, cst.Name] = {}
        self._new_aliases: dict[cst.ImportAlias, list[cst.ImportAlias]] = {}
        self._comments: list[str] = []  # of names that leave the statement

    def visit_Module(self, node: cst.Module) -> None:
        self._scopes: Any = self.metadata[metadata.ScopeProvider]
        packages: dict[tuple[Any, str], list[cst.ImportAlias]] = {}
        for statement in m.findall(node, m.Import() | m.ImportFrom()):
            self._concerns_us |= any(_NAMES.fullmatch(_root(path)) for path in _paths(statement))
            for alias in statement.names if isinstance(statement, cst.Import) else ():
                name = alias.evaluated_name
                if _root(name) == "ignite" and (alias.asname is None or name == "ignite"):
                    packages.setdefault((self._scopes[statement], alias.evaluated_alias or "ignite"), []).append(alias)
                elif _root(name) == "ignite" and (new := moved(name)):
                    self._new_aliases[alias] = [alias.with_changes(name=_dotted(new))]
        for (scope, head), binders in packages.items():
            self._move_package(scope, head, binders)

    def _move_package(self, scope: Any, head: str, binders: list[cst.ImportAlias]) -> None:
        """Replace ``import ignite...`` in a scope, and everything that is accessed through that name."""
        assignments = scope[head]
        if {one.node for one in assignments} - {self._parent(alias) for alias in binders}:
            self._note(binders[0], f"not rewritten, because {head!r} is also the name of something else", "imports")
            return
        move: list[cst.CSTNode] = []  # what is replaced by a name
        stay: list[str] = []  # paths
        # not `assignment.references`, which lack uses above the import, as in cells that run out of order
        for access in (one for any_scope in {*self._scopes.values()} - {None} for one in any_scope.accesses):
            nodes, path = [_head(access.node)], "ignite"
            if getattr(nodes[0], "value", "") != head or not assignments & access.scope[head]:
                continue  # another name, or in a string
            while isinstance(parent := self._parent(nodes[-1]), cst.Attribute) and parent.value is nodes[-1]:
                nodes.append(parent)
                path += f".{parent.attr.value}"
            if path != "ignite" and moved(path):
                move.append(nodes[path.startswith("ignite.contrib.handlers")])
            else:
                stay.append(path)
        is_renamed = head != "ignite" and not stay  # `import camshaft as ig`
        self._new_names.update((node, cst.Name(head if is_renamed else "camshaft")) for node in move)
        names = [alias.evaluated_name for alias in binders]
        results = [[name if stay and name == "ignite" else moved(name) or name] for name in names]
        roots = {_root(name) for result in results for name in result}
        if move and "camshaft" not in roots:
            results[0].insert(0, "camshaft")
        if stay and "ignite" not in roots:
            results[0].append(
                "ignite.metrics" if all(path.startswith("ignite.metrics.") for path in stay) else "ignite"
            )
        for alias, result in zip(binders, results, strict=True):
            self._new_aliases[alias] = [
                alias.with_changes(name=_dotted(name), asname=alias.asname if is_renamed or name == "ignite" else None)
                for name in result
            ]

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return self._new_names.get(original_node, updated_node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        return self._new_names.get(original_node, updated_node)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        names = [one for alias in original_node.names for one in self._new_aliases.get(alias, [alias])]
        if names == [*original_node.names]:
            return updated_node
        names = [one.with_changes(comma=cst.MaybeSentinel.DEFAULT) for one in names]
        if len(original_node.names) > 1:
            return updated_node.with_changes(names=names)
        return cst.FlattenSentinel(
            [updated_node.with_changes(names=names[:1]), *(cst.Import([one]) for one in names[1:])]
        )

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        """Replace ``from ignite... import ...`` with one statement for each new module."""
        module = _module(original_node)
        if _root(module) != "ignite":
            return updated_node
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node.with_changes(module=_dotted(moved(module) or module))
        groups: dict[str, list[cst.ImportAlias]] = {}
        for alias in updated_node.names:
            path = moved(f"{module}.{alias.evaluated_name}")
            groups.setdefault(path.rpartition(".")[0] if path else module, []).append(alias)
        if [*groups] == [module]:
            return updated_node
        first = max(groups, key=lambda name: (name != module, len(groups[name])))
        kept = self._only(updated_node, groups.pop(first)).with_changes(module=_dotted(first))
        others = [
            cst.ImportFrom(_dotted(name), [one.with_changes(comma=cst.MaybeSentinel.DEFAULT) for one in aliases])
            for name, aliases in groups.items()
        ]
        return cst.FlattenSentinel([kept, *others])

    def _only(self, node: Any, kept: list[Any]) -> Any:
        """Return an import with only some of its names, and take the comments beside the others."""
        removed: list[Any] = [one for one in node.names if one not in kept]
        *others, last = kept
        end = node.names[-1]
        rpar = node.rpar
        if last is not end:  # what is after the last name moves to another one
            after = last.comma.whitespace_after
            if isinstance(after, cst.ParenthesizedWhitespace):  # the parenthesis closes on a line of its own
                comma = last.comma.with_changes(whitespace_after=after.with_changes(last_line=cst.SimpleWhitespace("")))
                removed.append(rpar)
                rpar = cst.RightParen()
            else:
                comma = end.comma
            last = last.with_changes(comma=comma)
        self._comments += [getattr(found, "value", "") for one in removed for found in m.findall(one, m.Comment())]
        return node.with_changes(names=[*others, last], rpar=rpar)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Give new statements lines of their own if the old one had its own line."""
        lines = [updated_node]
        if len(original_node.body) == 1:
            lines = [updated_node.with_changes(body=updated_node.body[:1])]
            lines += [cst.SimpleStatementLine([one]) for one in updated_node.body[1:]]
        if self._comments:
            comment: Any = lines[-1].trailing_whitespace.comment
            text = "  ".join([*([comment.value] if comment else []), *self._comments])
            trailing = cst.TrailingWhitespace(cst.SimpleWhitespace("  "), cst.Comment(text))
            lines[-1] = lines[-1].with_changes(trailing_whitespace=trailing)
        self._comments = []
        return cst.FlattenSentinel(lines)

    # --- notes

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        for path in _paths(node):
            name = path.rpartition(".")[2]
            if _root(path) != "ignite" or path.startswith(("ignite.metrics", "ignite.contrib.metrics")):
                continue
            if path == "ignite.__version__":
                self._note(node, _VERSION, "imports")
            elif name != "*" and moved(path) is None:
                texts = [one.text for one in _RULES_OF.get(name, ()) if one.section == "not-included"]
                text = texts[0] if texts else "stays with PyTorch-Ignite, because camshaft does not have it"
                self._note(node, f"{name} {text}", "not-included")

    def visit_Call(self, node: cst.Call) -> None:
        origin, attribute = self._origin(node.func), isinstance(node.func, cst.Attribute) and node.func.attr.value
        name = attribute or origin.rpartition(".")[2]
        for rule in _RULES_OF.get(name if origin else f".{name}", ()):
            if rule.section == "not-included" and not attribute:
                continue  # reported where it is imported
            if rule.applies(node) and (rule.is_change or _root(origin) != "camshaft"):
                self._note(node, f"{name}: {rule.text}", rule.section, rule.is_change)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if (name := node.attr.value) in _PRIVATE:
            text = "does not exist: to fire an event use fire_event, to observe one register a handler"
            self._note(node, f"{name} {text}", "not-included")
        elif name == "__version__" and self._origin(node) == "ignite.__version__":
            self._note(node, _VERSION, "imports")

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if "b" not in node.prefix and _MODULE.fullmatch(node.raw_value):
            self._note(node, _text_of(node.raw_value), "imports")

    def _note(self, node: cst.CSTNode, text: str, section: str, is_change: bool = True) -> None:
        if self._concerns_us:
            line = self.get_metadata(metadata.PositionProvider, node).start.line
            self.notes.append(Note(line, text, section, is_change))

    def _origin(self, node: cst.BaseExpression) -> str:
        """Return the full name in PyTorch-Ignite or camshaft that a name refers to, or an empty string."""
        scope = self._scopes.get(head := _head(node))
        if scope is None or not isinstance(head, cst.Name):
            return ""
        found = sorted(one.name for one in scope.get_qualified_names_for(node) if one.source.name == "IMPORT")
        return next((name for name in found if _NAMES.fullmatch(_root(name))), "")

    def _parent(self, node: cst.CSTNode) -> cst.CSTNode:
        return self.get_metadata(metadata.ParentNodeProvider, node)


def _dotted(path: str) -> Any:
    return cst.parse_expression(path)


def _root(path: str) -> str:
    return path.partition(".")[0]


def _head(node: Any) -> Any:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _module(node: cst.ImportFrom) -> str:
    """Return the module from which a statement imports; that of a relative import begins with a dot."""
    return "." * len(node.relative) + (get_full_name_for_node(node.module) or "" if node.module else "")


def _paths(node: Any) -> list[str]:
    """Return the full names of what a statement imports."""
    module = f"{_module(node)}." if isinstance(node, cst.ImportFrom) else ""
    names = ["*"] if isinstance(node.names, cst.ImportStar) else [one.evaluated_name for one in node.names]
    return [module + name for name in names]


def _text_of(name: str) -> str:
    """Return the note on a string that may name a module or something in it."""
    new = moved(name) or name.replace("ignite", "camshaft", 1)
    return f"the string {name!r} is not rewritten: if it names a logger, a module, or a class, change it to {new!r}"


def _of_libraries(tree: ast.AST) -> Iterator[Note]:
    """Yield the imports of installed libraries that import PyTorch-Ignite themselves."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for module, importers in map(_importers, names):
            if importers:
                where = "" if importers[0] == module else f" in {importers[0]}"
                text = (
                    f"{module} imports PyTorch-Ignite{where}: its engines, events, and handlers do not work with those "
                    "of camshaft, so leave the code that uses them on PyTorch-Ignite, or replace them"
                )
                yield Note(getattr(node, "lineno", 0), text, "half-migrated-scripts", "." in module or not where)


@cache
def _importers(name: str) -> tuple[str, list[str]]:
    """Return the installed module that a name is, or is in, and the modules in it that import PyTorch-Ignite."""
    root, *parts = name.split(".")
    try:
        spec = None if root in ("camshaft", "ignite", "torch") else find_spec(root)
    except (ImportError, ValueError):  # a package that is broken, or run as a script
        spec = None
    if spec is None or not spec.origin or not {"dist-packages", "site-packages"}.intersection(Path(spec.origin).parts):
        return root, []
    top = path = Path(spec.origin)
    if top.name == "__init__.py":
        top = path = top.parent
    for part in parts:
        inner = next((one for one in (path / part, path / f"{part}.py") if one.exists()), None)
        if inner is None:
            break
        path = inner
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = [one for one in files if _IMPORTS_IGNITE.search(one.read_bytes())]
    module, *others = (
        ".".join(one.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__") for one in (path, *found)
    )
    return module, others


def _lines(source: str) -> list[str]:
    """Return the lines as the parser counts them: ``str.splitlines`` splits at other characters, too."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", source)


# --- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A file before and after rewriting.

    Attributes:
        path: the file.
        old: its content.
        new: its new content.
        encoding: of the content.
        notes: pairs of a place in the file and a note.
    """

    path: Path
    old: str
    new: str
    encoding: str
    notes: list[tuple[str, Note]]


def migrate_file(path: Path, numbers_after: bool = False) -> Result:
    """Read a script, a notebook, or a YAML file, and return its new content without changing the file.

    Args:
        path: the file.
        numbers_after: whether notes on a script use the line numbers of the new source.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it is not valid.
        UnicodeError: its encoding is not the one that it declares.
    """
    data = path.read_bytes()
    if not _NAMES.search(data.decode("latin-1")):  # it may be in another language, or in another encoding
        found = []
        with contextlib.suppress(SyntaxError):
            found = sorted({*_of_libraries(_parse(data))}) if path.suffix == ".py" else []
        return Result(path, "", "", "utf-8", [(str(note.line), note) for note in found])
    if path.suffix in (".yaml", ".yml"):
        old = new = data.decode()
        encoding = "utf-8"
        names = [(line, one[0]) for line, text in enumerate(_lines(old), 1) for one in _MODULE_IN_TEXT.finditer(text)]
        notes = [(str(line), Note(line, _text_of(name), "imports")) for line, name in names if _MODULE.fullmatch(name)]
    elif path.suffix == ".ipynb":
        old, encoding = data.decode(), "utf-8"
        new, notes = _migrate_notebook(old)
    else:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        old = data.decode(encoding)
        new, found = migrate(old)
        shift = _line_after(old, new) if numbers_after else int
        notes = [(str(shift(note.line)), note) for note in found]
    return Result(path, old, new, encoding, notes)


def _line_after(old: str, new: str) -> Callable[[int], int]:
    """Return a function that maps line numbers of the old source to those of the new one."""
    blocks = difflib.SequenceMatcher(None, _lines(old), _lines(new), autojunk=False).get_opcodes() if old != new else []

    def number(line: int) -> int:
        for _, first, last, start, stop in blocks:
            if first < line <= last:
                return max(start + 1, min(start + line - first, stop))
        return line

    return number


def _migrate_notebook(text: str) -> tuple[str, list[tuple[str, Note]]]:
    """Rewrite the code cells of a notebook; all other JSON keeps its formatting.

    Raises:
        SyntaxError: it is not a notebook, or a cell is not valid.
    """
    places = _SOURCE.finditer(text)
    try:
        cells = json.loads(text)["cells"]
        spans = [next(one.span(1) for one in places if json.loads(one[1]) == cell["source"]) for cell in cells]
        sources = [
            ("".join(cell["source"]), span)
            for cell, span in zip(cells, spans, strict=True)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise SyntaxError(f"not a notebook: {type(error).__name__}: {error}") from error
    token = os.urandom(8).hex()  # what no cell contains
    commands: list[str] = []
    whole, lines = "", [("", 0)]  # all cells as one source, as names that one imports are used in others
    for number, (code, _) in enumerate(sources, 1):
        try:
            plain = _without_commands(code, commands, token)
        except SyntaxError as error:
            raise SyntaxError(f"cell {number}: {error}") from error
        if plain.strip():
            whole += f"# {token} {number}\n{plain}\n"
            lines += [(f"cell {number}, line {line}", line) for line in range(len(_lines(f"{plain}\n")) + 1)]
    new, found = migrate(whole)
    notes = [(lines[note.line][0], note) for note in found]
    _, *parts = re.split(rf"^# {token} (\d+)\n", new, flags=re.MULTILINE)
    for number, part in reversed([*zip(map(int, parts[::2]), parts[1::2], strict=True)]):
        code = re.sub(rf"[ \t]*pass  # {token}-(\d+)", lambda match: commands[int(match.group(1))], part[:-1])
        start, end = sources[number - 1][1]
        if code != sources[number - 1][0]:
            text = text[:start] + _encoded(text[start:end], code) + text[end:]
    return text, notes


def _encoded(old: str, code: str) -> str:
    """Return code as JSON, formatted like the old one; unchanged lines stay the same, byte for byte."""
    first, *between, last = re.split(_STRING, old)
    literals = {json.loads(one): one for one in re.findall(_STRING, old)}
    lines = _lines(code) if first else [code]
    separator = between[0] if between else "," + first[1:]
    return (
        first
        + separator.join(literals.get(line) or json.dumps(line, ensure_ascii=old.isascii()) for line in lines)
        + last
    )


def _without_commands(code: str, commands: list[str], token: str) -> str:
    """Replace IPython commands, such as ``%matplotlib inline``, with placeholder statements, and add them to a list.

    Raises:
        SyntaxError: the rest is not valid.
    """
    first = code.lstrip().split("\n", 1)[0]
    if first.startswith("%%") and not _PYTHON_CELLS.match(first):
        return ""
    with contextlib.suppress(SyntaxError):
        _parse(code)
        return code
    lines, goes_on, indent = [], False, ""
    for line in code.split("\n"):
        command = line.lstrip()
        if goes_on or re.match(r"[%!?]|[\w, ]+=\s*[%!]|[^#]*\?$", command):
            indent = indent if goes_on else line[: len(line) - len(command)]
            goes_on = command.endswith("\\")
            lines.append(f"{indent}pass  # {token}-{len(commands)}")
            commands.append(line)
        else:
            lines.append(line)
    _parse("\n".join(lines))
    return "\n".join(lines)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to read: scripts, notebooks, and YAML in folders, and any file that is given explicitly."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in _SKIPPED_FOLDERS)
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def _imported(path: Path, source: str) -> Iterator[Path]:
    """Yield the modules beside a script that it imports, and that import PyTorch-Ignite."""
    for module in dict.fromkeys(re.findall(r"^[ \t]*(?:from|import)[ \t]+\.?(\w[\w.]*)", source, re.MULTILINE)):
        other = path.parent / f"{module.replace('.', '/')}.py"
        if other.is_file() and _IMPORTS_IGNITE.search(other.read_bytes()):
            yield other


def _diff(result: Result, look: Look) -> str:
    """Return the differences, in the colors of ``git diff``."""
    lines = difflib.unified_diff(_lines(result.old), _lines(result.new), str(result.path), str(result.path))
    styles = {"@": CYAN, "-": RED, "+": GREEN}
    text = ""
    for number, line in enumerate(lines):
        content = line.rstrip("\r\n")
        end = line[len(content) :] or "\n\\ No newline at end of file\n"
        text += look.styled(content, BOLD if number < 2 else styles.get(line[0])) + end
    return text


def _line_numbers(lines: list[str]) -> str:
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(lines)}"


def _write(result: Result) -> None:
    """Replace a file in one step; it keeps its permissions, and a link stays a link."""
    path = Path(os.path.realpath(result.path))
    mode = path.stat().st_mode & 0o7777

    def write(file: Any) -> None:
        file.write(result.new.encode(result.encoding))
        os.chmod(file.name, mode)

    write_atomically(path, write)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite files, or show what would change.

    Args:
        arguments: command-line arguments; by default those of the process.

    Returns:
        The exit code: 0 if nothing is left to change, 1 if ``--write`` would change something, 2 if a file was skipped
        because of an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m camshaft.migrate",
        description="Rewrite the imports of scripts and notebooks from PyTorch-Ignite to camshaft. Print a unified "
        "diff, and report on standard error, line by line, first what may have to change (change:), then what else "
        "behaves differently (note:). Imports of ignite.metrics stay. Names in YAML files are only reported.",
    )
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATHS", help="files, or folders with *.py, *.ipynb, and *.yaml files"
    )
    options = parser.parse_args(arguments)
    changed = failed = 0
    reports: dict[bool, list[str]] = {True: [], False: []}  # changes, notes
    paths = list(_files(options.paths))
    given = {path.resolve() for path in paths}
    for path in paths:
        try:
            result = migrate_file(path, numbers_after=options.write)
            if result.new != result.old:
                if options.write:
                    _write(result)
                else:
                    sys.stdout.write(_diff(result, Look.of(sys.stdout)))
                changed += 1
        except (OSError, SyntaxError, UnicodeError) as error:
            sys.stderr.write(f"{path}: left as it is: {error}\n")
            failed += 1
            continue
        # What an earlier --write left unchanged was reported then.
        is_migrated = options.write and result.new == result.old and "camshaft" in result.old
        places: dict[tuple[str, str, bool], list[str]] = {}
        for place, note in () if is_migrated else result.notes:
            places.setdefault((note.text, note.section, note.is_change), []).append(place)
        for (text, section, is_change), (first, *others) in places.items():
            separator, where = (", ", "; ".join(others)) if first.startswith("cell") else (":", _line_numbers(others))
            also = f"; also in {where}" if others else ""
            kind = "change" if is_change else "note"
            reports[is_change].append(f"{path}{separator}{first}: {kind}: {text}{also} ({PAGE}#{section})\n")
        for other in () if is_migrated else _imported(path, result.old):
            if other.resolve() not in given:
                text = f"imports {other}, which imports PyTorch-Ignite and is not among PATHS"
                reports[True].append(f"{path}: change: {text} ({PAGE}#half-migrated-scripts)\n")
    sys.stderr.writelines(reports[True] + reports[False])
    done = "rewritten" if options.write else "would be rewritten; --write does it"
    sys.stderr.write(f"{counted(changed, 'file')} {done}\n" if changed else "nothing to rewrite\n")
    return 2 if failed else int(changed > 0 and not options.write)


if __name__ == "__main__":
    sys.exit(main())
