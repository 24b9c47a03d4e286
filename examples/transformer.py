"""Train a small byte-level transformer on paragraphs of any length.

By default, the text is the documentation of this repository. Paragraphs are padded, so batches contain different
numbers of bytes. An optimizer step uses several batches on several ranks, and `batch_weight` gives every byte in it the
same weight. With the same --checkpoints, a later run resumes from the last checkpoint.

    python examples/transformer.py
    python examples/transformer.py --text ~/books/*.txt --layers 6 --width 384 --epochs 20 --checkpoints runs/books
    torchrun --nproc_per_node 2 examples/transformer.py --backend gloo
    mpirun -np 2 python examples/transformer.py --backend mpi
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import Checkpoint, Throughput
from camshaft.utils import manual_seed

LONGEST = 160  # maximum bytes of a paragraph
PADDING = -1  # target at positions without a byte to predict
END = 10  # a line feed, at the start and the end of each paragraph


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
    return (
        nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=PADDING) / torch.tensor(2.0).log()
    )


class Transformer(nn.Module):
    """Predict each byte from those before it; return logits of shape [paragraphs, bytes, 256]."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LONGEST + 1, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        places = self.places(torch.arange(length, device=x.device))
        scores: Tensor = self.scores(self.layers(self.bytes(x) + places, mask, is_causal=True))
        return scores


@torch.no_grad()
def write(model: nn.Module, start: str) -> str:
    """Complete a paragraph with the model."""
    model.eval()
    written = torch.tensor([[END, *start.encode()]], device=idist.device())
    while written.shape[1] <= LONGEST and (len(start) == written.shape[1] - 1 or written[0, -1] != END):
        chances = (model(written)[0, -1] / 0.6).softmax(0)
        written = torch.cat([written, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(written[0, 1:].tolist()).decode(errors="replace").strip()


def training(local_rank: int, config: argparse.Namespace) -> float:
    """Train and return the bits per byte on held-out paragraphs; runs in every process."""
    manual_seed(config.seed)
    paragraphs: Any = load_paragraphs(config.text)
    options = {"batch_size": config.batch_size, "collate_fn": pad}
    held_out = idist.auto_dataloader(paragraphs[::10], shuffle=False, **options)
    others: Any = [one for index, one in enumerate(paragraphs) if index % 10]
    data = idist.auto_dataloader(others, shuffle=True, seed=config.seed, **options)

    network = Transformer(config.layers, config.width)
    model = idist.auto_model(network)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    trainer = create_supervised_trainer(
        model, optimizer, loss_fn, device=idist.device(), clip_grad_norm=1.0,
        gradient_accumulation_steps=config.accumulate, batch_weight=bytes_in,
    )  # fmt: skip
    Throughput(tokens=lambda batch: bytes_in(*batch)).attach(trainer, Events.EPOCH_COMPLETED)

    def bits_and_bytes(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
        count = bytes_in(x, y)
        return torch.stack([loss_fn(scores, y) * count, count])

    evaluator = create_supervised_evaluator(model, device=idist.device(), output_transform=bits_and_bytes)

    @evaluator.on(Events.STARTED)
    def reset(engine: Engine) -> None:
        engine.state.sums = torch.zeros(2, device=idist.device())

    @evaluator.on(Events.ITERATION_COMPLETED)
    def add(engine: Engine) -> None:
        engine.state.sums += engine.state.output

    @evaluator.on(Events.COMPLETED)
    def divide(engine: Engine) -> None:
        bits, count = idist.all_reduce(engine.state.sums).tolist()
        engine.state.metrics["bits per byte"] = bits / count

    @trainer.on(Events.EPOCH_COMPLETED)
    def show(engine: Engine) -> None:
        bits = evaluator.run(held_out).metrics["bits per byte"]
        if idist.get_rank() == 0:
            speed = engine.state.metrics["tokens_per_second"]
            print(f"epoch {engine.state.epoch}: {bits:.3f} bits per byte; {speed:.0f} bytes/s", flush=True)

    if config.checkpoints:
        objects = {"trainer": trainer, "model": model, "optimizer": optimizer}
        checkpoint = Checkpoint(objects, config.checkpoints)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        checkpoint.resume_latest()  # does nothing without a checkpoint

    trainer.run(data, max_epochs=config.epochs)
    if idist.get_rank() == 0:
        print(write(network, config.start), flush=True)
    return float(evaluator.run(held_out).metrics["bits per byte"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="training text (default: the documentation)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default: 2)")
    parser.add_argument("--width", type=int, default=96, help="embedding size, a multiple of 32 (default: 96)")
    parser.add_argument(
        "--epochs", type=int, default=8, help="passes over the text, including those before a resume (default: 8)"
    )
    parser.add_argument("--batch_size", type=int, default=8, help="paragraphs in a batch, over all processes")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step (default: 2)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--start", default="The ", help="start of the paragraph to complete at the end")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder for the newest checkpoint, from which a later run resumes"
    )
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
