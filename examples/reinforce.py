"""Learn to balance a pole on a cart by trial and error: an engine without a data set.

    python examples/reinforce.py
    python examples/reinforce.py --gymnasium
    torchrun --nproc_per_node 2 examples/reinforce.py --backend gloo

Each iteration plays games and makes pushes that worked better than expected more likely (REINFORCE). After each epoch
you see for how many moves the pole stays up: 30 at first, and 475 of 500 at the end. The cart is simulated below.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.utils import manual_seed

LONGEST = 500  # moves after which a game is won


class CartPoles:
    """A batch of carts, each with a pole, to be pushed left (0) or right (1)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def reset(self) -> Tensor:
        """Return the initial states (position, velocity, angle, angular velocity), of shape [count, 4]."""
        self.states = torch.rand(self.count, 4, device=idist.device()) / 10 - 0.05
        return self.states

    def step(self, pushes: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by 0.02 s; return the states, and which games are lost."""
        _, velocity, angle, spin = self.states.unbind(1)
        force = (20.0 * pushes - 10 + 0.05 * spin**2 * angle.sin()) / 1.1  # the cart weighs 1 kg, the pole 0.1 kg
        turn = (9.8 * angle.sin() - angle.cos() * force) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = force - 0.05 * turn * angle.cos() / 1.1
        self.states = self.states + 0.02 * torch.stack([velocity, push, spin, turn], dim=1)
        return self.states, (self.states[:, 0].abs() > 2.4) | (self.states[:, 2].abs() > 0.2095)


class Gymnasium:
    """The same carts, from gymnasium."""

    def __init__(self, count: int, seed: int) -> None:
        import gymnasium  # type: ignore[import-not-found, unused-ignore]

        self.count = count
        self.games = gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="sync")
        self.games.reset(seed=seed)

    def reset(self) -> Tensor:
        return torch.as_tensor(self.games.reset()[0], device=idist.device())

    def step(self, pushes: Tensor) -> tuple[Tensor, Tensor]:
        states, _, lost, _, _ = self.games.step(pushes.cpu().numpy())
        return torch.as_tensor(states, device=idist.device()), torch.as_tensor(lost, device=idist.device())


@torch.no_grad()
def play(carts: Any, policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Play all games; return the states, the pushes, and which games were still running, as [moves, games, ...]."""
    states, on = carts.reset(), torch.ones(carts.count, dtype=torch.bool, device=idist.device())
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    while on.any() and len(moves) < LONGEST:
        pushes = Categorical(logits=policy(states)).sample()
        moves.append((states, pushes, on))
        states, lost = carts.step(pushes)
        on = on & ~lost
    return tuple(torch.stack(part) for part in zip(*moves, strict=True))  # type: ignore[return-value]  # three of them


def expected_returns(on: Tensor, discount: float) -> Tensor:
    """Return the discounted number of moves that each game continued after each move, in the shape of ``on``."""
    returns: list[Tensor] = []
    after = torch.zeros(on.shape[1], device=on.device)
    for still in on.flip(0).float():
        after = still * (1 + discount * after)
        returns.append(after)
    return torch.stack(returns).flip(0)


def training(local_rank: int, config: argparse.Namespace) -> list[float]:
    """Train and return the mean length of the games in each epoch; runs in every process."""
    manual_seed(config.seed + idist.get_data_parallel_rank())  # games; auto_model broadcasts the weights of rank 0
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    policy = idist.auto_model(network)
    optimizer = idist.auto_optim(torch.optim.Adam(policy.parameters(), lr=config.lr))
    seed = config.seed + config.games * idist.get_rank()
    carts = Gymnasium(config.games, seed) if config.gymnasium else CartPoles(config.games)
    lengths: list[float] = []

    def step(engine: Engine, batch: None) -> Tensor:
        states, pushes, on = play(carts, network)
        returns = expected_returns(on, config.discount)
        advantages = (returns - returns[on].mean()) / returns[on].std()
        optimizer.zero_grad()
        log_chances = Categorical(logits=policy(states)).log_prob(pushes)
        (-(log_chances * advantages)[on].sum() / config.games).backward()
        optimizer.step()
        moves: Tensor = on.sum() / config.games
        return moves

    trainer = Engine(step)

    @trainer.on(Events.EPOCH_STARTED)
    def reset(engine: Engine) -> None:
        engine.state.moves = 0

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(engine: Engine) -> None:
        engine.state.moves += engine.state.output

    @trainer.on(Events.EPOCH_COMPLETED)
    def show(engine: Engine) -> None:
        mean = idist.all_reduce(engine.state.moves).item() / config.epoch_length / idist.get_world_size()
        lengths.append(mean)
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: the pole stays up for {mean:.0f} moves", flush=True)
        if mean > 0.95 * LONGEST:  # the mean is the same on all ranks, so all of them stop
            engine.terminate()

    trainer.run(max_epochs=config.epochs, epoch_length=config.epoch_length)
    return lengths


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="maximum; ends when the game is won (default: 20)")
    parser.add_argument("--epoch_length", type=int, default=5, help="policy updates per epoch (default: 5)")
    parser.add_argument("--games", type=int, default=32, help="games per update and process (default: 32)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--discount", type=float, default=0.99, help="discount factor per move (default: 0.99)")
    parser.add_argument("--gymnasium", action="store_true", help="play CartPole-v1 of the library gymnasium")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
