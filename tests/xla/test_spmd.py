"""SPMD: one process uses two devices; batches are sharded, everything else behaves as with one device."""

from __future__ import annotations

import logging

import torch
import torch_xla
import torch_xla.runtime as runtime
from torch import nn

import camshaft.distributed as idist
from camshaft.engine import create_supervised_trainer
from tests.distributed.check_training import DATA, numbers_of
from tests.xla.processes import call_alone

CUT = "{devices=[2,1]0,1}"
WHOLE = ("", "{replicated}")


def layout(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def model_with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def train(model, optimizer, loader, device):
    seen = []
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), device)
    trainer.add_event_handler(
        "GET_BATCH_COMPLETED",
        lambda engine: seen.append((len(engine.state.batch[0]), *map(layout, engine.state.batch))),
    )
    trainer.run(loader, max_epochs=3)
    return numbers_of(model), seen


def train_on_two_devices():
    idist.initialize("xla-tpu", spmd=True)
    assert (idist.model_name(), idist.backend(), idist.get_world_size()) == ("xla-dist", "xla-tpu", 1)
    assert runtime.global_runtime_device_count() == 2

    model = idist.auto_model(model_with_batch_norm(), sync_bn=True)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = idist.auto_dataloader(DATA, batch_size=6)
    assert (len(loader), len(loader.dataset)) == (3, 16)
    got, seen = train(model, optimizer, loader, idist.device())
    assert seen == [(size, CUT, CUT) for size in (6, 6, 4)] * 3
    shards = torch_xla._XLAC._get_local_shards([next(iter(loader))[0]])[0]
    assert [(tuple(shard.shape), device) for shard, device in shards] == [((3, 3), "CPU:0"), ((3, 3), "CPU:1")]

    alone = model_with_batch_norm()
    plain = torch.utils.data.DataLoader(DATA, batch_size=6)
    start = numbers_of(alone)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for inputs, targets in plain:
            optimizer.zero_grad()
            nn.functional.mse_loss(alone(inputs), targets).backward()
            optimizer.step()
    for one, (name, other) in zip(got, [*alone.named_parameters(), *alone.named_buffers()], strict=True):
        if name != "1.running_var":  # torch_xla computes it differently, also on one device
            torch.testing.assert_close(one, other.detach(), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(got[4], start[4], rtol=1e-2, atol=1e-2), "the steps change the weights"


def test_training_on_two_devices_matches_one_process():
    call_alone(train_on_two_devices, CPU_NUM_DEVICES="2")


def exchange():
    logging.basicConfig(level=logging.INFO, force=True)
    idist.spawn("xla-tpu", among_two_devices, (), spmd=True)
    assert idist.model_name() == "serial"


def among_two_devices(local_rank):
    assert local_rank == 0
    tensor = torch.arange(4.0).to(idist.device())
    assert idist.all_reduce(tensor) is tensor
    assert tensor.tolist() == idist.broadcast(tensor).tolist() == idist.all_gather(tensor).tolist() == [0, 1, 2, 3]
    assert idist.all_reduce(2**53 + 1) == 2**53 + 1
    assert idist.all_gather({"a": [1]}) == [{"a": [1]}]
    idist.barrier()

    model = idist.auto_model(model_with_batch_norm())
    assert {layout(tensor) for tensor in model.state_dict().values()} <= set(WHOLE)

    odd = torch.arange(7.0)
    batches = list(idist.auto_dataloader(odd, batch_size=4))
    assert [layout(batch) for batch in batches] == ["{devices=[2]0,1}", WHOLE[1]]
    assert torch.cat([batch.cpu() for batch in batches]).equal(odd)
    assert batches[1].mean().item() == 5.0


def test_collectives_behave_as_in_one_process_and_uneven_batches_are_replicated():
    output = call_alone(exchange, CPU_NUM_DEVICES="2")
    assert "INFO:camshaft.distributed.utils:SPMD over 2 CPU devices" in output


def adopt():
    runtime.use_spmd()
    assert idist.model_name() == "serial", "the runtime has not started"
    assert torch.ones(1, device="xla").item() == 1
    assert idist.model_name() == "xla-dist"
    loader = idist.auto_dataloader(range(4), batch_size=4)
    assert layout(next(iter(loader))) == "{devices=[2]0,1}"
    idist.finalize()
    idist.initialize("xla-tpu")
    assert layout(next(iter(idist.auto_dataloader(range(4), batch_size=4)))) == "{devices=[2]0,1}"


def test_a_runtime_in_spmd_mode_is_adopted():
    call_alone(adopt, CPU_NUM_DEVICES="2")
