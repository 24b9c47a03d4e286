"""Gradient accumulation: windows, means, ranks, and resuming."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import camshaft.distributed as idist
from camshaft.distributed import auto_dataloader
from camshaft.engine import Engine, Events
from tests.engine.traces import Sizeless, at, unsized
from tests.engine.windows import RATE, Weighted, batches_of, check, expected, samples, squared, trainer_of, weights_of
from tests.ranks import on_ranks, run_on_ranks

# === Windows of micro-batches ===


DATA = batches_of(4, 4, 4, 4, 4, 4, 4)
ENDLESS = 10**6


def train(data, size, *, prepare=lambda trainer: None, **arguments):
    model = Weighted()
    trainer, steps = trainer_of(model, size)
    prepare(trainer)
    trainer.run(data, **arguments)
    return model, steps, trainer


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "size", "arguments", "windows"),
    [
        (DATA[:4], 1, {}, [[0], [1], [2], [3]]),
        (DATA[:4], 2, {"max_epochs": 2}, [[0, 1], [2, 3]] * 2),
        # the last window of an epoch may be shorter, and the next epoch begins one
        (DATA[:5], 2, {"max_epochs": 2}, [[0, 1], [2, 3], [4]] * 2),
        (DATA[:5], 3, {"max_epochs": 2}, [[0, 1, 2], [3, 4]] * 2),
        (DATA[:3], 5, {"max_epochs": 2}, [[0, 1, 2]] * 2),
        # epochs that are not passes
        (DATA[:5], 2, {"max_epochs": 2, "epoch_length": 3}, [[0, 1], [2], [3, 4], [0]]),
        (DATA[:2], 3, {"max_epochs": 2, "epoch_length": 4}, [[0, 1, 0], [1]] * 2),
        # the number of iterations ends in a window
        (DATA[:4], 3, {"max_iters": 5}, [[0, 1, 2], [3], [0]]),
        (DATA[:6], 4, {"max_iters": 2}, [[0, 1]]),
        (DATA[:6], 4, {"max_iters": 6}, [[0, 1, 2, 3], [4, 5]]),
        # the length of an epoch is not known before its end
        (unsized(DATA[:5]), 2, {}, [[0, 1], [2, 3], [4]]),
        (unsized(DATA[:5]), 7, {}, [[0, 1, 2, 3, 4]]),
        (Sizeless(*DATA[:5]), 3, {"max_epochs": 2}, [[0, 1, 2], [3, 4]] * 2),
        (Sizeless(*DATA[:3]), 2, {"max_iters": 5}, [[0, 1], [2], [0, 1]]),
        (Sizeless(*DATA[:4]), 3, {"max_iters": 2}, [[0, 1]]),
    ],
)
def test_a_window_is_one_step_with_the_mean_over_it(data, size, arguments, windows):
    model, steps, _ = train(data, size, **arguments)
    check(model, DATA, windows)
    assert len(steps) == len(windows)


CUT = r"the epoch ended inside a window of {} batches, before its last iteration: the gradients of {} are dropped"


@pytest.mark.filterwarnings("ignore:the data ran out:UserWarning")
def test_a_window_in_which_data_run_dry_is_dropped_with_a_warning():
    with pytest.warns(UserWarning, match=CUT.format(2, "1 batch")):
        model, _, _ = train(unsized(DATA[:5]), 2, max_epochs=3, epoch_length=4)
    check(model, DATA, [[0, 1], [2, 3]])


@pytest.mark.parametrize("skipping", [False, True])
def test_a_window_in_which_the_epoch_is_cut_short_is_dropped_with_a_warning(skipping):
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(skipping), 5)

    with pytest.warns(UserWarning, match=CUT.format(3, "2 batches")) as told:
        model, steps, _ = train(DATA[:6], 3, prepare=prepare, max_epochs=2)
    check(model, DATA, [[0, 1, 2], [0, 1, 2], [3, 4, 5]])
    assert steps == [3, 8, 11]
    assert len(told) == 1


def test_handlers_of_the_end_of_an_epoch_find_the_step_done():
    found = []
    trainer, steps = trainer_of(Weighted(), 3)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: found.append(len(steps)))
    trainer.run(Sizeless(*DATA[:4]))
    assert found == [2]


@pytest.mark.parametrize(("data", "arguments"), [(DATA[:4], {"max_epochs": 1}), (DATA[:6], {"max_iters": 4})])
def test_handlers_of_the_last_iteration_find_the_step_done(data, arguments):
    found = []
    trainer, steps = trainer_of(Weighted(), 3)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda engine: found.append(list(steps)))
    trainer.run(data, **arguments)
    assert found == [steps] == [[3, 4]]


def test_parameters_without_a_gradient_do_not_matter():
    model = Weighted()
    model.unused = nn.Parameter(torch.ones(1))
    trainer, _ = trainer_of(model, 3)
    trainer.run(unsized(DATA[:2]))
    assert model.unused.item() == 1.0
    del model.unused
    check(model, DATA, [[0, 1]])


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.GET_BATCH_STARTED])
@pytest.mark.parametrize("arguments", [{"max_epochs": 1}, {"max_epochs": 2}, {"max_iters": 6}], ids=str)
def test_a_run_that_a_user_ends_steps_no_more(event, arguments):
    """Perhaps it is ended because these gradients are bad."""
    model, steps, _ = train(
        DATA[:6], 3, prepare=lambda trainer: at(trainer, event, lambda e: e.terminate(), 5), **arguments
    )
    check(model, DATA, [[0, 1, 2]])
    assert steps == [3]


def test_after_a_run_that_a_user_ended_the_next_begins_a_window():
    model, _, trainer = train(
        DATA[:6], 2, prepare=lambda t: at(t, Events.ITERATION_COMPLETED, lambda e: e.terminate(), 3), max_epochs=3
    )
    trainer.run(DATA[:6])
    check(model, DATA, [[0, 1], *[[0, 1], [2, 3], [4, 5]] * 2])


def test_a_pause_changes_nothing():
    for pause_at in range(1, 11):
        trainer, _ = trainer_of(model := Weighted(), 3)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=pause_at), trainer.interrupt)
        trainer.run(DATA[:5], max_epochs=2)
        trainer.run(DATA[:5], max_epochs=2)
        check(model, DATA, [[0, 1, 2], [3, 4]] * 2)


def test_a_pause_in_which_the_target_grows_leaves_the_mean_a_mean():
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), 4)

    model, steps, trainer = train(DATA[:6], 3, prepare=prepare, max_iters=5)
    trainer.run(max_iters=6)
    check(model, DATA, [[0, 1, 2], [3, 4, 5]])
    assert steps == [3, 6]


# --- errors --------------------------------------------------------------------------------------------------------


def failing_at(number):
    """Return a loss function that raises at its n-th call."""
    calls = iter(range(1, ENDLESS))

    def loss_fn(y_pred, y):
        if next(calls) == number:
            raise ArithmeticError("no loss")
        return squared(y_pred, y)

    return loss_fn


def test_an_error_that_is_swallowed_ends_the_epoch_and_what_it_has_is_dropped():
    model = Weighted()
    trainer, steps = trainer_of(model, 3, failing_at(5))
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    with pytest.warns(UserWarning, match=CUT.format(3, "1 batch")):
        trainer.run(DATA[:6], max_epochs=2)
    check(model, DATA, [[0, 1, 2], [5, 0, 1], [2, 3, 4]])
    assert steps == [3, 8, 11]


def test_an_error_in_the_first_batch_of_a_window_leaves_nothing_to_step():
    model = Weighted()
    trainer, steps = trainer_of(model, 3, failing_at(4))
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    trainer.run(DATA[:6])
    check(model, DATA, [[0, 1, 2]])
    assert steps == [3]


def test_a_run_that_continues_after_an_error_steps_means():
    model = Weighted()
    trainer, _ = trainer_of(model, 3, failing_at(5))
    with pytest.raises(ArithmeticError):
        trainer.run(DATA[:6], max_epochs=2)
    with pytest.warns(UserWarning, match="has lost accumulated gradients"):
        trainer.run(DATA[:6])  # from the beginning of the data
    windows = [0, 1, 2], [0, 1], [2, 3, 4], [5, 0, 1]
    assert torch.allclose(weights_of(model), expected([[DATA[index] for index in window] for window in windows]))


# --- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", range(6))
def test_a_window_that_is_resumed_in_its_middle_holds_the_rest(iteration):
    model = Weighted()
    trainer, steps = trainer_of(model, 3)
    trainer.load_state_dict({"iteration": iteration, "epoch_length": 6, "max_epochs": 1})
    trainer.run(DATA[iteration:6])
    windows = [[index for index in window if index >= iteration] for window in ([0, 1, 2], [3, 4, 5])]
    check(model, DATA, [window for window in windows if window])
    assert steps == [3, 6] if iteration < 3 else [6]


@pytest.mark.parametrize(("how", "stops_at"), [("pause", 4), ("pause", 5), ("error", 5), ("error", 6)])
def test_loading_a_state_discards_the_window_that_was_begun(how, stops_at):
    model = Weighted()
    trainer, _ = trainer_of(model, 3, failing_at(stops_at) if how == "error" else squared)
    if how == "pause":
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), stops_at)
    with pytest.raises(ArithmeticError) if how == "error" else nullcontext():
        trainer.run(DATA[:6])
    model.load_state_dict(Weighted().state_dict())
    trainer.load_state_dict({"iteration": 4, "epoch_length": 6, "max_epochs": 1})
    trainer.run(DATA[4:6])
    check(model, DATA, [[4, 5]])


def test_a_step_that_two_engines_share_keeps_their_windows_apart():
    model = Weighted()
    first, steps = trainer_of(model, 2)
    second = Engine(first._process_function)
    for _ in range(2):
        first.run(Sizeless(*DATA[:3]))
        second.run(Sizeless(*DATA[3:6]))
    check(model, DATA, [[0, 1], [2], [3, 4], [5]] * 2)
    assert len(steps) == 8


# === Batches weighted by samples or tokens, and clipped gradients ===


DATA_MEANS = batches_of(4, 4, 4, 4, 4)

# --- weights -------------------------------------------------------------------------------------------------------


UNEVEN = batches_of(5, 1, 2, 3, 1)
WEIGHTS = {
    "number": samples,
    "tensor": lambda x, y: torch.tensor(len(y)),
    "tensor of one": lambda x, y: torch.tensor([float(len(y))]),
    "doubled": lambda x, y: 2.0 * len(y),
}


@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize(
    ("data", "size", "arguments", "windows"),
    [
        (UNEVEN, 5, {"max_epochs": 2}, [[0, 1, 2, 3, 4]] * 2),
        (UNEVEN, 2, {"max_epochs": 2}, [[0, 1], [2, 3], [4]] * 2),
        (UNEVEN, 1, {}, [[0], [1], [2], [3], [4]]),
        (Sizeless(*UNEVEN), 3, {"max_epochs": 2}, [[0, 1, 2], [3, 4]] * 2),
        (UNEVEN, 4, {"max_iters": 3}, [[0, 1, 2]]),
    ],
)
def test_weighed_by_samples_a_step_is_the_mean_over_all_samples_of_its_window(weigh, data, size, arguments, windows):
    model = Weighted()
    trainer, _ = trainer_of(model, size, batch_weight=weigh)
    trainer.run(data, **arguments)
    check(model, UNEVEN, windows)


def test_without_weights_all_batches_count_alike():
    model = Weighted()
    trainer, _ = trainer_of(model, 2)
    trainer.run(UNEVEN[:2])
    with pytest.raises(AssertionError):
        check(model, UNEVEN, [[0, 1]])


def test_weighed_by_tokens_a_step_is_the_mean_over_all_tokens_of_its_window():
    """A target of 0 is padding: the loss is the mean over the tokens that are none."""

    def loss_fn(y_pred, y):
        return ((y_pred - y) ** 2)[y != 0].mean()

    torch.manual_seed(0)
    data = [
        (x, y * torch.tensor(mask)[:, None])
        for (x, y), mask in zip(DATA_MEANS, ([1, 1, 1, 1], [0, 1, 0, 0]), strict=False)
    ]
    model = Weighted()
    trainer, _ = trainer_of(model, 2, loss_fn, batch_weight=lambda x, y: (y != 0).sum())
    outputs = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output))
    trainer.run(data)
    tokens = [(x[y[:, 0] != 0], y[y[:, 0] != 0]) for x, y in data]
    torch.testing.assert_close(weights_of(model), expected([tokens]))
    untrained = Weighted()
    assert outputs == pytest.approx([squared(untrained(x), y).item() for x, y in tokens])


# --- clipping ------------------------------------------------------------------------------------------------------


LIMIT = 0.3
CLIPS = {
    "clip_grad_norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, LIMIT),
    "clip_grad_value": lambda parameters: nn.utils.clip_grad_value_(parameters, LIMIT),
}


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"amp_mode": "amp", "scaler": scaler}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize(
    "make_options", [dict, scaled, lambda: {"batch_weight": samples}], ids=["plain", "scaled", "weighed"]
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_clipping_applies_to_the_gradient_of_the_window(name, make_options, size):
    model = Weighted()
    trainer, _ = trainer_of(model, size, **make_options(), **{name: LIMIT})
    trainer.run(DATA_MEANS)
    windows = [DATA_MEANS[start : start + size] for start in range(0, 5, size)]
    clipped = expected(windows, CLIPS[name])
    torch.testing.assert_close(weights_of(model), clipped, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(clipped, expected(windows), atol=1e-2)  # the limit matters


@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_are_clipped_once_a_step(monkeypatch, function):
    calls, clip = [], getattr(nn.utils, function)
    monkeypatch.setattr(nn.utils, function, lambda *arguments: (calls.append(1), clip(*arguments)))
    trainer, steps = trainer_of(Weighted(), 2, **{function.rstrip("_"): LIMIT})
    trainer.run(DATA_MEANS)
    assert len(calls) == len(steps) == 3


# === Resuming from a state saved in a window ===


(WHOLE,) = batches_of(23)
SAMPLES = list(zip(*WHOLE, strict=True))
EPOCHS = 3


def loader(batch_size=3):
    return idist.auto_dataloader(SAMPLES, batch_size=batch_size, shuffle=True, seed=5)


class Training:
    """A model, and what is saved of it after each iteration."""

    def __init__(self, size=3, saved=None, loss_fn=squared, **options):
        self.model, self.saved, self.given = Weighted(), {}, []
        self.trainer, self.steps = trainer_of(self.model, size, loss_fn, **options)
        step = self.trainer._process_function
        self.trainer._process_function = lambda engine, batch: (self.given.append(batch[1]), step(engine, batch))[1]
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.defer(self.save))
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.trainer.load_state_dict(saved[1])

    def save(self, engine):
        self.saved[engine.state.iteration] = copy.deepcopy((self.model.state_dict(), engine.state_dict()))


@pytest.mark.parametrize(("size", "epoch_length"), [(3, None), (5, None), (50, None), (2, 4)])
def test_every_iteration_can_be_resumed_from_and_the_weights_are_the_same(size, epoch_length):
    whole = Training(size)
    whole.trainer.run(loader(), max_epochs=EPOCHS, epoch_length=epoch_length)
    for iteration, saved in list(whole.saved.items())[:-1]:
        again = Training(size, saved)
        again.trainer.run(loader(), max_epochs=EPOCHS)
        assert torch.equal(weights_of(again.model), weights_of(whole.model)), iteration


def test_with_another_batch_size_no_sample_is_lost():
    whole = Training()
    whole.trainer.run(loader(), max_epochs=2)
    again = Training(saved=whole.saved[11])
    again.trainer.run(loader(batch_size=2))
    seen = torch.cat([*whole.given[8:11], *again.given])
    assert torch.equal(seen.sort(0).values, WHOLE[1].sort(0).values)
    assert (again.trainer.state.iteration, again.trainer.state.epoch) == (11 + 7, 2)


# --- other data --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES[:15])


class Stateful(list):
    """Data with a state of their own, which knows the present place only."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def resumed_on(data, iteration, **arguments):
    whole = Training()
    whole.trainer.run(data(), **arguments)
    again = Training(saved=whole.saved[iteration])
    again.trainer.run(data())
    return whole, again


@pytest.mark.filterwarnings("ignore:the data cannot seek")
def test_streams_are_skipped_to_the_end_of_the_window():
    whole, again = resumed_on(lambda: idist.auto_dataloader(Stream(), batch_size=3), 3)
    assert torch.equal(weights_of(again.model), weights_of(whole.model))


# === Windows on several ranks ===


SIZES = [(4,) * 6, (4,) * 6]  # of the batches of each rank
UNEVEN_RANKS = [(5, 1, 2, 3, 1, 2), (1, 4, 2, 1, 3, 1)]
LIMIT_RANKS = 0.3


def data_of(sizes):
    return [batches_of(*own, seed=rank) for rank, own in enumerate(sizes)]


def on_a_rank(sizes, size, count=6, sized=True, action=None, fails_at=None, static_graph=False, **options):
    """Train on the batches of this rank; give the weights, and how often gradients were exchanged and stepped."""
    exchanges, calls = [], []
    warnings.filterwarnings("ignore", CUT.format(3, "1 batch"))

    def hook(group, bucket):
        exchanges.append(1)
        return allreduce_hook(group, bucket)

    def loss_fn(y_pred, y):
        calls.append(1)
        if len(calls) == fails_at:
            raise ArithmeticError("no loss")
        return squared(y_pred, y)

    model = DistributedDataParallel(Weighted(), static_graph=static_graph)
    model.register_comm_hook(None, hook)
    data = data_of(sizes)[torch.distributed.get_rank()][:count]
    trainer, steps = trainer_of(model, size, loss_fn, **options)
    if action is not None:
        at(trainer, Events.ITERATION_COMPLETED, ACTIONS[action], 4)
    if fails_at is not None:
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    trainer.run(data if sized else Sizeless(*data), max_epochs=2)
    if action == "pause":
        trainer.run(data, max_epochs=2)
    return weights_of(model), len(exchanges), steps, model.require_backward_grad_sync


ACTIONS = {
    "end epoch": lambda engine: engine.terminate_epoch(),
    "end": lambda engine: engine.terminate(),
    "pause": lambda engine: engine.interrupt(),
}


def all_tokens(x, y):
    return torch.tensor(len(y))


CASES = {
    # name: (arguments, windows, exchanges by DDP)
    "whole windows": ({"size": 2}, [[0, 1], [2, 3], [4, 5]] * 2, 6),
    "a shorter last window": ({"size": 4}, [[0, 1, 2, 3], [4, 5]] * 2, 4),
    "a window of an epoch": ({"size": 9, "count": 3}, [[0, 1, 2]] * 2, 2),
    "unknown length": ({"size": 2, "count": 3, "sized": False}, [[0, 1], [2]] * 2, 3 + 2),  # known in epoch 2
    "an epoch cut short": ({"size": 3, "action": "end epoch"}, [[0, 1, 2], [0, 1, 2], [3, 4, 5]], 3),
    "a run ended": ({"size": 3, "action": "end"}, [[0, 1, 2]], 1),
    "a pause": ({"size": 3, "action": "pause"}, [[0, 1, 2], [3, 4, 5]] * 2, 4),
    "an error swallowed": ({"size": 3, "fails_at": 5}, [[0, 1, 2], [5, 0, 1], [2, 3, 4]], 3),
}


def union(sizes, windows):
    """Return each window with the batches of all ranks in it."""
    data = data_of(sizes)
    return [[batches[index] for batches in data for index in window] for window in windows]


def check_ranks(results, weights, exchanges, num_steps, **tolerance):
    (first, *counts), (second, *others) = results
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights, **tolerance)
    assert counts == others
    assert (counts[0], len(counts[1]), counts[2]) == (exchanges, num_steps, True)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_like_one_process_on_all_their_batches(case):
    arguments, windows, exchanges = CASES[case]
    results = run_on_ranks(2, on_a_rank, SIZES, **arguments)
    check_ranks(results, expected(union(SIZES, windows)), exchanges, len(windows))


@pytest.mark.parametrize("case", ["each batch", "a shorter last window", "unknown length", "an error swallowed"])
def test_batches_of_different_sizes_are_weighed_over_all_ranks(case):
    each = ({"size": 1}, [[index] for index in range(6)] * 2, 12)
    arguments, windows, exchanges = CASES.get(case, each)
    results = run_on_ranks(2, on_a_rank, UNEVEN_RANKS, **arguments, batch_weight=all_tokens)
    check_ranks(results, expected(union(UNEVEN_RANKS, windows)), exchanges, len(windows))


@pytest.mark.parametrize("action", [None, "end epoch"])
def test_the_gradient_of_all_ranks_is_clipped(action):
    results = run_on_ranks(2, on_a_rank, SIZES, 3, action=action, clip_grad_norm=LIMIT_RANKS)
    windows = [[0, 1, 2], [0, 1, 2], [3, 4, 5]] if action else [[0, 1, 2], [3, 4, 5]] * 2
    weights = expected(union(SIZES, windows), lambda parameters: nn.utils.clip_grad_norm_(parameters, LIMIT_RANKS))
    check_ranks(results, weights, len(windows), len(windows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["a shorter last window", "an epoch cut short"])
def test_a_static_graph_exchanges_in_every_batch(case):
    arguments, windows, _ = CASES[case]
    results = run_on_ranks(2, on_a_rank, SIZES, **arguments, static_graph=True)
    check_ranks(
        results, expected(union(SIZES, windows)), sum(map(len, windows)) + ("action" in arguments), len(windows)
    )


@pytest.mark.parametrize("weighed", [False, True], ids=["even batches", "uneven batches by weight"])
@on_ranks(2)
def test_ranks_that_shard_the_model_step_like_one_process_on_all_their_batches(weighed):
    from torch.distributed.fsdp import fully_shard  # takes a second

    warnings.filterwarnings("ignore", CUT.format(3, "1 batch"))
    sizes, options = (UNEVEN_RANKS, {"batch_weight": samples}) if weighed else (SIZES, {})
    own = data_of(sizes)[torch.distributed.get_rank()]
    for name, (case, windows, _) in CASES.items():
        if "fails_at" in case:
            continue
        model, data, action = Weighted(), own[: case.get("count", 6)], case.get("action")
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        trainer, steps = trainer_of(model, case["size"], clip_grad_norm=LIMIT_RANKS, **options)
        if action is not None:
            at(trainer, Events.ITERATION_COMPLETED, ACTIONS[action], 4)
        trainer.run(data if case.get("sized", True) else Sizeless(*data), max_epochs=2)
        if action == "pause":
            trainer.run(data, max_epochs=2)
        whole = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
        weights = expected(union(sizes, windows), lambda parameters: nn.utils.clip_grad_norm_(parameters, LIMIT_RANKS))
        torch.testing.assert_close(whole, weights, atol=1e-7, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert len(steps) == len(windows), name


@on_ranks(2)
def test_ranks_that_shard_the_model_and_have_batches_of_different_sizes_step_like_one_process():
    from torch.distributed.fsdp import fully_shard

    [(x, y)] = batches_of(7)
    for size, windows in ((1, [[0], [1]]), (2, [[0, 1]])):
        model, alone = Weighted(), Weighted()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        shares = []
        trainer, _ = trainer_of(model, size)
        at(trainer, Events.ITERATION_COMPLETED, lambda engine, shares=shares: shares.append(engine.batch_share), 2)
        trainer.run(auto_dataloader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=False))
        assert shares[0] != 1.0
        optimizer = torch.optim.SGD(alone.parameters(), RATE)
        for window in windows:
            optimizer.zero_grad()
            for batch in window:
                (squared(alone(x[batch * 4 :][:4]), y[batch * 4 :][:4]) / len(window)).backward()
            optimizer.step()
        whole = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(whole, weights_of(alone), atol=1e-8, rtol=0)


class Small(nn.Sequential):
    """A model whose layers can be split over ranks."""

    def __init__(self):
        super().__init__(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh())
        self.double()


def sharded_and_replicated(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def sharded_and_tensor_parallel(model):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def sharded_in_the_older_way(model):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, **options)


def wrapped_inside(model):
    return nn.Sequential(DistributedDataParallel(model))


WRAPPERS = {  # and the number of ranks that divide the data
    sharded_and_replicated: 4,
    sharded_and_tensor_parallel: 2,
    sharded_in_the_older_way: 4,
    wrapped_inside: 4,
}


@on_ranks(4)
def test_weights_of_batches_are_averaged_over_the_ranks_that_gradients_are_averaged_over():
    sizes = [(5, 1, 2, 3), (1, 4, 2, 1), (2, 2, 7, 1), (3, 1, 1, 1)]
    inputs = batches_of(3)[0][0]
    for wrap, divide in WRAPPERS.items():
        torch.manual_seed(0)
        alone = Small()
        wrapped = wrap(copy.deepcopy(alone))
        data = data_of(sizes[:divide])
        own = data[torch.distributed.get_rank() * divide // 4]
        trainer, _ = trainer_of(wrapped, 2, batch_weight=samples)
        trainer.run(own, max_epochs=2)
        windows = [[batches[index] for batches in data for index in window] for window in [(0, 1), (2, 3)]]
        big = [tuple(torch.cat(parts) for parts in zip(*window, strict=True)) for window in windows]
        with pytest.warns(UserWarning, match="each of the 4 ranks trains a model of its own"):
            trainer, _ = trainer_of(alone, 1)
        trainer.run(big, max_epochs=2)
        torch.testing.assert_close(
            wrapped(inputs), alone(inputs), atol=1e-8, rtol=0, msg=lambda text, wrap=wrap: f"{wrap}: {text}"
        )


@on_ranks(2)
def test_ranks_exchange_gradients_again_after_an_error_between_exchanges():
    model = DistributedDataParallel(Weighted())
    trainer, _ = trainer_of(model, 4)
    synchronized = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda e: synchronized.append(model.require_backward_grad_sync))
    with pytest.raises(ValueError, match="unpack"):
        trainer.run([*batches_of(2, 2), ("no pair",)], max_epochs=2)
    assert synchronized == [True] * 3
    with pytest.raises(RuntimeError, match="size"), pytest.warns(UserWarning, match="lost accumulated gradients"):
        trainer.run([(torch.ones(2, 3), torch.ones(2, 1))] * 3, max_epochs=2)
    assert model.require_backward_grad_sync
