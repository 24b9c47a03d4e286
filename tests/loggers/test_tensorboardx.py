"""Repeat tests of TensorboardLogger with the writer of tensorboardX, without tensorboard."""

from __future__ import annotations

import time

import pytest
import tensorboardX

from camshaft.handlers import TensorboardLogger, tensorboard_logger
from tests.handlers import test_tensorboard_logger as with_torch

pytestmark = pytest.mark.filterwarnings("ignore:TensorboardLogger uses tensorboardX")


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch):
    load = tensorboard_logger.load_optional

    def fail(module, **options):
        return load("no_such_module" if module == "tensorboard" else module, **options)

    monkeypatch.setattr(tensorboard_logger, "load_optional", fail)


@pytest.fixture(autouse=True)
def a_second_between_runs(monkeypatch):
    """Create a file per writer: tensorboardX names them by the second."""
    run = with_torch.run
    monkeypatch.setattr(with_torch, "run", lambda *args, **options: run(*args, **options) or time.sleep(1.1))


test_outputs = with_torch.test_outputs_are_scalars_named_by_tag_and_path
test_optimizers = with_torch.test_optimizers_weights_and_gradients
test_a_resume = with_torch.test_each_point_of_a_run_that_was_resumed_repeatedly_exists_once


def test_the_writer_of_tensorboardx_is_used(tmp_path):
    with TensorboardLogger(log_dir=tmp_path) as logger:
        assert isinstance(logger.writer, tensorboardX.SummaryWriter)
