"""Port scripts and notebooks from PyTorch-Ignite: ``python -m camshaft.migrate [--write] PATHS``.

Imports, and the uses of what ``import ignite`` binds, are replaced where they stand; everything else in a script keeps
its bytes. Imports of ``ignite.metrics``, of ``ignite.exceptions``, and of names that camshaft does not have, are left
unchanged. What a user has to change is reported line by line, also in files whose imports have been rewritten, and in
YAML files. A comment ``# migrated`` at the end of a reported line acknowledges the report.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import pkgutil
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from camshaft.files import write_atomically
from camshaft.interop import REPLACEMENTS
from camshaft.text import counted

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
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "venv")
_PACKAGES = ("camshaft", "ignite")
_YAML = (".yaml", ".yml")
_NAME = re.compile(r"(?<![\w./-])ignite(\.[^\W\d]\w*)*")  # not in pytorch-ignite, nor in a path
_STAYS = re.compile(r"ignite\.((contrib\.)?metrics|exceptions)\b")  # metrics, and the error that only they raise
_IN_TEXT = "{!r} is not rewritten: if it names a logger, a module, or a class, change it to {!r}"
_VERSION = "__version__ becomes that of camshaft: change code that compares it, and text that names PyTorch-Ignite"

# --- what a user has to change --------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change that calls need which a rewritten import does not make.

    Attributes:
        names: of the functions and classes of PyTorch-Ignite, separated by blanks; those of other packages in full. A
            name that begins with a dot is that of an attribute, of whatever object, also where it is not called.
        section: of the reference page.
        text: what to change, and why.
        keyword: only calls that pass it are affected.
        unless: keywords, and positions from 0: calls that pass one of them are not affected.
    """

    names: str
    section: str
    text: str
    keyword: str = ""
    unless: str = ""


CHANGES = (
    Change("ModelCheckpoint", "what-raises-an-error-now",
        "save_interval= does not exist: attach the handler to an event with a filter, such as "
        "Events.ITERATION_COMPLETED(every=100)", keyword="save_interval"),
    Change("ModelCheckpoint", "what-raises-an-error-now",
        "save_as_state_dict= does not exist: remove it, as only states are saved", keyword="save_as_state_dict"),
    Change(".listdir .iterdir", "checkpoints",
        "in a directory of checkpoints, the hidden folder .manifest is listed, too: use glob('*.pt')"),
    Change(".load_objects", "loading-the-checkpoint-of-a-running-job",
        "once the job has saved with camshaft, use resume_latest() of the Checkpoint that saves"),
    Change("torch.load", "checkpoints",
        "does not verify a checkpoint: pass its path to Checkpoint.load_objects, which compares the checksum"),
    Change("LRScheduler ReduceLROnPlateauScheduler ConcatScheduler create_lr_scheduler_with_warmup",
        "schedules-of-a-running-job",
        "if you continue a running job, its state in a checkpoint of PyTorch-Ignite is rejected, as it counts calls in "
        "another way: leave it out, and repeat its calls (ReduceLROnPlateauScheduler: finish the job first)"),
    Change("LRScheduler", "what-changes-results",
        "on ITERATION_COMPLETED it needs use_legacy=True, or rates are one iteration late", unless="use_legacy"),
    Change("EMAHandler", "what-changes-results",
        "the momentum warms up: warmup_iters=0 gives the average of PyTorch-Ignite",
        unless="momentum_warmup warmup_iters 2"),
    Change("OutputHandler .attach_output_handler", "what-raises-an-error-now",
        "another_engine= does not exist: pass global_step_transform=global_step_from_engine(engine), a function of "
        "camshaft.handlers", keyword="another_engine"),
    Change("AveragePrecision CohenKappa EpochMetric MatthewsCorrCoef PrecisionRecallCurve ROC_AUC RocCurve "
        "MedianAbsoluteError MedianAbsolutePercentageError MedianRelativeAbsoluteError",
        "what-raises-an-error-now",
        "is rejected in a job of several ranks, because it gathers samples as if every rank had the same number: use "
        "camshaft.handlers.attach_metrics with a metric of torchmetrics"),
    Change("._fire_event ._event_handlers ._allowed_events ._internal_run ._run_once_on_dataset",
        "what-raises-an-error-now",
        "does not exist: to fire an event use fire_event, to observe one register a handler"),
)  # fmt: skip


class Note(NamedTuple):
    """A line that a user has to change, or may have to."""

    line: int
    text: str
    section: str


# --- sources --------------------------------------------------------------------------------------------------------


@cache
def moved(path: str) -> str | None:
    """Return the camshaft name of a PyTorch-Ignite module, or of a name in it; ``None`` if camshaft does not have it.

    >>> moved("ignite.contrib.handlers.tqdm_logger"), moved("ignite.handlers.EarlyStopping")
    ('camshaft.handlers.tqdm_logger', 'camshaft.handlers.EarlyStopping')
    >>> moved("ignite.metrics")
    """
    name = re.sub(r"^ignite(\.contrib(?=\.handlers))?", "camshaft", path)
    if _STAYS.match(path) or re.search(r"\._(?!_)", name):  # what is private may have the same name and differ
        return None
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
    is_imported_there = isinstance(found, ModuleType) and found.__name__ != name
    return None if is_imported_there else name


def migrate(source: str) -> tuple[str, list[Note]]:
    """Rewrite the imports of a source.

    Args:
        source: Python code, or the code of a notebook's cells.

    Returns:
        The new source, and notes on what is left to change, by their line in the old one.

    Raises:
        SyntaxError: the source is not valid.

    >>> migrate("from ignite.engine import Events  # the usual ones\\n")
    ('from camshaft.engine import Events  # the usual ones\\n', [])
    """
    if not re.search("|".join(_PACKAGES), source):
        return source, []
    _check(source)
    try:
        tree = metadata.MetadataWrapper(cst.parse_module(source))
        if tree.module.code != source:
            raise SyntaxError("LibCST does not keep its formatting, such as a form feed")
        migration = _Migration(source)
        tree.visit(migration)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise SyntaxError(f"cannot be parsed: {error}") from error
    data = source.encode()
    for (start, end), text in sorted(migration.edits.items(), reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data.decode(), _unacknowledged(migration.notes, source) if migration.concerns_us else []


def _unacknowledged(notes: Iterable[Note], source: str) -> list[Note]:
    """Return the notes on lines that do not end with a comment that acknowledges them."""
    lines = source.split("\n")
    return sorted(note for note in notes if not lines[note.line - 1].rstrip().endswith("# migrated"))


def _check(source: str) -> None:
    """Raise a SyntaxError if a source is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        raise SyntaxError(f"cannot be parsed: {error}") from error


class _Migration(cst.CSTVisitor):
    """Collects what to replace in a source, and what to report.

    Args:
        source: the source.
    """

    METADATA_DEPENDENCIES = (
        metadata.ByteSpanPositionProvider,
        metadata.ParentNodeProvider,
        metadata.QualifiedNameProvider,
        metadata.ScopeProvider,
    )

    def __init__(self, source: str) -> None:
        super().__init__()
        self.notes: set[Note] = set()
        self.edits: dict[tuple[int, int], str] = {}  # new text by its place in the encoded source
        self.concerns_us = False  # whether the source imports PyTorch-Ignite or camshaft
        self._data = source.encode()
        self._binders: dict[str, list[cst.ImportAlias]] = {}  # of the package, by the name that they bind
        self._uses: dict[str, list[tuple[str, cst.CSTNode]]] = {}  # of these names: a path, and what its move replaces

    def visit_Module(self, node: cst.Module) -> None:
        self._newline = node.default_newline

    # --- imports

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            name = alias.evaluated_name
            self.concerns_us |= _root(name) in _PACKAGES
            if _root(name) != "ignite":
                continue
            self._report_missing(alias, name)
            if alias.asname is None or name == "ignite":
                self._binders.setdefault(alias.evaluated_alias or "ignite", []).append(alias)
            elif new := moved(name):
                self._edit(alias.name, new)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = "" if node.relative or node.module is None else get_full_name_for_node(node.module) or ""
        self.concerns_us |= _root(module) in _PACKAGES
        if _root(module) != "ignite":
            return False
        if isinstance(node.names, cst.ImportStar):
            paths, modules = [module], [moved(module) or module]
        else:
            paths = [f"{module}.{alias.evaluated_name}" for alias in node.names]
            modules = [(moved(path) or path).rpartition(".")[0] for path in paths]
        for path in paths:
            self._report_missing(node, path)
        if len({*modules}) > 1:
            self._split(node, modules)
        elif node.module is not None and modules[0] != module:
            self._edit(node.module, modules[0])
        return False

    def _split(self, node: cst.ImportFrom, modules: list[str]) -> None:
        """Replace an import from several modules by one import per line, with the comments beside the names."""
        line = self.get_metadata(metadata.ParentNodeProvider, node)
        if not m.matches(line, m.SimpleStatementLine(body=[m.ImportFrom()])):
            self._note(node, "not rewritten, because it has to be split: give it a line of its own", "imports")
            return
        aliases: Any = node.names
        beside: Any = [[alias] for alias in aliases]
        if node.lpar and node.rpar:
            beside[0].insert(0, node.lpar)
            beside[-1].append(node.rpar)
        imports = []
        for module, alias, nodes in zip(modules, aliases, beside, strict=True):
            name = cst.Module([]).code_for_node(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
            comments: Any = [comment for one in nodes for comment in m.findall(one, m.Comment())]
            imports.append("  ".join([f"from {module} import {name}", *(comment.value for comment in comments)]))
        start = self.get_metadata(metadata.ByteSpanPositionProvider, node).start
        first = self._data.rfind(b"\n", 0, start) + 1
        self._edit(node, (self._newline + self._data[first:start].decode()).join(imports))

    # --- uses of a package

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        chain: list[Any] = [node]
        while isinstance(chain[0], cst.Attribute):
            self._report_changes(chain[0], {f".{chain[0].attr.value}"}, {""})
            chain.insert(0, chain[0].value)
        if isinstance(chain[0], cst.Name):
            self._use(chain)
        return not isinstance(chain[0], cst.Name)

    def visit_Name(self, node: cst.Name) -> None:
        self._use([node])

    def _use(self, chain: list[Any]) -> None:
        """Note a use of a name: ``chain`` is its first part, its first two parts, and so on."""
        head, whole = chain[0].value, chain[-1]
        path = ".".join(["ignite", *(one.attr.value for one in chain[1:])])
        names = self.get_metadata(metadata.QualifiedNameProvider, whole, ())
        origin = self._origin(whole)
        if not names and self._origin(chain[0]) == "ignite":  # LibCST names no attribute that an import below it binds
            origin = path
        if origin and (len(chain) > 1 or origin == "ignite.__version__"):  # other names are reported in their import
            self._report_missing(whole, origin)
        if origin != path:
            return  # not of what `import ignite` binds
        if len(names) > 1:
            self._note(whole, f"not rewritten, because {head!r} is also the name of something else", "imports")
            path = "ignite"
        is_contrib = path.startswith("ignite.contrib.handlers")
        self._uses.setdefault(head, []).append((path, chain[int(is_contrib)]))

    def leave_Module(self, original_node: cst.Module) -> None:
        for head, aliases in self._binders.items():
            uses = self._uses.get(head, [])
            moving = [node for path, node in uses if path != "ignite" and moved(path)]
            stays = len(moving) < len(uses)
            for node in moving:
                self._edit(node, "camshaft" if stays or head == "ignite" else head)  # `import camshaft as ig`
            scopes = set()  # that have an import of camshaft
            for alias in aliases:
                name = alias.evaluated_name
                new = name if stays else moved(name) or name
                scope = self.get_metadata(metadata.ScopeProvider, alias, None)
                if moving and _root(new) == "ignite" and scope not in scopes:
                    new = f"camshaft, {new}"
                scopes.add(scope)
                self._edit(alias.name, new)

    # --- notes

    def visit_Call(self, node: cst.Call) -> None:
        names = {name.rpartition(".")[2] if _root(name) in _PACKAGES else name for name in self._imported(node.func)}
        if isinstance(node.func, cst.Attribute):
            names.add(f".{node.func.attr.value}")
        arguments = enumerate(node.args)
        passed = {one.keyword.value if one.keyword else one.star or str(position) for position, one in arguments}
        self._report_changes(node, names, {"", *passed})

    def _report_changes(self, node: cst.CSTNode, names: set[str], passed: set[str]) -> None:
        for change in CHANGES:
            named = names.intersection(change.names.split())
            if named and change.keyword in passed and passed.isdisjoint(change.unless.split()):
                self._note(node, f"{named.pop().removeprefix('.')}: {change.text}", change.section)

    def _report_missing(self, node: cst.CSTNode, path: str) -> None:
        parts = path.split(".")
        replaced = next((part for part in parts if part in REPLACEMENTS), None)
        missing = next((part for end, part in enumerate(parts, 1) if moved(".".join(parts[:end])) is None), None)
        if path == "ignite.__version__":
            self._note(node, _VERSION, "imports")
        elif replaced:
            self._note(node, f"{replaced} is not included: use {REPLACEMENTS[replaced]}", "not-included")
        elif missing and not _STAYS.match(path):
            self._note(node, f"camshaft does not have {missing}: replace it, or import it from ignite", "not-included")

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if "b" not in node.prefix and _NAME.fullmatch(node.raw_value) and (note := _note_on_name(node.raw_value)):
            self._note(node, *note)

    def _note(self, node: cst.CSTNode, text: str, section: str) -> None:
        start = self.get_metadata(metadata.ByteSpanPositionProvider, node).start
        self.notes.add(Note(1 + self._data.count(b"\n", 0, start), text, section))

    def _edit(self, node: cst.CSTNode, text: str) -> None:
        span = self.get_metadata(metadata.ByteSpanPositionProvider, node)
        self.edits[span.start, span.start + span.length] = text

    def _origin(self, node: cst.CSTNode) -> str:
        """Return the full name in PyTorch-Ignite or camshaft that an expression refers to, or an empty string."""
        return next((name for name in self._imported(node) if _root(name) in _PACKAGES), "")

    def _imported(self, node: cst.CSTNode) -> list[str]:
        names = self.get_metadata(metadata.QualifiedNameProvider, node, ())
        return [one.name for one in names if one.source is metadata.QualifiedNameSource.IMPORT]


def _note_on_name(name: str) -> tuple[str, str] | None:
    """Return what to report of a name in a text, and the section; ``None`` if there is nothing to change."""
    if replacement := REPLACEMENTS.get(name.rpartition(".")[2]):
        return f"{name!r} is not included: use {replacement}", "not-included"
    new = moved(name)
    return None if new is None else (_IN_TEXT.format(name, new), "imports")


def _root(path: str) -> str:
    return path.partition(".")[0]


# --- notebooks ------------------------------------------------------------------------------------------------------

_CELL = "# camshaft.migrate: cell "
_COMMAND = "pass  # camshaft.migrate: "
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun|python3?|writefile\s.*\.py)\b")


def migrate_notebook(text: str) -> tuple[str, list[tuple[str, Note]]]:
    """Rewrite the code cells of a notebook.

    Returns:
        The new text, with the indentation of the old one, and pairs of a place in the notebook and a note.

    Raises:
        SyntaxError: it is not a notebook, or a cell is not valid.
    """
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise SyntaxError(f"not a notebook: {type(error).__name__}: {error}") from error
    plain = {number: _without_commands(source, number) for number, source in enumerate(sources, 1)}
    # All cells are one source, as names that one of them imports are used in others.
    old = "".join(f"{_CELL}{number}\n{source}\n" for number, source in plain.items() if source.strip())
    new, notes = migrate(old)
    starts = [(line, name[len(_CELL) :]) for line, name in enumerate(_lines(old), 1) if name.startswith(_CELL)]
    places = []
    for note in notes:
        start, number = max((line, number.strip()) for line, number in starts if line < note.line)
        places.append((f"cell {number}, line {note.line - start}", note))
    if new == old:
        return text, places
    for part in new.split(_CELL)[1:]:
        number, _, source = part.partition("\n")
        cell = cells[int(number) - 1]
        source = re.sub(rf"^[ \t]*{_COMMAND}", "", source[:-1], flags=re.MULTILINE)
        cell["source"] = source if isinstance(cell["source"], str) else _lines(source)
    indentation = re.match(r"\{\s*?\n([ \t]*)", text)
    end = text[len(text.rstrip()) :]
    return json.dumps(notebook, ensure_ascii=text.isascii(), indent=indentation and indentation[1]) + end, places


def _without_commands(code: str, number: int) -> str:
    """Return the code of a cell with IPython commands, such as ``%matplotlib inline``, as placeholder statements."""
    if code.lstrip().startswith("%%") and not _PYTHON_CELLS.match(code.lstrip()):
        return ""
    with contextlib.suppress(SyntaxError):
        _check(code)
        return code
    lines, goes_on, indent = [], False, ""
    for line in code.split("\n"):
        command = line.lstrip()
        if goes_on or re.match(r"[%!?]|[\w, ]+=\s*[%!]|[^#]*\?$", command):
            indent = indent if goes_on else line[: len(line) - len(command)]
            goes_on = command.endswith("\\")
            line = f"{indent}{_COMMAND}{line}"
        lines.append(line)
    code = "\n".join(lines)
    try:
        _check(code)
    except SyntaxError as error:
        raise SyntaxError(f"cell {number}: {error}") from error
    return code


# --- files ----------------------------------------------------------------------------------------------------------


def _migrate_text(path: Path, text: str) -> tuple[str, list[tuple[str, Note]]]:
    if path.suffix == ".ipynb":
        return migrate_notebook(text)
    if path.suffix in _YAML:
        names = {(line, one[0]) for line, content in enumerate(text.split("\n"), 1) for one in _NAME.finditer(content)}
        dotted = [(line, name) for line, name in names if "." in name]  # `ignite` may be anything
        notes = [Note(line, *note) for line, name in dotted if (note := _note_on_name(name))]
        new, notes = text, _unacknowledged(notes, text)
    else:
        new, notes = migrate(text)
    return new, [(str(note.line), note) for note in notes]


def _migrate_file(path: Path, has_to_write: bool) -> bool:
    """Rewrite a file, or print what would change, and report what is left to change.

    Returns:
        Whether anything changes.

    Raises:
        OSError: the file cannot be read or written.
        SyntaxError: it is not valid.
        UnicodeError: its encoding is not the one that it declares.
    """
    data = path.read_bytes()
    if not re.search(rb"ignite|camshaft", data):
        return False  # it may be in another language, or in another encoding
    encoding = "utf-8" if path.suffix == ".ipynb" else tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    old = data.decode(encoding)
    new, notes = _migrate_text(path, old)
    if has_to_write and new != old:
        target = path.resolve()  # a link stays a link
        mode = target.stat().st_mode & 0o7777

        def write(file: Any) -> None:
            file.write(new.encode(encoding))
            os.chmod(file.name, mode)

        write_atomically(target, write)
        _, notes = _migrate_text(path, new)  # with the lines of the file as it now is
    for line in () if has_to_write else difflib.unified_diff(_lines(old), _lines(new), str(path), str(path)):
        sys.stdout.write(line if line.endswith(("\r", "\n")) else f"{line}\n\\ No newline at end of file\n")
    for place, note in notes:
        separator = ", " if path.suffix == ".ipynb" else ":"
        sys.stderr.write(f"{path}{separator}{place}: {note.text} ({PAGE}#{note.section})\n")
    return new != old


def _lines(text: str) -> list[str]:
    """Return the lines as Python counts them: ``str.splitlines`` splits at other characters, too."""
    return list(io.StringIO(text, newline=""))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to read: scripts, notebooks, and YAML files in folders, and files that are given explicitly."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in _SKIPPED_FOLDERS)
            yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", ".ipynb", *_YAML)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite files, or show what would change.

    Args:
        arguments: command-line arguments; by default those of the process.

    Returns:
        The exit code: 0 if there is nothing to rewrite, 1 if ``--write`` would change something, 2 if a file was
        skipped because of an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m camshaft.migrate",
        description="Rewrite the imports of scripts and notebooks from PyTorch-Ignite to camshaft. Print a unified "
        "diff, and report on standard error, line by line, what else may have to change, also in YAML files. A comment "
        "'# migrated' at the end of a reported line silences the report. Imports of ignite.metrics and "
        "ignite.exceptions stay.",
    )
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATHS", help="files, or folders that contain them")
    options = parser.parse_args(arguments)
    changed = failed = 0
    for path in _files(options.paths):
        try:
            changed += _migrate_file(path, options.write)
        except (OSError, SyntaxError, UnicodeError) as error:
            sys.stderr.write(f"{path}: left as it is: {error}\n")
            failed += 1
    done = "rewritten" if options.write else "would be rewritten; --write does it"
    sys.stderr.write(f"{counted(changed, 'file')} {done}\n" if changed else "nothing to rewrite\n")
    return 2 if failed else int(changed > 0 and not options.write)


if __name__ == "__main__":
    sys.exit(main())
