"""Train a generator to draw digits that a discriminator cannot distinguish from handwritten ones.

    python examples/gan.py
    torchrun --nproc_per_node 2 examples/gan.py --backend gloo
    mpirun -np 2 python examples/gan.py --backend mpi

Two networks and two optimizers share one step, which fires custom events. The digits are the 1,797 images of 8 x 8
pixels that come with scikit-learn. Every 500 steps you see the distance between drawings and digits, which falls, and
at the end some drawings as text.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.engine import Engine, EventEnum, Events
from camshaft.handlers import EMAHandler
from camshaft.utils import manual_seed

NOISE = 16


class Steps(EventEnum):
    """Fired by the training step after each update of one of the networks."""

    DISCRIMINATOR_STEP = "discriminator_step"
    GENERATOR_STEP = "generator_step"


def load_digits() -> Tensor:
    """Return images with values from -1 (white) to 1 (black), of shape [1797, 64]."""
    from sklearn import datasets

    return torch.tensor(datasets.load_digits().data, dtype=torch.float32) / 8 - 1


def make_networks() -> tuple[nn.Module, nn.Module]:
    def network(inputs: int, outputs: int) -> nn.Sequential:
        hidden = (nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2))
        return nn.Sequential(*hidden, nn.Linear(128, outputs))

    return network(NOISE, 64).append(nn.Tanh()), network(64, 1)


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Return the Fréchet distance of two sets of drawings, from their means and covariances."""
    means, covariances = zip(*((part.mean(0), part.T.cov()) for part in (one.double(), other.double())), strict=True)
    common = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    distance = (means[0] - means[1]).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * common
    return float(distance)


def as_text(drawings: Tensor) -> str:
    """Format drawings side by side, one character per pixel."""
    rows = torch.cat([*drawings.reshape(-1, 8, 8)], dim=1).add(1).mul(2).round().int().tolist()
    return "\n".join("".join(" .:*#"[pixel] * 2 for pixel in row) for row in rows)


def training(local_rank: int, config: argparse.Namespace) -> float:
    """Train and return the final distance between drawings and digits; runs in every process."""
    manual_seed(config.seed + idist.get_data_parallel_rank())  # noise; auto_model broadcasts the weights of rank 0
    digits = load_digits()
    loader = idist.auto_dataloader(TensorDataset(digits), batch_size=config.batch_size, shuffle=True, seed=config.seed)
    drawing, judging = make_networks()
    generator, discriminator = idist.auto_model(drawing), idist.auto_model(judging)
    generator_optimizer, discriminator_optimizer = (
        idist.auto_optim(torch.optim.Adam(model.parameters(), lr=config.lr, betas=(0.5, 0.9)))
        for model in (generator, discriminator)
    )

    def noise(count: int) -> Tensor:
        return torch.randn(count, NOISE, device=idist.device())

    def step(engine: Engine, batch: list[Tensor]) -> dict[str, float]:
        real = batch[0].to(idist.device())
        with torch.no_grad():
            drawn = drawing(noise(len(real)))
        discriminator_optimizer.zero_grad()
        for_real, for_drawn = discriminator(torch.cat([real, drawn])).chunk(2)
        discriminator_loss = (softplus(-for_real) + softplus(for_drawn)).mean()
        (discriminator_loss * engine.batch_share).backward()
        discriminator_optimizer.step()
        engine.state.discriminator_steps += 1
        engine.fire_event(Steps.DISCRIMINATOR_STEP)

        judging.requires_grad_(False)  # it is not trained in this half: ranks exchange no gradients of it
        generator_optimizer.zero_grad()
        generator_loss = softplus(-judging(generator(noise(len(real))))).mean()
        (generator_loss * engine.batch_share).backward()
        generator_optimizer.step()
        judging.requires_grad_(True)
        engine.state.generator_steps += 1
        engine.fire_event(Steps.GENERATOR_STEP)
        return {"discriminator": discriminator_loss.item(), "generator": generator_loss.item()}

    trainer = Engine(step)
    counters = {Steps.DISCRIMINATOR_STEP: "discriminator_steps", Steps.GENERATOR_STEP: "generator_steps"}
    trainer.register_events(*Steps, event_to_attr=counters)  # filters such as `every` use these

    # the averaged weights of the generator draw better than those of any single step
    average = EMAHandler(drawing, momentum=0.005, momentum_warmup=0.2, warmup_iters=500)
    average.attach(trainer, event=Steps.GENERATOR_STEP)

    def distance() -> float:
        with torch.no_grad():
            return frechet_distance(digits, average.ema_model(noise(len(digits))).cpu())

    @trainer.on(Events.STARTED | Steps.GENERATOR_STEP(every=config.show_every))
    @idist.one_rank_only()
    def show(engine: Engine) -> None:
        losses = ", ".join(f"{name} loss {loss:.3f}" for name, loss in (engine.state.output or {}).items())
        print(f"step {engine.state.generator_steps}: distance {distance():.2f}{losses and ', '}{losses}", flush=True)

    trainer.run(loader, max_epochs=config.epochs)
    if idist.get_rank() == 0:
        with torch.no_grad():
            print(as_text(average.ema_model(noise(8)).cpu()), flush=True)
    return distance()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100, help="passes over the digits (default: 100)")
    parser.add_argument("--batch_size", type=int, default=64, help="digits in a batch, over all processes")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of both networks (default: 0.001)")
    parser.add_argument("--show_every", type=int, default=500, help="generator steps between two lines of output")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
