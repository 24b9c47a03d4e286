"""Port scripts and notebooks from PyTorch-Ignite: ``python -m camshaft.migrate [--write] PATHS``.

Imports are rewritten at the positions that Python's parser reports, so everything else stays the same, byte for byte.
Imports of ``ignite.metrics``, and of names that camshaft does not have, are left unchanged. What behaves differently is
reported line by line, and what is left to change also in files whose imports have been rewritten. So are libraries that
import PyTorch-Ignite, and names in YAML files.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from json import decoder, scanner
from pathlib import Path
from types import ModuleType
from typing import Any

from camshaft.files import write_atomically
from camshaft.text import BOLD, CYAN, GREEN, RED, Look, counted

PAGE = "docs/reference/pytorch-ignite.md"
Edit = tuple[int, int, str]  # start, end, replacement
_SUFFIXES = (".py", ".ipynb", ".yaml", ".yml")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "venv")
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun|python3?|writefile\s.*\.py)\b")


# --- what behaves differently ---------------------------------------------------------------------------------------


def _is_resuming(call: ast.Call) -> bool:
    """Return whether a call loads a training state: by ``load_objects``, or into what is named like an engine."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "load_state_dict":
        return bool(re.search("trainer|engine", ast.unparse(function.value), re.IGNORECASE))
    return True


def _keyword(name: str) -> Callable[[ast.Call], bool]:
    """Return a condition: the call passes a keyword whose value is not ``None`` or ``False``."""

    def is_given(call: ast.Call) -> bool:
        values = [one.value for one in call.keywords if one.arg == name]
        return any(not (isinstance(value, ast.Constant) and value.value in (None, False)) for value in values)

    return is_given


def _passes(name: str) -> Callable[[ast.Call], bool]:
    """Return a condition: the call passes a keyword, whatever its value."""
    return lambda call: any(one.arg == name for one in call.keywords)


@dataclass(frozen=True)
class Rule:
    """A difference that affects calls of certain functions or classes.

    Attributes:
        names: their names, without the module; names of methods, and of functions of ``os``, begin with a dot.
        section: section of the migration page.
        text: what behaves differently, and why.
        applies: returns whether a call is affected.
        is_change: whether the script may have to change, also after its imports have been rewritten.
    """

    names: tuple[str, ...]
    section: str
    text: str
    applies: Callable[[ast.Call], bool] = lambda call: True
    is_change: bool = False


_SAMPLES = (
    "AveragePrecision",
    "CohenKappa",
    "EpochMetric",
    "MatthewsCorrCoef",
    "PrecisionRecallCurve",
    "ROC_AUC",
    "RocCurve",
)
_MEDIANS = ("MedianAbsoluteError", "MedianAbsolutePercentageError", "MedianRelativeAbsoluteError")
_HOSTED = ("NeptuneLogger", "NeptuneSaver", "PolyaxonLogger", "setup_neptune_logging", "setup_plx_logging")

RULES = (
    Rule(
        ("auto_dataloader",), "data",
        "with several ranks, batches differ: a rank reads blocks of samples, each sample once per epoch, where "
        "PyTorch-Ignite distributes them in strides, padded. At the end of an epoch, ranks may have batches of "
        "different sizes: nothing to do with create_supervised_trainer; a step of your own multiplies a mean loss by "
        "engine.batch_share",
    ),
    Rule(
        ("DistributedProxySampler",), "data",
        "the order is the same as in PyTorch-Ignite, but the global random state does not change",
    ),
    Rule(
        (".set_epoch",), "data",
        "the engine itself calls set_epoch on the samplers of its loader; a number set in EPOCH_STARTED is kept",
    ),
    Rule(
        ("DeterministicEngine",), "data",
        "batches after terminate_epoch, or with persistent workers, differ from those of PyTorch-Ignite: each pass is "
        "seeded with its number, so that a resumed run has the same batches; set the same seed before it",
    ),
    Rule(
        ("create_supervised_trainer",), "data",
        "deterministic=True: batches after terminate_epoch, or with persistent workers, differ from those of "
        "PyTorch-Ignite, because each pass is seeded with its number",
        _keyword("deterministic"),
    ),
    Rule(
        ("create_supervised_trainer", "supervised_training_step", "supervised_training_step_amp"), "training",
        "gradient_accumulation_steps: the optimizer also steps for the last, partial window of an epoch, whose "
        "gradients were lost or leaked into the next epoch",
        _keyword("gradient_accumulation_steps"),
    ),
    Rule(
        ("create_supervised_trainer", "create_supervised_evaluator"), "training",
        "amp_mode='amp' on a CPU computes in bfloat16, whereas PyTorch-Ignite warned and stayed in float32",
        _keyword("amp_mode"),
    ),
    Rule(
        (".register_events",), "training",
        "event_to_attr: the counter belongs to this engine, and no longer appears on every other state",
        _keyword("event_to_attr"),
    ),
    Rule(
        ("ModelCheckpoint", "DiskSaver"), "checkpoints",
        "a directory that contains checkpoints is rejected without require_empty=False, "
        "and saving adds the hidden folder .manifest: list checkpoints with glob('*.pt')",
        lambda call: not _passes("require_empty")(call),
    ),
    Rule(
        ("ModelCheckpoint",), "checkpoints",
        "save_interval= does not exist: attach the handler to an event with a filter, such as "
        "Events.ITERATION_COMPLETED(every=100)",
        _passes("save_interval"),
        is_change=True,
    ),
    Rule(
        ("ModelCheckpoint",), "checkpoints",
        "save_as_state_dict= does not exist: remove it, as only states are saved",
        _passes("save_as_state_dict"),
        is_change=True,
    ),
    Rule(
        (".listdir", ".iterdir"), "checkpoints",
        "in a directory of checkpoints, the hidden folder .manifest is listed, too: use glob('*.pt')",
        is_change=True,
    ),
    Rule(
        ("load_objects",), "loading-the-checkpoint-of-a-running-job",
        "checkpoints of PyTorch-Ignite load, except for the states of LRScheduler, ReduceLROnPlateauScheduler, "
        "ConcatScheduler, and warm-ups, which count calls differently; run returns at once if the loaded state has "
        "reached its target",
        is_change=True,
    ),
    Rule(
        ("load_objects", ".load_objects", ".load_state_dict"), "loading-the-checkpoint-of-a-running-job",
        "once the job has saved with camshaft, resume_latest() of the Checkpoint that saves replaces this: it loads "
        "the newest complete checkpoint, the same on all ranks, and prunes those of earlier runs, which a handler "
        "otherwise does not know",
        _is_resuming,
        is_change=True,
    ),
    Rule(
        ("LRScheduler", "ReduceLROnPlateauScheduler", "ConcatScheduler", "create_lr_scheduler_with_warmup"),
        "schedules-of-a-running-job",
        "its state in a checkpoint of PyTorch-Ignite is rejected, because it counts calls differently: leave it out, "
        "and repeat its calls (ReduceLROnPlateauScheduler: finish the job first)",
        is_change=True,
    ),
    Rule(
        ("EMAHandler",), "handlers",
        "momentum_warmup and warmup_iters must be given together: one alone was silently ignored",
        lambda call: len({one.arg for one in call.keywords} & {"momentum_warmup", "warmup_iters"}) == 1,
    ),
    Rule(
        ("EarlyStopping",), "handlers",
        "threshold_mode='rel': the margin is a fraction of the absolute score, also for scores below zero",
        lambda call: any(isinstance(one.value, ast.Constant) and one.value.value == "rel" for one in call.keywords),
    ),
    Rule(
        ("FastaiLRFinder",), "handlers",
        "a search takes exactly num_iter iterations and restores the random state, so suggestions and later losses may "
        "differ slightly",
    ),
    Rule(
        ("BasicTimeProfiler", "HandlersTimeProfiler"), "handlers",
        "times belong to the event and the iteration in which they were measured; calls that a filter rejects are not "
        "counted",
    ),
    Rule(
        ("ProgressBar",), "loggers",
        "where the output is not a terminal, whole lines are printed, at most one every ten seconds: carriage returns "
        "make a log file unreadable",
    ),
    Rule(
        ("TensorboardLogger", "setup_tb_logging"), "loggers",
        "uses torch's writer, which needs tensorboard; tensorboardX, whose flush loses points, is used only if "
        "tensorboard is missing",
    ),
    Rule(
        ("OutputHandler", ".attach_output_handler"), "loggers",
        "another_engine= does not exist: pass global_step_transform=global_step_from_engine(engine), a function of "
        "camshaft.handlers",
        _passes("another_engine"),
        is_change=True,
    ),
    Rule(
        ("ClearMLLogger", "setup_clearml_logging"), "loggers",
        "does not upload the file of each torch.save, which included temporary ones: use ClearMLSaver",
    ),
    Rule(
        ("MLflowLogger", "setup_mlflow_logging"), "loggers",
        "sends in the background, so that a slow server delays nothing",
    ),
    Rule(
        ("VisdomLogger", "setup_visdom_logging"), "not-included",
        "is not included: use TensorboardLogger, setup_tb_logging",
        is_change=True,
    ),
    Rule(
        _HOSTED, "not-included",
        "is not included: use WandBLogger, MLflowLogger, or ClearMLLogger, and their setup functions",
        is_change=True,
    ),
    Rule(
        (*_SAMPLES, *_MEDIANS), "metrics",
        "is rejected in a job of several ranks, because it gathers samples as if every rank had the same number: use "
        "camshaft.handlers.attach_metrics with a metric of torchmetrics",
        is_change=True,
    ),
    Rule(
        ("RunningAverage",), "metrics",
        "works; camshaft.handlers.RunningAverage can replace it, and does not wait for the GPU in each iteration, but "
        "does not average over ranks",
    ),
    Rule(
        ("setup_common_training_handlers", "setup_common_distrib_training_handlers"), "handlers",
        "output_names: each rank has its own running averages, because averaging over ranks would make them wait for "
        "each other in each iteration",
        _keyword("output_names"),
    ),
    Rule(
        ("show_config", "Parallel", "EarlyStopping"), "loggers",
        "configures no logging: camshaft.utils.setup_logger('camshaft') shows its records, and those of "
        "auto_dataloader and auto_model",
    ),
)  # fmt: skip
_NAMES = re.compile("ignite|camshaft")
_MODULE = re.compile(r"ignite(\.(?!metrics)\w+)*")
_MODULE_IN_TEXT = re.compile(r"(?<![\w.-])ignite(\.\w+)+")
_IMPORTS_IGNITE = re.compile(rb"^[ \t]*(?:from|import)[ \t]+ignite\b|import\w*\(\s*[\"']ignite\b", re.MULTILINE)
_VERSION = "__version__ becomes that of camshaft: change code that compares it, and text that names PyTorch-Ignite"
_PRIVATE = (
    "_allowed_events",
    "_event_handlers",
    "_fire_event",
    "_internal_run",
    "_run_once_on_dataset",
)
_RULES_OF: dict[str, list[Rule]] = {
    name: [rule for rule in RULES if name in rule.names] for one in RULES for name in one.names
}


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
    tree = _parse(source)
    rewriting = _Rewriting(source, tree)
    new = _applied(source, rewriting.edits())
    if new != source and _strings(_parse(new)) != _strings(tree):
        raise SyntaxError("the names in an f-string cannot be located")
    return new, sorted({*rewriting.notes, *_notes(tree), *_of_libraries(tree)})


def _parse(source: str | bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        if isinstance(error, SyntaxError):
            raise
        raise SyntaxError(f"cannot be parsed: {error}") from error


def _strings(tree: ast.Module) -> list[str]:
    return sorted(repr(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))


def _lines(source: str) -> list[str]:
    """Return the lines as the parser counts them: ``str.splitlines`` splits at other characters, too."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", source)


def _applied(source: str, edits: Iterable[Edit]) -> str:
    for start, end, text in sorted(set(edits), reverse=True):
        source = source[:start] + text + source[end:]
    return source


@dataclass
class _Use:
    """A name in the code that refers to something in PyTorch-Ignite, such as ``ignite.engine.Engine``."""

    head: ast.Name
    chain: list[ast.Attribute]  # inner first

    @property
    def path(self) -> str:
        return ".".join(["ignite", *(one.attr for one in self.chain)])


@dataclass
class _Rewriting:
    """The edits of a source."""

    source: str
    tree: ast.Module
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = _lines(self.source)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        newline = re.search(r"\r\n|\r|\n", self.source)
        self._newline = newline.group() if newline else "\n"

    def edits(self) -> list[Edit]:
        """Return the edits of all imports, and of the uses of names that they bind."""
        found: list[Edit] = []
        packages: dict[tuple[ast.AST, str], list[tuple[ast.Import, ast.alias]]] = {}
        for scope, node in _imports(self.tree, self.tree):
            if isinstance(node, ast.ImportFrom):
                if node.level == 0 and _is_ignite(node.module or ""):
                    found += self._of_names(node)
                continue
            for alias in filter(lambda one: _is_ignite(one.name), node.names):
                if alias.asname is None or alias.name == "ignite":
                    packages.setdefault((scope, alias.asname or "ignite"), []).append((node, alias))
                elif (new := moved(alias.name)) is not None:
                    found.append((*self._span(alias), f"{new} as {alias.asname}"))
        bound = _bound(self.tree) if packages else set()
        for (scope, head), binders in packages.items():
            if head in bound:
                line = binders[0][0].lineno
                self.notes.append(
                    Note(line, f"not rewritten, because {head!r} is also the name of something else", "imports")
                )
            else:
                found += self._of_package(scope, head, binders)
        return found

    def _of_names(self, node: ast.ImportFrom) -> list[Edit]:
        """Return the edits of ``from ignite... import ...``, with one statement for each new module."""
        module = node.module or ""
        groups: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            path = moved(module if alias.name == "*" else f"{module}.{alias.name}")
            new = module if path is None else path if alias.name == "*" else path.rpartition(".")[0]
            groups.setdefault(new, []).append(alias)
        if list(groups) == [module]:
            return []
        first = max(groups, key=lambda name: (name != module, len(groups[name])))
        start, _ = self._span(node)
        path_of = re.compile(r"[\s\\]*\.[\s\\]*".join(module.split("."))).search(self.source, start)
        assert path_of is not None, "the statement names its module"
        edits: list[Edit] = [(*path_of.span(), first)] if first != module else []
        edits += [(*span, "") for span in self._without(node, groups[first])]
        if others := [name for name in groups if name != first]:
            texts = {name: ", ".join(self.source[slice(*self._span(one))] for one in groups[name]) for name in others}
            statements = [f"from {name} import {text}" for name, text in texts.items()]
            edits.append(self._after(node, statements))
        return edits

    def _without(self, node: ast.ImportFrom, kept: list[ast.alias]) -> list[tuple[int, int]]:
        """Return the spans to delete so that only some names of an import are left."""
        spans = [self._span(alias) for alias in node.names]
        spans_kept = [alias in kept for alias in node.names]
        deleted: list[tuple[int, int]] = []
        for index, ((start, end), stays) in enumerate(zip(spans, spans_kept, strict=True)):
            if stays:
                continue
            if any(spans_kept[index:]):  # up to the next name, or with its own line
                following = spans[index + 1][0]
                if self._same_line(end, following):
                    deleted.append((start, following))
                    continue
                comma = re.compile(r"(?:[^,#]|#.*)*,").match(self.source, end)  # not one in a comment
                assert comma is not None, "a comma separates two names"
                deleted.append(self._with_line(start, comma.end()))
                continue
            last = spans[max(position for position, one in enumerate(spans_kept[:index]) if one)][1]
            if self._same_line(last, start) or "\\" in self.source[last:start]:  # a line must follow a backslash
                deleted.append((last, end))
            else:
                comma_after = re.compile(r"\s*,").match(self.source, end)
                deleted.append(self._with_line(start, comma_after.end() if comma_after else end))
        return _joined(deleted)

    def _same_line(self, start: int, end: int) -> bool:
        return not re.search(r"[\r\n]", self.source[start:end])

    def _with_line(self, start: int, end: int) -> tuple[int, int]:
        """Extend a span to its whole line if nothing else is on it."""
        before = re.compile(r"(?:(?<=[\r\n])|\A)[^\S\r\n]*\Z")
        first = before.search(self.source[:start])
        rest = re.compile(r"[^\S\r\n]*(?:\r\n|\r|\n)").match(self.source, end)
        if first and rest:
            return first.start(), rest.end()
        blanks = re.compile(r"[^\S\r\n]*").match(self.source, end)
        return start, blanks.end() if blanks else end

    def _after(self, node: ast.stmt, statements: list[str]) -> Edit:
        """Return the edit that adds statements after another one, on separate lines if that one has its own line."""
        start, end = self._span(node)
        indent = self._lines[node.lineno - 1][: start - self._starts[node.lineno - 1]]
        stop = self._starts[node.end_lineno or node.lineno]
        rest = self.source[end:stop]
        if indent.strip() or not re.fullmatch(r"\s*(#.*)?\s*", rest):
            return end, end, "".join(f"; {one}" for one in statements)
        if not rest.endswith(("\r", "\n")):
            return stop, stop, "".join(f"{self._newline}{indent}{one}" for one in statements)
        return stop, stop, "".join(f"{indent}{one}{self._newline}" for one in statements)

    def _of_package(self, scope: ast.AST, head: str, binders: list[tuple[ast.Import, ast.alias]]) -> list[Edit]:
        """Return the edits of ``import ignite...``, and of everything that is accessed through that name."""
        move: list[_Use] = []
        stay: list[_Use] = []
        edits: list[Edit] = []
        for use in _uses(scope, head):
            start, end = self._span(use.head)
            new = moved(use.path) if use.chain else None
            # not where the parser is wrong, as it was in some f-strings before Python 3.12
            (move if new and self.source[start:end] == head else stay).append(use)
        alias_stays = head != "ignite" and not stay  # `import camshaft as ig`
        package = head if alias_stays else "camshaft"
        for use in move:
            is_contrib = [one.attr for one in use.chain[:2]] == ["contrib", "handlers"]
            last, suffix = (use.chain[1], ".handlers") if is_contrib else (use.head, "")
            edits.append((self._span(use.head)[0], self._span(last)[1], package + suffix))
        new_names = [None if stay and alias.name == "ignite" else moved(alias.name) for _, alias in binders]
        results = [[new or alias.name] for new, (_, alias) in zip(new_names, binders, strict=True)]
        names = [name.partition(".")[0] for result in results for name in result]
        if move and "camshaft" not in names:
            results[0].insert(0, "camshaft")
        if stay and "ignite" not in names:
            all_metrics = all(use.path.startswith("ignite.metrics.") for use in stay)
            results[0].append("ignite.metrics" if all_metrics else "ignite")
        for (node, alias), result in zip(binders, results, strict=True):
            shown = [
                f"{name} as {head}" if head != "ignite" and (alias_stays or name == "ignite") else name
                for name in result
            ]
            if shown == [self.source[slice(*self._span(alias))]]:
                continue
            edits.append((*self._span(alias), shown[0] if len(node.names) == 1 else ", ".join(shown)))
            if len(node.names) == 1 and shown[1:]:
                edits.append(self._after(node, [f"import {name}" for name in shown[1:]]))
        return edits

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Return the index in the source of a position from the parser, whose columns count bytes."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return self._starts[line - 1] + len(text.encode()[:column].decode(errors="ignore"))


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that overlap."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _is_ignite(module: str) -> bool:
    return module.partition(".")[0] == "ignite"


def _imports(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.Import | ast.ImportFrom]]:
    """Yield all imports, each with the function or module in which it binds names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield scope, child
        if not isinstance(child, ast.expr):  # an expression holds no imports, and may be nested deeply
            yield from _imports(child, child if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else scope)


def _bound(tree: ast.AST) -> set[str]:
    """Return all names that are bound by anything other than an import of PyTorch-Ignite."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) or (
            isinstance(node, ast.Import) and not any(_is_ignite(one.name) for one in node.names)
        ):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return names


def _uses(scope: ast.AST, head: str) -> list[_Use]:
    """Return the uses of a name, each with all attributes that follow it."""
    chains: dict[int, ast.Attribute] = {id(one.value): one for one in ast.walk(scope) if isinstance(one, ast.Attribute)}
    uses = [_Use(one, []) for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == head]
    for use in uses:
        node: ast.AST = use.head
        while id(node) in chains:
            node = chains[id(node)]
            use.chain.append(chains[id(use.chain[-1] if use.chain else use.head)])
    return uses


# --- notes ----------------------------------------------------------------------------------------------------------


def _notes(tree: ast.Module) -> Iterator[Note]:
    """Yield what behaves differently, and what is left to change where imports have been rewritten."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _NAMES.fullmatch(root := alias.name.partition(".")[0]):
                    names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            root = (node.module or "").partition(".")[0]
            for alias in node.names if _NAMES.fullmatch(root) else ():
                path = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = path
                if root == "camshaft":
                    continue
                is_metric = path.startswith(("ignite.metrics", "ignite.contrib.metrics"))
                if moved(path) is None and alias.name != "*" and not is_metric:
                    texts = [one.text for one in _RULES_OF.get(alias.name, ()) if one.section == "not-included"]
                    text = texts[0] if texts else "stays with PyTorch-Ignite, because camshaft does not have it"
                    yield Note(node.lineno, f"{alias.name} {text}", "not-included")
                elif path == "ignite.__version__":
                    yield Note(node.lineno, _VERSION, "imports")
    if not names:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node, names)
        elif isinstance(node, ast.Attribute) and node.attr in _PRIVATE:
            text = f"{node.attr} does not exist: to fire an event use fire_event, to observe one register a handler"
            yield Note(node.lineno, text, "not-included")
        elif isinstance(node, ast.Attribute) and node.attr == "__version__":
            if isinstance(node.value, ast.Name) and names.get(node.value.id) == "ignite":
                yield Note(node.lineno, _VERSION, "imports")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield _of_text(node.lineno, node.value)


def _of_text(line: int, name: str) -> Note:
    """Return the note on a string that may name a module or something in it."""
    new = moved(name) or name.replace("ignite", "camshaft", 1)
    text = f"the string {name!r} is not rewritten: if it names a logger, a module, or a class, change it to {new!r}"
    return Note(line, text, "imports")


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


def _of_call(node: ast.Call, names: dict[str, str]) -> Iterator[Note]:
    function, attributes = node.func, []
    while isinstance(function, ast.Attribute):
        attributes.append(function.attr)
        function = function.value
    theirs = names.get(function.id, "") if isinstance(function, ast.Name) else ""
    name = attributes[0] if attributes else theirs.rpartition(".")[2]
    for rule in _RULES_OF.get(name if theirs else f".{name}", ()):
        if rule.section == "not-included" and not attributes:
            continue  # reported where it is imported
        if rule.applies(node) and (rule.is_change or not theirs.startswith("camshaft")):
            yield Note(node.lineno, f"{name}: {rule.text}", rule.section, rule.is_change)


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
        notes = [(str(line), _of_text(line, name)) for line, name in names if _MODULE.fullmatch(name)]
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


class _Located(str):
    """A string of a JSON text, with its position."""

    start: int
    end: int


def _migrate_notebook(text: str) -> tuple[str, list[tuple[str, Note]]]:
    """Rewrite the code cells of a notebook; all other JSON keeps its formatting.

    Raises:
        SyntaxError: it is not a notebook, or a cell is not valid.
    """

    def located(whole: str, end: int, strict: bool = True) -> tuple[str, int]:
        value, stop = decoder.scanstring(whole, end, strict)  # type: ignore[attr-defined]  # not in typeshed
        string = _Located(value)
        string.start, string.end = end - 1, stop
        return string, stop

    reader: Any = json.JSONDecoder()
    reader.parse_string = located
    reader.scan_once = scanner.py_make_scanner(reader)  # type: ignore[attr-defined]  # not in typeshed
    try:
        cells = reader.decode(text)["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise SyntaxError(f"not a notebook: {type(error).__name__}: {error}") from error
    token = os.urandom(8).hex()  # what no cell contains
    commands: list[str] = []
    texts: dict[int, list[_Located]] = {}
    whole, places = "", [("", 0)]  # all cells as one source, as names that one imports are used in others
    for number, source in enumerate(sources, 1):
        pieces: list[_Located] = [source] if isinstance(source, _Located) else source
        code = "".join(pieces)
        try:
            plain = _without_commands(code, commands, token)
        except SyntaxError as error:
            raise SyntaxError(f"cell {number}: {error}") from error
        if plain.strip():
            texts[number] = pieces
            whole += f"# {token} {number}\n{plain}\n"
            places += [(f"cell {number}, line {line}", line) for line in range(len(_lines(f"{plain}\n")) + 1)]
    new, found = migrate(whole)
    notes = [(places[note.line][0], note) for note in found]
    edits: list[Edit] = []
    _, *parts = re.split(rf"^# {token} (\d+)\n", new, flags=re.MULTILINE)
    for number, part in zip(map(int, parts[::2]), parts[1::2], strict=True):
        code = re.sub(rf"[ \t]*pass  # {token}-(\d+)", lambda match: commands[int(match.group(1))], part[:-1])
        pieces = texts[number]
        if code != "".join(pieces):
            edits.append((pieces[0].start, pieces[-1].end, _encoded(text, pieces, sources[number - 1], code)))
    return _applied(text, edits), notes


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


def _encoded(text: str, pieces: list[_Located], source: Any, new: str) -> str:
    """Return the new source as JSON, formatted like the old one; unchanged lines stay the same, byte for byte."""
    literals = {str(piece): text[piece.start : piece.end] for piece in pieces}
    is_ascii = all(literal.isascii() for literal in literals.values())
    lines = [new] if isinstance(source, _Located) else re.findall(r"[^\n]*\n|[^\n]+", new)
    if len(pieces) > 1:
        between = text[pieces[0].end : pieces[1].start]
    else:
        before = text[: pieces[0].start]
        between = "," + before[len(before.rstrip()) :]
    return between.join(literals.get(line) or json.dumps(line, ensure_ascii=is_ascii) for line in lines)


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
        if other.is_file() and re.search(rb"^[ \t]*(from|import)[ \t]+ignite\b", other.read_bytes(), re.MULTILINE):
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
