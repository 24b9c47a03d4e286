"""The names in the states of modules, whichever wrappers they and their parts were saved from and are loaded into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from camshaft.handlers import Checkpoint, EMAHandler
from tests.handlers.parts import Memory, at

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch.compile


class Net(nn.Module):
    """A module with real submodules called `module`, alone and beside others, and with a version in its metadata."""

    def __init__(self, value=0.0):
        super().__init__()
        self.module = nn.Linear(1, 1)
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        self.alone = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(1, 1)})})
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


def part(name, wrap):
    def wrapped(net):
        path, _, last = name.rpartition(".")
        parent = net.get_submodule(path)
        parent._modules[last] = wrap(parent._modules[last])
        return net

    return wrapped


def both(module):
    return nn.DataParallel(torch.compile(module))


WRAPS = {
    "plain": lambda net: net,
    "whole": nn.DataParallel,
    "whole compiled": torch.compile,
    "whole, both": both,
    "a layer compiled": part("layers.0", torch.compile),
    "a part": part("layers", nn.DataParallel),
    "a part, both": part("layers.1", both),
    "a part called module": part("module", nn.DataParallel),
    "below modules called module": part("alone.module.module", nn.DataParallel),
    "above modules called module": part("alone", nn.DataParallel),
    "whole and parts": lambda net: both(part("alone.module", both)(part("layers.0", torch.compile)(net))),
}


@pytest.fixture(scope="module")
def states():
    """Return what each kind of wrapped module saves by itself, as in files of other libraries."""
    return {kind: wrap(Net(2.0)).state_dict() for kind, wrap in WRAPS.items()}


@pytest.mark.parametrize("kind", WRAPS)
def test_a_state_is_saved_under_the_names_without_wrappers(kind):
    memory = Memory()
    model = WRAPS[kind](Net(2.0))
    Checkpoint({"model": model, "ema": EMAHandler(model)}, memory)(at())
    saved = memory.files["checkpoint_0.pt"]
    expected = Net().state_dict()
    assert list(saved["model"]) == list(saved["ema"]["ema_model"]) == list(expected)
    assert saved["model"]._metadata == expected._metadata


@pytest.mark.parametrize("target", WRAPS)
@pytest.mark.parametrize("source", WRAPS)
def test_a_state_of_any_wrapped_module_loads_into_any_other(states, source, target):
    net = Net()
    versions = {}

    def note(module, state, prefix, metadata, *rest):
        versions[prefix] = metadata.get("version")

    net.layers[1].register_load_state_dict_pre_hook(note)
    model = WRAPS[target](net)
    before = list(states[source])
    Checkpoint.load_objects({"model": model}, {"model": states[source]})
    assert list(states[source]) == before
    assert all(bool((parameter == 2.0).all()) for parameter in model.parameters())
    assert list(versions.values()) == [2]  # of batch norm


@pytest.mark.parametrize("state", [{0: 1}, [1, 2], {"module": {"weight": 1}}])
def test_a_state_of_the_modules_own_making_is_left_alone(state):
    class Own(nn.Sequential):
        def state_dict(self):
            return state

        def load_state_dict(self, state):
            self.loaded = state

    memory, model = Memory(), Own(nn.DataParallel(nn.Linear(1, 1)))
    Checkpoint({"model": model, "other": Net()}, memory)(at())
    Checkpoint.load_objects({"model": model}, memory.files["checkpoint_0.pt"])
    assert model.loaded == memory.files["checkpoint_0.pt"]["model"] == state


def test_real_modules_called_module_stay_when_only_a_part_is_loaded():
    file = {"module.module.weight": torch.ones(1, 1), "module.other": torch.ones(1)}
    net = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(1, 1)})})
    Checkpoint.load_objects({"net": net}, {"net": file}, strict=False)
    assert net["module"]["module"].weight.item() == 1.0
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other.weight"'):
        Checkpoint.load_objects({"net": nn.Linear(1, 1)}, {"net": {"module.other.weight": torch.ones(1, 1)}})
