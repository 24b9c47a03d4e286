"""Train a small byte-level transformer on paragraphs of any length, in one process or sharded over many.

You see a progress bar, after each epoch the bits per byte on paragraphs that are not trained on, which fall from 3.8 to
2.5, and at the end a paragraph that the model writes. Paragraphs are padded: `batch_weight` gives every byte in an
optimizer step the same weight. Kill these runs at any time: together they report the same losses as a single one.

    run="examples/transformer.py --checkpoints runs/text --resume"
    torchrun --nproc_per_node 4 $run --mesh dp_shard=2,tp=2
    torchrun --nproc_per_node 2 $run --mesh tp=2
    python $run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import Checkpoint, ProgressBar
from camshaft.utils import manual_seed, setup_logger

LONGEST = 160  # maximum bytes of a paragraph
PADDING = -1  # target at positions without a byte to predict
END = 10  # a line feed, at the start and the end of each paragraph
PLAN = {"blocks.layers.*.linear1": ColwiseParallel(), "blocks.layers.*.linear2": RowwiseParallel()}  # along tp
torch.backends.mha.set_fastpath_enabled(False)  # it reads all weights of a block at once, which may be on other ranks


def load_paragraphs(files: list[Path]) -> list[Tensor]:
    """Return the paragraphs of all files as tensors of bytes."""
    root = Path(__file__).parent.parent
    texts = [file.read_bytes() for file in files or [root / "README.md", *sorted(root.glob("docs/**/*.md"))]]
    paragraphs = [b" ".join(one.split()) for text in texts for one in text.split(b"\n\n")]
    return [torch.tensor([END, *one[:LONGEST], END]) for one in paragraphs if one]


def pad(paragraphs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a batch: the bytes and, for each of them, the next byte; both of shape [paragraphs, bytes]."""
    x = nn.utils.rnn.pad_sequence([one[:-1] for one in paragraphs], batch_first=True)
    y = nn.utils.rnn.pad_sequence([one[1:] for one in paragraphs], batch_first=True, padding_value=PADDING)
    return x, y


def bytes_in(x: Tensor, y: Tensor) -> Tensor:
    """Return the weight of a batch: the number of bytes to predict."""
    return (y != PADDING).sum()


def loss_fn(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the bytes to predict, in bits."""
    nats = nn.functional.cross_entropy(scores, y.flatten(), ignore_index=PADDING)
    return nats / torch.tensor(2.0).log()


class Transformer(nn.Module):
    """Predict each byte from those before it; return logits of shape [paragraphs * bytes, 256]."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LONGEST + 1, width)
        block = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        embedded = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.scores(self.blocks(embedded, mask, is_causal=True).flatten(0, 1))


@torch.no_grad()
def write(model: nn.Module) -> str:
    """Write a paragraph; all ranks must call this, as each may hold only a part of the model."""
    model.eval()
    written = torch.tensor([[END]], device=idist.device())
    while written.shape[1] <= LONGEST and (written.shape[1] == 1 or written[0, -1] != END):
        chances = (model(written)[-1] / 0.6).softmax(0)
        written = torch.cat([written, idist.broadcast(torch.multinomial(chances, 1)[None])], dim=1)
    return bytes(written[0].tolist()).decode(errors="replace").strip()


def training(local_rank: int, config: argparse.Namespace) -> None:
    """Train, and report the bits per byte on held-out paragraphs; runs in every process."""
    manual_seed(17)
    setup_logger("camshaft.handlers.checkpoint", format="%(message)s")  # says where a run resumes
    paragraphs: Any = load_paragraphs(config.text)
    others: Any = [one for index, one in enumerate(paragraphs) if index % 10]
    layout: Any = {}
    if config.mesh:
        sizes = {axis: int(size) for axis, size in (one.split("=") for one in config.mesh.split(","))}
        layout = {"mesh": idist.make_mesh(**sizes), "tensor_plan": PLAN}
    held_out = idist.auto_dataloader(paragraphs[::10], batch_size=8, collate_fn=pad, shuffle=False)
    data = idist.auto_dataloader(others, batch_size=8, collate_fn=pad, shuffle=True)

    model = idist.auto_model(Transformer(config.layers, config.width), **layout)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    trainer = create_supervised_trainer(
        model, optimizer, loss_fn, idist.device(), clip_grad_norm=1, gradient_accumulation_steps=2,
        batch_weight=bytes_in,
    )  # fmt: skip
    evaluator = create_supervised_evaluator(
        model, device=idist.device(),
        output_transform=lambda x, y, scores: torch.stack([loss_fn(scores, y) * bytes_in(x, y), bytes_in(x, y)]),
    )  # fmt: skip
    (bar := ProgressBar()).attach(trainer, output_transform=lambda loss: {"bits": loss})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        sums = torch.zeros(2, device=idist.device())
        with evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: sums.add_(evaluator.state.output)):
            evaluator.run(held_out)
        bits, count = idist.all_reduce(sums).tolist()
        bar.log_message(f"epoch {engine.state.epoch}: {bits / count:.3f} bits per byte")

    if config.checkpoints:
        objects = {"trainer": trainer, "model": model, "optimizer": optimizer}
        checkpoint = Checkpoint(objects, config.checkpoints, sharded=bool(layout))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        if config.resume:
            checkpoint.resume_latest()

    trainer.run(data, max_epochs=config.epochs)
    bar.log_message(write(model))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="training text (default: the documentation)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default: 2)")
    parser.add_argument("--width", type=int, default=96, help="embedding size, a multiple of 32 (default: 96)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the text, in all runs (default: 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--mesh", help="axes to shard the model over, such as dp_shard=2,tp=2 (default: replicas)")
    parser.add_argument("--checkpoints", type=Path, help="folder for the newest checkpoint")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint, if there is one")
    parser.add_argument("--backend", default="auto", help="gloo, nccl, mpi, ... (default: by launcher and devices)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(config.backend, config.nproc_per_node) as parallel:
        parallel.run(training, config)
