"""The average of a model: values, buffers, momentum, and number of operations."""

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
from camshaft.handlers import Checkpoint, DiskSaver, EMAHandler, ExpStateScheduler, LambdaStateScheduler
from camshaft.handlers.ema_handler import EMAWarmUp
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


def values(model):
    return {round(value, 6) for one in model.parameters() for value in one.flatten().tolist()}


def trainer_of(model):
    """Return an engine that sets the model to the values of the batches."""
    return Engine(lambda engine, batch: set_to(model, batch))


def test_each_update_moves_the_average_by_the_momentum():
    model = Buffered()
    set_to(model, 1.0)
    ema = EMAHandler(model, momentum=0.25)
    seen = []
    trainer = trainer_of(model)
    ema.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(values(ema.ema_model)))
    trainer.run([5.0, 5.0, 9.0])
    assert seen == [{2.0}, {2.75}, {4.3125}]
    assert values(model) == {9.0}


@given(
    momenta=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5),
    numbers=st.lists(st.floats(-10, 10), min_size=6, max_size=6),
)
def test_an_update_follows_the_formula(momenta, numbers):
    model = nn.Linear(1, 1, bias=False).double()
    set_to(model, numbers[0])
    ema = EMAHandler(model)
    average = numbers[0]
    for momentum, number in zip(momenta, numbers[1:], strict=False):
        set_to(model, number)
        ema.update(momentum)
        average = (1 - momentum) * average + momentum * number
        assert ema.ema_model.weight.item() == pytest.approx(average, abs=1e-9)


def test_the_average_is_a_separate_model_without_gradients():
    model = Buffered()
    model.first.weight.grad = torch.ones(2, 2)
    ema = EMAHandler(model)
    assert ema.model is model
    assert all(not one.requires_grad and one.is_leaf and one.grad is None for one in ema.ema_model.parameters())
    assert model.first.weight.requires_grad
    assert ema.ema_model.first.weight is ema.ema_model.second.weight
    ema.update(0.5)
    assert all(one.grad_fn is None and not one.requires_grad for one in ema.ema_model.parameters())


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


@pytest.mark.parametrize("handle_buffers", ["copy", "update"])
def test_the_two_models_share_no_memory(handle_buffers):
    model = Buffered()
    ema = EMAHandler(model, handle_buffers=handle_buffers)
    ema.update(0.5)
    theirs = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}
    assert not theirs & {one.data_ptr() for one in (*ema.ema_model.parameters(), *ema.ema_model.buffers())}
    model.count += 7
    assert ema.ema_model.count.item() == 0
    other = Buffered()
    set_to(other, 3.0)
    ema.ema_model.load_state_dict(other.state_dict())
    assert model.count.item() == 7


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
    ema = EMAHandler(model, handle_buffers="update")
    with Counting() as counting:
        ema.update(0.5)
    assert counting.operations == ["aten._foreach_lerp_.Scalar", "aten._foreach_copy_.default"]


def test_weights_of_several_dtypes_are_averaged():
    model = nn.ModuleList([nn.Linear(1, 1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)])
    set_to(model, 0.0)
    ema = EMAHandler(model)
    set_to(model, 2.0)
    ema.update(0.5)
    assert {complex(one.flatten()[0].item()) for one in ema.ema_model.parameters()} == {1 + 0j}


def replace_weights(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def replace_module(model):
    model[0] = nn.Linear(1, 1)


def replace_buffer(model):
    model[0].register_buffer("level", model[0].level + 0)


@pytest.mark.parametrize("replace", [replace_weights, replace_module, replace_buffer])
@pytest.mark.parametrize("when", ["before the run", "in the run", "without a run"])
@pytest.mark.parametrize("of", ["model", "ema_model"])
def test_what_is_replaced_is_found(replace, when, of):
    model = nn.Sequential(nn.Linear(1, 1))
    if replace is replace_buffer:
        model[0].register_buffer("level", torch.zeros(()))
    ema = EMAHandler(model, handle_buffers="update")
    set_to(ema.ema_model, 0.0)

    def step(engine=None, batch=0.0):
        if when != "before the run":
            replace(getattr(ema, of))
        set_to(ema.ema_model, 0.0)
        set_to(model, 2.0)

    trainer = Engine(step)
    trainer.state.ema_momentum = 0.5
    ema.attach(trainer, warn_if_exists=False)
    if when == "without a run":
        step()
        ema.update(0.5)
    else:
        if when == "before the run":
            replace(getattr(ema, of))
        trainer.run([0.0])
    assert values(ema.ema_model) == {1.0}
    assert all(one.item() == 1.0 for one in ema.ema_model.buffers())


def test_a_changed_architecture_is_reported():
    model = nn.Sequential(nn.Linear(1, 1))
    ema = EMAHandler(model)
    model[0] = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="create a new EMAHandler"):
        ema.update(0.5)


# --- low precision -----------------------------------------------------------------------------------------

LOW = [torch.bfloat16, torch.float16]


def low(dtype, buffered=False):
    model = Buffered().to(dtype) if buffered else nn.Linear(2, 2, dtype=dtype)
    set_to(model, 1.0)
    return model


@pytest.mark.parametrize("dtype", LOW)
def test_weights_of_low_precision_are_averaged_in_float32_and_handed_out_as_they_are(dtype):
    model, exact = low(dtype, buffered=True), low(torch.float32, buffered=True)
    ema, reference = (EMAHandler(one, handle_buffers="update") for one in (model, exact))
    set_to(model, 2.0)
    set_to(exact, 2.0)
    for _ in range(2000):  # of the default momentum, none of which changes the weight by itself
        ema.update(ema.momentum)
        reference.update(ema.momentum)
    for ours, theirs in zip(
        ema.ema_model.state_dict().values(), reference.ema_model.state_dict().values(), strict=True
    ):
        assert ours.dtype in (dtype, torch.int64)
        assert torch.equal(ours, theirs.to(ours.dtype))
    assert max(values(reference.ema_model)) == pytest.approx(1.33, abs=0.01)
    state = ema.state_dict()["ema_model"]
    assert state["first.weight"].dtype == state["mean"].dtype == torch.float32
    assert torch.equal(state["first.weight"], reference.ema_model.first.weight)


@pytest.mark.parametrize("dtype", LOW)
def test_a_resumed_average_of_low_precision_continues_exactly(dtype, tmp_path):
    def updated(ema, number):
        for _ in range(number):
            set_to(ema.model, 2.0)
            ema.update(0.001)
        return ema

    whole = updated(EMAHandler(low(dtype)), 100).state_dict()
    torch.save(updated(EMAHandler(low(dtype)), 50).state_dict(), tmp_path / "ema.pt")
    resumed = EMAHandler(low(dtype))
    resumed.load_state_dict(torch.load(tmp_path / "ema.pt"))
    torch.testing.assert_close(updated(resumed, 50).state_dict(), whole, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("way", ["handler", "model", "prefixed"])
def test_states_of_low_precision_load_as_those_of_earlier_versions(dtype, way):
    ema = EMAHandler(low(dtype))
    ema.update(0.5)
    earlier = low(dtype)
    set_to(earlier, 5.0)
    weights = earlier.state_dict()
    if way == "model":
        ema.ema_model.load_state_dict(weights)
    else:
        prefix = "_orig_mod." if way == "prefixed" else ""
        weights = {f"{prefix}{name}": one for name, one in weights.items()}
        ema.load_state_dict({"ema_model": weights, "momentum_scheduler": None})
    set_to(ema.model, 7.0)
    ema.update(0.5)
    assert values(ema.ema_model) == {6.0}


def test_weights_swapped_in_and_out_for_an_evaluation_keep_their_exact_average():
    ema = EMAHandler(low(torch.bfloat16))
    set_to(ema.model, 2.0)
    ema.update(0.001)
    before = ema.state_dict()["ema_model"]["weight"].clone()
    kept = copy.deepcopy(ema.ema_model.state_dict())
    set_to(ema.ema_model, 9.0)
    ema.ema_model.load_state_dict(kept)
    ema.update(0.0)
    assert torch.equal(ema.state_dict()["ema_model"]["weight"], before)
    assert before.unique().item() == pytest.approx(1.001)


def test_the_average_may_have_another_precision_than_the_model():
    model = low(torch.bfloat16)
    ema = EMAHandler(model, ema_model=nn.Linear(2, 2))
    set_to(model, 2.0)
    ema.update(0.001)
    assert values(ema.ema_model) == {1.001}
    assert ema.ema_model.weight.dtype == torch.float32


def test_a_model_without_weights_is_accepted():
    EMAHandler(nn.Identity()).update(0.5)


# --- the momentum ------------------------------------------------------------------------------------------


def momenta(trainer, name="ema_momentum", iterations=5):
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(getattr(trainer.state, name)))
    trainer.run([1.0] * iterations)
    return seen


@pytest.mark.parametrize("name", ["ema_momentum", "my_momentum"])
@pytest.mark.parametrize(
    ("warmup", "momentum", "iterations", "expected"),
    [
        (0.25, 0.75, 3, [0.25, 0.5, 0.75, 0.75, 0.75]),
        (0.75, 0.25, 5, [0.75, 0.625, 0.5, 0.375, 0.25]),
        (0.25, 0.75, 1, [0.25, 0.75, 0.75, 0.75, 0.75]),
        (1.0, 0.5, 3, [1.0, 0.75, 0.5, 0.5, 0.5]),  # the average starts as a copy of the model
        (0.0, 0.5, 3, [0.0, 0.25, 0.5, 0.5, 0.5]),
    ],
)
def test_the_momentum_warms_up_under_any_name(name, warmup, momentum, iterations, expected):
    model = nn.Linear(1, 1)
    ema = EMAHandler(model, momentum, warmup, iterations)
    trainer = trainer_of(model)
    ema.attach(trainer, name)
    assert getattr(trainer.state, name) == momentum
    assert momenta(trainer, name) == pytest.approx(expected)
    assert ema.momentum_scheduler.event_index == 5


def test_the_first_update_uses_the_momentum_of_the_warm_up():
    model = nn.Linear(1, 1)
    set_to(model, 0.0)
    ema = EMAHandler(model, 0.75, 0.25, 3)
    trainer = trainer_of(model)
    ema.attach(trainer, "other")
    trainer.run([4.0])
    assert values(ema.ema_model) == {1.0}


def test_the_warm_up_continues_after_a_resume():
    first = EMAHandler(nn.Linear(1, 1), 0.75, 0.25, 3)
    trainer = trainer_of(first.model)
    first.attach(trainer)
    trainer.run([1.0])
    second = EMAHandler(nn.Linear(1, 1), 0.75, 0.25, 3)
    second.momentum_scheduler.load_state_dict(first.momentum_scheduler.state_dict())
    trainer = trainer_of(second.model)
    second.attach(trainer)
    assert momenta(trainer, iterations=2) == [0.5, 0.75]


@pytest.mark.parametrize("warmup", [{}, {"momentum_warmup": 0.25, "warmup_iters": 4}], ids=["plain", "warm-up"])
def test_it_is_saved_and_resumed_like_other_objects(tmp_path, warmup):
    def make():
        model = Buffered()
        set_to(model, 0.0)
        ema = EMAHandler(model, 0.75, **warmup)
        trainer = trainer_of(model)
        ema.attach(trainer)
        return trainer, model, ema

    whole = make()
    whole[0].run([1.0, 2.0, 3.0, 4.0])
    trainer, model, ema = make()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=2),
        Checkpoint({"trainer": trainer, "model": model, "ema": ema}, DiskSaver(tmp_path, require_empty=False)),
    )
    trainer.run([1.0, 2.0, 3.0, 4.0], max_epochs=1)
    trainer, model, ema = make()
    assert Checkpoint.resume({"trainer": trainer, "model": model, "ema": ema}, tmp_path)
    trainer.run([3.0, 4.0])  # the rest of the epoch
    expected = whole[2].state_dict()
    assert ema.state_dict()["momentum_scheduler"] == expected["momentum_scheduler"]
    torch.testing.assert_close(ema.state_dict()["ema_model"], expected["ema_model"])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from torch.compile
def test_the_state_of_a_compiled_model_has_the_names_of_the_plain_one():
    plain, compiled = EMAHandler(nn.Linear(1, 1)), EMAHandler(torch.compile(nn.Linear(1, 1)))
    assert list(compiled.state_dict()["ema_model"]) == list(plain.state_dict()["ema_model"])
    compiled.load_state_dict(plain.state_dict())
    assert values(compiled.ema_model) == values(plain.ema_model)


def test_a_state_with_a_different_warm_up_is_rejected_and_changes_nothing():
    plain, warming = EMAHandler(nn.Linear(1, 1)), EMAHandler(nn.Linear(1, 1), 0.75, 0.25, 3)
    before = values(plain.ema_model), values(warming.ema_model)
    with pytest.raises(ValueError, match="must be that of an EMAHandler without a warm-up"):
        plain.load_state_dict(warming.state_dict())
    with pytest.raises(ValueError, match="that of an EMAHandler with a warm-up"):
        warming.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="state_dict must hold 'momentum_scheduler'"):
        plain.load_state_dict({"ema_model": plain.ema_model.state_dict()})
    assert (values(plain.ema_model), values(warming.ema_model)) == before


def test_without_a_warm_up_there_is_no_scheduler():
    assert not hasattr(EMAHandler(nn.Linear(1, 1)), "momentum_scheduler")


def test_any_scheduler_of_the_state_may_set_the_momentum():
    model = nn.Linear(1, 1)
    trainer = trainer_of(model)
    ExpStateScheduler(initial_value=1.0, gamma=0.5, param_name="ema_momentum", create_new=True).attach(trainer)
    EMAHandler(model).attach(trainer, warn_if_exists=False)
    set_to(model, 0.0)
    assert momenta(trainer, iterations=2) == [0.5, 0.25]


def test_an_existing_momentum_is_used_with_a_warning():
    model = nn.Linear(1, 1)
    trainer = trainer_of(model)
    trainer.state.ema_momentum = 0.5
    with pytest.warns(UserWarning, match="the existing state.ema_momentum"):
        EMAHandler(model).attach(trainer)
    assert trainer.state.ema_momentum == 0.5


def test_two_averages_with_different_names():
    model = nn.Linear(1, 1)
    set_to(model, 0.0)
    fast, slow = EMAHandler(model, 0.5), EMAHandler(model, 0.25)
    trainer = trainer_of(model)
    fast.attach(trainer, "fast")
    slow.attach(trainer, "slow", event=Events.ITERATION_COMPLETED(every=2))
    trainer.run([4.0, 4.0])
    assert (values(fast.ema_model), values(slow.ema_model)) == ({3.0}, {1.0})


def test_the_warm_up_can_be_simulated():
    rows = EMAWarmUp.simulate_values(3, momentum_warmup=0.5, warmup_iters=2, momentum=0.25)
    assert rows == [[0, 0.5], [1, 0.25], [2, 0.25]]


# --- invalid arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 0}, "momentum must be above 0 and below 1, got 0"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"momentum": float("nan")}, "momentum must be"),
        ({"momentum_warmup": 0.1}, "given together"),
        ({"warmup_iters": 10}, "given together"),
        ({"momentum_warmup": 0.1, "warmup_iters": 0}, "warmup_iters must be"),
        ({"momentum_warmup": 2, "warmup_iters": 3}, "momentum_warmup must be at least 0 and at most 1, got 2"),
        ({"momentum_warmup": -0.1, "warmup_iters": 3}, "momentum_warmup must be"),
        ({"momentum_warmup": float("nan"), "warmup_iters": 3}, "momentum_warmup must be"),
        ({"handle_buffers": "share"}, "handle_buffers must be 'copy', 'update' or 'ema_train', got 'share'"),
        ({"model": lambda x: x}, "model must be a torch.nn.Module"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        EMAHandler(**{"model": nn.Linear(1, 1), **arguments})


# --- several ranks -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_wrapped_model_is_unwrapped():
    model = nn.Linear(1, 1)
    ema = EMAHandler(DistributedDataParallel(model), momentum=0.5)
    assert ema.model is model
    assert list(ema.ema_model.state_dict()) == ["weight", "bias"]
    set_to(model, 0.0)
    set_to(ema.ema_model, 2.0)
    ema.update(0.5)
    assert values(ema.ema_model) == {1.0}


def test_data_parallel_is_not_unwrapped():
    model = nn.DataParallel(nn.Linear(1, 1))
    ema = EMAHandler(model)
    assert ema.model is model
    assert isinstance(ema.ema_model, nn.DataParallel)


def test_a_lambda_may_set_the_momentum():
    model = nn.Linear(1, 1)
    trainer = trainer_of(model)
    EMAHandler(model).attach(trainer)
    LambdaStateScheduler(lambda index: 1 / index, "ema_momentum").attach(trainer)
    assert momenta(trainer, iterations=2) == [1.0, 0.5]


def test_a_counter_of_the_engine_is_rejected_as_name():
    trainer = Engine(lambda engine, batch: None)
    with pytest.raises(ValueError, match="name must not be 'iteration', which is a counter of the engine"):
        EMAHandler(nn.Linear(1, 1)).attach(trainer, name="iteration")
    assert trainer.run([0, 0]).iteration == 2


def test_integer_parameters_are_copied():
    model = torch.nn.Linear(1, 1, bias=False)
    model.levels = torch.nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
    ema = EMAHandler(model, momentum=0.5)
    model.levels.copy_(torch.tensor([3, 4]))
    ema.update(0.5)
    assert ema.ema_model.levels.tolist() == [3, 4]
