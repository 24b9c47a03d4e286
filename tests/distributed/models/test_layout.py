"""Models distributed over a mesh by auto_model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import camshaft.distributed as idist
from tests.distributed.models.test_auto import close
from tests.distributed.test_layouts import LAYOUTS, whole_weights
from tests.ranks import on_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 4)])
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads[0](x)


WHOLE = ({"dp_replicate": 4}, {"tp": 4})  # layouts without fully_shard
PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
INPUTS = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def of_rank_0(seed):
    """Return a model whose weights differ between ranks, and the whole weights that rank 0 has."""
    torch.manual_seed(seed)
    wanted = whole_weights(Net())
    torch.manual_seed(seed + idist.get_rank())
    return Net(), wanted


def sharded_modules(model):
    found = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return [name.replace("._checkpoint_wrapped_module", "") for name in found]


# --- what is rejected, before anything is changed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"tensor_plan": {"blocks.*.upper": ColwiseParallel()}},
            ValueError,
            "'blocks.*.upper', .*: the model has",
        ),
        ({"tensor_plan": {"up": ColwiseParallel()}}, ValueError, r"'up', where \* matches one component of a name: "),
        ({"shard": [nn.Conv2d]}, ValueError, "shard matches no module, got .*: the model has Block, LayerNorm"),
        ({"mesh": "dp"}, TypeError, "mesh must be a DeviceMesh"),
        ({"shard": Block, "colour": "red"}, TypeError, "unknown options"),
    ],
)
def test_arguments_are_checked_in_a_single_process_too(arguments, error, message):
    with pytest.raises(error, match=message):
        idist.auto_model(Net(), **arguments)


@on_ranks(2)
def test_a_mesh_must_fit_the_job_and_the_model():
    with pytest.raises(ValueError, match="mesh must be given to distribute the model"):
        idist.auto_model(Net(), shard=[Block])
    with pytest.raises(ValueError, match="mesh must have all 2 ranks, along axes named as in .*: use make_mesh"):
        idist.auto_model(Net(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    by_hand = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = Net()
    with pytest.raises(ValueError, match="tensor_plan must be given, as the mesh has tp=2"):
        idist.auto_model(model, mesh=by_hand)
    assert idist.get_data_parallel_size() == 1  # the first mesh is that of the job
    with pytest.raises(ValueError, match="mesh divides the data among 2 ranks, .* but that of the job .* among 1"):
        idist.auto_model(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    with pytest.raises(ValueError, match="sync_bn must be False"):
        idist.auto_model(model, True, mesh=by_hand, tensor_plan=PLAN)
    assert not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


# --- layouts ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_each_layout_starts_with_the_weights_of_rank_0():  # tests/distributed/test_layouts.py trains in them
    for number, sizes in enumerate(LAYOUTS):
        mesh, (net, wanted) = idist.make_mesh(**sizes), of_rank_0(10 * number)
        keys = net.state_dict().keys()
        model = idist.auto_model(net, mesh=mesh, tensor_plan=PLAN if "tp" in sizes else None)
        assert isinstance(model, DistributedDataParallel) == (sizes == {"dp_replicate": 4})
        close(whole_weights(model), wanted)
        assert sharded_modules(net) == ([] if sizes in WHOLE else ["", "blocks.0", "blocks.1"])
        assert net.state_dict().keys() == keys
        if is_recomputed := "dp_shard" in sizes:  # as on the page about sharding
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        forwards = []
        net.blocks[0].up.register_forward_pre_hook(lambda *of_hook, forwards=forwards: forwards.append(1))
        model(INPUTS).square().mean().backward()
        assert len(forwards) == (2 if is_recomputed else 1)


@on_ranks(2)
def test_what_is_sharded_and_how_is_up_to_the_user():
    mesh = idist.make_mesh(dp_shard=2)

    def sharded(shard, **options):
        return idist.auto_model(Net(), mesh=mesh, shard=shard, **options)

    assert sharded_modules(sharded(None)) == ["", "blocks.0", "blocks.1"]
    assert sharded_modules(sharded([nn.Linear, Block]))[:4] == ["", "heads.0", "blocks.0", "blocks.0.up"]
    assert sharded_modules(sharded(lambda module: isinstance(module, nn.LayerNorm))) == [
        "",
        *(f"blocks.{n}.norm" for n in (0, 1)),
    ]
    assert sharded_modules(sharded([])) == [""]
    in_host_memory = sharded(None, offload_policy=CPUOffloadPolicy(pin_memory=False))
    torch.testing.assert_close(in_host_memory(INPUTS), in_host_memory(INPUTS))
    assert sharded_modules(sharded(iter([Block]))) == ["", "blocks.0", "blocks.1"]
    nested = nn.Sequential(nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])]))
    assert sharded_modules(idist.auto_model(nested, mesh=mesh)) == ["", "0.0.0", "0.0.1"]
    assert sharded_modules(idist.auto_model(nn.Linear(2, 2), mesh=mesh)) == [""]
    assert sharded_modules(idist.auto_model(Net(), shard=Block)) == ["", "blocks.0", "blocks.1"]  # the mesh of the job
    low = sharded(None, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=False)
    assert low(INPUTS).dtype == torch.bfloat16
    compiled = torch.compile(Net(), backend="eager")
    assert idist.auto_model(compiled, mesh=mesh) is compiled
    assert sharded_modules(compiled._orig_mod) == ["", "blocks.0", "blocks.1"]
    replicated = idist.make_mesh(dp_replicate=2)
    low = idist.auto_model(Net(), mesh=replicated, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert low(INPUTS).dtype == torch.bfloat16


@on_ranks(2)
def test_tied_weights_stay_tied_or_raise():
    def tied():
        net = Net()
        net.heads.append(nn.Linear(8, 4))
        net.heads[1].weight = net.heads[0].weight
        net.blocks.append(net.blocks[0])  # the same module twice
        return net

    for sizes in {"dp_shard": 2}, {"tp": 2}:
        mesh = idist.make_mesh(**sizes)
        model = idist.auto_model(tied(), mesh=mesh, tensor_plan=PLAN if "tp" in sizes else None)
        assert model.heads[0].weight is model.heads[1].weight
        assert model.blocks[0].up.weight is model.blocks[2].up.weight
    with pytest.raises(ValueError, match=r"^heads.0.weight and heads.1.weight were tied, and would be trained separat"):
        idist.auto_model(tied(), mesh=mesh, tensor_plan={"heads.0": ColwiseParallel()})
    with pytest.raises(ValueError, match="were tied|is shared with"):  # since 2.13, torch itself notices
        idist.auto_model(tied(), mesh=idist.make_mesh(dp_shard=2), shard=nn.Linear)


def test_a_layout_has_no_effect_in_a_single_process():
    with torch.device("meta"):
        model = Net()
    before = list(model.parameters())
    for options in ({}, {"mesh": idist.make_mesh(dp_shard=-1), "shard": Block, "tensor_plan": PLAN}):
        assert idist.auto_model(model, **options) is model
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_a_model_on_the_meta_device_is_initialized_after_it_was_sharded():
    with torch.device("meta"):
        model = Net()
    idist.auto_model(model, mesh=idist.make_mesh(dp_shard=2))
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device=idist.device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert torch.equal(whole_weights(model)[0], torch.full((4, 8), 0.5))


@on_ranks(2)
def test_what_was_distributed_by_hand_is_left_as_it_is():
    mesh = idist.make_mesh(tp=2)
    model = parallelize_module(Net(), mesh["tp"], PLAN)
    before = list(model.parameters())
    assert idist.auto_model(model) is model
    assert idist.auto_model(model, mesh=mesh) is model
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    for options in ({}, {"mesh": mesh}):
        with pytest.raises(ValueError, match="sync_bn must be False for a model that is sharded or parallelized"):
            idist.auto_model(model, sync_bn=True, **options)
    with pytest.raises(ValueError, match="tensor_plan must be None for a model that is parallelized already"):
        idist.auto_model(model, mesh=mesh, tensor_plan=PLAN)
    mesh = idist.make_mesh(dp_shard=2)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    assert idist.auto_model(model) is model
    assert idist.auto_model(model, mesh=mesh, shard=[Block]) is model
    assert sharded_modules(model) == ["blocks.0", "blocks.1"]
    wrapped = DistributedDataParallel(Net())
    assert idist.auto_model(wrapped, mesh=mesh) is wrapped
    half = nn.ModuleDict({"wrapped": wrapped, "new": nn.Linear(2, 2)})
    assert isinstance(idist.auto_model(half), DistributedDataParallel)  # else nobody would average the new gradients


@on_ranks(4)
def test_a_model_that_is_tensor_parallel_by_hand_is_sharded_along_the_other_axes():
    mesh = idist.make_mesh(dp_shard=2, tp=2)
    net, wanted = of_rank_0(5)
    model = idist.auto_model(parallelize_module(net, mesh["tp"], PLAN), mesh=mesh)
    assert sharded_modules(model) == ["", "blocks.0", "blocks.1"]
    close(whole_weights(model), wanted)


# --- optimizers that were created too early --------------------------------------------------------------------------


@on_ranks(2)
def test_an_optimizer_created_before_sharding_raises_whichever_is_adapted_first():
    mesh = idist.make_mesh(dp_shard=2)
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    idist.auto_model(net, mesh=mesh)
    message = (
        r"^optimizer SGD was created before the model was sharded: 14 of its parameters \(heads.0.weight, "
        r"heads.0.bias, blocks.0.up.weight, \.\.\.\) are not those of the sharded model, and would never change; "
        r"create it after auto_model, from model.parameters\(\)$"
    )
    with pytest.raises(ValueError, match=message):
        idist.auto_optim(optimizer)
    idist.auto_optim(SGD(net.parameters(), lr=0.1))
    net = Net()
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="optimizer SGD was created before the model was sharded: 14 of"):
        idist.auto_model(net, mesh=mesh)
    assert sharded_modules(net) == []
