"""Train a variational autoencoder on handwritten digits, and draw new ones from noise.

    python examples/vae.py

The digits are the 1,797 images of 8 x 8 pixels that come with scikit-learn. After each tenth epoch you see the loss
on images that are not trained on, in nats per image, split into the cost of the reconstruction and that of the code.
At the end, digits are printed as text: in the first row originals, in the second their reconstructions, in the third
new ones that the decoder draws from random codes.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from camshaft.engine import Engine, Events
from camshaft.utils import manual_seed


class Autoencoder(nn.Module):
    """Encodes an image as the mean and the logarithm of the variance of a normal distribution, and decodes samples."""

    def __init__(self, pixels: int = 64, codes: int = 8, hidden: int = 128) -> None:
        super().__init__()
        self.codes = codes
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 2 * codes))
        self.decoder = nn.Sequential(nn.Linear(codes, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(sample), mean, log_variance


def as_text(images: Tensor) -> str:
    """Format images side by side, two characters per pixel."""
    rows = torch.cat([*images.reshape(-1, 8, 8)], dim=1).mul(4).round().int().tolist()
    return "\n".join("".join(" .:*#"[pixel] * 2 for pixel in row) for row in rows)


def training(config: argparse.Namespace) -> float:
    """Train, and return the loss on the images that are not trained on."""
    from sklearn import datasets

    manual_seed(config.seed)
    images = torch.tensor(datasets.load_digits().data, dtype=torch.float32) / 16
    images = images[torch.randperm(len(images))]
    loader = DataLoader(TensorDataset(images[300:]), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(images[:300]), batch_size=300)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def costs(images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cost of the reconstruction and the divergence of the codes from a standard normal distribution."""
        drawn, mean, log_variance = model(images)
        reconstruction = binary_cross_entropy_with_logits(drawn, images, reduction="sum")
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        return reconstruction / len(images), divergence / len(images)

    def train_step(engine: Engine, batch: list[Tensor]) -> float:
        model.train()
        reconstruction, divergence = costs(batch[0])
        loss = reconstruction + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluation_step(engine: Engine, batch: list[Tensor]) -> tuple[float, float]:
        model.eval()
        reconstruction, divergence = costs(batch[0])
        return reconstruction.item(), divergence.item()

    trainer, evaluator = Engine(train_step), Engine(evaluation_step)

    @trainer.on(Events.EPOCH_COMPLETED(every=10))
    def evaluate(engine: Engine) -> None:
        reconstruction, code = evaluator.run(held_out).output
        total = reconstruction + code
        print(
            f"epoch {engine.state.epoch}: {total:.2f} nats, {reconstruction:.2f} to reconstruct, {code:.2f} to encode"
        )

    trainer.run(loader, max_epochs=config.epochs)
    loss = sum(evaluator.run(held_out).output)
    with torch.no_grad():
        print(as_text(images[:6]))
        print(as_text(model(images[:6])[0].sigmoid()))
        print(as_text(model.decoder(torch.randn(6, model.codes)).sigmoid()))
    return float(loss)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100, help="passes over the digits (default: 100)")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
