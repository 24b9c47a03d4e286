"""Nodes that do not share a directory: a run resumes from a checkpoint that only some of them have, or says so."""

from __future__ import annotations

import shutil
import warnings
from contextlib import nullcontext

import pytest
import torch

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver
from camshaft.handlers.checkpoint import loading
from camshaft.handlers.checkpoint.manifest import Manifest
from tests.handlers.parts import Part, names
from tests.ranks import on_ranks
from tests.threads import run_on_threads


@pytest.fixture
def names_of_nodes(monkeypatch):
    monkeypatch.setattr(loading, "hostname", lambda: f"node-{idist.get_node_rank()}")


def train(folder, max_epochs, **options):
    """Resume and train in the directory of this node; return where the run resumed, and the file."""
    trainer, part = Engine(lambda engine, batch: None), Part()
    best = Checkpoint({"part": part}, folder / "best", score_function=lambda engine: part.value)
    checkpoint = Checkpoint({"trainer": trainer, "part": part, "best": best}, folder, **{"n_saved": 2, **options})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: setattr(part, "value", engine.state.iteration))
    for handler in (best, checkpoint):
        trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    newest = checkpoint.resume_latest()
    resumed_at = trainer.state.iteration
    assert part.value == resumed_at
    if trainer.state.epoch < max_epochs:
        trainer.run(range(3), max_epochs=max_epochs)
    return resumed_at, newest and newest.name


def node(tmp_path, is_swapped=False):
    return tmp_path / f"node_{idist.get_node_rank() ^ is_swapped}"


def on_two_nodes(tmp_path, max_epochs, is_swapped=False, **options):
    def on_each_rank():
        return train(node(tmp_path, is_swapped), max_epochs, **options)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = run_on_threads(4, on_each_rank, nodes=2)
    assert len({*results}) == 1
    return results[0], [str(one.message) for one in seen]


REPLACED = {"node 0 replaced": 0, "node 1 replaced": 1}


@pytest.mark.usefixtures("names_of_nodes")
@pytest.mark.parametrize(
    ("save_on_rank", "event"),
    [
        *((0, event) for event in ("nothing", "swapped", "node 1 replaced")),
        *(("node", event) for event in ("nothing", "swapped", *REPLACED, "node 1 is behind")),
    ],
)
def test_a_checkpoint_of_one_node_is_sent_to_the_others(tmp_path, save_on_rank, event):
    assert on_two_nodes(tmp_path, 3, save_on_rank=save_on_rank) == ((0, None), [])
    assert names(tmp_path / "node_0") == ["best", "checkpoint_6.pt", "checkpoint_9.pt"]
    if event in REPLACED:
        shutil.rmtree(tmp_path / f"node_{REPLACED[event]}", ignore_errors=True)
    if event == "node 1 is behind":
        DiskSaver(tmp_path / "node_1", require_empty=False).remove("checkpoint_9.pt")
    is_swapped = event == "swapped"
    resumed, seen = on_two_nodes(tmp_path, 5, is_swapped, save_on_rank=save_on_rank)
    assert resumed == (9, "checkpoint_9.pt")
    lacking = {"node 0 replaced": 0}.get(event, 1) ^ (is_swapped and save_on_rank == 0)
    if save_on_rank == "node" and event in ("nothing", "swapped"):
        assert seen == []
    else:
        (message,) = seen
        assert f"checkpoint_9.pt' is not on node-{lacking} (2 ranks, from {2 * lacking})" in message
        assert "all nodes share" in message
    writers = (0, 1) if save_on_rank == "node" else (int(is_swapped),)
    for number in writers:
        assert names(tmp_path / f"node_{number}")[-2:] == ["checkpoint_12.pt", "checkpoint_15.pt"]


@pytest.mark.filterwarnings("ignore:the checkpoint .* is not on")
def test_each_process_of_a_node_may_have_a_directory(tmp_path):
    def on_each_rank(max_epochs):
        return train(tmp_path / str(idist.get_rank()), max_epochs, save_on_rank=1)

    assert run_on_threads(2, on_each_rank, 2) == [(0, None)] * 2
    assert run_on_threads(2, on_each_rank, 4) == [(6, "checkpoint_6.pt")] * 2
    assert {"checkpoint_9.pt", "checkpoint_12.pt"} <= {*names(tmp_path / "1")}


def test_a_node_whose_clock_is_behind_saves_newer_checkpoints_than_the_node_before_it(tmp_path, monkeypatch):
    on_two_nodes(tmp_path, 3)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    assert on_two_nodes(tmp_path, 4, is_swapped=True)[0] == (9, "checkpoint_9.pt")
    assert on_two_nodes(tmp_path, 5)[0] == (12, "checkpoint_12.pt")


def test_a_file_that_is_damaged_on_one_node_is_skipped_on_all(tmp_path):
    on_two_nodes(tmp_path, 3, save_on_rank="node")
    file = tmp_path / "node_1" / "checkpoint_9.pt"
    file.write_bytes(file.read_bytes()[::-1])
    resumed, (message,) = on_two_nodes(tmp_path, 3, save_on_rank="node")
    assert resumed == (6, "checkpoint_6.pt")
    assert "checkpoint_9.pt' is damaged" in message


@pytest.mark.parametrize("source", [0, 1])
@on_ranks(2)
def test_a_file_is_sent_in_pieces_through_a_process_group(tmp_path, monkeypatch, source):
    monkeypatch.setattr(loading, "_PIECE", 100)
    rank = idist.get_rank()
    folder = tmp_path / str(rank)
    saver = DiskSaver(folder, save_on_rank=source)
    tied = torch.arange(60.0) + rank
    saver({"model": {"a": tied, "b": tied[10:]}}, "model_1.pt")

    class Kept:
        def load_state_dict(self, state):
            self.state = state

    kept = Kept()
    with pytest.warns(UserWarning, match=rf"not on \S+ \(1 rank, from {1 - source}\)") if rank == 0 else nullcontext():
        assert Checkpoint.resume({"model": kept}, folder) == folder / "model_1.pt"
    assert torch.equal(kept.state["a"], torch.arange(60.0) + source)
    assert kept.state["b"].data_ptr() == kept.state["a"][10:].data_ptr()


@pytest.mark.usefixtures("names_of_nodes")
def test_a_message_names_a_few_nodes(tmp_path):
    def resume():
        folder = tmp_path / str(idist.get_rank())
        if idist.get_rank() == 0:
            DiskSaver(folder)({"value": 3}, "part_1.pt")
        idist.barrier()
        Checkpoint.resume({"part": (part := Part())}, folder)
        return part.value

    with pytest.warns(UserWarning, match="is not on node-1") as seen:
        assert run_on_threads(8, resume, nodes=8) == [3] * 8
    (message,) = [str(one.message) for one in seen]
    assert "is not on node-1 (1 rank, from 1), node-2 (1 rank, from 2), " in message
    assert "node-4 (1 rank, from 4), 3 other nodes, so rank 0 sends it" in message


@pytest.mark.usefixtures("names_of_nodes")
@pytest.mark.parametrize("lost", [0, 1])
def test_shards_that_one_node_does_not_see_raise_on_all_ranks_and_nothing_is_removed(tmp_path, lost):
    trainer = Engine(lambda engine, batch: None)
    Checkpoint({"part": Part(3), "trainer": trainer}, tmp_path / f"node_{1 - lost}", sharded=True)(trainer)

    def resume():
        (folder := node(tmp_path)).mkdir(exist_ok=True)
        checkpoint = Checkpoint({"part": Part(), "trainer": Engine(lambda engine, batch: None)}, folder)
        with pytest.raises(
            RuntimeError, match=rf"checkpoint_0.sharded' is not on node-{lost} \(2 ranks, .*all nodes share"
        ):
            checkpoint.resume_latest()
        if idist.get_rank() == 0 and lost == 1:
            with pytest.raises(ValueError, match="not resumed"):
                checkpoint(Engine(lambda engine, batch: None))

    run_on_threads(4, resume, nodes=2)
    assert names(tmp_path / f"node_{1 - lost}") == ["checkpoint_0.sharded"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_resume_makes_one_exchange_and_lists_the_manifest_once(tmp_path, monkeypatch, nodes):
    exchanges, lists = [], []
    gather, paths = loading.all_gather, Manifest._paths
    run_on_threads(4, train, tmp_path, 3, nodes=nodes)
    monkeypatch.setattr(loading, "all_gather", lambda *args: (exchanges.append(args), gather(*args))[1])
    monkeypatch.setattr(Manifest, "_paths", lambda *args: (lists.append(args), paths(*args))[1])

    def resume():
        trainer, part = Engine(lambda engine, batch: None), Part()
        best = Checkpoint({"part": part}, DiskSaver(tmp_path / "best", require_empty=False))
        checkpoint = Checkpoint({"trainer": trainer, "part": part, "best": best}, tmp_path, n_saved=2)
        idist.barrier()
        lists.clear()
        idist.barrier()
        return checkpoint.resume_latest().name

    assert run_on_threads(4, resume, nodes=nodes) == ["checkpoint_9.pt"] * 4
    assert (len(exchanges), len(lists)) == (4, 4)  # one for each rank
