"""The average of a model: values, buffers, precision, momentum, and number of operations."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver, EMAHandler, ExpStateScheduler
from tests.ranks import on_ranks


class Buffered(nn.Module):
    """Two weights, one tied, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def set_to(model, value):
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            one.fill_(value)
    return model


def values(model):
    return {round(value, 6) for one in model.parameters() for value in one.flatten().tolist()}


def trainer_of(model):
    """Return an engine that sets the model to the values of the batches."""
    return Engine(lambda engine, batch: set_to(model, batch))


@given(
    momenta=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5),
    numbers=st.lists(st.floats(-10, 10), min_size=6, max_size=6),
)
def test_an_update_follows_the_formula(momenta, numbers):
    model = set_to(nn.Linear(1, 1, bias=False).double(), numbers[0])
    ema, average = EMAHandler(model), numbers[0]
    for momentum, number in zip(momenta, numbers[1:], strict=False):
        set_to(model, number)
        ema.update(momentum)
        average = (1 - momentum) * average + momentum * number
        assert ema.ema_model.weight.item() == pytest.approx(average, abs=1e-9)
        assert model.weight.item() == number


@pytest.mark.parametrize("handle_buffers", ["copy", "update"])
def test_the_average_is_a_separate_model_without_gradients(handle_buffers):
    model = Buffered()
    model.first.weight.grad = torch.ones(2, 2)
    ema = EMAHandler(model, handle_buffers=handle_buffers)
    ema.update(0.5)
    assert ema.model is model
    assert all(not one.requires_grad and one.is_leaf and one.grad is None for one in ema.ema_model.parameters())
    assert model.first.weight.requires_grad
    assert ema.ema_model.first.weight is ema.ema_model.second.weight
    theirs = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}
    assert not theirs & {one.data_ptr() for one in (*ema.ema_model.parameters(), *ema.ema_model.buffers())}  # [H14]


@pytest.mark.parametrize(
    ("handle_buffers", "mean", "count", "training"),
    [("copy", 4.0, 4, False), ("update", 1.0, 4, False), ("ema_train", 0.0, 0, True)],
)
def test_buffers_are_copied_averaged_or_unchanged(handle_buffers, mean, count, training):
    model = Buffered()
    ema = EMAHandler(model, momentum=0.25, handle_buffers=handle_buffers)
    set_to(model, 4.0)
    ema.update(0.25)
    assert ema.ema_model.mean.tolist() == [mean, mean]
    assert ema.ema_model.count.item() == count
    assert ema.ema_model.training is training
    assert model.training


class Counting(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_all_weights_are_updated_in_one_operation():
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(20)))
    ema, low = (EMAHandler(one, handle_buffers="update") for one in (model, copy.deepcopy(model).bfloat16()))
    with Counting() as counting:
        ema.update(0.5)
    assert counting.operations == ["aten._foreach_lerp_.Scalar", "aten._foreach_copy_.default"]
    low.update(0.5)
    with Counting() as counting:
        low.update(0.5)
    assert {one for one in counting.operations if "foreach" not in one} == {"aten.empty_like.default"}


def test_weights_of_several_dtypes_are_averaged_and_those_of_integers_copied():
    model = nn.ModuleList([nn.Linear(1, 1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)])
    model.levels = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
    ema = EMAHandler(set_to(model, 0))
    set_to(model, 2)
    ema.update(0.5)
    assert [complex(one.flatten()[0].item()) for one in ema.ema_model.parameters()] == [2, *[1] * 6]
    EMAHandler(nn.Identity()).update(0.5)


def replace_weights(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def replace_module(model):
    model[0] = copy.deepcopy(model[0])


def replace_buffer(model):
    model[0].register_buffer("level", model[0].level + 0)


@pytest.mark.parametrize("replace", [replace_weights, replace_module, replace_buffer])
@pytest.mark.parametrize("of", ["model", "ema_model"])
def test_what_is_replaced_is_found_and_another_architecture_is_reported(replace, of):
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("level", torch.zeros(()))
    ema = EMAHandler(model, handle_buffers="update")
    replace(getattr(ema, of))
    set_to(ema.ema_model, 0.0)
    set_to(model, 2.0)
    ema.update(0.5)
    assert values(ema.ema_model) == {1.0} == {one.item() for one in ema.ema_model.buffers()}
    model[0] = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="create a new EMAHandler"):
        ema.update(0.5)


@on_ranks(1)
def test_distributed_data_parallel_is_unwrapped_and_data_parallel_is_not():
    model = nn.Linear(1, 1)
    ema = EMAHandler(DistributedDataParallel(model))
    assert ema.model is model
    assert list(ema.ema_model.state_dict()) == ["weight", "bias"]
    model = nn.DataParallel(model)
    ema = EMAHandler(model)
    assert ema.model is model
    assert isinstance(ema.ema_model, nn.DataParallel)


# --- low precision -------------------------------------------------------------------------------------------------


def low(dtype=torch.bfloat16):
    return set_to(nn.Linear(2, 2, dtype=dtype), 1.0)


def updated(ema, number=1):
    for _ in range(number):
        set_to(ema.model, 2.0)
        ema.update(0.001)
    return ema


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_low_precision_are_averaged_in_float32_and_handed_out_as_they_are(dtype):
    ema, reference = (
        EMAHandler(set_to(Buffered().to(one), 1.0), handle_buffers="update") for one in (dtype, torch.float32)
    )
    for one in (ema, reference):
        updated(one, 400)  # none of which changes the weight by itself
    for ours, theirs in zip(
        ema.ema_model.state_dict().values(), reference.ema_model.state_dict().values(), strict=True
    ):
        assert ours.dtype in (dtype, torch.int64)
        assert torch.equal(ours, theirs.to(ours.dtype))
    assert max(values(reference.ema_model)) == pytest.approx(1.33, abs=0.01)
    state = ema.state_dict()["ema_model"]
    assert state["first.weight"].dtype == state["mean"].dtype == torch.float32
    assert torch.equal(state["first.weight"], reference.ema_model.first.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_resumed_average_of_low_precision_continues_exactly(dtype, tmp_path):
    whole = updated(EMAHandler(low(dtype)), 100).state_dict()
    torch.save(updated(EMAHandler(low(dtype)), 50).state_dict(), tmp_path / "ema.pt")
    resumed = EMAHandler(low(dtype))
    resumed.load_state_dict(torch.load(tmp_path / "ema.pt"))
    torch.testing.assert_close(updated(resumed, 50).state_dict(), whole, rtol=0, atol=0)


@pytest.mark.parametrize("prefix", [None, "", "_orig_mod."])
def test_states_of_low_precision_load_as_those_of_earlier_versions(prefix):
    ema, weights = updated(EMAHandler(low())), set_to(low(), 5.0).state_dict()
    if prefix is None:
        ema.ema_model.load_state_dict(weights)
    else:
        weights = {f"{prefix}{name}": one for name, one in weights.items()}
        ema.load_state_dict({"ema_model": weights, "momentum_scheduler": None})
    set_to(ema.model, 7.0)
    ema.update(0.5)
    assert values(ema.ema_model) == {6.0}


def test_weights_swapped_in_and_out_for_an_evaluation_keep_their_exact_average():
    ema = updated(EMAHandler(low()))
    before = ema.state_dict()["ema_model"]["weight"].clone()
    kept = copy.deepcopy(ema.ema_model.state_dict())
    set_to(ema.ema_model, 9.0)
    ema.ema_model.load_state_dict(kept)
    replace_weights(ema.model)  # so that tensors are paired again
    ema.update(0.0)
    assert torch.equal(ema.state_dict()["ema_model"]["weight"], before)
    assert before.unique().item() == pytest.approx(1.001)


def test_the_average_may_have_another_precision_than_the_model():
    ema = updated(EMAHandler(low(), ema_model=nn.Linear(2, 2)))
    assert values(ema.ema_model) == {1.001}
    assert ema.ema_model.weight.dtype == torch.float32


# --- the momentum --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0.75, None, 0), [0.75] * 5),
        ((0.75, 0.25, 3), [0.25, 0.5, 0.75, 0.75, 0.75]),
        ((0.25, 0.75, 5), [0.75, 0.625, 0.5, 0.375, 0.25]),
        ((0.75, 0.25, 1), [0.25, 0.75, 0.75, 0.75, 0.75]),
        ((0.5, 1.0, 3), [1.0, 0.75, 0.5, 0.5, 0.5]),  # the average starts as a copy of the model
        ((0.5, 0.0, 3), [0.0, 0.25, 0.5, 0.5, 0.5]),
    ],
)
def test_the_momentum_warms_up_under_any_name_and_each_update_uses_it(arguments, expected):
    model, seen, average, averages = set_to(nn.Linear(1, 1), 0.0), [], 0.0, []
    ema, trainer = EMAHandler(model, *arguments), trainer_of(model)
    ema.attach(trainer, "my_momentum")
    assert trainer.state.my_momentum == arguments[0]
    assert hasattr(ema, "momentum_scheduler") == (arguments[1] is not None)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append((trainer.state.my_momentum, ema.ema_model.weight.item()))
    )
    trainer.run([4.0] * 5)
    for momentum in expected:
        average += momentum * (4.0 - average)
        averages.append(average)
    assert seen == [pytest.approx(pair) for pair in zip(expected, averages, strict=True)]


class Warming:
    """Trains a model of one weight, and remembers the momentum of each update."""

    def __init__(self, momentum=0.5, **options):
        self.model = set_to(nn.Linear(1, 1), 0.0)
        self.trainer = trainer_of(self.model)
        self.ema = EMAHandler(self.model, momentum)
        self.momenta, update = [], self.ema.update
        self.ema.update = lambda momentum: (self.momenta.append(momentum), update(momentum))
        self.ema.attach(self.trainer, **options)

    def run(self, length, **target):
        self.trainer.run([4.0] * length, **target)
        return self.momenta


WARM = [9 / (10 + n) if n < 9 else 0.5 for n in range(1, 21)]


def test_by_default_the_momentum_warms_up_by_the_number_of_updates():
    warming = Warming()
    assert warming.run(4) == pytest.approx(WARM[:4])
    assert warming.trainer.state.ema_momentum == warming.momenta[-1]
    warming.trainer.state.max_epochs = None
    assert warming.run(16) == pytest.approx(WARM)  # goes on in another run
    late = Warming(event=Events.ITERATION_COMPLETED(every=5, after=10))
    assert late.run(40) == pytest.approx(WARM[:6])


@pytest.mark.parametrize("saves_momentum", [False, True])
def test_a_warm_up_resumes_exactly(saves_momentum):
    first, second = Warming(), Warming()
    for one in (first, second):
        one.trainer.state_dict_user_keys += ["ema_momentum"] * saves_momentum
    first.run(3)
    for name in ("trainer", "ema"):
        getattr(second, name).load_state_dict(getattr(first, name).state_dict())
    assert second.run(3, max_epochs=3) == pytest.approx(WARM[3:9])


def test_an_average_that_was_loaded_is_not_forgotten():
    by_hand, of_old = Warming(), Warming()
    by_hand.ema.ema_model.load_state_dict(set_to(nn.Linear(1, 1), 2.0).state_dict())
    state = of_old.ema.state_dict()
    del state["updates"]  # which earlier versions did not save
    of_old.ema.load_state_dict(state)
    for one in (by_hand, of_old):
        assert one.run(3) == [0.5] * 3
        assert one.ema.state_dict()["updates"] is None


def test_a_momentum_that_others_set_is_used_as_it_is():
    scheduled, by_hand = Warming(), Warming()
    ExpStateScheduler(initial_value=1.0, gamma=0.5, param_name="ema_momentum").attach(scheduled.trainer)
    assert scheduled.run(3) == pytest.approx([WARM[0], 0.5, 0.25])  # 0.5 is its own momentum, too
    by_hand.trainer.add_event_handler(
        Events.ITERATION_STARTED(once=2), lambda engine: setattr(engine.state, "ema_momentum", 0.1)
    )
    assert by_hand.run(3) == pytest.approx([WARM[0], 0.1, 0.1])


def test_any_scheduler_of_the_state_may_set_the_momentum_of_which_a_warning_tells():
    model = set_to(nn.Linear(1, 1), 0.0)
    trainer, ema = trainer_of(model), EMAHandler(model)
    ExpStateScheduler(initial_value=1.0, gamma=0.5, param_name="ema_momentum", create_new=True).attach(trainer)
    with pytest.warns(UserWarning, match="the existing state.ema_momentum"):
        ema.attach(trainer)
    trainer.run([4.0])
    assert (trainer.state.ema_momentum, values(ema.ema_model)) == (0.5, {2.0})
    EMAHandler(model).attach(trainer, warn_if_exists=False)
    with pytest.raises(ValueError, match="name"):
        EMAHandler(model).attach(trainer, name="iteration")


def test_two_averages_with_different_names():
    model = set_to(nn.Linear(1, 1), 0.0)
    fast, slow = EMAHandler(model, 0.5, warmup_iters=0), EMAHandler(model, 0.25, warmup_iters=0)
    trainer = trainer_of(model)
    fast.attach(trainer, "fast")
    slow.attach(trainer, "slow", event=Events.ITERATION_COMPLETED(every=2))
    trainer.run([4.0, 4.0])
    assert (values(fast.ema_model), values(slow.ema_model)) == ({3.0}, {1.0})


@pytest.mark.parametrize("warmup", [{}, {"momentum_warmup": 0.25, "warmup_iters": 4}], ids=["plain", "warm-up"])
def test_it_is_saved_and_resumed_like_other_objects(tmp_path, warmup):
    def make():
        model = set_to(Buffered(), 0.0)
        ema, trainer = EMAHandler(model, 0.75, **warmup), trainer_of(model)
        ema.attach(trainer)
        return {"trainer": trainer, "model": model, "ema": ema}

    whole, first, second = make(), make(), make()
    whole["trainer"].run([1.0, 2.0, 3.0, 4.0])
    checkpoint = Checkpoint(first, DiskSaver(tmp_path, require_empty=False))
    first["trainer"].add_event_handler(Events.ITERATION_COMPLETED(once=2), checkpoint)
    first["trainer"].run([1.0, 2.0, 3.0, 4.0])
    assert Checkpoint.resume(second, tmp_path)
    second["trainer"].run([3.0, 4.0])  # the rest of the epoch
    expected, resumed = whole["ema"].state_dict(), second["ema"].state_dict()
    assert resumed["momentum_scheduler"] == expected["momentum_scheduler"]
    torch.testing.assert_close(resumed["ema_model"], expected["ema_model"])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from torch.compile
def test_the_state_of_a_compiled_model_has_the_names_of_the_plain_one():
    plain, compiled = EMAHandler(nn.Linear(1, 1)), EMAHandler(torch.compile(nn.Linear(1, 1)))
    assert list(compiled.state_dict()["ema_model"]) == list(plain.state_dict()["ema_model"])
    compiled.load_state_dict(plain.state_dict())
    assert values(compiled.ema_model) == values(plain.ema_model)


def test_a_state_with_a_different_warm_up_is_rejected_and_changes_nothing():
    plain, warming = EMAHandler(nn.Linear(1, 1)), EMAHandler(nn.Linear(1, 1), 0.75, 0.25, 3)
    before = values(plain.ema_model), values(warming.ema_model)
    for one, state, message in (
        (plain, warming.state_dict(), "without a warm-up"),
        (warming, plain.state_dict(), "with a warm-up"),
        (plain, {"ema_model": warming.ema_model.state_dict()}, "momentum_scheduler"),
    ):
        with pytest.raises(ValueError, match=message):
            one.load_state_dict(state)
    assert (values(plain.ema_model), values(warming.ema_model)) == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 0},
        {"momentum": 1.0},
        {"momentum": float("nan")},
        {"momentum_warmup": 0.1},
        {"warmup_iters": 10},
        {"warmup_iters": 0, "momentum_warmup": 0.1},
        {"momentum_warmup": 2, "warmup_iters": 3},
        {"momentum_warmup": -0.1, "warmup_iters": 3},
        {"handle_buffers": "share"},
        {"model": lambda x: x},
    ],
)
def test_invalid_arguments_are_rejected(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        EMAHandler(**{"model": nn.Linear(1, 1), **arguments})
