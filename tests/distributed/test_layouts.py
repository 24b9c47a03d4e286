"""Training in every layout ends with the weights of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.engine import Events, create_supervised_trainer
from tests.ranks import on_ranks

LAYOUTS = (
    {"dp_replicate": 4},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
)
PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
STEPS = 20


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


@pytest.mark.jobs
@pytest.mark.timeout(230)
@on_ranks(4, limit=220)
def test_every_layout_ends_with_the_weights_of_one_process():
    with idist.use_backend(SerialBackend()):
        alone = trained()
    torch.manual_seed(7)
    start = Tagger()
    assert max((one - other).abs().max() for one, other in zip(alone, start.parameters(), strict=True)) > 0.1
    for sizes in LAYOUTS:
        distance = max((one - other).abs().max() for one, other in zip(trained(sizes), alone, strict=True))
        assert distance < 1e-6, (sizes, distance)
