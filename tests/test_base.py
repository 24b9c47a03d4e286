from __future__ import annotations

import inspect
from types import MappingProxyType

import pytest

from camshaft.base import ResettableHandler, Serializable


class Counter(Serializable):
    _state_dict_all_req_keys = ("name", "length")
    _state_dict_one_of_opt_keys = (("iteration", "epoch"), ("max_epochs", "max_iters"))


class FlatGroup(Serializable):
    _state_dict_one_of_opt_keys = ("iteration", "epoch")


class EmptyGroup(Serializable):
    _state_dict_one_of_opt_keys = ((),)


GOOD = {"name": "n", "length": 2, "epoch": 1, "max_epochs": 3}


@pytest.mark.parametrize(
    ("thing", "state"),
    [
        (Counter(), GOOD),
        (Counter(), MappingProxyType({**GOOD, "more": None})),
        (FlatGroup(), {"iteration": None}),
        (Serializable(), {}),
    ],
)
def test_a_complete_state_is_accepted(thing, state):
    assert thing.load_state_dict(state) is None


@pytest.mark.parametrize("state", [None, 1, [("name", "n")], "name"])
def test_a_state_must_be_a_mapping(state):
    with pytest.raises(TypeError, match="state_dict must be a mapping, got"):
        Serializable().load_state_dict(state)


@pytest.mark.parametrize("key", Counter._state_dict_all_req_keys)
def test_required_keys_must_exist(key):
    with pytest.raises(ValueError, match=f"state_dict must hold '{key}', got keys"):
        Counter().load_state_dict({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("thing", "state"),
    [
        (Counter(), {key: GOOD[key] for key in GOOD if key != "epoch"}),
        (Counter(), {**GOOD, "iteration": 2}),
        (Counter(), {**GOOD, "max_iters": 2}),
        (FlatGroup(), {}),
        (FlatGroup(), {"iteration": 1, "epoch": 1}),
        (EmptyGroup(), {}),
        (EmptyGroup(), {"iteration": 1}),
    ],
)
def test_exactly_one_key_of_each_group_must_exist(thing, state):
    with pytest.raises(ValueError, match="state_dict must hold exactly one of"):
        thing.load_state_dict(state)


def test_state_dict_is_for_subclasses():
    with pytest.raises(NotImplementedError, match="Counter must define state_dict"):
        Counter().state_dict()


@pytest.mark.parametrize("missing", ["reset", "attach"])
def test_a_resettable_handler_must_define_both_methods(missing):
    methods = {name: lambda self, *args: None for name in ("reset", "attach") if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Half", (ResettableHandler,), methods)()


def test_attach_accepts_the_engine_and_further_arguments():
    parameters = inspect.signature(ResettableHandler.attach).parameters.values()
    assert [str(parameter).split(":")[0] for parameter in parameters] == ["self", "engine", "*args", "**kwargs"]
