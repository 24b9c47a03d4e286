"""Segment balls in noisy volumes with MONAI's trainer, which runs on camshaft here, and resumes exactly after a kill.

python examples/monai_segmentation.py
"""

import camshaft.as_ignite  # noqa: F401, I001  # the first import: the engines of MONAI are those of camshaft from here on

import argparse
from pathlib import Path

import torch
from monai.data import DataLoader
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import MeanDice, ValidationHandler, from_engine
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Activationsd, AsDiscreted, Compose
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, ProgressBar
from camshaft.utils import setup_logger

SIZE = 24  # voxels along each side of a volume


class Balls(Dataset):
    """Volumes with a ball in noise, and the voxels that belong to it; the same for each index.

    Each item has two tensors of shape ``(1, SIZE, SIZE, SIZE)``.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        steps = torch.arange(SIZE, dtype=torch.float32)
        self.places = torch.stack(torch.meshgrid(steps, steps, steps, indexing="ij"))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + index)
        radius = 4 + 3 * torch.rand(1, generator=generator)
        center = radius + (SIZE - 2 * radius) * torch.rand(3, generator=generator)
        ball = ((self.places - center.view(3, 1, 1, 1)).square().sum(0, keepdim=True) < radius**2).float()
        return {"image": ball + torch.randn(ball.shape, generator=generator), "label": ball}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="(%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/monai"), help="folder of the checkpoints (%(default)s)"
    )
    config = parser.parse_args()

    setup_logger("camshaft.handlers.checkpoint", format="%(message)s")  # says where a run resumes
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2), norm="instance")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = idist.auto_dataloader(Balls(64, seed=0), batch_size=4, shuffle=True, seed=0)
    binary = Compose([Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)])
    evaluator = SupervisedEvaluator(
        device,
        DataLoader(Balls(16, seed=1000), batch_size=4),
        model,
        postprocessing=binary,
        key_val_metric={"dice": MeanDice(output_transform=from_engine(["pred", "label"]))},
    )
    trainer = SupervisedTrainer(
        device,
        config.epochs,
        loader,
        model,
        optimizer,
        DiceLoss(sigmoid=True),
        train_handlers=[ValidationHandler(1, evaluator)],
    )

    def show(engine: Engine) -> None:
        bar.log_message(f"epoch {trainer.state.epoch}: dice {engine.state.metrics['dice']:.3f}")

    evaluator.add_event_handler(Events.COMPLETED, show)
    bar = ProgressBar()
    bar.attach(trainer, output_transform=lambda output: {"loss": output[0]["loss"]})
    checkpoint = Checkpoint({"trainer": trainer, "model": model, "optimizer": optimizer}, config.output, n_saved=2)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), checkpoint)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    checkpoint.resume_latest()
    trainer.run()


if __name__ == "__main__":
    main()
