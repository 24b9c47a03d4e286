"""Train a segmentation network with MONAI's engines and handlers, which import PyTorch-Ignite; prints a line of JSON.

python -m camshaft.as_ignite tests/clients/segment.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import ignite.distributed as idist
import ignite.engine
import torch
from monai.data import DataLoader, Dataset, SmartCacheDataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import (
    ROCAUC,
    CheckpointLoader,
    CheckpointSaver,
    ConfusionMatrix,
    DecollateBatch,
    EarlyStopHandler,
    GarbageCollector,
    LrScheduleHandler,
    MeanDice,
    MetricsSaver,
    PostProcessing,
    SmartCacheHandler,
    StatsHandler,
    SurfaceDistance,
    TensorBoardImageHandler,
    TensorBoardStatsHandler,
    ValidationHandler,
    from_engine,
)
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Activationsd, AsDiscreted, Compose

folder = Path(sys.argv[1])
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
rank, size = idist.get_rank(), idist.get_world_size()
torch.manual_seed(0)


def volume(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    label, first = torch.zeros(1, 16, 16, 16), 2 + number % 6
    label[:, first : first + 8, first : first + 8, first : first + 8] = 1
    return {"image": label + torch.rand(label.shape, generator=generator) / 2, "label": label}


def of_rank(first: int, last: int) -> list[dict[str, torch.Tensor]]:
    return [volume(number) for number in range(first, last)][rank::size]


network = UNet(3, 1, 1, (4, 8), (2,), norm="instance")
model = torch.nn.parallel.DistributedDataParallel(network) if size > 1 else network
optimizer = torch.optim.Adam(network.parameters(), 0.02)
binary = Compose([Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)])
both, device = from_engine(["pred", "label"]), torch.device("cpu")
evaluator = SupervisedEvaluator(
    device,
    DataLoader(Dataset(of_rank(100, 104)), batch_size=2),
    model,
    key_val_metric={"dice": MeanDice(output_transform=both)},
    additional_metrics={
        "surface": SurfaceDistance(include_background=True, output_transform=both),
        "sensitivity": ConfusionMatrix(metric_name="sensitivity", output_transform=both),
        "auc": ROCAUC(
            output_transform=lambda output: (
                [torch.tensor([one["pred"].mean()]) for one in output],
                [torch.tensor([float(i % 2)]) for i, _ in enumerate(output)],
            )
        ),
    },
    val_handlers=[
        StatsHandler(output_transform=lambda output: None),
        TensorBoardStatsHandler(log_dir=str(folder / "logs"), output_transform=lambda output: None),
        TensorBoardImageHandler(
            log_dir=str(folder / "logs"),
            batch_transform=from_engine(["image", "label"]),
            output_transform=from_engine(["pred"]),
        ),
        CheckpointSaver(str(folder), {"network": network}, save_key_metric=True),
        MetricsSaver(str(folder / "metrics"), metrics="*", metric_details=["dice", "surface"], summary_ops="*"),
    ],
    postprocessing=binary,
)
cache = SmartCacheDataset(
    of_rank(0, 16), None, replace_rate=0.5, cache_num=4, progress=False, num_init_workers=1, num_replace_workers=1
)
trainer = SupervisedTrainer(
    device,
    8,
    DataLoader(cache, batch_size=2),
    model,
    optimizer,
    DiceLoss(sigmoid=True),
    decollate=False,
    key_train_metric={"train_dice": MeanDice(output_transform=both)},
    train_handlers=[
        SmartCacheHandler(cache),
        DecollateBatch(),
        PostProcessing(binary),
        ValidationHandler(1, evaluator),
        StatsHandler(tag_name="loss", output_transform=from_engine(["loss"], first=True)),
        LrScheduleHandler(torch.optim.lr_scheduler.StepLR(optimizer, 4), print_lr=False),
        CheckpointSaver(
            str(folder), {"network": network, "optimizer": optimizer}, save_interval=1, n_saved=2, save_final=True
        ),
        GarbageCollector("epoch"),
    ],
)
EarlyStopHandler(100, lambda engine: engine.state.metrics["dice"], trainer, epoch_level=True).attach(evaluator)
trainer.run()

metrics = dict(evaluator.state.metrics)
for parameter in network.parameters():
    torch.nn.init.zeros_(parameter)
best = next(folder.glob("network_key_metric=*.pt"))
CheckpointLoader(str(best), {"network": network}, map_location="cpu").attach(evaluator)
evaluator.run()
if rank == 0:
    print(
        json.dumps(
            {
                "engine": ignite.engine.Engine.__module__,
                "size": size,
                "iteration": trainer.state.iteration,
                "metrics": {name: float(value) for name, value in metrics.items()},
                "loaded": float(evaluator.state.metrics["dice"]),
                "best": float(best.stem.partition("=")[2]),
                "lr": optimizer.param_groups[0]["lr"],
                "files": sorted(
                    str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".pt", ".csv")
                ),
                "events": len(list((folder / "logs").glob("*tfevents*"))),
            }
        )
    )
