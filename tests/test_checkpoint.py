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
    assert (code, text) == (0, f"no checkpoints in '{tmp_path}': no .pt or .safetensors files, and no shards\n")
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


def test_diff_prints_the_largest_difference_across_layouts(folder, capsys):
    sharded, whole = folder / "checkpoint_10.sharded", folder / "checkpoint_20.pt"
    assert run(capsys, "diff", sharded, sharded) == (0, "no differences\n")
    code, text = run(capsys, "diff", sharded, whole, "--json")
    assert code == 1
    largest = {"largest": 0.5, "relative": 1 / 3}  # 1.0 and 1.5
    row = {"value": "['model']['weight']", "difference": "2 of 2 elements", **largest}
    assert [json.loads(line) for line in text.splitlines()] == [row, {"values": 3, "different": 1, **largest}]
    code, text = run(capsys, "diff", sharded, whole, "--atol", "0.4")
    assert code == 1
    summary = "values that differ beyond the tolerance: 1 of 3; largest difference: 0.5, relative: 0.333333"
    assert text.splitlines()[1:] == ["['model']['weight']  2 of 2 elements  0.5      0.333333", summary]
    code, text = run(capsys, "diff", sharded, whole, "--atol", "0.5")
    assert code == 0
    assert text == "values that differ beyond the tolerance: 0 of 3; largest difference: 0.5, relative: 0.333333\n"
    code, text = run(capsys, "diff", sharded, whole, "--atol", "0.5", "--json")
    assert (code, json.loads(text)) == (0, {"values": 3, "different": 0, **largest})


@pytest.mark.parametrize(
    ("tolerances", "is_tolerated"),
    [
        ((), False),
        (("--rtol", "0.1"), False),  # of the second checkpoint, as torch.allclose
        (("--rtol", "0.12"), True),
        (("--rtol", "0.1", "--atol", "0.1"), True),
        (("--atol", "0.1"), False),
    ],
)
def test_diff_has_the_tolerances_of_allclose(tmp_path, capsys, tolerances, is_tolerated):
    first, second = torch.tensor([10.0, 1.0, 0.0]), torch.tensor([9.0, 1.0, 0.0])
    options = {name.strip("-"): float(value) for name, value in zip(tolerances[::2], tolerances[1::2], strict=True)}
    assert torch.allclose(first, second, **{"rtol": 0.0, "atol": 0.0, **options}) == is_tolerated
    for name, weight in (("first.pt", first), ("second.pt", second)):
        torch.save({"weight": weight, "loss": weight[0].item()}, tmp_path / name)
    code, text = run(capsys, "diff", tmp_path / "first.pt", tmp_path / "second.pt", *tolerances)
    assert code == (0 if is_tolerated else 1)
    assert f"{0 if is_tolerated else 2} of 2; largest difference: 1, relative: 0.1" in text


def test_diff_without_a_tolerance_finds_integers_that_floats_cannot_tell_apart(tmp_path, capsys):
    for name, value in (("first.pt", 2**60), ("second.pt", 2**60 + 1)):
        torch.save({"count": torch.tensor(value)}, tmp_path / name)
    assert run(capsys, "diff", tmp_path / "first.pt", tmp_path / "second.pt")[0] == 1


def test_what_may_not_be_unpickled_is_an_error_and_not_a_difference(tmp_path, capsys):
    torch.save({"parser": run}, tmp_path / "code.pt")
    code, text = run(capsys, "diff", tmp_path / "code.pt", tmp_path / "code.pt")
    assert code == 2
    assert text.startswith("error: ")


def test_diff_prints_missing_keys_and_other_shapes_and_values(tmp_path, capsys):
    nan, inf = float("nan"), float("inf")
    first = {"a": torch.ones(2), "b": 1, "c": nan, "only": 0, "n": torch.tensor([nan, inf]), "lr": 0.5, "s": "a"}
    second = {"a": torch.ones(3), "b": 2, "c": nan, "n": torch.tensor([nan, inf]), "lr": 0.25, "s": "a"}
    for name, state in (("first.pt", first), ("second.pt", second)):
        torch.save(state, tmp_path / name)
    code, text = run(capsys, "diff", tmp_path / "first.pt", tmp_path / "second.pt")
    assert code == 1
    *table, summary = text.splitlines()
    rows = [line.split("  ") for line in table]
    assert [row[0] for row in rows] == ["value", "['a']", "['b']", "['only']", "['lr']"]
    assert table[-1].split()[-2:] == ["0.25", "0.5"]
    assert summary == "values that differ: 4 of 7; largest difference: 0.25, relative: 0.5"
    assert "(2,) float32 and (3,) float32" in text
    assert "1 and 2" in text
    assert f"only in {tmp_path / 'first.pt'}" in text


def test_diff_tolerates_no_number_that_is_not_finite_in_one_checkpoint_only(tmp_path, capsys):
    nan, inf = float("nan"), float("inf")
    for name, values in (("first.pt", [nan, 0.0, inf]), ("second.pt", [1.0, 0.0, inf])):
        torch.save({"weight": torch.tensor(values), "loss": values[0]}, tmp_path / name)
    code, text = run(capsys, "diff", tmp_path / "first.pt", tmp_path / "second.pt", "--atol", "9", "--json")
    assert code == 1
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["difference"] for row in rows[:2]] == ["1 of 3 elements", "nan and 1.0"]
    assert all((row["largest"], row["relative"]) == (inf, inf) for row in rows)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["list", "nowhere"], "DIR must be an existing directory"),
        (["verify", "checkpoints/checkpoint_10.sharded"], "is a checkpoint: pass the directory that contains it"),
        (["consolidate", "checkpoints/checkpoint_10.sharded", "x.bin"], "FILE must end in .pt or .safetensors"),
        (["consolidate", "checkpoints/checkpoint_10.sharded", "x.safetensors"], "holds the state of one model"),
        (["consolidate", "checkpoints/checkpoint_10.sharded", "x.pt", "--object", "y"], "--object must be one of"),
        (["consolidate", "checkpoints/killed", "x.pt"], "lists no shards"),
        (["diff", "checkpoints/checkpoint_20.pt", "nowhere.pt"], "nowhere.pt"),
        (["diff", "a.pt", "b.pt", "--atol", "-1"], "--atol must be 0 or more, got -1.0"),
    ],
)
def test_what_cannot_be_done_is_explained(folder, monkeypatch, capsys, command, message):
    monkeypatch.chdir(folder.parent)
    code, text = run(capsys, *command)
    assert code == 2
    assert message in text
