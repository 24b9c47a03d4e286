"""Train a segmentation model of torchvision to find discs, boxes, and triangles, on one process or several.

    python examples/segmentation.py
    torchrun --nproc_per_node 2 examples/segmentation.py --backend gloo
    python examples/segmentation.py --data ~/voc --model fcn_resnet50 --size 480 --epochs 30 --lr 1e-3

After each epoch you see the mean IoU on images that are not trained on: the overlap of predicted and true pixels
divided by their union, averaged over the classes. It is computed from the pixels on all processes, so each image counts
once, although 101 images cannot be divided evenly. At the end, `runs/segmentation/predictions.png` shows images, the
true classes of their pixels, and the predicted ones. Without `--data`, shapes of random colors, sizes, and places are
drawn in the format of Pascal VOC; the folder of the real data set is the one that contains `VOCdevkit`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import datasets, models
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.transforms.v2 import functional

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.utils import manual_seed

BORDER = 255  # pixels of Pascal VOC that belong to no class


def draw_shapes(folder: Path, train: int = 480, val: int = 101, size: int = 32) -> None:
    """Save images, and the classes of their pixels: background, disc, box, and triangle; later shapes cover earlier."""
    generator, unfinished = torch.Generator().manual_seed(0), folder.with_name(f"{folder.name}.unfinished")
    root = unfinished / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True, exist_ok=True)
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for part, count in (("train", train), ("val", val)):
        names = [f"{part}_{index}" for index in range(count)]
        (root / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            image = torch.randint(0, 128, (3, size, size), generator=generator)
            classes = torch.zeros(size, size)
            for number in (1, 2, 3):
                center = torch.randint(size // 5, size - size // 5, (2,), generator=generator).tolist()
                radius = int(torch.randint(size // 8, size // 3, (), generator=generator))
                down, right = row - center[0], column - center[1]
                disc = down**2 + right**2 <= radius**2
                box = (down.abs() <= radius) & (right.abs() <= radius)
                triangle = (down.abs() <= radius) & (2 * right.abs() <= down + radius)
                inside = [disc, box, triangle][number - 1]
                image[:, inside] = torch.randint(128, 256, (3, 1), generator=generator)
                classes[inside] = number
            picture, mask = (functional.to_pil_image(part.to(torch.uint8)) for part in (image, classes))
            picture.save(root / "JPEGImages" / f"{name}.jpg", quality=95)
            mask.save(root / "SegmentationClass" / f"{name}.png")
    unfinished.rename(folder)  # so that the folder is complete, or absent


def load_data(folder: Path, part: str, size: int) -> datasets.VOCSegmentation:
    """Return pairs of an image and the classes of its pixels, in the format of Pascal VOC."""

    def as_tensors(image: Image.Image, mask: Image.Image) -> tuple[Tensor, Tensor]:
        pixels = functional.resize(functional.to_image(image), [size, size], antialias=True)
        classes = functional.resize(functional.to_image(mask), [size, size], functional.InterpolationMode.NEAREST)
        return functional.to_dtype(pixels, torch.float32, scale=True), classes[0].long()

    return datasets.VOCSegmentation(str(folder), image_set=part, transforms=as_tensors)


def make_model(name: str, classes: int) -> Any:
    """Return a network of torchvision, or `fcn_resnet10`, which trains on a CPU within a minute."""
    if name != "fcn_resnet10":
        return models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)
    backbone = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    backbone.maxpool = nn.Identity()  # the images are small
    features = create_feature_extractor(backbone, {"layer2": "out"})
    return models.segmentation.FCN(features, models.segmentation.fcn.FCNHead(128, classes))


def training(local_rank: int, config: argparse.Namespace) -> float:
    """Train, and return the mean IoU after the last epoch; runs in every process."""
    from matplotlib import pyplot
    from torchmetrics.classification import MulticlassJaccardIndex

    manual_seed(config.seed)
    device, folder = idist.device(), config.data or config.output / "shapes"
    with idist.one_rank_first(local=True):
        if config.data is None and not folder.exists():
            draw_shapes(folder)
    classes = 4 if config.data is None else 21
    train_data, val_data = (load_data(folder, part, config.size) for part in ("train", "val"))
    train_loader = idist.auto_dataloader(train_data, batch_size=config.batch_size, shuffle=True, seed=config.seed)
    val_loader = idist.auto_dataloader(val_data, batch_size=config.batch_size, shuffle=False)

    model = idist.auto_model(make_model(config.model, classes))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    loss_function = nn.CrossEntropyLoss(ignore_index=BORDER)
    options: Any = {"device": device, "model_transform": lambda output: output["out"]}  # the model returns a dict
    trainer = create_supervised_trainer(model, optimizer, loss_function, **options)
    metrics = {"iou": MulticlassJaccardIndex(classes, ignore_index=BORDER, validate_args=False)}
    evaluator = create_supervised_evaluator(model, metrics, **options)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        reached = evaluator.run(val_loader).metrics["iou"]
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: mean IoU {reached:.1%}", flush=True)

    @trainer.on(Events.COMPLETED)
    @idist.one_rank_only()
    @torch.no_grad()
    def draw() -> None:
        images, truth = (torch.stack(part) for part in zip(*(val_data[index] for index in range(8)), strict=True))
        found = getattr(model, "module", model)(images.to(device))["out"].argmax(dim=1).cpu()
        colors = torch.tensor(pyplot.get_cmap("tab20")(range(20)))
        rows = [images.permute(0, 2, 3, 1), *(colors[part % 20, :3].float() for part in (truth, found))]
        picture = torch.cat([torch.cat([*row], dim=1) for row in rows])
        config.output.mkdir(parents=True, exist_ok=True)
        pyplot.imsave(config.output / "predictions.png", picture.repeat_interleave(3, 0).repeat_interleave(3, 1))
        print(f"saved {config.output / 'predictions.png'}")

    trainer.run(train_loader, max_epochs=config.epochs)
    return float(evaluator.state.metrics["iou"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with VOCdevkit (default: shapes are drawn)")
    parser.add_argument("--model", default="fcn_resnet10", help="a segmentation model of torchvision, or fcn_resnet10")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images (default: 32)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the images (default: 8)")
    parser.add_argument("--batch_size", type=int, default=16, help="images in a step, over all processes (default: 16)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--output", type=Path, default=Path("runs/segmentation"), help="folder for the picture")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
