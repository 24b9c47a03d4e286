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
from camshaft.migrate import CHANGES, main, migrate

PAGE = Path(__file__).parent.parent / module.PAGE


def new(source):
    return migrate(source)[0]


# before and after
MOVES = [
    # imports from a module
    ("from ignite.engine import Engine, Events as E", "from camshaft.engine import Engine, Events as E"),
    ("from ignite.handlers import *", "from camshaft.handlers import *"),
    ("from ignite import engine, handlers", "from camshaft import engine, handlers"),
    ("from ignite . engine import Engine, \\\n    Events", "from camshaft.engine import Engine, \\\n    Events"),
    ("import fire\nimport ignite.engine as e; e.x()", "import fire\nimport camshaft.engine as e; e.x()"),
    ("def f():\n\tfrom ignite import utils  # é", "def f():\n\tfrom camshaft import utils  # é"),
    ("import ignite.engine, os  # both", "import camshaft.engine, os  # both"),
    # contrib
    ("from ignite.contrib.engines import common", "from camshaft.contrib.engines import common"),
    ("from ignite.contrib.handlers.tqdm_logger import P", "from ignite.contrib.handlers.tqdm_logger import P"),
    ("from ignite.contrib.handlers import ProgressBar", "from camshaft.handlers import ProgressBar"),
    ("from ignite.contrib import engines, handlers",
     "from camshaft.contrib import engines\nfrom camshaft import handlers"),
    ("import ignite.contrib.handlers\nignite.contrib.handlers.Timer",
     "import camshaft.handlers\ncamshaft.handlers.Timer"),
    # names that stay and names that move
    ("from ignite.handlers import Checkpoint, VisdomLogger as V, Timer  # all",
     "from camshaft.handlers import Checkpoint\nfrom ignite.handlers import VisdomLogger as V\n"
     "from camshaft.handlers import Timer  # all"),
    ("if é:\n\tfrom ignite import (  # é\n\t\tmetrics,  # one\n\t\t# two\n\t\tutils,\n\t\t# three\n\t)  # four",
     "if é:\n\tfrom ignite import metrics  # é  # one  # two\n\tfrom camshaft import utils  # three  # four"),
    # uses of a package
    ("import ignite\nprint(ignite.__version__, ignite.engine.Engine)",
     "import camshaft\nprint(camshaft.__version__, camshaft.engine.Engine)"),
    ("import ignite\ndef f(é: ignite.engine.Engine) -> 'ignite.engine.Engine': ...",
     "import camshaft\ndef f(é: camshaft.engine.Engine) -> 'ignite.engine.Engine': ..."),
    ("import ignite\nx = f'é {ignite.engine.Engine!r:>{9}} ignite' f'''\n{ignite.__version__}'''",
     "import camshaft\nx = f'é {camshaft.engine.Engine!r:>{9}} ignite' f'''\n{camshaft.__version__}'''"),
    ("import ignite\nx = (ignite\n  .engine  # one\n  .Engine)",
     "import camshaft\nx = (camshaft\n  .engine  # one\n  .Engine)"),
    ("ignite.engine.Engine\nimport ignite", "camshaft.engine.Engine\nimport camshaft"),  # cells out of order
    ("import ignite\nf(ignite=x.ignite.engine)", "import camshaft\nf(ignite=x.ignite.engine)"),
    ("import ignite as ig\nig.engine.Engine\nig.contrib.handlers.Timer",
     "import camshaft as ig\nig.engine.Engine\nig.handlers.Timer"),
    ("try:\n  import ignite\nexcept ImportError:\n  pass\nignite.engine",
     "try:\n  import camshaft\nexcept ImportError:\n  pass\ncamshaft.engine"),
    # uses of a package that stay and uses that move
    ("import ignite\nignite.engine.Engine\nignite.metrics.Accuracy",
     "import camshaft, ignite\ncamshaft.engine.Engine\nignite.metrics.Accuracy"),
    ("import os; import ignite.metrics\nignite.engine.Engine\nignite.metrics.Accuracy",
     "import os; import camshaft, ignite.metrics\ncamshaft.engine.Engine\nignite.metrics.Accuracy"),
    ("import ignite.exceptions, ignite.engine\nignite.engine.Engine\nignite.exceptions.NotComputableError",
     "import camshaft, ignite.exceptions, ignite.engine\ncamshaft.engine.Engine\nignite.exceptions.NotComputableError"),
    ("from ignite import engine, exceptions", "from camshaft import engine\nfrom ignite import exceptions"),
    ("import ignite.metrics\nignite.engine.Engine", "import camshaft, ignite.metrics\ncamshaft.engine.Engine"),
    ("import ignite as ig\nig.engine.Engine\nig.metrics.Accuracy",
     "import camshaft, ignite as ig\ncamshaft.engine.Engine\nig.metrics.Accuracy"),
    ("import ignite.engine, os, ignite.metrics\nignite.engine.Engine",
     "import camshaft.engine, os, ignite.metrics\ncamshaft.engine.Engine"),
    ("import ignite\nignite.engine.Engine.__init__\nignite.engine.Events.__members__\nignite.engine._prepare_batch",
     "import camshaft, ignite\ncamshaft.engine.Engine.__init__\ncamshaft.engine.Events.__members__\n"
     "ignite.engine._prepare_batch"),
    ("def f():\n  import ignite, ignite.engine\n  ignite.metrics\ndef g():\n  import ignite\n  ignite.engine",
     "def f():\n  import camshaft, ignite, ignite.engine\n  ignite.metrics\n"
     "def g():\n  import camshaft, ignite\n  camshaft.engine"),
    ("import ignite\nignite.engine\nimport ignite.engine", "import camshaft\ncamshaft.engine\nimport camshaft.engine"),
    ("import ignite\ndef f(ignite):\n  ignite.metrics\nignite.engine",
     "import camshaft\ndef f(ignite):\n  ignite.metrics\ncamshaft.engine"),
    # what stays
    *((source, source) for source in (
        "from ignite.metrics import Accuracy",
        "from ignite.contrib.metrics import *",
        "import ignite.metrics as m",
        "from ignite.exceptions import NotComputableError",  # which metrics of PyTorch-Ignite raise
        "import ignite.exceptions as e\ne.NotComputableError",
        "import ignite\nprint(ignite)",
        "from ignite.engine import _prepare_batch",
        "from ignite.engine.supervised import torch",  # a module that is imported there
        "from .ignite import engine",
        "import ignited, pyignite.x as ignite2",
        "x = 'import ignite'  # ignite.engine",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_imports_move_and_a_second_time_changes_nothing(before, after):
    for end in ("\n", ""):
        assert new(before + end) == after + end
    before, after = (f"{text}\n".replace("\n", "\r\n") for text in (before, after))
    assert new(before) == after
    assert new(after) == after


OTHERS = ["x = [\n  'é',  # ignite\n]", "", "if x:\n\tpass", "# ignite", '"""\nimport ignite\n"""', "import torch"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([before for before, _ in MOVES] + OTHERS), max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_any_source_still_parses_keeps_its_other_lines_and_changes_once(parts, newline):
    source = "\n".join(parts).replace("\n", newline)
    result = new(source)
    ast.parse(result)
    assert new(result) == result

    def others(text):  # without imports that are split, and comments beside them
        return [line for line in text.split(newline) if not re.search(r"ignite|camshaft|\big\b|^\t[\t)#]", line)]

    assert others(result) == others(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import ignite\nx = (", r"'\(' was never closed"),
        ("import ignite\nx = '\0'", "null bytes"),
        ("x = 1\n\x0cimport ignite\n", "formatting"),
        ("import ignite\nx = a" + ".b()" * 3000, "cannot be parsed: "),
    ],
)
def test_a_source_that_cannot_be_parsed_or_kept_is_an_error(source, message):
    with pytest.raises(SyntaxError, match=message):
        migrate(source)


# --- what is left to change -----------------------------------------------------------------------------------------

RESUMING, ERRORS = "loading-the-checkpoint-of-a-running-job", "what-raises-an-error-now"
# source, section, and text of the note on its last line
NOTES = [
    ("import os, ignite\nos.listdir('x')", "checkpoints", "listdir: .*manifest"),
    ("from ignite.handlers import ModelCheckpoint as M\nM('x', save_interval=3)", ERRORS, "save_interval= does"),
    ("import ignite\nignite.handlers.Checkpoint.load_objects(x, y)", RESUMING, "load_objects: once .*resume_latest"),
    ("import ignite\nsaving.load_objects(x, y)", RESUMING, "load_objects: once the job has saved with camshaft, use"),
    ("import ignite, torch as t\nstate = t.load(x)", "checkpoints", "torch.load: does not verify a checkpoint: pass"),
    ("import ignite.handlers as h\nh.LRScheduler(s, use_legacy=x)", "schedules-of-a-running-job", "LRScheduler: .*rep"),
    ("import camshaft.handlers as h\nh.LRScheduler(s)", "what-changes-results", "LRScheduler: .*use_legacy=True"),
    ("import ignite\nx = 'ignite.handlers.VisdomLogger'", "not-included", "VisdomLogger' is not included: use"),
    ("import ignite\nl.attach_output_handler(e, x, another_engine=e)", ERRORS, "another_engine= does not exist"),
    ("from ignite.metrics import ROC_AUC\nROC_AUC()", ERRORS, "ROC_AUC: is rejected in a job of several ranks"),
    ("from ignite.handlers import VisdomLogger", "not-included", "VisdomLogger is not included: use Tensorboard"),
    ("from ignite.contrib.engines import common\ncommon.setup_plx_logging(t)", "not-included", "setup_plx_logging is"),
    ("from ignite.engine import _prepare_batch", "not-included", "camshaft does not have _prepare_batch: replace"),
    ("import ignite.handlers as ih\nclass L(ih.VisdomLogger): ...", "not-included", "VisdomLogger is not included"),
    ("import camshaft.handlers as ih\nL = ih.VisdomLogger", "not-included", "VisdomLogger is not included"),
    ("import ignite.distributed as idist\nidist.utils._model", "not-included", "camshaft does not have _model"),
    ("import ignite.contrib.handlers.neptune_logger as nl", "not-included", "camshaft does not have neptune_logger"),
    ("from ignite.handlers.visdom_logger import *", "not-included", "camshaft does not have visdom_logger"),
    ("import ignite\nignite.utils.new()", "not-included", "camshaft does not have new: replace"),
    ("import ignite\ne._fire_event(x)", ERRORS, "_fire_event: does not exist: .* use fire_event"),
    ("import ignite\nfor x in e()._event_handlers.items(): ...", ERRORS, "_event_handlers: does not exist"),
    ("import ignite\nE.STARTED in e._allowed_events", ERRORS, "_allowed_events: does not exist: .* register"),
    ("from ignite.handlers import EMAHandler\nEMAHandler(m, 0.1, **x)", "what-changes-results", "momentum warms up"),
    ("import ignite\ngetLogger('ignite.engine')", "imports", "change it to 'camshaft.engine'"),
    ("import ignite as i\nprint(i.__version__)", "imports", "__version__ becomes that of camshaft"),
    ("from ignite import __version__", "imports", "__version__ becomes that of camshaft"),
    ("try: import ignite\nexcept E: ignite = 3\nignite.engine", "imports", "'ignite' is also the name"),
    ("import os; from ignite import engine, metrics", "imports", "give it a line of its own"),
    ("if x: from ignite import engine, metrics", "imports", "give it a line of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "section", "text"), NOTES)
def test_what_is_left_to_change_is_reported_where_it_occurs(source, section, text):
    after, notes = migrate(source)
    [note] = [note for note in notes if note.line == 1 + source.count("\n") and note.section == section]
    assert re.search(text, note.text)
    if note.text.startswith("not rewritten"):
        assert after == source


@pytest.mark.parametrize(
    "source",
    [
        "from ignite.handlers import ModelCheckpoint\nModelCheckpoint('x', require_empty=False)",
        "from ignite.metrics import Accuracy\nAccuracy()",
        "from other import ROC_AUC\nimport ignite\nROC_AUC()",
        "import os\nos.listdir('ignite')",
        "import ignite\nx = 'ignite.metrics', b'ignite.engine', 'ignite.exceptions', 'ignite.yaml', 'ignite.0'",
        "from ignite.handlers import EMAHandler as E\nE(m, warmup_iters=0)\nE(m, momentum_warmup=x)\nE(m, 0.1, 0.2, 9)",
        "import ignite\nx.load('torch.load')",
        "import ignite\nfrom ignite.distributed import auto_model\nauto_model(m)\nignite.contrib.metrics.X()",
    ],
)
def test_what_needs_no_change_is_not_reported(source):
    assert migrate(source)[1] == []


def test_a_comment_at_the_end_of_the_reported_line_silences_its_report():
    lines = ["import ignite", "x.load_objects(  # migrated", "    f, os.listdir(d))  # noqa: X  # migrated",
             "(x", " .iterdir())  # migrated", "x.iterdir()  # migrated?", ""]  # fmt: skip
    for newline in ("\n", "\r\n"):
        after, notes = migrate(newline.join(lines))
        assert after.startswith("import camshaft")
        assert [note.line for note in notes] == [4, 6]


def test_each_section_is_on_the_page():
    headings = re.findall(r"^#+ (.*)", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    anchors = {re.sub(r"\W+", "-", heading.lower()).strip("-") for heading in headings}
    assert {*(change.section for change in CHANGES), "imports", "not-included"} <= anchors


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("from ignite import engine, metrics\npath.iterdir()")
    return path


def test_without_write_a_diff_is_printed_and_nothing_changes(script, capsys):
    before = script.read_bytes()
    assert main([str(script)]) == 1
    assert script.read_bytes() == before
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"--- {script}",
        f"+++ {script}",
        "@@ -1,2 +1,3 @@",
        "-from ignite import engine, metrics",
        "+from camshaft import engine",
        "+from ignite import metrics",
        " path.iterdir()",
        "\\ No newline at end of file",
    ]
    report, summary = printed.err.splitlines()
    assert report.startswith(f"{script}:2: iterdir: ")
    assert report.endswith(f" ({module.PAGE}#checkpoints)")
    assert summary == "1 file would be rewritten; --write does it"


def test_with_write_the_file_changes_once_keeps_its_permissions_and_is_reported_as_it_is_left(script, capsys):
    script.chmod(0o751)
    link = script.with_name("link.py")
    link.symlink_to(script)
    assert main(["--write", str(link)]) == 0
    assert script.read_text() == "from camshaft import engine\nfrom ignite import metrics\npath.iterdir()"
    assert stat.S_IMODE(script.stat().st_mode) == 0o751
    assert link.is_symlink()
    printed = capsys.readouterr()
    assert printed.out == ""
    report, summary = printed.err.splitlines()
    assert report.startswith(f"{link}:3: iterdir: ")
    assert summary == "1 file rewritten"
    for arguments in ([], ["--write"]):
        assert main([*arguments, str(link)]) == 0
        assert capsys.readouterr() == ("", f"{report}\nnothing to rewrite\n")
    assert sorted(path.name for path in script.parent.iterdir()) == ["link.py", "train.py"]


def test_a_broken_file_is_reported_and_left_alone_and_the_others_are_rewritten(script, capsys):
    broken = {"a.py": b"import ignite\nx = (\n", "b.py": b"import ignite  # \xff", "d.ipynb": b'{"import ignite": 3}',
              "e.ipynb": b"ignite"}  # fmt: skip
    for name, content in broken.items():
        script.with_name(name).write_bytes(content)
    script.with_name("latin.py").write_bytes(b"# caf\xe9\n")  # is not read further
    assert main(["--write", str(script.parent), str(script.with_name("missing.py"))]) == 2
    assert {name: script.with_name(name).read_bytes() for name in broken} == broken
    errors = capsys.readouterr().err
    assert re.findall(r"(\S*): left as it is: ", errors) == [
        str(script.with_name(name)) for name in (*broken, "missing.py")
    ]
    assert script.read_text().startswith("from camshaft")


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
    ],
)
def test_encodings_marks_and_ends_of_lines_are_kept(tmp_path, before, after):
    path = tmp_path / "train.py"
    path.write_bytes(before)
    assert main(["--write", str(path)]) == 0
    assert path.read_bytes() == after


def test_folders_are_searched_except_for_hidden_ones_and_packages(script, capsys):
    for name in (".git/a.py", "venv/a.py", "inner/a.py", "inner/notes.txt"):
        other = script.parent / name
        other.parent.mkdir(exist_ok=True)
        other.write_text("import ignite\n")
    assert main([str(script.parent)]) == 1
    shown = re.findall(r"^--- (.*)", capsys.readouterr().out, flags=re.MULTILINE)
    assert shown == [str(script), str(script.parent / "inner" / "a.py")]


CONFIG = """\
scheduler:
  _target_: ignite.handlers.PiecewiseLinear  # é
  "ignite.contrib.handlers.tqdm_logger.ProgressBar": {{ template }}
done: ignite.engine.Engine  # migrated
logger: ignite.handlers.VisdomLogger
other: [ignite, ignite.metrics.Accuracy, ignite.yaml, ignite.0, my.ignite.engine, github.com/pytorch/ignite.utils]
"""


@pytest.mark.parametrize("name", ["conf.yaml", "conf.yml"])
def test_names_in_yaml_files_are_reported_and_nothing_is_rewritten(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_text(CONFIG, "utf-8")
    for one in (tmp_path, path):
        assert main(["--write", str(one)]) == 0
        assert path.read_text("utf-8") == CONFIG
        first, second, third, summary = capsys.readouterr().err.splitlines()
        assert first.startswith(f"{path}:2: 'ignite.handlers.PiecewiseLinear' is not rewritten: ")
        assert first.endswith(f"change it to 'camshaft.handlers.PiecewiseLinear' ({module.PAGE}#imports)")
        assert second.startswith(f"{path}:3: ")
        assert "'camshaft.handlers.tqdm_logger.ProgressBar'" in second
        assert third.startswith(f"{path}:5: 'ignite.handlers.VisdomLogger' is not included: use Tensorboard")
        assert summary == "nothing to rewrite"


# --- notebooks ------------------------------------------------------------------------------------------------------

NOTEBOOK = r"""{
 "cells": [
  {
   "cell_type": "markdown",
   "source": [
    "# é\n",
    "import ignite\n"
   ]
  },
  {
   "cell_type": "code",
   "execution_count": null,
   "source": [
    "%matplotlib inline\n",
    "!pip install \\\n",
    "  pytorch-ignite\n",
    "import ignite\n",
    "from ignite import distributed as idist, metrics  # é"
   ]
  },
  {
   "cell_type": "code",
   "source": [
    "%%bash\n",
    "import ignite\n"
   ]
  },
  {
   "cell_type": "code",
   "source": []
  },
  {
   "cell_type": "code",
   "source": "%%time\nif x:\n    !ls\n    ignite.engine.Engine\npath.iterdir()"
  }
 ],
 "metadata": {}
}
"""


def test_cells_of_a_notebook_are_rewritten_and_it_keeps_its_indentation(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    with_tabs = re.sub(r"^ +", lambda match: "\t" * len(match[0]), NOTEBOOK.strip(), flags=re.MULTILINE)
    for text in (NOTEBOOK, with_tabs, json.dumps(json.loads(NOTEBOOK))):
        path.write_text(text, "utf-8")
        assert main(["--write", str(path)]) == 0
        expected = json.loads(text)
        expected["cells"][1]["source"][3:] = [
            "import camshaft\n",
            "from camshaft import distributed as idist\n",
            "from ignite import metrics  # é",
        ]
        expected["cells"][4]["source"] = expected["cells"][4]["source"].replace("ignite", "camshaft")
        written = path.read_text("utf-8")
        assert json.loads(written) == expected
        unchanged = [line for line in text.split("\n") if "ignite" not in line]
        assert [line for line in written.split("\n") if "ignite" not in line and "camshaft" not in line] == unchanged
        assert capsys.readouterr().err.startswith(f"{path}, cell 4, line 5: iterdir: ")
        assert main([str(path)]) == 0
        capsys.readouterr()


def test_an_error_in_a_notebook_names_the_cell(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    cells = [{"cell_type": "code", "source": source} for source in ("x = 1", ["import ignite\n", "x = (\n"])]
    path.write_text(json.dumps({"cells": cells}))
    assert main([str(path)]) == 2
    assert "left as it is: cell 2: " in capsys.readouterr().err


# --- without LibCST -------------------------------------------------------------------------------------------------


@pytest.mark.jobs
def test_without_libcst_the_command_says_what_to_install(script):
    command = (
        "import runpy, sys; sys.modules['libcst'] = None; runpy.run_module('camshaft.migrate', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", command, str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "camshaft.migrate needs 'libcst': pip install 'camshaft[migrate]'\n"
