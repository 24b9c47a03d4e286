"""Training of models sharded by ``fully_shard`` and ``parallelize_module``, compared with one process."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.engine import Events, create_supervised_trainer
from camshaft.engine.update import Update
from tests.engine.traces import at
from tests.layouts import Layout, Net, data_of, full_weights, made, token_loss, tokens, trained_alone
from tests.ranks import on_ranks

LIMIT = 0.2
SIZES = [[3, 1, 2, 1, 4], [1, 4, 1, 2, 2], [2, 2, 3, 1, 1], [1, 1, 1, 3, 2]]
WINDOWS = [[0, 1], [2, 3], [4]]

ON_4 = {
    "fsdp2": Layout(dp_shard=4),
    "fsdp2 of parts, without names": Layout(dp_shard=4, has_names=False, has_root=False),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "tp": Layout(tp=4),
    "fsdp2 + tp": Layout(dp_shard=2, tp=2),
}


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def check_layout(layout, num_epochs=2, change=lambda net: None):
    """Train a sharded model, and compare it with one process."""
    own, everyone = data_of(layout, SIZES)
    model = made(layout, change)
    optimizer = adamw(model.parameters())
    trainer = create_supervised_trainer(
        model,
        optimizer,
        token_loss,
        gradient_accumulation_steps=2,
        clip_grad_norm=LIMIT,
        batch_weight=tokens,
    )
    trainer.run(own, max_epochs=num_epochs)
    alone = trained_alone(everyone, WINDOWS * num_epochs, LIMIT, adamw).state_dict()
    for name, value in full_weights(model).items():
        torch.testing.assert_close(value, alone[name], atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    unclipped = trained_alone(everyone, WINDOWS * num_epochs, 1e9, adamw)
    assert not torch.allclose(unclipped.head.weight, alone["head.weight"], atol=1e-4)  # the limit matters


def check_named(name, check, *arguments):
    try:
        check(*arguments)
    except BaseException as error:
        raise AssertionError(f"in the layout {name}: {error}") from error


# --- collectives ---------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the collectives of this rank."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, sys.modules["torch.distributed.tensor"].DTensor) for kind in types):
            return NotImplemented  # its own operations follow
        name = function.overloadpacket.__name__.replace("_", "")
        if function.namespace.startswith(("c10d", "_c10d")) and not name.startswith(("wait", "wrap")):
            self.counts[name.removesuffix("base").removesuffix("intotensor").removesuffix("tensor")] += 1
        return function(*args, **kwargs or {})


def counted(function):
    """Return the collectives that a function makes on this rank, by name."""
    with Collectives() as mode:
        function()
    return mode.counts


def bare_step(model, optimizer, batches):
    """Step once as torch's own documentation does, with one norm for each mesh."""
    from torch.distributed.tensor import DTensor

    optimizer.zero_grad()
    for number, (x, y) in enumerate(batches, start=1):
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(number == len(batches), recurse=False)
        (token_loss(model(x), y) / len(batches)).backward()
    by_mesh = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([one.grad for one in group]) for group in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, LIMIT, total, foreach=False)
    optimizer.step()


def check_collectives(layout):
    own, _ = data_of(layout, SIZES)

    def count(is_bare):
        model = made(layout)
        optimizer = adamw(model.parameters())
        trainer = create_supervised_trainer(
            model, optimizer, token_loss, gradient_accumulation_steps=2, clip_grad_norm=LIMIT
        )

        def step():
            bare_step(model, optimizer, own[:2]) if is_bare else trainer.run(own[:2])

        step()  # initializes FSDP
        return counted(step)

    bare, ours = count(True), count(False)
    assert bare.keys() == ours.keys(), (bare, ours)
    assert all(ours[name] <= bare[name] for name in bare), (bare, ours)


# --- scaling -------------------------------------------------------------------------------------------------------


def check_scaler(layout):
    """Make a gradient infinite in the part of one rank and its replicas: all ranks must skip the step."""
    model = made(layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    update = Update(optimizer, clip_grad_norm=LIMIT, scaler=scaler)
    x, y = data_of(layout, SIZES)[0][0]
    before = full_weights(model)
    for is_bad in (True, False):
        optimizer.zero_grad()
        update.backward(token_loss(model(x), y))
        part = model.blocks[1].up.weight.grad.to_local()
        if is_bad and dist.get_rank() % 2 == 1:
            part[0, 0] = torch.inf
        update.apply()
        changed = [not torch.equal(before[name], value) for name, value in full_weights(model).items()]
        assert all(changed) if not is_bad else not any(changed)
        assert scaler.get_scale() == 4.0


# --- ends that cannot be foreseen ------------------------------------------------------------------------------------


def check_cut_short(layout):
    """End an epoch in a window, and fail in another: what they have is dropped."""
    own, everyone = data_of(layout, SIZES)
    model = made(layout)
    fails = iter([False] * 6 + [True])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = create_supervised_trainer(
        model, optimizer, token_loss, gradient_accumulation_steps=4, clip_grad_norm=LIMIT, batch_weight=tokens
    )
    at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), 3)

    def fail_once():
        if next(fails, False):
            raise ArithmeticError("no batch")

    trainer.add_event_handler(Events.ITERATION_STARTED, fail_once)
    with pytest.raises(ArithmeticError), pytest.warns(UserWarning, match="gradients of 3 batches are dropped"):
        trainer.run(own, max_epochs=2)
    with pytest.warns(UserWarning, match="has lost accumulated gradients"):
        trainer.run(own, max_epochs=2)  # from the beginning of the data
    windows = [[0], [1]]
    alone = trained_alone(everyone, windows, LIMIT, lambda parameters: torch.optim.SGD(parameters, 0.1)).state_dict()
    for name, value in full_weights(model).items():
        torch.testing.assert_close(value, alone[name], atol=1e-6, rtol=0)


def check_all(names):
    for name in names:
        check_named(name, check_layout, ON_4[name])
        check_named(name, check_collectives, ON_4[name])
        check_named(name, check_scaler, ON_4[name])
        if ON_4[name].data_ranks > 1:
            check_named(name, check_cut_short, ON_4[name])


@on_ranks(4)
def test_four_ranks_that_shard_a_model_step_like_one_process_with_no_more_collectives_than_bare_torch():
    check_all(["hsdp", "fsdp2 + tp"])  # in one start of the ranks


@pytest.mark.jobs
@on_ranks(4)
def test_four_ranks_step_like_one_process_in_other_layouts_too():
    check_all(["fsdp2", "fsdp2 of parts, without names", "tp"])


# --- other ranks, compiled blocks, and wrong optimizers -------------------------------------------------------------


@pytest.mark.jobs
@on_ranks(2)
def test_two_ranks_that_shard_a_model_step_like_one_process():
    for name, layout in {"fsdp2": Layout(dp_shard=2), "tp": Layout(tp=2)}.items():
        check_named(name, check_layout, layout)
        check_named(name, check_collectives, layout)


@pytest.mark.jobs
@on_ranks(8)
def test_eight_ranks_with_three_mesh_dimensions_step_like_one_process():
    check_layout(Layout(dp_replicate=2, dp_shard=2, tp=2))


def compile_blocks(net):
    for block in net.blocks:
        block.compile(backend="eager")


@pytest.mark.jobs
@on_ranks(2)
def test_blocks_may_be_compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        for name, layout in {"fsdp2": Layout(dp_shard=2), "tp": Layout(tp=2)}.items():
            check_named(name, check_layout, layout, 1, compile_blocks)


@on_ranks(2)
def test_a_scaler_that_is_disabled_has_no_effect():
    def weights_after(scaler):
        model = made(Layout(dp_shard=2))
        trainer = create_supervised_trainer(
            model, adamw(model.parameters()), token_loss, amp_mode=scaler and "amp", scaler=scaler or False
        )
        trainer.run(data_of(Layout(dp_shard=2), SIZES)[0][:1])
        return [parameter.full_tensor() for parameter in model.parameters()]

    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for one, other in zip(weights_after(scaler), weights_after(None), strict=True):
        assert one.isfinite().all()
        assert torch.allclose(one, other, atol=0.02)  # one of them was computed in lower precision


@on_ranks(2)
def test_an_optimizer_that_was_created_before_the_model_was_sharded_is_rejected():
    for layout in (Layout(dp_shard=2), Layout(tp=2)):
        model = Net()
        optimizer = adamw(model.parameters())
        layout.apply(model)
        with pytest.raises(ValueError, match=r"no longer in it, the first of shape .*: create the optimizer after"):
            create_supervised_trainer(model, optimizer, token_loss)
