"""Jobs on GPUs: every layout, lower precision, and sharded saves, on one rank and on one rank per GPU."""

from __future__ import annotations

import pytest
import torch

import camshaft.distributed as idist
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.engine import Events, create_supervised_trainer
from camshaft.handlers import Checkpoint
from tests.distributed.test_layouts import PLAN, Tagger, data, token_loss, trained, whole_weights
from tests.gpu.devices import ON_GPU, no_synchronization

BACKEND, SIZES = ("nccl", sorted({1, torch.cuda.device_count()})) if ON_GPU else ("gloo", [2])
STEPS, EPOCHS = (20, 16) if ON_GPU else (2, 5)  # tests/distributed and tests/engine cover the CPU


class OnCPU(SerialBackend):
    """A run of one process that does not use the GPU."""

    device = torch.device("cpu")


def layouts(size):
    """Return the layouts that fit on a number of ranks; without sizes, the model is wrapped for data parallelism."""
    found = {"fsdp2": {"dp_shard": size}}
    if size > 1 and ON_GPU:
        found["ddp"] = {"dp_replicate": size}
    if size in (2, 4) and ON_GPU:  # the layers have 12 features
        found["tp"] = {"tp": size}
    if size >= 4 and size % 2 == 0:
        found["hsdp"] = {"dp_replicate": 2, "dp_shard": size // 2}
        found["fsdp2 + tp"] = {"dp_shard": size // 2, "tp": 2}
        found["ddp + tp"] = {"dp_replicate": size // 2, "tp": 2}
    if size >= 8 and size % 4 == 0:
        found["hsdp + tp"] = {"dp_replicate": 2, "dp_shard": size // 4, "tp": 2}
    return found


def make(sizes, batch_size, **options):
    """Return a model in single precision, its optimizer, its trainer, and its data."""
    torch.manual_seed(1)
    mesh = idist.make_mesh(**sizes)
    model = idist.auto_model(Tagger().float(), mesh=mesh, tensor_plan=PLAN if "tp" in sizes else None)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.02))
    trainer = create_supervised_trainer(
        model, optimizer, token_loss, idist.device(), non_blocking=True, clip_grad_norm=1.0, **options
    )
    return model, optimizer, trainer, idist.auto_dataloader(data(), batch_size=batch_size, seed=2)


def check_weights(sizes):
    """Compare double precision with one process on the CPU."""
    batch_size = max(8, 2 * idist.get_world_size())
    with idist.use_backend(OnCPU()):
        alone = trained(None, batch_size, STEPS)
    for one, other in zip(trained(sizes, batch_size, STEPS), alone, strict=True):
        assert one.device == idist.device()
        torch.testing.assert_close(one.cpu(), other, atol=1e-6, rtol=0)


def check_precision(sizes):
    """Train in lower precision; a scaler whose scale is too large skips a step on all ranks."""
    for dtype in (torch.float16, torch.bfloat16):
        scaler = None
        if dtype == torch.float16:  # skips the first step
            scaler = torch.amp.GradScaler(idist.device().type, init_scale=2.0**24, backoff_factor=2.0**-12)
        model, _, trainer, loader = make(sizes, 27, amp_mode="amp", amp_dtype=dtype, scaler=scaler or False)
        losses = []

        def keep(engine, losses=losses):
            losses.append(idist.all_reduce(float(engine.state.output)))

        trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
        trainer.run(loader, max_epochs=EPOCHS)
        assert losses[-1] < losses[0], losses
        assert all(weight.isfinite().all() for weight in whole_weights(model))
        if scaler is not None:
            assert set(idist.all_gather(scaler.get_scale())) == {2.0**12}


def check_save(sizes, folder):
    """Save in the background during training, and resume in another object."""
    model, optimizer, trainer, loader = make(sizes, 16)
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer}
    checkpoint = Checkpoint(objects, folder, sharded=True, asynchronous=True)
    saved = []

    def save():
        saved.extend(whole_weights(model))
        with no_synchronization():
            checkpoint(trainer)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), save)
    trainer.run(loader, max_epochs=2)
    model, optimizer, trainer, loader = make(sizes, 16)
    Checkpoint.resume({"model": model, "optimizer": optimizer, "trainer": trainer}, folder)
    assert trainer.state.iteration == 3
    assert all(torch.equal(one, other) for one, other in zip(whole_weights(model), saved, strict=True))
    trainer.run(loader, max_epochs=3)
    assert trainer.state.iteration == 6


def check_all(local_rank, folder):
    """Make all checks in one job, as a process that uses a GPU takes seconds to start."""
    assert idist.device().type == ("cuda" if ON_GPU else "cpu")
    assert idist.device().index == (local_rank if ON_GPU else None)
    for name, sizes in layouts(idist.get_world_size()).items():
        for check, *arguments in ((check_weights,), (check_precision,), (check_save, f"{folder}/{name}")):
            try:
                check(sizes, *arguments)
            except Exception as error:
                raise AssertionError(f"{check.__name__} failed in the layout {name}") from error


@pytest.mark.parametrize("size", SIZES)
def test_every_layout_trains_saves_and_resumes(size, tmp_path):
    idist.spawn(BACKEND, check_all, (str(tmp_path),), nproc_per_node=size)
