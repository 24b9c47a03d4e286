"""Code that was written for PyTorch-Ignite runs on camshaft, unmodified; metrics are those of PyTorch-Ignite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ENDS = r"{} ran on camshaft \S+, with ignite\.metrics of pytorch-ignite " + re.escape(version("pytorch-ignite"))
pytestmark = pytest.mark.jobs
COMMAND = [sys.executable, "-m", "camshaft.as_ignite"]
TRAIN = """
import sys
import ignite
import torch
from ignite.contrib.engines import common
from ignite.contrib.handlers import ProgressBar
from ignite.contrib.handlers.tqdm_logger import ProgressBar as OfModule
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers.param_scheduler import LRScheduler
from ignite.metrics import Accuracy, RunningAverage
from ignite.utils import setup_logger

torch.manual_seed(0)
inputs = torch.rand(4, 16, 2)
batches = list(zip(inputs, (inputs.sum(dim=2) > 1).long()))
model = torch.nn.Linear(2, 2)
trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.cross_entropy)
RunningAverage(output_transform=float).attach(trainer, "loss")
evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
trainer.run(batches, max_epochs=2)
evaluator.run(batches)
assert ProgressBar is OfModule and type(trainer) is Engine
print(sys.argv, __name__, __file__, sys.path[0])
print(ignite.__version__, Engine.__module__, Accuracy.__module__, common.__name__, setup_logger.__module__)
print(trainer.state.iteration, 0 < evaluator.state.metrics["accuracy"] <= 1, trainer.state.metrics["loss"] > 0)
"""
START = """
import multiprocessing
import sys
import torch
from ignite.engine import Engine

class Classes(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Engine.__module__

def put(queue):
    queue.put(Engine.__module__)

"""
MAIN = """
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    context.Process(target=put, args=(queue,)).start()
    print(queue.get())
    print(*torch.utils.data.DataLoader(Classes(), num_workers=1, multiprocessing_context=context, collate_fn="".join))
"""


def run(*command: object, folder: Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_script_runs_on_camshaft_with_its_own_arguments_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "jobs" / "the script.py"
    script.write_text(TRAIN)
    done = run(*COMMAND, "jobs/the script.py", "--epochs", "2", folder=tmp_path)
    assert done.stdout.splitlines() == [
        f"['jobs/the script.py', '--epochs', '2'] __main__ {script} {script.parent}",
        f"{version('pytorch-ignite')} camshaft.engine.engine ignite.metrics.accuracy camshaft.contrib.engines.common "
        "camshaft.utils",
        "8 True True",
    ]
    assert re.fullmatch(ENDS.format(re.escape(str(script))) + "\n", done.stderr)


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_runs_on_camshaft(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "engines.py").write_text("from ignite.engine import Engine")
    for module in ("train", "__main__"):
        text = "import sys\nfrom .engines import Engine\nprint(Engine.__module__, sys.argv[1:])"
        (tmp_path / "package" / f"{module}.py").write_text(text)
    done = run(*COMMAND, "-m", name, "-x", folder=tmp_path)
    assert done.stdout == "camshaft.engine.engine ['-x']\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("is_command", [True, False], ids=["command", "import"])
def test_processes_that_a_script_starts_see_the_same(tmp_path: Path, method: str, is_command: bool) -> None:
    (tmp_path / "start.py").write_text(
        f"{'' if is_command else 'import camshaft.as_ignite'}\n{START}if __name__ == '__main__':{MAIN}"
    )
    done = run(*(COMMAND if is_command else [sys.executable]), "start.py", method, folder=tmp_path)
    assert done.stdout.split() == ["camshaft.engine.engine"] * 2


def test_processes_that_do_not_run_the_script_again_see_the_same(tmp_path: Path) -> None:
    """As in a notebook."""
    (tmp_path / "others.py").write_text(
        "from ignite.engine import Engine\ndef put(queue): queue.put(Engine.__module__)"
    )
    script = (
        "import camshaft.as_ignite, multiprocessing, others\n"
        "for method in ('spawn', 'forkserver'):\n"
        "    context = multiprocessing.get_context(method)\n"
        "    queue = context.Queue()\n"
        "    context.Process(target=others.put, args=(queue,)).start()\n"
        "    print(queue.get())"
    )
    assert run(sys.executable, "-c", script, folder=tmp_path).stdout.split() == ["camshaft.engine.engine"] * 2


def test_a_package_starts_processes_without_running_again_in_each(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("from .main import main\nmain()")
    (tmp_path / "package" / "main.py").write_text(f"{START}\ndef main():\n{MAIN}")
    done = run(sys.executable, "-W", "error::ImportWarning", *COMMAND[1:], "-m", "package", "spawn", folder=tmp_path)
    assert done.stdout.split() == ["camshaft.engine.engine"] * 2


def test_a_script_is_compiled_and_finds_modules_as_without_camshaft(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("")
    (tmp_path / "train.py").write_text(
        "import os\n"
        "try:\n    from . import utils\nexcept ImportError:\n    import utils\n"
        "def double(x: int) -> int: return 2 * x\n"
        "assert double.__annotations__['x'] is int\n"
        "print(utils.__file__)\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait()"
    )
    done = run(*COMMAND, "train.py", folder=tmp_path)
    assert done.stdout == f"{tmp_path / 'utils.py'}\n"
    assert re.fullmatch(".*train.py has not imported ignite; .* did not run on camshaft: put .*\n", done.stderr)


def test_another_package_sees_the_same_once_the_first_import_was_made(tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text("import ignite.engine\nengine = ignite.engine.Engine")
    script = "import camshaft.as_ignite, camshaft.engine, others\nassert others.engine is camshaft.engine.Engine"
    done = run(sys.executable, "-c", script, folder=tmp_path)
    assert done.stderr == ""


def test_a_finder_of_somebody_else_does_not_count(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "class _Finder:\n    find_spec = staticmethod(lambda *arguments: None)\n"
        "sys.meta_path.insert(0, _Finder())\n"
        "import camshaft.as_ignite, ignite.engine\n"
        "print(ignite.engine.Engine.__module__)"
    )
    assert run(sys.executable, "-c", script, folder=tmp_path).stdout == "camshaft.engine.engine\n"


def test_camshafts_modules_stay_as_they_are(tmp_path: Path) -> None:
    script = (
        "import camshaft.as_ignite, importlib, ignite.engine.events, ignite.handlers, camshaft.handlers\n"
        "for name in ('camshaft.engine', 'camshaft.engine.events', 'camshaft.handlers'):\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__name__ == module.__spec__.name == name\n"
        "assert ignite.handlers is camshaft.handlers and ignite.engine.events is camshaft.engine.events\n"
        "importlib.reload(ignite.handlers)\n"
        "importlib.reload(camshaft.as_ignite)"
    )
    run(sys.executable, "-c", script, folder=tmp_path)


@pytest.mark.parametrize(
    ("before", "users"), [("import ignite.engine", "__main__"), ("import others", "others")], ids=["main", "module"]
)
def test_an_earlier_import_of_ignite_is_an_error_that_says_where(tmp_path: Path, before: str, users: str) -> None:
    (tmp_path / "others.py").write_text("from ignite.engine import Engine")
    done = run(sys.executable, "-c", f"{before}\nimport camshaft.as_ignite", folder=tmp_path, code=1)
    assert f"ImportError: ignite was imported before camshaft.as_ignite, by {users}: make" in done.stderr


def test_errors_and_exit_codes_are_those_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import sys, ignite.engine\nsys.exit(3) if sys.argv[1:] else 1 / 0")
    assert run(*COMMAND, script, "x", folder=tmp_path, code=3).stderr.count("\n") == 1
    traceback, _, last = run(*COMMAND, script, folder=tmp_path, code=1).stderr.strip().rpartition("\n")
    assert traceback.endswith("ZeroDivisionError: division by zero")
    assert f'File "{script}", line 2' in traceback
    assert re.fullmatch(ENDS.format(re.escape(str(script))), last)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["-x"], 2), (["-m"], 2), (["--help"], 0)])
def test_a_command_without_a_script_shows_its_usage(tmp_path: Path, arguments: list[str], code: int) -> None:
    done = run(*COMMAND, *arguments, folder=tmp_path, code=code)
    assert done.stderr == "usage: python -m camshaft.as_ignite [-m MODULE | SCRIPT] [ARGS ...]\n"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert "FileNotFoundError" in run(*COMMAND, "train.py", folder=tmp_path, code=1).stderr
    assert "no module 'missing' to run" in run(*COMMAND, "-m", "missing", folder=tmp_path, code=1).stderr
    script = "from unittest import mock\nwith mock.patch('importlib.util.find_spec', lambda name: None):\n"
    done = run(sys.executable, "-c", f"{script}    import camshaft.as_ignite", folder=tmp_path, code=1)
    assert "which is not installed: pip install pytorch-ignite" in done.stderr


def test_ranks_of_torchrun_report_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import ignite.distributed as idist\n"
        "with idist.Parallel('gloo') as parallel:\n"
        "    parallel.run(lambda rank: print(f'{idist.all_reduce(1)} {idist.__name__}\\n', end=''))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *COMMAND[1:]]
    done = run(*torchrun, "train.py", folder=tmp_path, OMP_NUM_THREADS="1")
    assert done.stdout.splitlines() == ["2 camshaft.distributed"] * 2
    assert done.stderr.count(" ran on camshaft ") == 1


def test_a_name_that_camshaft_does_not_have_is_an_error_that_names_its_replacement(tmp_path: Path) -> None:
    script = "import camshaft.as_ignite\nfrom ignite.contrib.handlers import VisdomLogger"
    done = run(sys.executable, "-c", script, folder=tmp_path, code=1)
    assert "ImportError: camshaft does not include VisdomLogger: use TensorboardLogger" in done.stderr


def test_a_metric_that_collects_samples_is_a_warning_on_several_ranks_as_the_script_may_pad_its_data(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(
        "import ignite.distributed as idist, torch\n"
        "from ignite.engine import Engine\n"
        "from ignite.metrics import ROC_AUC\n"
        "def main(local_rank):\n"
        "    engine = Engine(lambda engine, batch: batch)\n"
        "    ROC_AUC().attach(engine, 'area')\n"
        "    labels = torch.arange(4) % 2\n"
        "    print(f'{engine.run([(labels / 2, labels)]).metrics}\\n', end='', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    with idist.Parallel('gloo', nproc_per_node=2) as parallel:\n"
        "        parallel.run(main)\n"
    )
    done = run(*COMMAND, "train.py", folder=tmp_path, OMP_NUM_THREADS="1")
    assert "UserWarning: ROC_AUC of PyTorch-Ignite in a job of 2 ranks gathers samples" in done.stderr
    assert done.stdout == "{'area': 1.0}\n" * 2
