"""Training in every layout ends with the weights of one process, and costs what the page on layouts says."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.engine import Events, create_supervised_trainer
from tests.docs.titled import ROOT, titled
from tests.ranks import on_ranks

LAYOUTS = (
    {"dp_replicate": 4},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2},
)
PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
STEPS = 20
PAGE = "how-to/choosing-a-layout.md"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tagger(nn.Module):
    """Predicts a class for each token of a sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 5)
        self.double()

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # not a view, of which fully_shard warns


def data():
    """Return sequences of different lengths: classes of -100 do not count. The last batch of an epoch is uneven."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, (27, 6), generator=generator)
    classes = torch.where(torch.rand(27, 6, generator=generator) < 0.3, -100, (tokens * 3 + 1) % 5)
    classes[:, 0] = tokens[:, 0] % 5
    return TensorDataset(tokens, classes)


def token_loss(scores, classes):
    return nn.functional.cross_entropy(scores, classes.flatten())


def trained(sizes=None, batch_size=8, num_steps=STEPS):
    """Train on the ranks of a mesh, or in one process; return the whole weights."""
    mesh = None if sizes is None else idist.make_mesh(**sizes)
    torch.manual_seed(7 + (0 if sizes is None else idist.get_rank()))  # rank 0 has the weights of one process
    model = idist.auto_model(Tagger(), mesh=mesh, tensor_plan=PLAN if sizes and "tp" in sizes else None)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    loader = idist.auto_dataloader(data(), batch_size=batch_size, shuffle=True, seed=3)
    trainer = create_supervised_trainer(
        model, optimizer, token_loss, idist.device(), clip_grad_norm=0.4, gradient_accumulation_steps=2,
        batch_weight=lambda x, y: (y != -100).sum(),
    )  # fmt: skip
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: len(steps) == num_steps and trainer.terminate())
    trainer.run(loader, max_epochs=num_steps)
    assert len(steps) == num_steps
    return whole_weights(model)


def whole_weights(model):
    return [getattr(one, "full_tensor", one.clone)() for one in (tensor.detach() for tensor in model.parameters())]


def costs_of_page(name="costs"):
    """Run the script on the page; return its names."""
    names: dict[str, Any] = {"__name__": name}
    exec(titled(PAGE, "costs.py"), names)
    return names


def test_the_page_on_layouts_shows_what_its_script_prints(capsys):
    costs_of_page("__main__")
    printed = capsys.readouterr().out
    text = (ROOT / "docs" / PAGE).read_text("utf-8")
    assert f"```console\n{printed}```" in text
    shown = re.findall(r"^\| ([\w+]+) \| ([\d.]+ GB) \| ([\d.]+ GB) \|", text, re.MULTILINE)
    assert [" ".join(row) for row in shown] == [" ".join(line.split()) for line in printed.splitlines()]


class Collectives(TorchDispatchMode):
    """Adds up the bytes of the gathered, scattered, and reduced tensors."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own operations follow
        name = function.overloadpacket.__name__.replace("_", "")
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            if "c10d" in function.namespace and kind.replace("_", "") in name:
                self.bytes[kind] += max(one.nbytes for one in tree_leaves(args) if isinstance(one, torch.Tensor))
        return function(*args, **kwargs or {})


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Pairs(nn.Module):
    """Blocks of two layers that can be split, and nothing else."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + 0.0  # not a view, of which fully_shard warns


def check_costs():
    """Compare the memory and the collectives of a step with what the page computes."""
    page = costs_of_page()
    weights = sum(parameter.numel() for parameter in Pairs().parameters())
    page.update(BLOCKS=2, WIDTH=8, LENGTH=5, WEIGHTS=weights)
    sequences = 12
    for name, sizes in page["LAYOUTS"].items():
        mesh = idist.make_mesh(**sizes)
        model = idist.auto_model(Pairs(), mesh=mesh, tensor_plan=PLAN if "tp" in sizes else None)
        optimizer = idist.auto_optim(torch.optim.Adam(model.parameters()))
        x = torch.randn(sequences // idist.get_data_parallel_size(), 5, 8, requires_grad=True)
        for _ in range(2):  # the first step initializes
            optimizer.zero_grad()
            with Collectives() as found:
                model(x).sum().backward()
            optimizer.step()
        expected = Counter()
        for (kind, axis), size in page["collectives"](sequences, **sizes).items():
            expected[kind] += size if sizes.get(axis, 1) > 1 else 0
        assert found.bytes == expected, name
        states = [one for state in optimizer.state.values() for one in (state["exp_avg"], state["exp_avg_sq"])]
        tensors = [*model.parameters(), *(one.grad for one in model.parameters()), *states]
        held = sum(getattr(one, "to_local", lambda one=one: one)().nbytes for one in tensors)
        assert held == page["memory"](**sizes), name


@pytest.mark.jobs
@on_ranks(4)
def test_every_layout_ends_with_the_weights_of_one_process_and_costs_what_the_page_says():
    check_costs()
    with idist.use_backend(SerialBackend()):
        alone = trained()
    torch.manual_seed(7)
    start = Tagger()
    assert max((one - other).abs().max() for one, other in zip(alone, start.parameters(), strict=True)) > 0.1
    for sizes in LAYOUTS:
        distance = max((one - other).abs().max() for one, other in zip(trained(sizes), alone, strict=True))
        assert distance < 1e-6, (sizes, distance)
