"""Train with the extensions of pytorch-pfn-extras, at once and in two parts, shown by ignite-rich-logger; prints JSON.

python -m camshaft.as_ignite tests/clients/extend.py FOLDER
"""

import json
import sys

import ignite.engine
import pytorch_pfn_extras as ppe
import torch
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from ignite_rich_logger import ProgressBar
from pytorch_pfn_extras.training import IgniteExtensionsManager, extensions

inputs = torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 1).long())
loss = torch.nn.functional.cross_entropy
loader = torch.utils.data.DataLoader(data, batch_size=8)


class Model(torch.nn.Linear):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scores = super().forward(batch)
        ppe.reporting.report({"spread": scores.std().item()})
        return scores


def train(folder: str, max_epochs: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = Model(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    trainer = create_supervised_trainer(model, optimizer, loss)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(), "loss": Loss(loss)})
    bar = ProgressBar()
    bar.attach(trainer, "train", output_transform=lambda output: {"loss": output}, state_attributes=["iteration"])
    bar.attach(evaluator, "dev", metric_names="all", logging_strategy="epoch")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    manager = IgniteExtensionsManager(trainer, {"main": model}, {"main": optimizer}, max_epochs, out_dir=folder)
    manager.extend(extensions.IgniteEvaluator(evaluator, loader, model), trigger=(1, "epoch"))
    manager.extend(extensions.LogReport(trigger=(1, "epoch")))
    manager.extend(extensions.snapshot(autoload=True, n_retains=1), trigger=(1, "epoch"))
    manager.extend(lambda _: schedule.step(), name="schedule", trigger=(2, "epoch"))
    trainer.run(loader, max_epochs=max_epochs)
    with open(f"{folder}/log") as log:
        records = json.load(log)
    for record in records:
        del record["elapsed_time"]
    return {"log": records, "shown": bar.metrics_by_tag, "weights": model.weight.flatten().tolist()}


train(f"{sys.argv[1]}/parts", 2)
print(
    json.dumps(
        {
            "engine": ignite.engine.Engine.__module__,
            "whole": train(f"{sys.argv[1]}/whole", 4),
            "parts": train(f"{sys.argv[1]}/parts", 4),
        }
    )
)
