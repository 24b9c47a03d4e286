"""Ray Train and Ray Tune, on a Ray that each test starts on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.limits import HANG

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = (ROOT / "docs" / "how-to" / "ray.md").read_text("utf-8")
WORKERS = "workers.txt"
# trials that run one after the other are compared in the order in which they were asked for
ONE_AT_A_TIME = """
import runpy, sys
import ray

ray.init(num_cpus=1, include_dashboard=False)
sys.argv[:1] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, *command: object, fails: bool = False) -> str:
    """Return the output, where Ray may write the lines of workers between a text that is printed and its line end."""
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # pytest's folders are too deep for Ray's sockets
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
            "RAY_TMPDIR": short,
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how long a report takes
            "RAY_worker_niceness": "0",  # not 15, with which workers hardly run beside other tests
        }
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, *map(str, command)],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=HANG,
            )
            if "timed out during startup" not in done.stdout:  # Ray allows 30 seconds for it
                break
        logs = {path.resolve() for path in Path(short).glob("**/logs/worker-*")}
        (folder / WORKERS).write_text("\n".join(path.read_text(errors="replace") for path in sorted(logs)))
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def resumed(folder: Path) -> set[str]:
    """Return where the last run in the folder has resumed; Ray may drop the last lines that it forwards."""
    lines = (folder / WORKERS).read_text()
    return set(re.findall(r"next: (epoch \d+, iteration \d+, sample \d+)", lines))


def file_of_page(name: str, folder: Path) -> Path:
    (code,) = re.findall(rf'^```python title="{name}"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    (folder / name).write_text(code)
    return folder / name


def test_workers_know_their_place_on_two_nodes(tmp_path: Path) -> None:
    run(tmp_path, FOLDER / "place.py", tmp_path)
    places = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [theirs for theirs, _ in places] == [[0, 3, 0, 2, 0], [1, 3, 1, 2, 0], [2, 3, 0, 1, 1]]
    assert all(theirs == ours for theirs, ours in places)


def test_every_sample_is_read_once_after_a_failed_run_another_number_of_workers_and_a_kill(tmp_path: Path) -> None:
    run(tmp_path, FOLDER / "exact.py", tmp_path, 2, 8, "raise", fails=True)
    output = run(tmp_path, FOLDER / "exact.py", tmp_path, 3, 13, "kill")
    assert {place.split(", ")[1] for place in resumed(tmp_path)} == {"iteration 7", "iteration 13"}, output
    seen = Counter[tuple[int, int]]()
    for record in (tmp_path / "records").iterdir():  # an attempt replaces what one before it has read further on
        for line in record.read_text().splitlines():
            epoch, _, samples = line.partition(" ")
            seen.update((int(epoch), sample) for sample in json.loads(samples))
    assert seen == {(epoch, sample): 1 for epoch in (1, 2) for sample in range(50)}


def test_the_example_resumes_when_a_worker_was_killed(tmp_path: Path) -> None:
    output = run(tmp_path, ROOT / "examples" / "ray_train.py", "--kill", "--epochs=4")
    # the other rank names the one that is gone, unless Ray does and ends it before that
    assert "RankFailedError: rank 1's process was killed or crashed" in output or "died" in output, output
    assert len(resumed(tmp_path)) == 1, output
    accuracy, iterations = re.findall(r"accuracy (\S+)% after (\d+) iterations", output)[0]
    assert float(accuracy) > 80
    assert iterations == "140"


def test_the_program_of_the_page(tmp_path: Path) -> None:
    output = run(tmp_path, file_of_page("train.py", tmp_path), tmp_path / "stored")
    (shown,) = re.findall(r"^loss \S+ after 80 iterations$", PAGE, re.MULTILINE)
    assert shown in output


def test_a_trial_that_ray_tune_stops_ends_the_engine_in_order(tmp_path: Path) -> None:
    search = file_of_page("search.py", tmp_path)
    log = f"""
    from camshaft.handlers import CSVLogger

    log = CSVLogger(f"{tmp_path}/{{config['rate']}}.csv")
    loss = {{"output_transform": lambda loss: {{"loss": loss}}}}
    log.attach_output_handler(trainer, Events.ITERATION_COMPLETED, "train", **loss)

    @trainer.on"""
    search.write_text(search.read_text().replace("\n    @trainer.on", log))
    output = run(tmp_path, "-c", ONE_AT_A_TIME, search, tmp_path / "stored")
    found = re.findall(r"rate (\S+): (\d+) epochs", output)
    assert found == [("0.1", "16"), ("0.01", "2"), ("0.001", "2"), ("0.0001", "2")]
    assert found == re.findall(r"^rate (\S+): (\d+) epochs$", PAGE, re.MULTILINE)
    rows = {file.stem: len(file.read_text().splitlines()) - 1 for file in tmp_path.glob("*.csv")}
    assert rows == {rate: 20 * int(epochs) for rate, epochs in found}
    assert "Traceback" not in output
