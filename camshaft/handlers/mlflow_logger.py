"""Log metrics to MLflow."""

from __future__ import annotations

import posixpath
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from camshaft.arguments import load_optional
from camshaft.handlers import base_logger
from camshaft.handlers.base_logger import Path, Silence, answers
from camshaft.handlers.steps import global_step_from_engine

__all__ = ["MLflowLogger", "OptimizerParamsHandler", "OutputHandler", "global_step_from_engine"]

# the limits of MLflow
_BATCH = 1000
_NAME = re.compile(r"[/\w.\- :]{1,250}")


class MLflowLogger(base_logger.ServiceLogger):
    """Writes metrics to a run of MLflow, on rank 0 and in the background.

    If the server does not answer, the logger warns and drops the metrics. A trainer that resumes in an earlier run of
    MLflow (``mlflow.start_run(run_id=...)`` before the logger is created) writes no metric twice for a step.

    Args:
        tracking_uri: of the server or store; by default the one that MLflow is configured with.

    Attributes:
        active_run: the run that was active, or else a new one; unknown attributes of the logger are looked up on
            the module ``mlflow``.

    Raises:
        ModuleNotFoundError: mlflow is not installed.

    >>> from camshaft.engine import Engine, Events
    >>> trainer = Engine(lambda engine, batch: 1 / batch)
    >>> with MLflowLogger("sqlite:///mlflow.db") as logger:  # doctest: +SKIP
    ...     logger.log_params({"rate": 0.1})
    ...     handle = logger.attach_output_handler(
    ...         trainer,
    ...         Events.ITERATION_COMPLETED(every=2),
    ...         "training",
    ...         output_transform=lambda loss: {"loss": loss},
    ...     )
    ...     state = trainer.run([1, 2, 4, 8])
    """

    _forwards_to = "_mlflow"

    def __init__(self, tracking_uri: str | None = None) -> None:
        mlflow = load_optional("mlflow", extra="mlflow", needed_by="MLflowLogger")
        self._mlflow: Any = Silence()
        self.active_run: Any = None
        self._outbox = Outbox()
        self._last_steps: dict[str, int] | None = None
        if not self.writes_here:
            return
        if tracking_uri is not None:
            mlflow.set_tracking_uri(tracking_uri)
        uri = mlflow.get_tracking_uri()
        if uri.startswith(("http://", "https://")) and not answers(uri):
            warnings.warn(f"MLflow at {uri} does not answer: nothing is logged there", stacklevel=2)
            return
        self._mlflow = mlflow
        self.active_run = mlflow.active_run() or mlflow.start_run()
        self._client = mlflow.MlflowClient()

    def write_values(self, values: Mapping[Path, Any], step: int) -> None:
        """Send a metric for each value; names that MLflow rejects are dropped with a warning."""
        if self.active_run is None:
            return
        metrics = {" ".join(path): float(value) for path, value in values.items()}
        for name in list(metrics):
            # like MLflow, also reject names that are not normalized paths
            is_plain = posixpath.normpath(name) == name and not name.startswith(("/", "..")) and name != "."
            if not (is_plain and _NAME.fullmatch(name)):
                warnings.warn(f"MLflow does not accept the name {name!r}: it is not logged", stacklevel=2)
                del metrics[name]
        self._outbox.put(self._attempt, self._send, metrics, step, int(time.time() * 1000))

    def close(self) -> None:
        """Wait at most a minute for metrics that are still to be sent, and end the run, which failed after an error."""
        self._attempt(self._outbox.close)
        if self.active_run is not None:
            self._attempt(self._mlflow.end_run, *(["FAILED"] if self.has_failed else []))
            self.active_run = None

    def _send(self, values: dict[str, float], step: int, milliseconds: int) -> None:
        run, metric = self.active_run.info.run_id, self._mlflow.entities.Metric
        metrics = [
            metric(name, value, milliseconds, step) for name, value in values.items() if self._is_new(name, step)
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(run, metrics[first : first + _BATCH])

    def _is_new(self, name: str, step: int) -> bool:
        if self._last_steps is None:
            return True
        if name not in self._last_steps:
            history = self._client.get_metric_history(self.active_run.info.run_id, name)
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return step > self._last_steps[name]

    def _rewind(self, iteration: int) -> None:
        self._last_steps = {}  # MLflow cannot delete points, so skip those that exist


class OutputHandler(base_logger.BaseOutputHandler):
    """Writes metrics, outputs and state attributes as metrics ``<tag> <name>``."""

    logger_class = MLflowLogger
    wrong_logger = TypeError


class OptimizerParamsHandler(base_logger.BaseOptimizerParamsHandler):
    """Writes a parameter of each group of an optimizer as metrics ``<tag> <parameter> group_<i>``."""

    logger_class = MLflowLogger
    wrong_logger = TypeError


class Outbox:
    """Runs calls in order in a background thread, so that a slow service does not block the run.

    The thread is a daemon: it does not delay the exit of a process that crashed, as a thread of ``concurrent.futures``
    would.

    Args:
        capacity: the maximum number of waiting calls.
        patience: the number of seconds that :meth:`close` waits for remaining calls.

    >>> outbox, sent = Outbox(), []
    >>> outbox.put(sent.append, 1)
    >>> outbox.close()
    >>> sent
    [1]
    """

    def __init__(self, capacity: int = 10_000, patience: float = 60.0) -> None:
        self._capacity, self._patience = capacity, patience
        self._calls = queue.SimpleQueue[Any]()  # without a limit, as there is always room for the mark of the end
        self._thread: threading.Thread | None = None

    def put(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a call, which must not raise.

        Raises:
            TimeoutError: too many calls are waiting.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="camshaft-log", daemon=True)
            self._thread.start()
        if self._calls.qsize() >= self._capacity:
            raise TimeoutError(f"{self._capacity} calls are waiting")
        self._calls.put((function, args))

    def close(self) -> None:
        """Wait for the remaining calls and end the thread; a later :meth:`put` starts another.

        Raises:
            TimeoutError: calls are still waiting.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(self._patience)
            if thread.is_alive():
                raise TimeoutError(f"about {self._calls.qsize()} calls were still waiting at the end")

    def _work(self) -> None:
        while call := self._calls.get():
            function, args = call
            function(*args)
