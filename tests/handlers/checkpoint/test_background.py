"""Saving in the background: the copy of the state, one save at a time, and what the engine waits for."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, ModelCheckpoint
from camshaft.handlers.checkpoint.background import StateCopier
from tests.handlers.parts import Part, at, load, names
from tests.limits import HANG
from tests.ranks import on_ranks


class Gate(DiskSaver):
    """A DiskSaver that blocks until it is opened."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.threads = []

    def __call__(self, *args):
        self.threads.append(threading.current_thread())
        self.entered.set()
        assert self.opened.wait(HANG)
        super().__call__(*args)


class Broken(Gate):
    def __call__(self, *args):
        self.entered.set()
        assert self.opened.wait(HANG)
        raise OSError(28, "No space left on device")


def background(to_save, saver, **options):
    return Checkpoint(to_save, saver, asynchronous=True, **options)


# --- the copy ----------------------------------------------------------------------------------------------


def test_the_run_continues_during_a_save_without_changing_the_saved_state(tmp_path):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    saver = Gate(tmp_path)
    checkpoint = background({"model": model}, saver)
    seen = []

    def step(engine, batch):
        with torch.no_grad():
            model.weight.fill_(batch)
        seen.append(names(tmp_path))
        if batch == 3:
            saver.opened.set()

    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), checkpoint)
    engine.run([1.0, 2.0, 3.0])
    assert all(not found for found in seen)
    assert torch.equal(load(tmp_path / "model_1.pt")["weight"], torch.ones(2, 2))
    assert saver.threads != [threading.current_thread()]


def test_shared_memory_is_copied_once_and_shared_in_the_copy():
    weight = torch.arange(6.0)
    state = {
        "a": weight,
        "b": weight,
        "c": weight[2:4],
        "d": weight.view(2, 3).t(),
        "rest": [(weight, 1), "text", None],
    }
    copied, finish = StateCopier().copy(state)
    finish()
    assert copied["a"].untyped_storage().data_ptr() == copied["c"].untyped_storage().data_ptr()
    assert copied["a"].untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
    expected = {name: torch.clone(state[name]) for name in "abcd"}
    weight.zero_()
    for name, tensor in expected.items():
        assert torch.equal(copied[name], tensor)
        assert copied[name].stride() == state[name].stride()
    assert copied["rest"][1:] == ["text", None]


def test_host_memory_is_reused():
    staging = StateCopier()
    first, _ = staging.copy({"a": torch.ones(1000), "b": torch.ones(10)})
    place = first["a"].data_ptr()
    second, _ = staging.copy({"a": torch.zeros(1000), "b": torch.ones(20)})
    assert second["a"].data_ptr() == place
    assert second["b"].numel() == 20
    assert torch.equal(second["a"], torch.zeros(1000))


def test_tensors_without_data_are_not_copied():
    shape = torch.empty(3, device="meta")
    copied, _ = StateCopier().copy({"shape": shape})
    assert copied["shape"] is shape


kinds = st.sampled_from(
    [
        torch.tensor(3),
        torch.empty(0),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, 3)[:, ::2],
        torch.eye(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64),
        nn.Parameter(torch.ones(2)),
        torch.ones(1).expand(3),
    ]
)
states = st.recursive(
    kinds | st.integers() | st.text() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(state=states)
def test_a_copy_equals_the_state(state):
    copied, finish = StateCopier().copy(state)
    finish()
    same(copied, state)


def same(one, other):
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.layout == other.layout
        assert (
            torch.equal(one.to_dense(), other.to_dense())
            if other.layout is not torch.strided
            else torch.equal(one, other)
        )
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        [same(one[key], other[key]) for key in other]
    elif isinstance(other, list):
        [same(*pair) for pair in zip(one, other, strict=True)]
    else:
        assert one == other


def test_the_copied_state_of_a_module_keeps_its_metadata(tmp_path):
    model = nn.BatchNorm1d(2)
    copied, _ = StateCopier().copy(model.state_dict())
    assert type(copied) is type(model.state_dict())
    assert copied._metadata == model.state_dict()._metadata


# --- one save at a time -----------------------------------------------------------------------------------------


def test_the_next_save_waits_for_the_previous_one(tmp_path):
    saver = Gate(tmp_path)
    checkpoint = background({"part": Part()}, saver, n_saved=None)
    checkpoint(at(1))
    threading.Timer(0.05, saver.opened.set).start()
    checkpoint(at(2))
    assert saver.threads[0] is not saver.threads[-1]
    assert checkpoint.state_dict()["_saved"] == [(1, "part_1.pt"), (2, "part_2.pt")]


def test_the_old_file_is_removed_after_the_new_one_is_saved(tmp_path):
    saver = Gate(tmp_path)
    checkpoint = background({"part": Part()}, saver)
    saver.opened.set()
    checkpoint(at(1))
    assert checkpoint.last_checkpoint.name == "part_1.pt"
    saver.opened.clear()
    checkpoint(at(2))
    assert names(tmp_path) == ["part_1.pt"]
    saver.opened.set()
    assert checkpoint.last_checkpoint.name == "part_2.pt"
    assert names(tmp_path) == ["part_2.pt"]


# --- on an engine -------------------------------------------------------------------------


def test_the_event_fires_after_the_save_and_before_the_run_ends(tmp_path):
    saver = Gate(tmp_path)
    checkpoint = background({"part": Part()}, saver)
    engine = Engine(lambda engine, batch: saver.opened.set() if batch == 2 else None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), checkpoint)
    fired = []
    engine.add_event_handler(
        Checkpoint.SAVED_CHECKPOINT, lambda: fired.append((engine.state.iteration, names(tmp_path)))
    )
    engine.run(range(3))
    ((iteration, files),) = fired
    assert iteration == 3
    assert files == ["part_1.pt"]
    assert not engine.has_event_handler(checkpoint._background.settle)


def test_a_failed_save_fails_the_run_at_the_next_iteration(tmp_path, caplog):
    saver = Broken(tmp_path)
    checkpoint = background({"part": Part()}, saver)

    def step(engine, batch):
        if batch == 5:
            saver.opened.set()
            thread.join()

    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), checkpoint)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: remember())

    def remember():
        nonlocal thread
        thread = next(one for one in threading.enumerate() if one.name.startswith("camshaft-checkpoint"))

    thread = None
    with pytest.raises(OSError, match="No space left"):
        engine.run(range(20))
    assert engine.state.iteration == 6
    assert "saving in the background failed" in caplog.text
    assert checkpoint.state_dict()["_saved"] == []
    assert not engine.has_event_handler(checkpoint._background.settle)


def test_a_failure_at_the_end_of_the_run_is_raised(tmp_path):
    saver = Broken(tmp_path)
    saver.opened.set()
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_COMPLETED, background({"part": Part()}, saver))
    with pytest.raises(OSError, match="No space left"):
        engine.run(range(2))


def test_an_error_of_the_run_takes_precedence_and_the_save_still_completes(tmp_path):
    saver = Gate(tmp_path)
    checkpoint = background({"part": Part()}, saver)

    def step(engine, batch):
        if batch == 1:
            saver.opened.set()
            raise ZeroDivisionError

    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
    with pytest.raises(ZeroDivisionError):
        engine.run(range(3))
    assert names(tmp_path) == ["part_1.pt"]
    assert checkpoint.last_checkpoint == tmp_path / "part_1.pt"
    assert not engine.has_event_handler(checkpoint._background.settle)


def test_on_an_evaluator_the_trainer_continues_and_waits_before_it_ends(tmp_path):
    saver = Gate(tmp_path)
    checkpoint = background({"part": Part()}, saver, score_function=lambda engine: trainer.state.epoch, n_saved=None)
    evaluator = Engine(lambda engine, batch: None)
    evaluator.add_event_handler(Events.COMPLETED, checkpoint)
    fired, seen = [], []
    evaluator.add_event_handler(Checkpoint.SAVED_CHECKPOINT, lambda: fired.append(trainer.state.iteration))

    def step(engine, batch):
        if batch == 3:
            seen.append(names(tmp_path))
            saver.opened.set()

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: evaluator.run(range(2)))
    trainer.run(range(5))
    assert (seen, names(tmp_path)) == ([[]], ["part_1.pt"])
    assert len(fired) == 1
    assert not trainer.has_event_handler(checkpoint._background.settle)


@pytest.mark.parametrize("event", [Events.COMPLETED, Events.TERMINATE])
def test_a_save_that_starts_at_the_end_of_a_run_is_awaited_at_once(tmp_path, event):
    saver = Broken(tmp_path)
    saver.opened.set()
    engine = Engine(lambda engine, batch: engine.terminate())
    engine.add_event_handler(event, background({"part": Part()}, saver))
    with pytest.raises(OSError, match="No space left"):
        engine.run(range(2))


def test_the_process_waits_at_exit(tmp_path):
    program = f"""
import time, torch
from camshaft.engine import Engine
from camshaft.handlers import Checkpoint, DiskSaver
class Slow(DiskSaver):
    def __call__(self, *args):
        time.sleep(0.5)
        super().__call__(*args)
engine = Engine(lambda engine, batch: None)
engine.run([1])
checkpoint = Checkpoint({{"model": torch.nn.Linear(1000, 1000)}}, Slow({str(tmp_path)!r}), asynchronous=True)
checkpoint(engine)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert names(tmp_path) == ["model_1.pt"]


def test_a_save_at_the_exit_of_the_process_is_synchronous(tmp_path):
    program = f"""
import atexit, torch
from camshaft.engine import Engine
from camshaft.handlers import Checkpoint
checkpoint = Checkpoint({{"model": torch.nn.Linear(2, 2)}}, {str(tmp_path)!r}, asynchronous=True)
atexit.register(checkpoint, Engine(lambda engine, batch: None))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert names(tmp_path) == ["model_0.pt"]


def test_a_model_checkpoint_saves_in_the_background(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, asynchronous=True)
    checkpoint(at(1), {"part": Part(3)})
    assert checkpoint.last_checkpoint == tmp_path / "part_1.pt"
    assert load(tmp_path / "part_1.pt") == {"value": 3}


def test_tensors_at_one_address_in_different_storages_are_copied_completely():
    array = numpy.arange(8.0)
    state = {"head": torch.from_numpy(array[:2]), "all": torch.from_numpy(array)}
    copied, finish = StateCopier().copy(state)
    finish()
    assert copied["head"].tolist() == [0, 1]
    assert copied["all"].tolist() == array.tolist()


# --- on ranks ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_rank_copies_and_writes_and_all_ranks_know_the_file(tmp_path):
    checkpoint = background({"part": Part(idist.get_rank())}, DiskSaver(tmp_path, save_on_rank=1))
    checkpoint(at(1))
    assert (checkpoint._background._pending is not None) == (idist.get_rank() == 1)
    assert checkpoint.last_checkpoint == tmp_path / "part_1.pt"
    idist.barrier()
    assert load(tmp_path / "part_1.pt") == {"value": 1}
