"""Train a GAN with MONAI's GanTrainer, which imports PyTorch-Ignite; prints a line of JSON.

python -m camshaft.as_ignite tests/clients/gan.py
"""

import json

import ignite.engine
import torch
from monai.data import DataLoader
from monai.engines import GanTrainer
from monai.handlers import StatsHandler
from monai.utils.enums import GanKeys

torch.manual_seed(0)
generator, discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
real = [{"reals": one} for one in torch.randn(16, 8)]


def loss_of_generator(scores: torch.Tensor) -> torch.Tensor:
    return -scores.mean()


def loss_of_discriminator(fakes: torch.Tensor, reals: torch.Tensor) -> torch.Tensor:
    return discriminator(fakes.detach()).mean() - discriminator(reals).mean()


trainer = GanTrainer(
    torch.device("cpu"),
    3,
    DataLoader(real, batch_size=4),
    generator,
    torch.optim.SGD(generator.parameters(), 0.1),
    loss_of_generator,
    discriminator,
    torch.optim.SGD(discriminator.parameters(), 0.1),
    loss_of_discriminator,
    latent_shape=4,
    train_handlers=[StatsHandler(output_transform=lambda output: output[GanKeys.GLOSS])],
    decollate=False,
    d_prepare_batch=lambda batch, device, non_blocking: batch["reals"],
)
trainer.run()
print(
    json.dumps(
        {
            "engine": ignite.engine.Engine.__module__,
            "iteration": trainer.state.iteration,
            "weights": generator.weight.flatten().tolist() + discriminator.weight.flatten().tolist(),
        }
    )
)
