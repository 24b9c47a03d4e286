"""Learn to balance a pole with ptan's events, handlers, and agents, which import PyTorch-Ignite; prints a line of JSON.

python -m camshaft.as_ignite tests/clients/reinforce.py FOLDER
"""

import json
import sys
from collections.abc import Iterator
from itertools import count

import gymnasium
import ignite.engine
import numpy as np
import ptan
import torch
from ignite.engine import Engine
from ignite.handlers.tensorboard_logger import OutputHandler, TensorboardLogger
from ignite.metrics import RunningAverage
from ptan.ignite import EndOfEpisodeHandler, EpisodeEvents, EpisodeFPSHandler, PeriodEvents, PeriodicEvents
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Batch = list[ptan.experience.ExperienceFirstLast]
torch.manual_seed(0)
np.random.seed(0)
environment = gymnasium.make("CartPole-v1")
environment.reset(seed=0)
network = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
target = ptan.agent.TargetNet(network)
selector = ptan.actions.EpsilonGreedyActionSelector(0.2)
source = ptan.experience.ExperienceSourceFirstLast(environment, ptan.agent.DQNAgent(network, selector), gamma=0.9)
buffer = ptan.experience.ExperienceReplayBuffer(source, buffer_size=1000)
optimizer = torch.optim.Adam(network.parameters(), 0.01)


def batches() -> Iterator[Batch]:
    buffer.populate(32)
    for _ in count():
        buffer.populate(1)
        yield buffer.sample(16)


def learn(engine: Engine, batch: Batch) -> dict[str, float]:
    states = torch.as_tensor(np.array([one.state for one in batch]))
    last = torch.as_tensor(np.array([one.state if one.last_state is None else one.last_state for one in batch]))
    goes_on = torch.tensor([one.last_state is not None for one in batch])
    wanted = torch.tensor([one.reward for one in batch]) + 0.9 * goes_on * target.target_model(last).max(dim=1).values
    found = network(states)[range(len(batch)), [int(one.action) for one in batch]]
    loss = torch.nn.functional.mse_loss(found, wanted.detach().float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}


engine = Engine(learn)
EndOfEpisodeHandler(source, bound_avg_reward=20).attach(engine)
EpisodeFPSHandler().attach(engine)
PeriodicEvents().attach(engine)
RunningAverage(output_transform=lambda output: output["loss"]).attach(engine, "loss")
events: list[tuple[str, int]] = []
for event in (*EpisodeEvents, PeriodEvents.ITERS_100_COMPLETED):
    engine.add_event_handler(event, lambda name: events.append((name, engine.state.iteration)), event.name)
engine.add_event_handler(PeriodEvents.ITERS_10_COMPLETED, target.sync)
engine.add_event_handler(EpisodeEvents.BOUND_REWARD_REACHED, engine.terminate)
with TensorboardLogger(log_dir=sys.argv[1]) as logger:
    episodes = OutputHandler("episodes", ["reward", "steps", "avg_reward"])
    logger.attach(engine, log_handler=episodes, event_name=EpisodeEvents.EPISODE_COMPLETED)
    training = OutputHandler("train", ["loss"], lambda output: output["loss"])
    logger.attach(engine, log_handler=training, event_name=PeriodEvents.ITERS_100_COMPLETED)
    engine.run(batches())

board = EventAccumulator(sys.argv[1]).Reload()
print(
    json.dumps(
        {
            "engine": ignite.engine.Engine.__module__,
            "events": events,
            "episode": engine.state.episode,
            "metrics": {name: engine.state.metrics[name] for name in ("reward", "steps", "avg_reward", "loss")},
            "names": sorted(engine.state.metrics),
            "logged": {
                tag: [(scalar.step, scalar.value) for scalar in board.Scalars(tag)] for tag in board.Tags()["scalars"]
            },
        }
    )
)
