"""`python -m camshaft.checkpoint`."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch import nn

from camshaft.checkpoint import main
from camshaft.handlers import Checkpoint, DiskSaver
from tests.handlers.parts import Part, at


@pytest.fixture
def folder(tmp_path):
    """Return a directory with a sharded checkpoint, a file, and the shards of an interrupted save."""
    folder = tmp_path / "checkpoints"
    model, part = nn.Linear(2, 1), Part(1)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 0.0)
    saver = DiskSaver(folder)
    Checkpoint({"model": model, "part": part}, saver, sharded=True)(at(10))
    nn.init.constant_(model.weight, 1.5)
    Checkpoint({"model": model, "part": part}, saver)(at(20))
    (folder / "killed").mkdir()
    (folder / "killed" / "shard-0-00000000.pt").touch()
    return folder


def run(capsys, *arguments):
    """Return the exit code and what a command prints."""
    code = main([*map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_list_prints_all_checkpoints_and_which_are_complete(folder, capsys):
    code, text = run(capsys, "list", folder)
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["checkpoint", "step", "score", "size", "ranks", "problem"]
    assert lines[1][:3] == ["checkpoint_20.pt", "20", "-"]
    assert lines[1][4:] == ["-", "-"]
    assert lines[2][:3] == ["checkpoint_10.sharded", "10", "-"]
    assert lines[2][4:] == ["1", "-"]
    assert lines[3][:6] == ["killed", "-", "-", "-", "-", "is"]


def test_list_notices_missing_and_truncated_files(folder, capsys):
    shard = next((folder / "checkpoint_10.sharded").iterdir())
    shard.write_bytes(b"short")
    (folder / "checkpoint_20.pt").unlink()
    _, text = run(capsys, "list", folder, "--json")
    rows = {row["checkpoint"]: row for row in map(json.loads, text.splitlines())}
    assert "has 5 bytes instead of" in rows["checkpoint_10.sharded"]["problem"]
    assert "is not there" in rows["checkpoint_20.pt"]["problem"]


def test_files_of_another_library_are_listed_newest_first_and_explained(tmp_path, capsys):
    code, text = run(capsys, "list", tmp_path)
    assert (code, text) == (0, f"no checkpoints in '{tmp_path}': no .pt files, and no shards\n")
    for number in (5, 10):  # as PyTorch-Ignite names them
        torch.save({}, file := tmp_path / f"model_{number}.pt")
        os.utime(file, (number, number))
    code, text = run(capsys, "list", tmp_path)
    assert code == 0
    _, newer, older, *remark = text.splitlines()
    problem = "is not in the manifest, and cannot be verified"
    for line, name in ((newer, "model_10.pt"), (older, "model_5.pt")):
        size = f"{(tmp_path / name).stat().st_size:,}"
        assert line.split(maxsplit=5) == [name, "-", "-", size, "-", problem]
    assert " ".join(remark) == (
        "files that are not in the manifest were saved by another library, such as PyTorch-Ignite, or copied without "
        "the folder .manifest; Checkpoint.load_objects loads them"
    )
    code, verified = run(capsys, "verify", tmp_path)
    assert code == 1
    assert verified.splitlines()[1:] == [f"model_10.pt  -     {problem}", f"model_5.pt   -     {problem}", *remark]
    code, text = run(capsys, "list", tmp_path, "--json")
    assert [json.loads(line)["checkpoint"] for line in text.splitlines()] == ["model_10.pt", "model_5.pt"]


def test_list_says_that_only_verify_reads_the_files(folder, capsys):
    for is_verified in (False, True):
        _, text = run(capsys, "verify" if is_verified else "list", folder)
        is_said = "only sizes are checked: verify compares the contents with their checksums\n" in text
        assert is_said is not is_verified


def test_verify_finds_a_flipped_bit_in_a_shard(folder, capsys):
    (folder / "killed" / "shard-0-00000000.pt").unlink()
    assert run(capsys, "verify", folder)[0] == 0
    shard = next((folder / "checkpoint_10.sharded").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, text = run(capsys, "verify", folder)
    assert code == 1
    assert f"has a shard '{shard.name}' that is damaged" in text


def test_consolidate_writes_one_file(folder, tmp_path, capsys):
    assert run(capsys, "consolidate", folder / "checkpoint_10.sharded", tmp_path / "all.pt") == (0, "")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(state["model"]["weight"], torch.ones(1, 2))
    assert state["part"] == {"value": 1}
    command = ("consolidate", folder / "checkpoint_10.sharded", tmp_path / "model.pt", "--object", "model")
    assert run(capsys, *command) == (0, "")
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) == {"weight", "bias"}
    code, text = run(capsys, *command)
    assert code == 2
    assert "FILE must not exist" in text


def test_consolidate_writes_safetensors(folder, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "model.safetensors"
    assert run(capsys, "consolidate", folder / "checkpoint_10.sharded", file, "--object", "model") == (0, "")
    assert torch.equal(safetensors.load_file(file)["weight"], torch.ones(1, 2))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["list", "nowhere"], "DIR must be an existing directory"),
        (["verify", "checkpoints/checkpoint_10.sharded"], "is a checkpoint: pass the directory that contains it"),
        (["consolidate", "checkpoints/checkpoint_10.sharded", "x.bin"], "FILE must end in .pt or .safetensors"),
        (["consolidate", "checkpoints/checkpoint_10.sharded", "x.safetensors"], "holds the state of one model"),
        (["consolidate", "checkpoints/checkpoint_10.sharded", "x.pt", "--object", "y"], "--object must be one of"),
        (["consolidate", "checkpoints/killed", "x.pt"], "lists no shards"),
        (["consolidate", "nowhere.pt", "x.pt"], "nowhere.pt"),
        (["consolidate", "code.pt", "x.pt"], "tests.handlers.checkpoint.test_cli.run"),
    ],
)
def test_what_cannot_be_done_is_explained(folder, monkeypatch, capsys, command, message):
    monkeypatch.chdir(folder.parent)
    torch.save({"function": run}, "code.pt")
    code, text = run(capsys, *command)
    assert code == 2
    assert message in text
