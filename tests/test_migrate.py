"""Test that imports move, that everything else keeps its bytes, and that files are changed completely or not at all."""

from __future__ import annotations

import ast
import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft import migrate as module
from camshaft.migrate import RULES, main, migrate

PAGE = Path(__file__).parent.parent / module.PAGE


def new(source):
    return migrate(source)[0]


def notes(source):
    return [(note.line, note.section, note.text) for note in migrate(source)[1]]


# before and after, per rule
MOVES = {
    "from a module": [
        ("from ignite.engine import Engine, Events as E", "from camshaft.engine import Engine, Events as E"),
        ("from ignite.handlers import *", "from camshaft.handlers import *"),
        ("from ignite import engine, handlers", "from camshaft import engine, handlers"),
        ("from ignite . engine import Engine, \\\n    Events", "from camshaft.engine import Engine, \\\n    Events"),
        ("import fire\nimport ignite.engine as e; e.x()", "import fire\nimport camshaft.engine as e; e.x()"),
        ("def f():\n\tfrom ignite import utils  # é", "def f():\n\tfrom camshaft import utils  # é"),
        ("import ignite.engine, os  # both", "import camshaft.engine, os  # both"),
    ],
    "contrib": [
        ("from ignite.contrib.engines import common", "from camshaft.contrib.engines import common"),
        ("from ignite.contrib.handlers.tqdm_logger import ProgressBar",
         "from camshaft.handlers.tqdm_logger import ProgressBar"),
        ("from ignite.contrib import engines, handlers",
         "from camshaft.contrib import engines\nfrom camshaft import handlers"),
        ("import ignite.contrib.handlers\nignite.contrib.handlers.ProgressBar()",
         "import camshaft.handlers\ncamshaft.handlers.ProgressBar()"),
    ],
    "an import of names that stay and names that move": [
        ("from ignite.handlers import Checkpoint, VisdomLogger, Timer",
         "from camshaft.handlers import Checkpoint, Timer\nfrom ignite.handlers import VisdomLogger"),
        ("from ignite import distributed, metrics  # both",
         "from camshaft import distributed  # both\nfrom ignite import metrics"),
        ("from ignite import (metrics, distributed,)",
         "from camshaft import (distributed,)\nfrom ignite import metrics"),
        ("from ignite.handlers import (\n    Checkpoint,  # one\n    NeptuneLogger as N,\n    Timer,\n"
         "    VisdomLogger\n)",
         "from camshaft.handlers import (\n    Checkpoint,  # one\n    Timer,\n)\n"
         "from ignite.handlers import NeptuneLogger as N, VisdomLogger"),
        ("from ignite.handlers import (\n    VisdomLogger,  # one\n    Timer,  # two\n    NeptuneLogger,  # three\n"
         ")",
         "from camshaft.handlers import (\n    Timer,  # two\n)\n"
         "from ignite.handlers import VisdomLogger, NeptuneLogger  # one  # three"),
        ("from ignite.handlers import (VisdomLogger # x, y\n  , Timer)",
         "from camshaft.handlers import (Timer)\nfrom ignite.handlers import VisdomLogger  # x, y"),
        ("from ignite.handlers import (VisdomLogger, # x\n  Timer); y = 1  # z",
         "from camshaft.handlers import (Timer); from ignite.handlers import VisdomLogger; y = 1  # z  # x"),
        ("x = 1; from ignite import engine, metrics", "x = 1; from camshaft import engine; from ignite import metrics"),
        ("from ignite import engine, metrics; import os",
         "from camshaft import engine; from ignite import metrics; import os"),
        ("if x: from ignite import engine, metrics", "if x: from camshaft import engine; from ignite import metrics"),
        ("def f():\n\tfrom ignite import metrics, utils\n\treturn utils",
         "def f():\n\tfrom camshaft import utils\n\tfrom ignite import metrics\n\treturn utils"),
        ("from ignite import distributed, \\\n    metrics as ignite_metrics",
         "from camshaft import distributed\nfrom ignite import metrics as ignite_metrics"),
    ],
    "uses of a package": [
        ("import ignite.distributed as idist\nidist.x", "import camshaft.distributed as idist\nidist.x"),
        ("import ignite\nprint(ignite.__version__, ignite.engine.Engine)",
         "import camshaft\nprint(camshaft.__version__, camshaft.engine.Engine)"),
        ("import ignite\ndef f(é: ignite.engine.Engine) -> 'ignite.engine.Engine': ...",
         "import camshaft\ndef f(é: camshaft.engine.Engine) -> 'ignite.engine.Engine': ..."),
        ("import ignite\nx: int | None\ny = ignite.engine.Events.STARTED | ignite.engine.Events.COMPLETED(every=2)",
         "import camshaft\nx: int | None\n"
         "y = camshaft.engine.Events.STARTED | camshaft.engine.Events.COMPLETED(every=2)"),
        ("import ignite\nx = f'é {ignite.engine.Engine!r:>{9}} ignite' f'''\n{ignite.__version__}'''",
         "import camshaft\nx = f'é {camshaft.engine.Engine!r:>{9}} ignite' f'''\n{camshaft.__version__}'''"),
        ("import ignite\nx = (ignite\n  .engine  # one\n  .Engine)",
         "import camshaft\nx = (camshaft\n  .engine  # one\n  .Engine)"),
        ("def f():\n  ignite.engine.Engine\nimport ignite", "def f():\n  camshaft.engine.Engine\nimport camshaft"),
        ("ignite.engine.Engine\nimport ignite", "camshaft.engine.Engine\nimport camshaft"),  # cells out of order
        ("import ignite\nx.ignite.engine", "import camshaft\nx.ignite.engine"),
        ("import ignite as ig\nig.engine.Engine", "import camshaft as ig\nig.engine.Engine"),
        ("try:\n  import ignite\nexcept ImportError:\n  pass\nignite.engine",
         "try:\n  import camshaft\nexcept ImportError:\n  pass\ncamshaft.engine"),
    ],
    "uses of a package that stay and uses that move": [
        ("import ignite\nignite.engine.Engine\nignite.metrics.Accuracy",
         "import camshaft\nimport ignite\ncamshaft.engine.Engine\nignite.metrics.Accuracy"),
        ("import ignite.engine\nignite.engine.Engine\nignite.metrics.Accuracy",
         "import camshaft.engine\nimport ignite.metrics\ncamshaft.engine.Engine\nignite.metrics.Accuracy"),
        ("import ignite.metrics\nignite.engine.Engine\nignite.metrics.Accuracy",
         "import camshaft\nimport ignite.metrics\ncamshaft.engine.Engine\nignite.metrics.Accuracy"),
        ("import ignite as ig\nig.engine.Engine\nig.metrics.Accuracy",
         "import camshaft\nimport ignite as ig\ncamshaft.engine.Engine\nig.metrics.Accuracy"),
        ("import ignite.engine, os, ignite.metrics\nignite.engine.Engine",
         "import camshaft.engine, os, ignite.metrics\ncamshaft.engine.Engine"),
        ("import ignite\nignite.engine.Engine.__init__\nignite.engine.Events.__members__\n"
         "ignite.engine._prepare_batch",
         "import camshaft\nimport ignite\ncamshaft.engine.Engine.__init__\ncamshaft.engine.Events.__members__\n"
         "ignite.engine._prepare_batch"),
        ("def f():\n  import ignite\n  ignite.metrics.Loss\ndef g():\n  import ignite\n  ignite.engine.Engine",
         "def f():\n  import ignite\n  ignite.metrics.Loss\ndef g():\n  import camshaft\n  camshaft.engine.Engine"),
        ("import ignite\ndef f(ignite):\n  ignite.metrics\nignite.engine",
         "import camshaft\ndef f(ignite):\n  ignite.metrics\ncamshaft.engine"),
    ],
    "what stays": [
        (source, source)
        for source in (
            "from ignite.metrics import Accuracy",
            "from ignite.contrib.metrics import *",
            "import ignite.metrics as m",
            "from ignite.engine import _prepare_batch",
            "import ignite\nignite = 3",
            "from .ignite import engine",
            "import ignited, pyignite.x as ignite2",
            "x = 'import ignite'  # ignite.engine",
        )
    ],
}  # fmt: skip
CASES = [
    pytest.param(*case, id=f"{rule}-{number}") for rule, cases in MOVES.items() for number, case in enumerate(cases)
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("before", "after"), CASES)
def test_imports_move_and_a_second_time_changes_nothing(before, after, newline):
    before, after = (newline.join(text.split("\n")) for text in (before, after))
    for end in (newline, "") if newline in before else (newline,):
        assert new(before + end) == after + end
    assert new(after) == after


statements = st.sampled_from(
    [before for cases in MOVES.values() for before, _ in cases if not before.startswith("import ignite\nignite = ")]
    + ["x = [\n  'é',  # ignite\n]", "", "if x:\n\tpass", "# ignite", '"""\nimport ignite\n"""', "import torch"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(statements, min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_any_source_still_parses_keeps_its_other_lines_and_changes_once(parts, newline):
    source = newline.join("\n".join(parts).split("\n"))
    result = new(source)
    ast.parse(result)
    assert new(result) == result

    def others(text):  # without the names that get a line of their own, and comments beside them
        return sorted(
            line for line in text.split(newline) if not re.search(r"ignite|camshaft|\big\b|Logger|Timer|^\)?$", line)
        )

    assert others(result) == others(source)


SCRIPT = '''\
"""Train on CIFAR10."""
from pathlib import Path

import ignite
import ignite.distributed as idist
import torch
from ignite.contrib.engines import common
from ignite.contrib.handlers import PiecewiseLinear
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import (
    Checkpoint,
    DiskSaver,  # saves
    # the next one is gone
    NeptuneLogger,
    global_step_from_engine,
)
from ignite.metrics import Accuracy, Loss


def training(local_rank, config):
    rank  =  idist.get_rank()   # as it was written
    if rank == 0:
        print(f"- PyTorch Ignite version: {ignite.__version__}")
    trainer = create_supervised_trainer(model, optimizer, loss)

    @trainer.on(Events.EPOCH_COMPLETED(every=3) | Events.COMPLETED)
    def validate(engine: "Engine"):
        evaluator.run( loader,
                       max_epochs=1 )

    metrics = {"accuracy": Accuracy(), "loss": Loss(loss)}
    return metrics, ignite.engine.Engine


if __name__ == "__main__":
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(training, {})
'''


def test_in_a_script_only_the_imports_and_their_uses_change():
    changed = {
        "import ignite\n": "import camshaft\n",
        "import ignite.distributed": "import camshaft.distributed",
        "ignite.contrib.engines": "camshaft.contrib.engines",
        "ignite.contrib.handlers": "camshaft.handlers",
        "ignite.engine": "camshaft.engine",
        "from ignite.handlers": "from camshaft.handlers",
        "    # the next one is gone\n    NeptuneLogger,\n": "    # the next one is gone\n",
        ")\nfrom ignite.metrics": ")\nfrom ignite.handlers import NeptuneLogger\nfrom ignite.metrics",
        "ignite.__version__": "camshaft.__version__",
    }
    expected = SCRIPT
    for before, after in changed.items():
        expected = expected.replace(before, after)
    assert new(SCRIPT) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import ignite\nx = (", r"'\(' was never closed"),
        ("import ignite\nx = '\0'", "null bytes"),
        ("x = 1\n\x0cimport ignite\n", "LibCST does not keep its formatting, such as a form feed"),
        ("import ignite\nx = a" + ".b()" * 3000, "cannot be parsed: "),
    ],
)
def test_a_source_that_cannot_be_parsed_or_kept_is_an_error(source, message):
    with pytest.raises(SyntaxError, match=message):
        migrate(source)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ignite.engine.Engine.run", "camshaft.engine.Engine.run"),
        ("ignite.handlers.nothing", None),
        ("ignite.engine.supervised.torch", None),  # a module that is imported there
    ],
)
def test_what_camshaft_has_is_read_from_camshaft(theirs, ours):
    assert module.moved(theirs) == ours


# --- what behaves differently ---------------------------------------------------------------------------------------

RESUMING = "loading-the-checkpoint-of-a-running-job"
# source, section, and text of the note on its last line
NOTES = [
    ("import ignite.distributed as idist\nidist.auto_dataloader(x)", "data", "auto_dataloader: .* blocks of samples"),
    ("import ignite\nignite.distributed.show_config()", "loggers", r"show_config: .*setup_logger\('camshaft"),
    ("from ignite.engine import DeterministicEngine as D\nD(f)", "data", "DeterministicEngine: .* seeded"),
    ("import ignite\ns.set_epoch(3)", "data", "set_epoch"),
    ("from ignite.engine import create_supervised_trainer as c\nc(m, deterministic=True)",
     "data",
     "deterministic=True"),
    ("from ignite.handlers import DiskSaver\nDiskSaver('x')", "checkpoints", "require_empty=False.*manifest"),
    ("import ignite\nimport os\nos.listdir('x')", "checkpoints", "listdir: .*manifest"),
    ("from ignite.handlers import ModelCheckpoint as M\nM('x', require_empty=False, save_interval=3)",
     "checkpoints",
     r"save_interval= does not exist: .*every=100"),
    ("from ignite.handlers import ModelCheckpoint as M\nM('x', require_empty=False, save_as_state_dict=False)",
     "checkpoints",
     "save_as_state_dict= does not exist: remove it"),
    ("import ignite\nself.trainer.load_state_dict(x)", RESUMING, r"load_state_dict: .*resume_latest\(\)"),
    ("import ignite\nsaving.load_objects(x, y)",
     RESUMING,
     r"load_objects: .*resume_latest\(\).* prunes those of earlier runs"),
    ("from ignite.handlers import EMAHandler\nEMAHandler(m, warmup_iters=3)",
     "handlers",
     "EMAHandler: .* must be given together"),
    ("from ignite.handlers.tensorboard_logger import OutputHandler\nOutputHandler('t', another_engine=e)",
     "loggers",
     "another_engine= does not exist: pass .*global_step_from_engine"),
    ("import ignite\nl.attach_output_handler(e, x, another_engine=e)", "loggers", "another_engine= does not exist"),
    ("from ignite.metrics import ROC_AUC\nROC_AUC()", "metrics", "ROC_AUC: is rejected in a job of several ranks"),
    ("from ignite.handlers import VisdomLogger", "not-included", "VisdomLogger is not included: use Tensorboard"),
    ("from ignite.contrib.engines import common\ncommon.setup_plx_logging(t)",
     "not-included",
     "setup_plx_logging: is not included"),
    ("from ignite.engine import _prepare_batch", "not-included", "_prepare_batch stays with PyTorch-Ignite"),
    ("import ignite\ne._fire_event(x)", "not-included", "_fire_event does not exist: .* use fire_event"),
    ("import ignite\ngetLogger('ignite.engine')",
     "imports",
     "the string 'ignite.engine' is not rewritten: .*, change it to 'camshaft.engine'"),
    ("import ignite as i\nprint(i.__version__)", "imports", "__version__ becomes that of camshaft"),
    ("from ignite import __version__", "imports", "__version__ becomes that of camshaft"),
    ("for ignite in []: import ignite",
     "imports",
     "not rewritten, because 'ignite' is also the name of something else"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "section", "text"), NOTES)
def test_differences_are_reported_where_they_occur(source, section, text):
    [(line, found_section, found)] = notes(source)
    assert (line, found_section) == (1 + source.count("\n"), section)
    assert re.search(text, found)


@pytest.mark.parametrize(
    "source",
    [
        "from ignite.handlers import ModelCheckpoint\nModelCheckpoint('x', require_empty=False)",
        "from ignite.engine import create_supervised_trainer as c\nc(m, deterministic=False, amp_mode=None)",
        "from ignite.handlers import EMAHandler\nEMAHandler(m, warmup_iters=3, momentum_warmup=0.1)",
        "from ignite.metrics import Accuracy\nAccuracy()",
        "from other import ROC_AUC\nimport ignite\nROC_AUC()",
        "import os\nos.listdir('ignite')",
        "import ignite\nx = 'ignite.metrics'",
        "import ignite\nmodel.load_state_dict(x)",
        "import ignite\ntrainer._process_function(trainer, batch)",
        "from ignite.engine import Events\nt.add_event_handler(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, f)",
    ],
)
def test_what_behaves_the_same_is_not_reported(source):
    assert notes(source) == []


def test_each_section_is_on_the_page():
    headings = re.findall(r"^#+ (.*)", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    anchors = {re.sub(r"\W+", "-", heading.lower()).strip("-") for heading in headings}
    assert {*(rule.section for rule in RULES), "imports", "not-included"} <= anchors


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import ignite.distributed as idist\nidist.show_config()\n")
    return path


def test_without_write_a_diff_is_printed_and_nothing_changes(script, capsys):
    before = script.read_bytes()
    assert main([str(script)]) == 1
    assert script.read_bytes() == before
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"--- {script}",
        f"+++ {script}",
        "@@ -1,2 +1,2 @@",
        "-import ignite.distributed as idist",
        "+import camshaft.distributed as idist",
        " idist.show_config()",
    ]
    assert f"{script}:2: note: show_config: " in printed.err
    assert "(docs/reference/pytorch-ignite.md#loggers)" in printed.err
    assert "1 file would be rewritten" in printed.err


def test_modules_beside_a_script_that_stay_with_ignite_are_named(script, capsys):
    (script.parent / "parts").mkdir()
    helper, part, plain = (script.parent / name for name in ("helper.py", "parts/loaders.py", "plain.py"))
    helper.write_text("from ignite.engine import Engine\n")
    part.write_text("import torch\nimport ignite\n")
    plain.write_text("import torch\n")
    with script.open("a") as file:
        file.write("import helper, plain\nfrom helper import Engine\nfrom .parts.loaders import *\nimport missing\n")
    text = f"which imports PyTorch-Ignite and is not among PATHS ({module.PAGE}#half-migrated-scripts)"
    main([str(script)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "PATHS" in line]
    assert lines == [f"{script}: change: imports {one}, {text}" for one in (helper, part)]
    main([str(script), str(helper)])
    assert [line for line in capsys.readouterr().err.splitlines() if "PATHS" in line] == lines[1:]
    main([str(script.parent)])
    assert "PATHS" not in capsys.readouterr().err


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Install a library whose engines and one of whose modules import PyTorch-Ignite."""
    files = {
        "rl/__init__.py": "",
        "rl/lists.py": "text = 'ignite'\n",
        "rl/on_ignite.py": "from ignite.engine import Engine\n",
        "rl/engines/__init__.py": "from rl.engines.trainer import Trainer\n",
        "rl/engines/trainer.py": "Engine, _ = optional_import('ignite.engine', '0.5', 'Engine')\n",
    }
    for name, text in files.items():
        path = tmp_path / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    module._importers.cache_clear()


@pytest.mark.parametrize(
    ("source", "is_change", "text"),
    [
        ("import rl.on_ignite as r\nimport ignite\n", True, "rl.on_ignite imports PyTorch-Ignite: "),
        ("from rl import on_ignite\n", True, "rl.on_ignite imports PyTorch-Ignite: "),
        (
            "def f():\n    from rl.engines import Trainer, Other\n",
            True,
            "rl.engines imports .* in rl.engines.trainer: ",
        ),
        ("from rl import Trainer\n", False, "rl imports PyTorch-Ignite in rl.engines.trainer: "),
        ("import rl\n", False, "rl imports PyTorch-Ignite in rl.engines.trainer: "),
        ("from rl.lists import text\n", None, ""),
        ("from .rl import engines\nimport json, torch, no_such_library.x, pytest\n", None, ""),
    ],
)
def test_libraries_that_stay_with_ignite_are_named(library, tmp_path, capsys, source, is_change, text):
    path = tmp_path / "script.py"
    path.write_text(source)
    main([str(path)])
    found = [line for line in capsys.readouterr().err.splitlines() if "leave the code that uses them" in line]
    assert len(found) == (is_change is not None)
    if found:
        line = 1 + source.startswith("def")
        assert re.search(f"{path}:{line}: {'change' if is_change else 'note'}: {text}", found[0])


def test_names_in_yaml_files_are_reported(tmp_path, capsys):
    path = tmp_path / "conf" / "trainer.yaml"
    path.parent.mkdir()
    path.write_text(
        "# ignite\nmetric:\n  _target_: ignite.metrics.Accuracy\nschedule:\n"
        "  _target_: ignite.contrib.handlers.ProgressBar\nneeds: [pytorch-ignite==0.5.0, my.ignite.engine]\n"
    )
    before = path.read_bytes()
    assert main(["--write", str(tmp_path)]) == 0
    assert path.read_bytes() == before
    [line] = [line for line in capsys.readouterr().err.splitlines() if ": change: " in line]
    assert line.startswith(f"{path}:5: change: the string 'ignite.contrib.handlers.ProgressBar' is not rewritten: ")
    assert "change it to 'camshaft.handlers.ProgressBar'" in line


def test_with_write_the_file_changes_once_and_keeps_its_permissions(script, capsys):
    script.chmod(0o751)
    link = script.with_name("link.py")
    link.symlink_to(script)
    assert main(["--write", str(link)]) == 0
    assert script.read_text() == "import camshaft.distributed as idist\nidist.show_config()\n"
    assert stat.S_IMODE(script.stat().st_mode) == 0o751
    assert link.is_symlink()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "1 file rewritten" in printed.err
    assert main([str(script)]) == 0
    assert capsys.readouterr().err == "nothing to rewrite\n"
    assert sorted(path.name for path in script.parent.iterdir()) == ["link.py", "train.py"]


def test_what_was_left_unchanged_is_reported_when_the_file_is_written_and_not_again(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from ignite.engine import Engine\nfrom ignite.metrics import RunningAverage\nRunningAverage()\n")
    note = f"{path}:3: note: RunningAverage: works; "
    for arguments, is_reported in ((["--write"], True), (["--write"], False), ([], True)):
        assert main([*arguments, str(path)]) == 0
        assert (note in capsys.readouterr().err) == is_reported
    path.write_text("from ignite.metrics import RunningAverage\nRunningAverage()  # no line of which was rewritten\n")
    main(["--write", str(path)])
    assert f"{path}:2: note: RunningAverage" in capsys.readouterr().err


def test_what_is_left_to_change_is_reported_first_and_also_after_the_imports_have_been_rewritten(tmp_path, capsys):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("import ignite.distributed as idist\nidist.show_config()\n")
    second.write_text(
        "from ignite.handlers import Checkpoint, EarlyStopping\nimport ignite.handlers.param_scheduler as schedules\n"
        "EarlyStopping(3, f, t)\nCheckpoint.load_objects(x, y)\nschedules.LRScheduler(s)\npath.iterdir()\n"
    )

    def reported(*arguments):
        main([*arguments, str(tmp_path)])
        return re.findall(r"(\w+\.py:\d+: \w+: \w+):", capsys.readouterr().err)

    changes = ["b.py:4: change: load_objects"] * 2 + ["b.py:5: change: LRScheduler", "b.py:6: change: iterdir"]
    everything = [*changes, "a.py:2: note: show_config", "b.py:3: note: EarlyStopping"]
    assert [reported(*arguments) for arguments in ([], ["--write"], ["--write"], [])] == [
        everything,
        everything,
        [],
        changes,
    ]


def test_notes_have_the_line_numbers_of_the_file_as_it_is_left(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from ignite import distributed, metrics\ndistributed.show_config()\n")
    main([str(path)])
    assert f"{path}:2: note: show_config" in capsys.readouterr().err
    main(["--write", str(path)])
    assert f"{path}:3: note: show_config" in capsys.readouterr().err


def test_a_difference_is_reported_once_per_file_with_all_its_lines(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from ignite.metrics import RunningAverage\n" + "RunningAverage()\n" * 3)
    main([str(path)])
    (note,) = (line for line in capsys.readouterr().err.splitlines() if "RunningAverage" in line)
    assert note.startswith(f"{path}:2: note: RunningAverage: works; ")
    assert note.endswith("; also in lines 3, 4 (docs/reference/pytorch-ignite.md#metrics)")


def test_a_broken_file_is_reported_and_left_alone_and_the_others_are_rewritten(script, capsys):
    broken = {"a.py": b"import ignite\nx = (\n", "b.py": b"x = '\0'; import ignite", "c.py": b"import ignite  # \xff",
              "d.ipynb": b'{"import ignite": 3}', "e.ipynb": b"ignite"}  # fmt: skip
    for name, content in broken.items():
        script.with_name(name).write_bytes(content)
    assert main(["--write", str(script.parent), str(script.with_name("missing.py"))]) == 2
    assert {name: script.with_name(name).read_bytes() for name in broken} == broken
    errors = capsys.readouterr().err
    for name in (*broken, "missing.py"):
        assert f"{script.with_name(name)}: left as it is: " in errors
    assert script.read_text().startswith("import camshaft")


def test_a_file_is_changed_completely_or_not_at_all(script, monkeypatch):
    before = script.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("camshaft.files.os.fsync", fail)
    assert main(["--write", str(script)]) == 2
    assert script.read_bytes() == before
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xef\xbb\xbfimport ignite\r\nx = 'a'\r\n", b"\xef\xbb\xbfimport camshaft\r\nx = 'a'\r\n"),
        (b"# coding: latin-1\nx = '\xe9'; import ignite\n", b"# coding: latin-1\nx = '\xe9'; import camshaft\n"),
        (b"x = '\xc3\xa9'; import ignite", b"x = '\xc3\xa9'; import camshaft"),
    ],
)
def test_encodings_marks_and_ends_of_lines_are_kept(tmp_path, before, after):
    path = tmp_path / "train.py"
    path.write_bytes(before)
    assert main(["--write", str(path)]) == 0
    assert path.read_bytes() == after


def test_folders_are_searched_except_for_hidden_ones_and_packages(script, capsys):
    for folder in (".git", "venv", "inner"):
        other = script.parent / folder / "other.py"
        other.parent.mkdir()
        other.write_text("import ignite\n")
    (script.parent / "notes.txt").write_text("import ignite\n")
    assert main([str(script.parent)]) == 1
    shown = re.findall(r"^--- (.*)", capsys.readouterr().out, flags=re.MULTILINE)
    assert shown == [str(script), str(script.parent / "inner" / "other.py")]


def test_a_missing_newline_at_the_end_is_shown(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import ignite")
    main([str(path)])
    end = "\\ No newline at end of file"
    assert capsys.readouterr().out.splitlines()[3:] == ["-import ignite", end, "+import camshaft", end]


# --- notebooks ------------------------------------------------------------------------------------------------------

NOTEBOOK = r"""{
 "cells": [
  {"cell_type": "markdown", "source": ["import ignite\n"], "metadata": {}},
  {
   "cell_type": "code",
   "execution_count": null,
   "source": [
    "%matplotlib inline\n",
    "!pip install \\\n",
    "  pytorch-ignite\n",
    "import ignite\n",
    "from ignite import distributed as idist, metrics  # \u00e9\n",
    "x = 'A\/B'"
   ],
   "outputs": [ {"text": ["import ignite"]} ]
  },
  {"cell_type": "code", "source": ["%%bash\n", "import ignite\n"]},
  {"cell_type": "code", "source": []},
  {"cell_type": "code", "source": "%%time\nif x:\n    !ls\n    ignite.engine.Engine\nidist.show_config()", "n": 1.50}
 ],
 "metadata" : {}
}"""


def test_cells_of_a_notebook_are_rewritten_and_other_json_keeps_its_form(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    path.write_text(NOTEBOOK, "utf-8")
    assert main(["--write", str(path)]) == 0
    expected = (
        NOTEBOOK.replace('"import ignite\\n",\n    "from ignite import distributed as idist, metrics  # \\u00e9\\n",',
                         '"import camshaft\\n",\n    "from camshaft import distributed as idist  # \\u00e9\\n",\n'
                         '    "from ignite import metrics\\n",')
        .replace("    ignite.engine.Engine", "    camshaft.engine.Engine")
    )  # fmt: skip
    assert path.read_text("utf-8") == expected
    json.loads(expected)
    assert f"{path}, cell 4, line 5: note: show_config: " in capsys.readouterr().err
    assert main([str(path)]) == 0


@pytest.fixture
def notebook(tmp_path):
    """Return a function that writes a notebook with code cells."""

    def write(*sources):
        cells = [{"cell_type": "code", "source": source} for source in sources]
        path.write_text(json.dumps({"cells": cells}))
        return path

    path = tmp_path / "train.ipynb"
    return write


def test_a_new_line_in_a_source_of_one_line_is_an_element_of_its_own(notebook):
    path = notebook(["from ignite import engine, metrics"])
    main(["--write", str(path)])
    assert json.loads(path.read_text())["cells"][0]["source"] == [
        "from camshaft import engine\n",
        "from ignite import metrics",
    ]


def test_places_in_a_notebook_name_the_cell(notebook, capsys):
    main([str(notebook(["import ignite.distributed as idist\n"], ["idist.show_config()"]))])
    assert "cell 2, line 1: note: show_config: " in capsys.readouterr().err
    assert main([str(notebook("x = 1", ["import ignite\n", "x = (\n"]))]) == 2
    assert "left as it is: cell 2: " in capsys.readouterr().err


def test_files_that_do_not_mention_ignite_are_not_read_further(notebook, tmp_path, capsys):
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    assert main([str(notebook(["x = [1 2]"])), str(tmp_path / "latin.py")]) == 0
    assert "left as it is" not in capsys.readouterr().err


# --- without LibCST -------------------------------------------------------------------------------------------------


def test_without_libcst_the_command_says_what_to_install(script):
    command = (
        "import runpy, sys; sys.modules['libcst'] = None; runpy.run_module('camshaft.migrate', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", command, str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "camshaft.migrate needs 'libcst': pip install 'camshaft[migrate]'\n"
