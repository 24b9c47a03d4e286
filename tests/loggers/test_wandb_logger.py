"""Test WandBLogger in offline mode by reading its files with the messages of W&B's library."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from wandb.proto import wandb_internal_pb2 as messages

from camshaft.engine import Events
from camshaft.handlers import wandb_logger
from tests.handlers.parts import at
from tests.loggers.scripts import run_script

HEADER, BLOCK = struct.Struct("<IHB"), 32768
WHOLE, LAST = 1, 4


def records(file: Path) -> Iterator[messages.Record]:
    """Read a log of W&B: seven bytes, then blocks of records in the format of LevelDB."""
    content = file.read_bytes()
    assert content.startswith(b":W&B")
    position, record = 7, b""
    while position < len(content):
        if BLOCK - position % BLOCK < HEADER.size:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, position)
        position += HEADER.size
        record += content[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            message = messages.Record()
            message.ParseFromString(record)
            yield message
            record = b""


def history(folder: Path) -> list[dict[str, object]]:
    (file,) = folder.glob("wandb/*run-*/*.wandb")
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            rows.append({name: value for name, value in row.items() if name not in ("_timestamp", "_runtime")})
    return rows


def test_values_and_text_are_written(tmp_path):
    run_script(
        tmp_path,
        """
        from camshaft.handlers import WandBLogger
        with WandBLogger(project="p", mode="offline") as logger:
            trainer = by_iteration(logger)
            evaluator = Engine(lambda engine, batch: "text")
            step = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
            logger.attach_output_handler(evaluator, Events.COMPLETED, tag="validation", global_step_transform=step,
                                         output_transform=lambda output: output, state_attributes=["epoch"])
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.25)
            logger.attach_opt_params_handler(trainer, Events.ITERATION_COMPLETED(once=1), optimizer, tag="net")
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
            logger.config.update({"rate": 0.25})
            trainer.run(range(4))
        """,
    )
    assert history(tmp_path) == [
        {"_step": 1, "net/lr/group_0": 0.25},
        {"_step": 2, "training/loss": 1.0},
        {"_step": 4, "training/loss": 2.0, "validation/output": "text", "validation/epoch": 1},
    ]


def test_an_unreachable_server_keeps_the_run_offline_with_one_warning(tmp_path):
    run_script(
        tmp_path,
        """
        import wandb
        from camshaft.handlers import WandBLogger
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            settings = wandb.Settings(init_timeout=3)
            with WandBLogger(project="p", settings=settings) as logger:
                assert by_iteration(logger).run(range(4)).iteration == 4
        found = [str(one.message) for one in caught if "written offline" in str(one.message)]
        assert len(found) == 1, caught
        """,
        WANDB_BASE_URL="http://127.0.0.1:9",
        WANDB_API_KEY="0" * 40,
    )
    offline = tmp_path / "offline"
    offline.mkdir()
    (tmp_path / "wandb").rename(offline / "wandb")
    for folder in offline.glob("wandb/run-*"):
        folder.rename(offline / folder.name)  # left by the attempt to reach the server
    assert history(offline) == [{"_step": 2, "training/loss": 1.0}, {"_step": 4, "training/loss": 2.0}]


class Module(ModuleType):
    """Replaces the library."""

    class errors:
        class CommError(Exception):
            pass

        class AuthenticationError(CommError):
            pass

    def __init__(self):
        super().__init__("wandb")
        self.lines, self.inits, self.finished = [], [], []

    def init(self, *args, **kwargs):
        self.inits.append((args, kwargs))

    def log(self, values, step):
        self.lines.append((values, step))

    def finish(self, exit_code=None):
        self.finished.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    module = Module()
    monkeypatch.setitem(__import__("sys").modules, "wandb", module)
    return module


def test_an_existing_run_is_reused(wandb):
    with wandb_logger.WandBLogger(init=False, project="p") as logger:
        assert wandb.inits == []
        assert logger.lines is wandb.lines
    assert wandb.finished == [None]
    wandb_logger.WandBLogger("entity", project="p")
    assert wandb.inits == [(("entity",), {"project": "p"})]


def test_a_run_whose_block_failed_is_marked_as_failed(wandb):
    with pytest.raises(ZeroDivisionError), wandb_logger.WandBLogger():
        raise ZeroDivisionError
    assert wandb.finished == [1]


def test_the_exit_code_of_a_failed_run_is_recorded(tmp_path):
    run_script(
        tmp_path,
        """
        from camshaft.handlers import WandBLogger
        try:
            with WandBLogger(project="p", mode="offline") as logger:
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        """,
    )
    (file,) = tmp_path.glob("wandb/*run-*/*.wandb")
    exits = [record.exit.exit_code for record in records(file) if record.WhichOneof("record_type") == "exit"]
    assert exits == [1]


def test_a_wrong_key_raises(wandb):
    def init(**kwargs):
        raise wandb.errors.AuthenticationError("wrong key")

    wandb.init = init
    with pytest.raises(wandb.errors.AuthenticationError, match="wrong key"):
        wandb_logger.WandBLogger(project="p")


def test_sync_is_deprecated_and_stays_positional(wandb):
    with pytest.warns(UserWarning, match="sync is deprecated"):
        handler = wandb_logger.OutputHandler("t", None, None, None, True, ["epoch"])
    with pytest.warns(UserWarning, match="sync is deprecated"):
        wandb_logger.OptimizerParamsHandler(type("Any", (), {"param_groups": []})(), "lr", "t", False)
    handler(at(epoch=3), wandb_logger.WandBLogger(), Events.COMPLETED)
    assert wandb.lines == [({"t/epoch": 3}, 3)]
    with pytest.raises(RuntimeError, match="needs a WandBLogger"):
        handler(at(), wandb, Events.COMPLETED)
