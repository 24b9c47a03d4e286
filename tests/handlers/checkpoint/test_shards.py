"""Sharded checkpoints: each rank saves its part, and any layout loads them."""

from __future__ import annotations

import random
import shutil
import warnings
import zipfile

import pytest
import torch
from torch import nn

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.errors import DamagedCheckpointError, RankDivergenceError
from camshaft.handlers import Checkpoint, DiskSaver, ModelCheckpoint
from camshaft.handlers.checkpoint.manifest import Manifest
from tests.handlers.parts import Memory, Part, at, names
from tests.ranks import on_ranks, run_on_ranks

BATCH = torch.ones(2, 3)
SIZES = {1: ["plain"], 2: ["fsdp", "tp", "plain"], 3: ["fsdp"], 4: ["hsdp", "fsdp and tp", "fsdp"]}


def make(layout="fsdp", seed=0):
    """Return a model whose sizes no number of ranks divides, its optimizer, and a scheduler."""
    # imported here, as each takes a second
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5), nn.BatchNorm1d(5))
    size = idist.get_world_size()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (size,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    elif layout == "fsdp and tp":  # the second layer is a replica on each data-parallel rank
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model[0], mesh=mesh["data"])
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    return {"model": model, "optimizer": optimizer, "trainer": Engine(lambda engine, batch: None)}


def fill(objects, seed=5):
    """Give every tensor of a model and its optimizer a value of its own, the same in every layout."""
    source = make("plain", seed)
    for parameter in source["model"].parameters():
        parameter.grad = torch.randn(parameter.shape)
    source["optimizer"].step()
    state = {name: one.state_dict() for name, one in source.items()}
    Checkpoint.load_objects({name: objects[name] for name in ("model", "optimizer")}, state)


def whole(state):
    return {
        name: whole(value) if isinstance(value, dict) else getattr(value, "full_tensor", lambda value=value: value)()
        for name, value in state.items()
    }


def tensors(objects):
    states = {name: objects[name].state_dict() for name in ("model", "optimizer")}
    return whole({"model": states["model"], "optimizer": states["optimizer"]["state"]})


def same(objects, expected):
    torch.testing.assert_close(tensors(objects), expected, rtol=0, atol=0)


def reference():
    objects = make("plain")
    fill(objects)
    return tensors(objects)


def save(folder):
    for layout in SIZES[idist.get_world_size()]:
        objects = make(layout)
        fill(objects)
        here = folder / f"{idist.get_world_size()} {layout}"
        saver, engine, is_async = DiskSaver(here), objects["trainer"], layout in ("tp", "fsdp and tp")
        checkpoint = Checkpoint(objects, saver, sharded=True, asynchronous=is_async, include_self=True)
        engine.add_event_handler(Events.ITERATION_COMPLETED, checkpoint)
        engine.run(range(2))
        assert checkpoint.last_checkpoint == here / "checkpoint_2.sharded"


def check_resume(folder):
    expected = reference()
    for layout in SIZES[idist.get_world_size()]:
        for here in sorted(folder.iterdir()):
            objects = make(layout, seed=1)
            checkpoint = Checkpoint(objects, DiskSaver(here, require_empty=False), sharded=True)
            assert Checkpoint.resume({**objects, "checkpointer": checkpoint}, here) == here / "checkpoint_2.sharded"
            assert objects["trainer"].state.iteration == 2
            assert checkpoint.last_checkpoint == here / "checkpoint_2.sharded"
            same(objects, expected)


def check_every_layout(folder, sizes_before, sizes_after):
    for size in sizes_before:
        run_on_ranks(size, save, folder)
    for path in folder.iterdir():
        assert names(path) == ["checkpoint_2.sharded"]
        assert len(names(path / "checkpoint_2.sharded")) == int(path.name[0])
    for size in sizes_after:
        run_on_ranks(size, check_resume, folder)


def test_two_ranks_save_shards_that_one_process_loads(tmp_path):
    check_every_layout(tmp_path, [2], [1])


@pytest.mark.jobs
def test_a_sharded_checkpoint_loads_into_every_layout(tmp_path):
    check_every_layout(tmp_path, [2, 4], SIZES)


def flip(path, number=0):
    """Flip one bit in the middle of a shard."""
    shard = sorted(path.glob("shard-*"))[number]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


@on_ranks(2)
def test_all_ranks_find_a_damaged_shard_and_resume_from_the_previous_checkpoint(tmp_path):
    part = Part()
    checkpoint = Checkpoint({"part": part}, tmp_path, n_saved=None, sharded=True)
    for part.value in (1, 2, 3):
        checkpoint(at(part.value))
    idist.barrier()
    if idist.get_rank() == 0:
        flip(tmp_path / "part_3.sharded", number=1)
        next((tmp_path / "part_2.sharded").glob("shard-1-*")).unlink()
    idist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert Checkpoint.resume({"part": part}, tmp_path).name == "part_1.sharded"
    assert part.value == 1
    texts = [str(one.message) for one in seen]
    if idist.get_rank() != 0:
        assert texts == []  # rank 0 reports what all ranks have found
        return
    assert all("resuming from 'part_1" in text for text in texts)
    assert any("part_3.sharded' has a shard 'shard-1-" in text and "is damaged" in text for text in texts)
    assert any("part_2.sharded' has a shard 'shard-1-" in text and "is not there" in text for text in texts)


def fail_on_rank_1(monkeypatch):
    def torch_save(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if idist.get_rank() == 1:
        monkeypatch.setattr(torch, "save", torch_save)


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_lost(tmp_path):
    part = Part(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for asynchronous in (False, True):
            monkeypatch.undo()
            checkpoint = Checkpoint(
                {"part": part}, DiskSaver(tmp_path, require_empty=False), sharded=True, asynchronous=asynchronous
            )
            checkpoint(at(1))
            assert checkpoint.last_checkpoint == tmp_path / "part_1.sharded"
            fail_on_rank_1(monkeypatch)
            with pytest.raises(OSError, match="No space left") as raised:
                checkpoint(at(2))
                checkpoint.state_dict()  # waits for the save in the background
            assert "raised on rank 1" in raised.value.__notes__[0]
            assert checkpoint.last_checkpoint == tmp_path / "part_1.sharded"
            idist.barrier()
            assert names(tmp_path) == ["part_1.sharded"]
            assert len(names(tmp_path / "part_1.sharded")) == 2
            idist.barrier()


@on_ranks(2)
def test_an_error_in_the_background_is_raised_on_all_ranks_during_the_run(tmp_path):
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_on_rank_1(monkeypatch)
        engine = Engine(lambda engine, batch: idist.barrier())
        checkpoint = Checkpoint({"part": Part(1)}, tmp_path, sharded=True, asynchronous=True)
        # in the last iteration, so that no rank fails before a step in which the other one waits for it
        engine.add_event_handler(Events.ITERATION_STARTED(once=2), checkpoint)
        with pytest.raises(OSError, match="No space left"):
            engine.run(range(2))
        idist.barrier()  # no rank ends while another is in the exchange


@on_ranks(2)
def test_the_score_of_the_rank_that_commits_decides(tmp_path):
    rank = idist.get_rank()
    scores = iter([[1, 3, 2], [3, 1, 2]][rank])
    part = Part()
    checkpoint = Checkpoint(
        {"part": part}, tmp_path, score_function=lambda engine: next(scores), score_name="good", sharded=True
    )
    for part.value in (1, 2, 3):
        checkpoint(at(part.value))
    idist.barrier()
    assert names(tmp_path) == ["part_good=3.sharded"]
    assert checkpoint.state_dict()["_saved"] == [(3, "part_good=3.sharded")]
    Checkpoint.resume({"part": part}, tmp_path)
    assert part.value == 2


@on_ranks(2)
def test_a_score_function_that_raises_on_one_rank_raises_on_all(tmp_path):
    def score(engine):
        return 1 / (1 - idist.get_rank())

    checkpoint = Checkpoint({"part": Part()}, tmp_path, score_function=score, sharded=True)
    with pytest.raises(ZeroDivisionError):
        checkpoint(at(1))
    idist.barrier()


@on_ranks(2)
def test_ranks_that_do_not_share_the_directory_are_reported(tmp_path):
    mine = tmp_path / str(idist.get_rank())
    mine.mkdir()
    checkpoint = Checkpoint({"part": Part()}, mine, sharded=True)
    with pytest.raises(FileNotFoundError, match="needs a directory that all ranks share"):
        checkpoint(at(1))
    assert names(mine) == []
    idist.barrier()


@on_ranks(2)
def test_a_save_on_one_rank_alone_raises_instead_of_waiting(tmp_path):
    checkpoint = Checkpoint({"part": Part()}, tmp_path, sharded=True)

    @idist.one_rank_only()
    def save_alone():
        with pytest.raises(RankDivergenceError, match="Checkpoint"):
            checkpoint(at(1))

    save_alone()


@pytest.mark.parametrize("number", [0, 1])
def test_a_flipped_bit_anywhere_in_a_shard_is_detected(tmp_path, number):
    run_on_ranks(2, save_plain, tmp_path)
    path = tmp_path / "part_1.sharded"
    shard = sorted(path.iterdir())[number]
    content = shard.read_bytes()
    part, chance = Part(), random.Random(number)
    for _ in range(50):
        position, bit = chance.randrange(len(content)), chance.randrange(8)
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        shard.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=shard.name):
            Checkpoint.load_objects({"part": part}, path)
    shard.write_bytes(content)
    Checkpoint.load_objects({"part": part}, path)
    assert part.value == 7


def save_plain(folder):
    Checkpoint({"part": Part(7)}, folder, sharded=True)(at(1))


# --- in one process -------------------------------------------------------------------------------------------------


def values(folder):
    """Return the values that the checkpoints of a directory hold."""
    found = []
    for entry in Manifest(folder).entries():
        part = Part()
        Checkpoint.load_objects({"part": part}, folder / entry.file)
        found.append(part.value)
    return sorted(found)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_retention_is_that_of_whole_files(tmp_path, asynchronous):
    part = Part()
    checkpoint = Checkpoint({"part": part}, tmp_path, n_saved=2, sharded=True, asynchronous=asynchronous)
    for part.value in (1, 2, 3):
        checkpoint(at(part.value))
    assert checkpoint.last_checkpoint == tmp_path / "part_3.sharded"
    assert names(tmp_path) == ["part_2.sharded", "part_3.sharded"]
    assert values(tmp_path) == [2, 3]


@pytest.mark.filterwarnings("ignore:to_save holds no engine")
def test_a_run_that_resumes_takes_over_the_shards_of_the_previous_one(tmp_path):
    part = Part()
    checkpoint = Checkpoint({"part": part}, tmp_path, n_saved=2, sharded=True)
    for part.value in (1, 2):
        checkpoint(at(part.value))
    with pytest.raises(ValueError, match="which were not resumed"):
        Checkpoint({"part": part}, tmp_path, sharded=True)(at(3))
    part = Part()
    checkpoint = Checkpoint({"part": part}, tmp_path, n_saved=2, sharded=True)
    assert checkpoint.resume_latest() == tmp_path / "part_2.sharded"
    assert part.value == 2
    part.value = 3
    checkpoint(at(3))
    assert names(tmp_path) == ["part_2.sharded", "part_3.sharded"]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has one setting for all threads")
def test_a_shard_has_only_the_checksum_of_its_entry_and_other_files_have_theirs(tmp_path):
    Checkpoint({"part": Part(1)}, tmp_path, sharded=True)(at(1))
    torch.save({"part": 1}, tmp_path / "own.pt")
    files = [*(tmp_path / "part_1.sharded").iterdir(), tmp_path / "own.pt"]
    assert [any(record.CRC for record in zipfile.ZipFile(file).infolist()) for file in files] == [False, True]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    part = Part()
    checkpoint = ModelCheckpoint(tmp_path, filename_pattern="last", sharded=True)
    for part.value in (1, 2):
        checkpoint(at(part.value), {"part": part})
        assert values(tmp_path) == [part.value]
    assert len(names(tmp_path / "last")) == 1


def test_a_failed_replacement_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    part = Part(1)
    checkpoint = ModelCheckpoint(tmp_path, filename_pattern="last", sharded=True)
    checkpoint(at(1), {"part": part})
    part.value = 2
    monkeypatch.setattr(Manifest, "write", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint(at(2), {"part": part})
    assert values(tmp_path) == [1]
    assert len(names(tmp_path / "last")) == 1


def test_the_shards_of_a_killed_save_are_not_a_checkpoint_and_are_removed(tmp_path):
    part = Part(1)
    Checkpoint({"part": part}, tmp_path, sharded=True)(at(1))
    killed = tmp_path / "part_2.sharded"
    shutil.copytree(tmp_path / "part_1.sharded", killed)
    (killed / ".saving").touch()
    (killed / "notes.txt").touch()
    assert Checkpoint.resume({"part": part}, tmp_path).name == "part_1.sharded"
    with pytest.raises(DamagedCheckpointError, match="lists no shards"):
        Checkpoint.load_objects({"part": part}, killed)
    DiskSaver(tmp_path, require_empty=False)
    assert names(killed) == ["notes.txt"]
    assert values(tmp_path) == [1]


def test_links_are_not_followed(tmp_path):
    Checkpoint({"part": Part(1)}, tmp_path / "a", sharded=True)(at(1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shard = next((tmp_path / "b" / "part_1.sharded").iterdir())
    shard.unlink()
    shard.symlink_to(tmp_path / "a" / "part_1.sharded" / shard.name)
    with pytest.raises(DamagedCheckpointError, match="is a link"):
        Checkpoint.load_objects({"part": Part()}, tmp_path / "b" / "part_1.sharded")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "part_1.sharded").symlink_to(tmp_path / "a" / "part_1.sharded")
    with pytest.raises(FileExistsError, match="is a link"):
        Checkpoint({"part": Part(1)}, tmp_path / "c", sharded=True)(at(1))


def test_a_damaged_entry_of_a_sharded_checkpoint_is_reported(tmp_path, caplog):
    part = Part(1)
    checkpoint = Checkpoint({"part": part}, tmp_path, n_saved=2, sharded=True)
    checkpoint(at(1))
    part.value = 2
    checkpoint(at(2))
    entry = next((tmp_path / ".manifest").glob("part_2*"))
    entry.write_text(entry.read_text().replace("shard-0", "shard-1"))
    assert Checkpoint.resume({"part": part}, tmp_path).name == "part_1.sharded"
    assert f"skipping the damaged entry '{entry}'" in caplog.text
    assert part.value == 1


def test_everything_of_a_state_keeps_its_type(tmp_path):
    class Odd(Part):
        def load_state_dict(self, state):
            self.value = state

    state = {"tuple": (1, (2, 3)), "list": [1], "none": None, "tensor": torch.arange(3), "empty": torch.empty(0, 2)}
    odd = Odd(0)
    odd.state_dict = lambda: state
    Checkpoint({"odd": odd, "part": Part()}, tmp_path, sharded=True)(at(1))
    Checkpoint.resume({"odd": odd, "part": Part()}, tmp_path)
    assert torch.equal(odd.value.pop("tensor"), state.pop("tensor"))
    assert odd.value.pop("empty").shape == state.pop("empty").shape
    assert odd.value == state


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"save_handler": Memory()}, TypeError, "save_handler must be a directory that all ranks share"),
        ({"save_handler": lambda checkpoint, filename: None}, TypeError, "save_handler must be a directory"),
        ({"save_on_rank": "node"}, ValueError, "save_on_rank must be a rank with sharded=True"),
        ({"filename_pattern": "{name}.safetensors"}, ValueError, "consolidate"),
    ],
)
def test_arguments_that_sharded_checkpoints_cannot_have_raise(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        Checkpoint({"part": Part()}, **{"save_handler": tmp_path, "sharded": True, **arguments})


def test_a_directory_that_holds_sharded_checkpoints_is_not_empty(tmp_path):
    Checkpoint({"part": Part()}, tmp_path, sharded=True)(at(1))
    with pytest.raises(ValueError, match=r"must not contain checkpoints, got .* with 'part_1\.sharded'"):
        DiskSaver(tmp_path)
