"""Train a convolutional GAN on handwritten digits, and save a picture of what it draws.

    python examples/dcgan.py

The digits are the 1,797 images of 8 x 8 pixels that come with scikit-learn. After every tenth epoch you see the
losses of both networks, and 32 drawings in `runs/dcgan/epoch_10.png` and so on, always from the same noise: blots
become digits. The step trains two networks with two optimizers; for the same on several processes, and with averaged
weights, see gan.py.
"""

from __future__ import annotations

import argparse
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from camshaft.engine import Engine, Events
from camshaft.handlers import RunningAverage
from camshaft.utils import manual_seed

NOISE = 16


def make_generator(width: int = 32) -> nn.Module:
    """Return a network from noise of shape [NOISE, 1, 1] to images of shape [1, 8, 8], with values from -1 to 1."""
    return nn.Sequential(
        *(nn.ConvTranspose2d(NOISE, 2 * width, 2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh()),
    )


def make_discriminator(width: int = 32) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * width, 1)),
    )


def as_grid(images: Tensor, columns: int = 8) -> Tensor:
    """Return images side by side, in rows, with values from 0 to 1."""
    rows = nn.functional.pad(images[:, 0], (1, 1, 1, 1), value=-1).split(columns)
    return torch.cat([torch.cat([*row], dim=1) for row in rows]).add(1).div(2)


def training(config: argparse.Namespace) -> Tensor:
    """Train, and return the last drawings."""
    from matplotlib import pyplot
    from sklearn import datasets

    manual_seed(config.seed)
    digits = torch.tensor(datasets.load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    loader = DataLoader(TensorDataset(digits), batch_size=64, shuffle=True, drop_last=True)
    generator, discriminator = make_generator(), make_discriminator()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))

    def step(engine: Engine, batch: list[Tensor]) -> dict[str, Tensor]:
        drawn = generator(torch.randn(len(batch[0]), NOISE, 1, 1))
        on_real, on_drawn = discriminator(torch.cat([batch[0], drawn.detach()])).chunk(2)
        discriminator_loss = (softplus(-on_real) + softplus(on_drawn)).mean()
        discriminator_optimizer.zero_grad()
        discriminator_loss.backward()
        discriminator_optimizer.step()

        generator_loss = softplus(-discriminator(drawn)).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        return {"discriminator": discriminator_loss.detach(), "generator": generator_loss.detach()}

    trainer = Engine(step)
    for name in ("discriminator", "generator"):
        RunningAverage(output_transform=itemgetter(name)).attach(trainer, name)

    config.output.mkdir(parents=True, exist_ok=True)
    noise = torch.randn(32, NOISE, 1, 1)

    @trainer.on(Events.EPOCH_COMPLETED(every=config.draw_every))
    @torch.no_grad()
    def draw(engine: Engine) -> None:
        generator.eval()
        grid = as_grid(generator(noise))
        generator.train()
        file = config.output / f"epoch_{engine.state.epoch}.png"
        pyplot.imsave(file, grid.repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray")
        losses = ", ".join(f"{name} loss {loss:.3f}" for name, loss in engine.state.metrics.items())
        print(f"epoch {engine.state.epoch}: {losses}, saved {file}")

    trainer.run(loader, max_epochs=config.epochs)
    generator.eval()
    with torch.no_grad():
        drawings: Tensor = generator(noise)
    return drawings


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="passes over the digits (default: 60)")
    parser.add_argument("--draw_every", type=int, default=10, help="epochs between two pictures (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("runs/dcgan"), help="folder for the pictures")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
