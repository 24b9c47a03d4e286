"""Train a classifier on ImageNet, or on any folder of images, with all that a long training needs. Copy this one.

    python examples/imagenet.py --model resnet10 --size 64 --epochs 8 --batch_size 12 --warm_up 1  # draws images first
    torchrun --nproc_per_node 8 examples/imagenet.py --data ~/imagenet --backend nccl --compile --num_workers 64
    tensorboard --logdir runs/imagenet

The data are a folder with `train` and `val`, with one folder of images per class in each. You see a progress bar with
the loss, and after each epoch the images per second and the accuracy (top 1 and top 5) over all validation images, each
counted once on any number of processes. It is that of the averaged weights, the best of which are kept as
`runs/imagenet/best_model_*.pt`. Kill the training at any time, or let Slurm preempt it: the same command resumes with
the next image, also on another number of processes. A run on drawn images, colors in noise, takes two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import datasets, models
from torchvision.transforms import v2 as transforms

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import (
    Checkpoint,
    EMAHandler,
    Preemption,
    ProgressBar,
    TensorboardLogger,
    Throughput,
    create_lr_scheduler_with_warmup,
    global_step_from_engine,
)
from camshaft.utils import manual_seed, setup_logger


def draw_images(folder: Path, classes: int = 10, train: int = 60, val: int = 20) -> None:
    """Save small JPEG images in the layout of ImageNet: the class is the color of a spot in colored noise."""
    generator, unfinished = torch.Generator().manual_seed(0), folder.with_name(f"{folder.name}.unfinished")
    for part, count in (("train", train), ("val", val)):
        for number in range(classes):
            (unfinished / part / f"class{number}").mkdir(parents=True, exist_ok=True)
            for index in range(count):
                noise, tint = (torch.randn((3, size, size), generator=generator) for size in (72, 1))
                image = 128 + 40 * noise + 25 * tint
                top, left = torch.randint(0, 40, (2,), generator=generator)
                hue = (number + 0.2 * torch.randn((), generator=generator)) / classes + torch.arange(3) / 3
                image[:, top : top + 32, left : left + 32] += 80 * torch.cos(2 * torch.pi * hue)[:, None, None]
                file = unfinished / part / f"class{number}" / f"{index}.jpg"
                transforms.functional.to_pil_image(image.clamp(0, 255).to(torch.uint8)).save(file)
    unfinished.rename(folder)  # so that the folder is complete, or absent


def load_data(folder: Path, size: int) -> tuple[datasets.ImageFolder, datasets.ImageFolder]:
    """Return the images for training, with augmentation, and those for validation."""
    as_tensor = [
        *(transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True)),
        transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ]
    augment = [transforms.RandomResizedCrop(size, antialias=True), transforms.RandomHorizontalFlip(), *as_tensor]
    center = [transforms.Resize(size * 8 // 7, antialias=True), transforms.CenterCrop(size), *as_tensor]
    return (
        datasets.ImageFolder(str(folder / "train"), transforms.Compose(augment)),
        datasets.ImageFolder(str(folder / "val"), transforms.Compose(center)),
    )


def make_model(name: str, classes: int) -> nn.Module:
    """Return a network of torchvision, or `resnet10`, which trains on a CPU within seconds."""
    network: nn.Module
    if name == "resnet10":
        network = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)
    else:
        network = models.get_model(name, num_classes=classes)
    return network


def prepare_batch(batch: list[Tensor], device: Any, non_blocking: bool) -> tuple[Tensor, Tensor]:
    images, labels = batch
    images = images.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
    return images, labels.to(device, non_blocking=non_blocking)


def training(local_rank: int, config: argparse.Namespace) -> dict[str, float]:
    """Train, and return the accuracy after the last epoch; runs in every process."""
    from torchmetrics.classification import MulticlassAccuracy

    manual_seed(config.seed)
    setup_logger("camshaft.handlers.checkpoint", format="%(message)s")  # says where a run resumes
    torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
    device = idist.device()

    with idist.one_rank_first(local=True):
        if config.data is None and not (config.output / "images").exists():
            draw_images(config.output / "images")
    train_data, val_data = load_data(config.data or config.output / "images", config.size)
    options = {"batch_size": config.batch_size, "num_workers": config.num_workers}  # of all processes together
    train_loader = idist.auto_dataloader(train_data, shuffle=True, seed=config.seed, **options)
    val_loader = idist.auto_dataloader(val_data, shuffle=False, **options)

    network: Any = make_model(config.model, len(train_data.classes))
    network = network.to(memory_format=torch.channels_last)
    model: Any = torch.compile(network) if config.compile else network
    model = idist.auto_model(model)
    learning_rate = config.lr * config.batch_size / 256
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    optimizer = idist.auto_optim(optimizer)

    name = config.precision or ("fp32" if device.type == "cpu" else "bf16")
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    precision: dict[str, Any] = {"amp_mode": dtype and "amp", "amp_dtype": dtype}
    trainer = create_supervised_trainer(
        model, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), device, non_blocking=True,
        prepare_batch=prepare_batch, scaler=name == "fp16", **precision,
    )  # fmt: skip

    # the learning rate rises linearly, and falls with a cosine
    steps, warm_up = config.epochs * len(train_loader), max(2, config.warm_up * len(train_loader))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up))
    schedule = create_lr_scheduler_with_warmup(cosine, 0.0, warm_up)
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)

    # the averaged weights, which are evaluated and kept
    average = EMAHandler(network, momentum=min(0.1, 50 / steps), momentum_warmup=0.5, warmup_iters=warm_up)
    average.attach(trainer)
    accuracy: Any = {"num_classes": len(train_data.classes), "average": "micro", "validate_args": False}
    metrics = {f"top{k}": MulticlassAccuracy(top_k=k, **accuracy) for k in (1, 5)}
    evaluator = create_supervised_evaluator(
        average.ema_model, metrics, device, non_blocking=True, prepare_batch=prepare_batch, **precision
    )

    every = Events.ITERATION_COMPLETED(every=config.log_every)
    Throughput(samples=lambda batch: len(batch[1])).attach(trainer, every)
    bar = ProgressBar()
    bar.attach(trainer, output_transform=lambda loss: {"loss": loss})
    logger = TensorboardLogger(log_dir=config.output)
    logger.attach_output_handler(
        trainer, every, "training", ["samples_per_second"], output_transform=lambda loss: {"loss": loss}
    )
    logger.attach_opt_params_handler(trainer, every, optimizer, param_name="lr")
    logger.attach_output_handler(
        evaluator, Events.COMPLETED, "validation", "all", global_step_transform=global_step_from_engine(trainer)
    )

    best = Checkpoint(
        {"model": average.ema_model}, config.output, "best", score_name="top1",
        global_step_transform=global_step_from_engine(trainer),
    )  # fmt: skip
    evaluator.add_event_handler(Events.COMPLETED, best)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        top1, top5 = map(evaluator.run(val_loader).metrics.get, ("top1", "top5"))
        speed = engine.state.metrics["samples_per_second"]
        bar.log_message(f"epoch {engine.state.epoch}: top 1 {top1:.2%}, top 5 {top5:.2%}; {speed:.0f} images/s")

    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule, "average": average}
    to_save["best"] = best
    if name == "fp16":
        to_save["scaler"] = trainer.state.scaler
    latest = Checkpoint(to_save, config.output, n_saved=2, asynchronous=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=config.save_every) | Events.EPOCH_COMPLETED, latest)
    Preemption(latest).attach(trainer)
    latest.resume_latest()
    if trainer.state.iteration >= steps:
        bar.log_message(f"already finished: pass more than --epochs {config.epochs} to continue")
    else:
        trainer.run(train_loader, max_epochs=config.epochs)
    logger.close()
    return {name: float(value) for name, value in evaluator.state.metrics.items()}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train and val (default: a small set is drawn)")
    parser.add_argument("--output", type=Path, default=Path("runs/imagenet"), help="folder for checkpoints and logs")
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision, or resnet10")
    parser.add_argument("--size", type=int, default=224, help="height and width of the crops (default: 224)")
    parser.add_argument("--epochs", type=int, default=90, help="passes over the images, in all runs (default: 90)")
    parser.add_argument("--batch_size", type=int, default=256, help="images in a step, over all processes")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate for 256 images (default: 0.1)")
    parser.add_argument("--warm_up", type=int, default=5, help="epochs until the peak (default: 5)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: fp32 on a CPU, otherwise bf16")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--num_workers", type=int, default=0, help="processes per node that load images")
    parser.add_argument("--log_every", type=int, default=20, help="iterations between two points of the curves")
    parser.add_argument("--save_every", type=int, default=1000, help="iterations between two checkpoints")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
