"""Learn to balance a pole on a cart with a critic, which judges moves before the game is over.

    python examples/actor_critic.py

A network chooses pushes (the actor) and predicts how soon the pole will fall (the critic). Each iteration plays 32
moves in each of 32 games, and makes those pushes more likely after which the prediction improved. These are generalized
advantage estimates with the clipped loss of proximal policy optimization (PPO). After each epoch you see after how many
moves a pole falls: fewer than 150 at first, and more than 5,000 after six to nine epochs, when the training ends. In
contrast, examples/reinforce.py has no critic and plays every game to its end.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from camshaft.engine import Engine, Events
from camshaft.utils import manual_seed

SCALE = torch.tensor([0.5, 0.5, 5.0, 0.5])  # of the inputs
LONGEST = 500  # moves after which a game is won


class CartPoles:
    """A batch of carts, each with a pole, to be pushed left (0) or right (1); a game that has is over starts again."""

    def __init__(self, count: int) -> None:
        self.states, self.moves = self.new_states(count), torch.zeros(count)

    @staticmethod
    def new_states(count: int) -> Tensor:
        """Return random states (position, velocity, angle, angular velocity), of shape [count, 4]."""
        return torch.rand(count, 4) / 10 - 0.05

    def step(self, pushes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advance by 0.02 s; return the states reached, which games are lost, and which are over: lost or won."""
        _, velocity, angle, spin = self.states.unbind(1)
        force = (20.0 * pushes - 10 + 0.05 * spin**2 * angle.sin()) / 1.1  # the cart weighs 1 kg, the pole 0.1 kg
        turn = (9.8 * angle.sin() - angle.cos() * force) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = force - 0.05 * turn * angle.cos() / 1.1
        states = self.states + 0.02 * torch.stack([velocity, push, spin, turn], dim=1)
        lost = (states[:, 0].abs() > 2.4) | (states[:, 2].abs() > 0.2095)
        over = lost | (self.moves + 1 == LONGEST)
        self.moves = (self.moves + 1) * ~over
        self.states = torch.where(over[:, None], self.new_states(len(over)), states)
        return states, lost, over


class ActorCritic(nn.Module):
    """Two small networks: the scores of both pushes, and the value of a state, from -1 (the pole falls now) to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(-2))

    def forward(self, states: Tensor) -> tuple[Categorical, Tensor]:
        inputs = states * SCALE
        return Categorical(logits=self.actor(inputs)), self.critic(inputs)


def decayed_sums(gains: Tensor, over: Tensor, decay: float) -> Tensor:
    """Add to each gain the decayed gains of the later moves of its game; the shapes are [moves, games]."""
    sums: list[Tensor] = []
    later = torch.zeros(gains.shape[1])
    for gain, ends in zip(gains.flip(0), over.flip(0), strict=True):
        later = gain + decay * later * ~ends
        sums.append(later)
    return torch.stack(sums).flip(0)


def training(config: argparse.Namespace) -> list[float]:
    """Train, and return the mean number of moves until the pole falls, in each epoch."""
    manual_seed(config.seed)
    carts, model = CartPoles(config.games), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    history: list[float] = []

    def step(engine: Engine, batch: None) -> Tensor:
        moves: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(config.moves):
                states = carts.states
                pushes = model(states)[0].sample()
                moves.append((states, pushes, *carts.step(pushes)))
            states, pushes, after, lost, over = (torch.stack(part) for part in zip(*moves, strict=True))
            values, values_after = model(states)[1], model(after)[1]
            gains = torch.where(lost, -1, config.discount * values_after) - values  # 0 if the prediction was right
            advantages = decayed_sums(gains, over, config.discount * 0.9)
            normalized = (advantages - advantages.mean()) / advantages.std()
            chances_then = model(states)[0].log_prob(pushes)
        for _ in range(config.repeats):
            chances, predictions = model(states)
            ratio = (chances.log_prob(pushes) - chances_then).exp()
            improved = torch.minimum(ratio * normalized, ratio.clamp(0.8, 1.2) * normalized)  # no reason to go further
            critic_loss = (predictions - values - advantages).square().mean()
            optimizer.zero_grad()
            (critic_loss - improved.mean() - config.entropy * chances.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return lost.sum()

    trainer = Engine(step)

    @trainer.on(Events.EPOCH_STARTED)
    def reset(engine: Engine) -> None:
        engine.state.lost = 0

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(engine: Engine) -> None:
        engine.state.lost += engine.state.output.item()

    @trainer.on(Events.EPOCH_COMPLETED)
    def show(engine: Engine) -> None:
        moves = config.epoch_length * config.moves * config.games
        history.append(moves / max(engine.state.lost, 1))
        print(f"epoch {engine.state.epoch}: the pole falls after {history[-1]:,.0f} moves", flush=True)
        if history[-1] > 10 * LONGEST:
            engine.terminate()

    trainer.run(max_epochs=config.epochs, epoch_length=config.epoch_length)
    return history


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="maximum; ends when the game is won (default: 30)")
    parser.add_argument("--epoch_length", type=int, default=20, help="updates per epoch (default: 20)")
    parser.add_argument("--moves", type=int, default=32, help="moves per update in each game (default: 32)")
    parser.add_argument("--games", type=int, default=32, help="games at the same time (default: 32)")
    parser.add_argument("--repeats", type=int, default=8, help="steps of the optimizer per update (default: 8)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate (default: 0.005)")
    parser.add_argument("--discount", type=float, default=0.98, help="discount factor per move (default: 0.98)")
    parser.add_argument("--entropy", type=float, default=0.01, help="bonus for random pushes (default: 0.01)")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
