"""Use camshaft, PyTorch-Ignite, Lightning, and Accelerate, each according to its documentation."""

from __future__ import annotations

import inspect
import io
import json
import re
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

SAMPLES, BATCH, STOP = (
    24,
    4,
    3,
)  # samples in an epoch, samples in a batch, and the batch after which the epoch is stopped
TRAINED: Any = range(SAMPLES)
EVALUATED: Any = range(7)
WEIGHTS = 64  # of the saved model; all 1 in the first checkpoint and all 2 in the second

Steps = list[list[int]]


class Engines:
    """The common interface of camshaft and PyTorch-Ignite; subclasses add what differs."""

    package: str
    ways_to_evaluate: tuple[str, ...] = ("",)  # if there are several
    resumes: tuple[str, ...] = ("",)

    def __init__(self, size: int) -> None:
        self.idist: Any = import_module(f"{self.package}.distributed")
        self.engine: Any = import_module(f"{self.package}.engine")
        self.handlers: Any = import_module(f"{self.package}.handlers")
        if size > 1:
            self.idist.initialize("gloo")

    def evaluate(self, way: str) -> list[int]:
        loader = self.idist.auto_dataloader(EVALUATED, batch_size=4, shuffle=False)  # over both ranks
        return [sample for batch in loader for sample in batch.tolist()]

    def train(self, folder: str, way: str, resume: bool) -> Steps:
        """Run an epoch up to a stop, or resume after it; return the samples of each step."""
        import_module(f"{self.package}.utils").manual_seed(0)
        steps: Steps = []
        trainer = getattr(self.engine, way or "Engine")(lambda engine, batch: steps.append(batch.tolist()))
        loader = self.idist.auto_dataloader(TRAINED, batch_size=BATCH, shuffle=True)
        file = Path(folder, "state")
        if resume:
            trainer.load_state_dict(torch.load(file, weights_only=False))
        else:

            def stop() -> None:
                torch.save(trainer.state_dict(), file)
                trainer.terminate()

            trainer.add_event_handler(self.engine.Events.ITERATION_COMPLETED(once=STOP), stop)

        trainer.run(loader, max_epochs=1)
        return steps

    def barrier_of_one(self) -> None:
        self.idist.one_rank_only()(self.idist.barrier)()

    def save(self, folder: str) -> str:
        """Save two checkpoints and return the newest."""
        model = torch.nn.Linear(WEIGHTS, 1)
        trainer = self.engine.Engine(lambda engine, batch: torch.nn.init.constant_(model.weight, engine.state.epoch))
        checkpoint = self.handlers.Checkpoint({"model": model, "trainer": trainer}, folder, n_saved=2)
        trainer.add_event_handler(self.engine.Events.EPOCH_COMPLETED, checkpoint)
        trainer.run([0], max_epochs=2)
        return str(Path(folder, checkpoint.last_checkpoint))

    def load(self, folder: str, newest: str) -> list[float]:
        model, trainer = torch.nn.Linear(WEIGHTS, 1), self.engine.Engine(lambda engine, batch: None)
        self._load({"model": model, "trainer": trainer}, folder, newest)
        return model.weight.flatten().tolist()

    def _load(self, objects: dict[str, Any], folder: str, newest: str) -> None:
        raise NotImplementedError


class Camshaft(Engines):
    package = "camshaft"

    def _load(self, objects: dict[str, Any], folder: str, newest: str) -> None:
        self.handlers.Checkpoint.resume(objects, folder)

    @staticmethod
    def backends() -> str:
        with redirect_stdout(io.StringIO()) as printed:
            import_module("camshaft.distributed.__main__").main(["--json"])
        return ", ".join(name for name in json.loads(printed.getvalue())["backends"] if name != "serial")


class Ignite(Engines):
    package = "ignite"
    resumes = ("Engine", "DeterministicEngine")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.engine.DeterministicEngine = import_module("ignite.engine.deterministic").DeterministicEngine

    def _load(self, objects: dict[str, Any], folder: str, newest: str) -> None:
        self.handlers.Checkpoint.load_objects(objects, newest)

    @staticmethod
    def backends() -> str:
        text = inspect.getdoc(import_module("ignite.distributed").initialize) or ""
        [listed] = [line for line in text.splitlines() if line.strip().startswith("backend: ")]
        return ", ".join(re.findall(r"`([\w-]+)`", listed))


class Lightning:
    ways_to_evaluate = ("",)
    resumes = ("",)

    def __init__(self, size: int) -> None:
        self.size = size
        self.library: Any = import_module("lightning.pytorch")

        class Module(self.library.LightningModule):  # type: ignore[misc, name-defined]  # it may not be installed
            def __init__(self, fill: bool = False) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(WEIGHTS, 1)
                self.fill = fill
                self.steps: Steps = []
                self.stop_after = 0

            def on_train_epoch_start(self) -> None:
                if self.fill:
                    torch.nn.init.constant_(self.layer.weight, self.current_epoch + 1)

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                self.steps.append(batch.tolist())
                loss: torch.Tensor = self.layer(torch.ones(WEIGHTS)).sum()
                return loss

            def on_train_batch_end(self, *arguments: Any) -> None:
                self.trainer.should_stop = len(self.steps) == self.stop_after

            def validation_step(self, batch: torch.Tensor, index: int) -> None:
                self.steps.append(batch.tolist())

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        self.module = Module

    def make(self, *callbacks: Any, epochs: int = 1) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return self.library.Trainer(
            accelerator="cpu",
            devices=self.size,
            strategy="ddp" if self.size > 1 else "auto",
            max_epochs=epochs,
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            **quiet,
        )

    def evaluate(self, way: str) -> list[int]:
        module, self.trainer = self.module(), self.make()
        self.trainer.validate(module, DataLoader(EVALUATED, batch_size=2), verbose=False)
        return [sample for step in module.steps for sample in step]

    def train(self, folder: str, way: str, resume: bool) -> Steps:
        self.library.seed_everything(0)
        module, loader = self.module(), DataLoader(TRAINED, batch_size=BATCH // self.size, shuffle=True)
        saving = import_module("lightning.pytorch.callbacks").ModelCheckpoint(
            folder, filename="state", every_n_train_steps=STOP, save_on_train_epoch_end=False
        )
        if resume:
            self.make().fit(module, loader, ckpt_path=str(Path(folder, "state.ckpt")))
        else:
            module.stop_after = STOP
            self.make(saving).fit(module, loader)
        return module.steps

    def barrier_of_one(self) -> None:
        self.evaluate("")  # connects the ranks
        import_module("lightning.pytorch.utilities").rank_zero_only(self.trainer.strategy.barrier)()

    def save(self, folder: str) -> str:
        saving = import_module("lightning.pytorch.callbacks").ModelCheckpoint(folder, save_top_k=-1)
        self.make(saving, epochs=2).fit(self.module(fill=True), DataLoader(TRAINED, batch_size=SAMPLES))
        return str(saving.best_model_path)

    def load(self, folder: str, newest: str) -> list[float]:
        layer: torch.nn.Linear = self.module.load_from_checkpoint(newest).layer
        return layer.weight.flatten().tolist()

    @staticmethod
    def backends() -> str:
        devices = import_module("lightning.pytorch.accelerators").AcceleratorRegistry.available_accelerators()
        return f"by device: {', '.join(sorted(devices))}"


class Accelerate:
    ways_to_evaluate = ("loader", "gather_for_metrics")
    resumes = ("skip_first_batches by hand", "and with use_seedable_sampler")

    def __init__(self, size: int) -> None:
        self.library, self.utilities = import_module("accelerate"), import_module("accelerate.utils")
        self.library.PartialState(cpu=True)  # connects to the other rank; Accelerator reuses it

    def make(self, folder: str | None = None, **loading: bool) -> Any:
        return self.library.Accelerator(
            cpu=True,
            dataloader_config=self.utilities.DataLoaderConfiguration(**loading),
            project_config=self.utilities.ProjectConfiguration(folder, automatic_checkpoint_naming=folder is not None),
        )

    def evaluate(self, way: str) -> list[int]:
        accelerator = self.make()
        loader = accelerator.prepare(DataLoader(EVALUATED, batch_size=2))
        if way == "loader":
            return [sample for batch in loader for sample in batch.tolist()]
        gathered = [sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()]
        return gathered if accelerator.is_main_process else []  # the same on all ranks

    def train(self, folder: str, way: str, resume: bool) -> Steps:
        self.utilities.set_seed(0)
        accelerator = self.make(split_batches=True, use_seedable_sampler=way == self.resumes[1])
        model = torch.nn.Linear(1, 1)
        model, loader = accelerator.prepare(model, DataLoader(TRAINED, batch_size=BATCH, shuffle=True))
        if resume:
            accelerator.load_state(folder)
            return [batch.tolist() for batch in accelerator.skip_first_batches(loader, STOP)]
        steps = []
        for batch in loader:
            steps.append(batch.tolist())
            if len(steps) == STOP:
                accelerator.save_state(folder)
                break
        return steps

    def barrier_of_one(self) -> None:
        accelerator = self.make()
        accelerator.on_main_process(accelerator.wait_for_everyone)()

    def save(self, folder: str) -> str:
        accelerator = self.make(folder)
        model = accelerator.prepare(torch.nn.Linear(WEIGHTS, 1))
        for epoch in (1, 2):
            torch.nn.init.constant_(model.weight, epoch)
            accelerator.save_state()
        return str(max(Path(folder).rglob("model*.safetensors"), key=lambda file: file.stat().st_mtime_ns))

    def load(self, folder: str, newest: str) -> list[float]:
        accelerator = self.make(folder)
        model: torch.nn.Linear = accelerator.prepare(torch.nn.Linear(WEIGHTS, 1))
        accelerator.load_state()
        return model.weight.flatten().tolist()

    @staticmethod
    def backends() -> str:
        kinds = import_module("accelerate.utils").DistributedType
        devices = [kind.value.removeprefix("MULTI_").lower() for kind in kinds if kind.value.startswith("MULTI_")]
        return f"by device: {', '.join(sorted([*devices, 'xla']) if 'XLA' in kinds.__members__ else devices)}"


LIBRARIES: dict[str, Any] = {
    "camshaft": Camshaft,
    "pytorch-ignite": Ignite,
    "lightning": Lightning,
    "accelerate": Accelerate,
}
PEERS = {"pytorch-ignite": "ignite", "lightning": "lightning.pytorch", "accelerate": "accelerate"}
