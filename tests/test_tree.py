from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft import tree
from camshaft.tree import apply_to_tensor, apply_to_type, convert_tensor, to_onehot

Pair = namedtuple("Pair", "first second")
ONE = torch.ones(1)


class Labeled(NamedTuple):
    x: object
    label: object = "none"


class OnlyMapping(Mapping):
    """A mapping built from a dict; a shallow copy shares its storage."""

    def __init__(self, content):
        self.content = content

    def __getitem__(self, key):
        return self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)

    def __setitem__(self, key, value):
        self.content[key] = value


class ByKeyword(OnlyMapping):
    """A mapping that cannot be built from a dict."""

    def __init__(self, *, content):
        super().__init__(content)


class OnlySequence(Sequence):
    def __init__(self, content):
        self.content = content

    def __getitem__(self, index):
        return self.content[index]

    def __len__(self):
        return len(self.content)

    def __setitem__(self, index, value):
        self.content[index] = value


class TwoArguments(OnlySequence):
    def __init__(self, content, other):
        super().__init__(content)


class Greedy(OnlySequence):
    def __init__(self, content):
        super().__init__(content.pages)


class NamedDict(dict):
    def __init__(self, name, content):
        super().__init__(content)
        self.name = name


class FrozenDict(NamedDict):
    def __setitem__(self, key, value):
        raise RuntimeError("frozen")


def plus_one(value):
    return value + 1


# 4.1: the order of the checks


def test_instances_are_mapped_even_if_they_are_strings_or_containers():
    assert apply_to_type([1, [2]], list, len) == 2
    assert apply_to_type(["a", b"b"], (str, bytes), lambda text: text * 2) == ["aa", b"bb"]
    assert apply_to_type(["text", b"bytes", 1], int, plus_one) == ["text", b"bytes", 2]
    with pytest.raises(TypeError, match=r"made of int or float, .* got None of type NoneType"):
        apply_to_type([None], (int, float), str)
    assert apply_to_type({"a": Pair(1, 2)}, Pair, sum) == {"a": 3}


@pytest.mark.parametrize(
    "x",
    [
        {"a": 1, "b": 2},
        OrderedDict(b=1, a=2),
        Counter(a=3),
        UserDict(a=1),
        MappingProxyType({"a": 1}),
        ChainMap({"a": 1}),
        OnlyMapping({"a": 1}),
        [1, 2],
        (1, 2),
        (),
        Pair(1, 2),
        Labeled(1),
        UserList([1]),
        OnlySequence([1]),
        torch.Size([1, 2]),
        defaultdict(list, a=1),
        deque([1, 2], maxlen=3),
        NamedDict("n", {"a": 1}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_containers_keep_their_type_and_the_original_is_unchanged(x):
    before = dict(x) if isinstance(x, Mapping) else list(x)
    result = apply_to_type(x, int, plus_one)
    assert type(result) is type(x)
    if isinstance(x, Mapping):
        assert dict(x) == before
        assert list(result.items()) == [(key, plus_one(value)) for key, value in before.items()]
    else:
        assert list(x) == before
        assert list(result) == [item if isinstance(item, str) else plus_one(item) for item in before]


# containers that cannot be built from their content


def test_copied_containers_keep_their_other_attributes():
    assert apply_to_type(defaultdict(list, a=1), int, plus_one)["new"] == []
    assert apply_to_type(deque([1], maxlen=3), int, plus_one).maxlen == 3
    assert apply_to_type(NamedDict("n", {"a": 1}), int, plus_one).name == "n"


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (range(3), [1, 2, 3]),
        (ByKeyword(content={"a": 1}), {"a": 2}),
        (FrozenDict("n", {"a": 1}), {"a": 2}),
        (TwoArguments([1], None), [2]),
        (Greedy(SimpleNamespace(pages=[1])), [2]),
    ],
    ids=["range", "mapping", "frozen dict", "two arguments", "attribute error"],
)
def test_containers_that_cannot_be_rebuilt_become_plain_ones_and_are_unchanged(x, expected):
    before = dict(x) if isinstance(x, Mapping) else list(x)
    result = apply_to_type(x, int, plus_one)
    assert result == expected
    assert type(result) is type(expected)
    assert (dict(x) if isinstance(x, Mapping) else list(x)) == before


def test_a_tuple_that_rejects_the_results_becomes_a_plain_tuple():
    assert apply_to_type(torch.Size([1, 2]), int, str) == ("1", "2")


def test_an_error_of_the_function_is_not_mistaken_for_one_of_the_container():
    with pytest.raises(ZeroDivisionError):
        apply_to_type(defaultdict(int, a=0), int, lambda value: 1 / value)


@pytest.mark.parametrize("leaf", [None, 1, {1}])
@pytest.mark.parametrize("function", [convert_tensor, lambda x: apply_to_tensor(x, plus_one)])
def test_unknown_leaves_raise_a_type_error_with_their_type(leaf, function):
    for x in (leaf, [ONE, {"a": (leaf,)}]):
        with pytest.raises(TypeError, match=rf"x must be made of Tensor.* of type {type(leaf).__name__}"):
            function(x)


NESTED = st.recursive(
    st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda content: defaultdict(list, content))
    ),
    max_leaves=12,
)


def skeleton(x):
    if isinstance(x, Mapping):
        return type(x), {key: skeleton(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x), [skeleton(item) for item in x]
    return type(x)


@given(NESTED)
def test_mapping_changes_leaves_and_keeps_the_structure(x):
    once = apply_to_type(x, int, plus_one)
    assert skeleton(once) == skeleton(x)
    assert apply_to_type(once, int, lambda value: value - 1) == x


# 4.2


def test_apply_to_tensor_takes_tensors_and_their_subclasses():
    result = apply_to_tensor({"x": ONE, "y": [torch.nn.Parameter(ONE)], "name": "n"}, lambda tensor: tensor.shape)
    assert result == {"x": (1,), "y": [(1,)], "name": "n"}


class Recorder(torch.Tensor):
    calls: list[tuple[object, object]]

    def to(self, device, non_blocking=False):
        self.calls.append((device, non_blocking))
        return "moved"


@pytest.fixture
def recorder():
    tensor = torch.ones(1).as_subclass(Recorder)
    tensor.calls = []
    return tensor


def test_a_bare_tensor_is_not_traversed(monkeypatch, recorder):
    monkeypatch.setattr(tree, "apply_to_type", None)
    assert convert_tensor(recorder) is recorder
    assert recorder.calls == []
    assert convert_tensor(recorder, "cpu") == "moved"
    assert recorder.calls == [("cpu", False)]


def test_without_a_device_tensors_are_unchanged_and_containers_are_new(recorder):
    x = {"a": [recorder, "text"]}
    result = convert_tensor(x)
    assert result == x
    assert result is not x
    assert result["a"][0] is recorder
    assert recorder.calls == []


def test_device_and_non_blocking_are_passed_to_every_tensor(recorder):
    assert convert_tensor([recorder, (recorder,)], "meta", True) == ["moved", ("moved",)]
    assert recorder.calls == [("meta", True)] * 2
    assert convert_tensor(Pair(ONE, b"raw"), torch.device("meta")).first.is_meta


# 4.3


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 4), (0,), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_to_onehot_adds_the_classes_as_the_second_dimension(shape, dtype):
    indices = torch.randint(0, 5, shape).to(dtype)
    result = to_onehot(indices, 5)
    assert result.dtype == torch.uint8
    assert result.shape == (shape[0], 5, *shape[1:])
    assert torch.equal(result.argmax(dim=1) if indices.numel() else indices.long(), indices.long())
    assert result.sum() == indices.numel()
    assert to_onehot(indices.to("meta"), 5).is_meta


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_to_onehot_is_compiled_by_torch_jit():
    compiled = torch.jit.script(to_onehot)
    for shape in ((4,), (2, 3), (2, 3, 2)):
        indices = torch.randint(5, shape)
        assert torch.equal(compiled(indices, 5), to_onehot(indices, 5))
    with pytest.raises(Exception, match="tensor of integers"):
        compiled(torch.ones(2), 3)


def test_to_onehot_rejects_floats():
    with pytest.raises(TypeError, match=r"indices must be a tensor of integers, got dtype torch.float32"):
        to_onehot(torch.ones(2), 3)


def test_to_onehot_rejects_classes_out_of_range():
    with pytest.raises(RuntimeError):
        to_onehot(torch.tensor([3]), 3)
