"""load_objects and reload_objects: which states fit, and that code in a file is not run."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from camshaft.errors import DamagedCheckpointError
from camshaft.handlers import Checkpoint, DiskSaver
from tests.handlers.parts import Memory, Part, at, linear, weight

load_objects = Checkpoint.load_objects


def saved(path, to_save, **options):
    """Save objects, and return the file."""
    checkpoint = Checkpoint(to_save, DiskSaver(path, require_empty=False), **options)
    checkpoint(at(1))
    return checkpoint.last_checkpoint


@pytest.mark.parametrize("kind", [str, Path, torch.load])
def test_objects_come_back_from_a_path_or_a_mapping(tmp_path, kind):
    parts = {"a": Part(1), "b": {"c": [Part(2), Part(3)], "d": (Part(4),)}}
    file = saved(tmp_path, parts)
    new = {"a": Part(), "b": {"c": [Part(), Part()], "d": (Part(),)}}
    load_objects(new, kind(file))
    assert [new["a"].value, *(part.value for part in (*new["b"]["c"], *new["b"]["d"]))] == [1, 2, 3, 4]


def test_other_contents_of_a_checkpoint_are_ignored(tmp_path):
    part = Part()
    load_objects({"a": part}, saved(tmp_path, {"a": Part(1), "b": Part(2)}))
    assert part.value == 1


@pytest.mark.parametrize(
    ("to_save", "to_load"),
    [
        ({"model": Part(1)}, {"model": Part()}),
        ({"model": Part(1)}, {"another_name": Part()}),
        ({"models": [Part(0), Part(1)]}, {"models": [Part(), Part()]}),
    ],
)
def test_a_checkpoint_of_one_object_is_its_state(tmp_path, to_save, to_load):
    load_objects(to_load, saved(tmp_path, to_save))
    (loaded,) = to_load.values()
    assert (loaded[-1] if isinstance(loaded, list) else loaded).value == 1


@pytest.mark.parametrize(
    ("to_load", "checkpoint", "error", "message"),
    [
        ([Part()], {}, TypeError, "to_load must be a mapping"),
        ({"a": Part()}, 3, TypeError, "checkpoint must be a mapping, a str or a Path, got 3 of type int"),
        ({"a": [Part(), 3]}, {}, TypeError, r"to_load\['a'\]\[1\] must have load_state_dict\(\), got 3"),
        ({"a": Part(), "b": Part()}, {"a": {"value": 1}}, ValueError, r"lacks the key 'b' of to_load, it has \['a'\]"),
        ({"a": Part(), "b": {"c": Part()}}, {"a": {"value": 1}, "b": {}}, ValueError, r"\['b'\] lacks the key 'c'"),
        ({"a": Part(), "b": {"c": Part()}}, {"a": {"value": 1}, "b": [1]}, ValueError, r"\['b'\] must be a mapping"),
        ({"a": Part(), "b": [Part()]}, {"a": {"value": 1}, "b": []}, ValueError, "of length 1, got one of length 0"),
        ({"a": Part(), "b": [Part()]}, {"a": {"value": 1}, "b": {0: 1}}, ValueError, r"\['b'\] must be a list"),
    ],
)
def test_a_mismatch_is_reported_and_nothing_is_loaded(to_load, checkpoint, error, message):
    with pytest.raises(error, match=message):
        load_objects(to_load, checkpoint)
    assert not isinstance(to_load, dict) or getattr(to_load["a"], "value", 0) == 0


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch.compile
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda model: nn.DataParallel(torch.compile(model))])
def test_wrapped_modules_are_loaded(tmp_path, wrap):
    model = linear(0.0)
    load_objects({"model": wrap(model)}, saved(tmp_path, {"model": linear(2.0)}))
    assert weight(model) == 2


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_state_of_a_compiled_module_loads_into_a_plain_one_and_is_unchanged():
    state, model = torch.compile(linear(2.0)).state_dict(), linear(0.0)
    load_objects({"model": model}, {"model": state})
    assert weight(model) == 2
    assert set(state) == {"_orig_mod.weight", "_orig_mod.bias"}
    assert "_orig_mod" in state._metadata


def test_further_arguments_go_to_modules_only():
    class Strict(Part):
        def load_state_dict(self, state):
            assert state == {"value": 1}

    model = linear(0.0)
    with pytest.raises(RuntimeError, match="Missing key") as raised:
        load_objects({"a": model, "b": Strict()}, {"a": {"weight": torch.ones(1, 1)}, "b": {"value": 1}})
    assert raised.value.__notes__ == ["raised while loading checkpoint['a']"]
    load_objects({"a": model, "b": Strict()}, {"a": {"weight": torch.ones(1, 1)}, "b": {"value": 1}}, strict=False)
    assert weight(model) == 1


def test_a_file_is_read_to_the_cpu_by_default(tmp_path, monkeypatch):
    asked, load = [], torch.load
    monkeypatch.setattr("torch.load", lambda path, **options: asked.append(options) or load(path, **options))
    file = saved(tmp_path, {"model": linear(1.0)})
    load_objects({"model": linear(0.0)}, file)
    load_objects({"model": linear(0.0)}, file, map_location="meta", assign=True)
    assert asked == [
        {"map_location": "cpu", "weights_only": True},
        {"map_location": "meta", "weights_only": True},
    ]


class Bomb:
    def __reduce__(self):
        return (print, ("boom",))


def test_code_in_a_file_is_not_run_and_the_error_names_the_file(tmp_path, capsys):
    torch.save({"model": Bomb()}, tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError) as raised:
        load_objects({"model": Part()}, tmp_path / "bad.pt")
    assert "bad.pt" in raised.value.__notes__[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more"])
def test_the_error_names_a_damaged_file(tmp_path, content):
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"bad.pt' cannot be read: "):
        load_objects({"model": Part()}, tmp_path / "bad.pt")


# --- the record in the checkpoint --------------------------------------------------------------------------


def test_the_record_loads_from_a_checkpoint_of_several_objects(tmp_path):
    file = saved(tmp_path, {"a": Part(1), "b": Part(2)}, include_self=True)
    checkpoint = Checkpoint({"a": Part()}, Memory())
    load_objects({"a": Part(), "checkpointer": checkpoint}, file)
    assert checkpoint.last_checkpoint == "checkpoint_1.pt"


@pytest.mark.parametrize("layout", ["inside the state", "beside the state"])
def test_with_one_object_both_layouts_load_strictly_with_and_without_the_record(tmp_path, layout):
    file = saved(tmp_path, {"model": nn.BatchNorm1d(2)}, include_self=True)
    state = torch.load(file)
    assert set(state) > {"checkpointer", "weight", "running_mean"}
    if layout == "beside the state":
        record = state.pop("checkpointer")
        state = {"model": state, "checkpointer": record}
    model, checkpoint = nn.BatchNorm1d(2), Checkpoint({"model": Part()}, Memory())
    load_objects({"model": model}, state)
    load_objects({"model": model, "checkpointer": checkpoint}, state)
    assert checkpoint.last_checkpoint == "model_1.pt"
    assert "checkpointer" in state


def test_the_version_of_a_modules_state_survives_taking_the_record_out(tmp_path):
    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            versions.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    versions: list[int] = []
    file = saved(tmp_path, {"model": Versioned(1, 1)}, include_self=True)
    load_objects({"model": Versioned(1, 1)}, file)
    assert versions == [3]


def test_a_state_with_a_key_checkpointer_of_its_own_keeps_it():
    class Own(Part):
        def load_state_dict(self, state):
            self.value = state

    part = Own()
    load_objects({"model": part}, OrderedDict(checkpointer=5))
    assert part.value == {"checkpointer": 5}


# --- reload_objects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "components"),
    [
        ({}, {"global_step": 1}),
        ({"filename_prefix": "best"}, {"name": "model", "global_step": 1}),
        ({"score_name": "accuracy"}, {"score": "0.5000"}),
        ({"score_name": "accuracy"}, {"score": 0.5}),
        ({"score_function": lambda engine: 7, "global_step_transform": lambda *_: 3}, {"score": 7, "global_step": 3}),
        ({"filename_pattern": "{name}-{global_step:03d}"}, {"global_step": 1}),
    ],
)
def test_objects_are_reloaded_by_the_components_of_the_name(tmp_path, options, components):
    checkpoint = Checkpoint({"model": Part(5)}, tmp_path, **options)
    checkpoint(at(1, accuracy=0.5))
    part = Part()
    checkpoint.reload_objects({"model": part}, **components)
    assert part.value == 5


def test_reloading_passes_options_and_rejects_invalid_arguments(tmp_path):
    checkpoint = Checkpoint({"model": linear(1.0)}, tmp_path)
    checkpoint(at(1))
    target = nn.Linear(1, 1, bias=False)
    checkpoint.reload_objects({"model": target}, {"strict": False}, global_step=1)
    assert weight(target) == 1
    with pytest.raises(FileNotFoundError, match=r"model_2\.pt"):
        checkpoint.reload_objects({"model": target}, global_step=2)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'step'"):
        checkpoint.reload_objects({"model": target}, step=2)
    with pytest.raises(AttributeError, match="reload_objects needs a directory"):
        Checkpoint({"model": Part()}, Memory()).reload_objects({"model": Part()}, global_step=1)


# --- optimizers --------------------------------------------------------------------------------------------


def test_an_optimizer_moves_its_state_to_the_device_of_its_parameters(tmp_path):
    model = linear(1.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    file = saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = torch.optim.Adam(linear(1.0).parameters())
    load_objects({"optimizer": other}, file)
    assert other.state_dict()["state"][0]["exp_avg"] == optimizer.state_dict()["state"][0]["exp_avg"]
