"""Test MLflowLogger with a store in SQLite and with a local server."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from camshaft.engine import Events
from camshaft.handlers.mlflow_logger import OutputHandler
from tests.handlers.parts import at
from tests.limits import HANG
from tests.loggers.scripts import run_script
from tests.torchrun.launching import free_port

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by MLflow's dependencies


PATIENT = f"""
        from functools import partial
        from camshaft.handlers import mlflow_logger
        mlflow_logger.answers = partial(mlflow_logger.answers, seconds={HANG})  # the server may be slow
        """


def history(store, name):
    """Read a metric from the store, ordered by step."""
    return query(store, "select step, value from metrics where key = ? and is_nan = 0 order by step", name)


def query(store, text, *values):
    with closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as connection:
        return connection.execute(text, values).fetchall()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Create the tables once, which takes longer than the tests."""
    folder = tmp_path_factory.mktemp("store")
    script = "from mlflow import MlflowClient; MlflowClient('sqlite:///mlflow.db').search_experiments()"
    run_script(folder, script)
    return folder / "mlflow.db"


@pytest.fixture
def store(prepared, tmp_path):
    (tmp_path / "mlflow.db").write_bytes(prepared.read_bytes())
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_metrics_are_written_to_the_store(store, tmp_path):
    run_script(
        tmp_path,
        f"""
        from camshaft.handlers import MLflowLogger
        with MLflowLogger({store!r}) as logger:
            logger.log_params({{"rate": 0.25}})
            trainer = by_iteration(logger)
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.25)
            logger.attach_opt_params_handler(trainer, Events.EPOCH_STARTED, optimizer, tag="net")
            logger.attach_output_handler(trainer, Events.COMPLETED, "odd", state_attributes=["bad%name", "nan"])
            trainer.state.nan = float("nan")
            setattr(trainer.state, "bad%name", 1)
            with warnings.catch_warnings(record=True) as caught:
                trainer.run(range(4))
            assert ["odd bad%name" in str(one.message) for one in caught] == [True]
        """,
    )
    assert history(store, "training loss") == [(2, 1.0), (4, 2.0)]
    assert history(store, "net lr group_0") == [(1, 0.25)]
    assert query(store, "select step from metrics where key = 'odd nan' and is_nan = 1") == [(1,)]
    assert query(store, "select key, value from params") == [("rate", "0.25")]
    assert query(store, "select distinct key from metrics where key like '%bad%'") == []
    assert query(store, "select status from runs") == [("FINISHED",)]


def test_a_run_whose_block_failed_is_marked_as_failed(store, tmp_path):
    run_script(
        tmp_path,
        f"""
        from camshaft.handlers import MLflowLogger
        try:
            with MLflowLogger({store!r}) as logger:
                by_iteration(logger).run(range(4))
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        """,
    )
    assert history(store, "training loss") == [(2, 1.0), (4, 2.0)]
    assert query(store, "select status from runs") == [("FAILED",)]


def test_each_point_exists_once_after_a_resume(store, tmp_path):
    run_script(
        tmp_path,
        f"""
        import mlflow
        from camshaft.handlers import MLflowLogger
        with MLflowLogger({store!r}) as logger:
            run_id = logger.active_run.info.run_id
            by_iteration(logger).run(range(5))
        mlflow.start_run(run_id=run_id)
        with MLflowLogger() as logger:
            assert logger.active_run.info.run_id == run_id
            trainer = by_iteration(logger, attempt=100)
            trainer.load_state_dict({{"iteration": 2, "epoch_length": 5, "max_epochs": 2}})
            trainer.run(range(5))
        """,
    )
    assert history(store, "training loss") == [(2, 1.0), (4, 2.0), (6, 300.0), (8, 400.0), (10, 500.0)]


@pytest.fixture
def server(store, tmp_path):
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port)]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--workers", "1", "--artifacts-destination", str(tmp_path / "artifacts")],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + HANG
        while not is_up(f"{uri}/health"):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < until, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
        yield uri, process
    finally:
        stop(process)


def is_up(address):
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def stop(process):
    """Kill the server and its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(HANG)


def test_metrics_are_sent_to_a_server(server, store, tmp_path):
    uri, _ = server
    script = f"""{PATIENT}
        from camshaft.handlers import MLflowLogger
        with MLflowLogger({uri!r}) as logger:
            by_iteration(logger).run(range(4))
        """
    run_script(tmp_path, script)
    assert history(store, "training loss") == [(2, 1.0), (4, 2.0)]
    client = MlflowClient(uri)
    (run,) = client.search_runs(["0"])
    found = client.get_metric_history(run.info.run_id, "training loss")
    assert sorted((metric.step, metric.value) for metric in found) == [(2, 1.0), (4, 2.0)]


def test_a_server_that_disappears_warns_once(server, tmp_path):
    """Also when the logger is closed, which can neither send the remaining metrics nor end the run."""
    uri, process = server
    script = f"""{PATIENT}
        import os, signal
        from camshaft.handlers import MLflowLogger
        logger = MLflowLogger({uri!r})
        trainer = by_iteration(logger)
        os.killpg({process.pid}, signal.SIGKILL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert trainer.run(range(50)).iteration == 50
            logger.close()
        found = [str(one.message) for one in caught if one.category is UserWarning]
        assert len(found) == 1 and found[0].startswith("MLflowLogger cannot write, values are lost: "), found
        os._exit(0)  # otherwise MLflow would try to end the run on the server
        """
    run_script(tmp_path, script, MLFLOW_HTTP_REQUEST_MAX_RETRIES="1")


def test_an_unreachable_server_warns_once(tmp_path):
    script = """
        from camshaft.handlers import MLflowLogger
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with MLflowLogger("http://127.0.0.1:9") as logger:
                logger.log_params({"rate": 1})
                assert by_iteration(logger).run(range(4)).iteration == 4
        found = [str(one.message) for one in caught if "does not answer" in str(one.message)]
        assert found == ["MLflow at http://127.0.0.1:9 does not answer: nothing is logged there"], caught
        """
    run_script(tmp_path, script)


def test_handlers_refuse_other_loggers():
    with pytest.raises(TypeError, match="needs a MLflowLogger"):
        OutputHandler("t", "all")(at(), Path(), Events.COMPLETED)
