"""Prune trials with Optuna's handler for PyTorch-Ignite; prints a line of JSON.

python -m camshaft.as_ignite tests/clients/prune.py
"""

import json

import ignite.engine
import optuna
from ignite.engine import Engine, Events
from ignite.metrics import Average
from optuna_integration import PyTorchIgnitePruningHandler

epochs = []


def objective(trial: optuna.Trial) -> float:
    level = trial.suggest_float("level", 0.0, 1.0)
    evaluator = Engine(lambda engine, batch: batch)
    Average().attach(evaluator, "level")
    trainer = Engine(lambda engine, batch: None)
    evaluator.add_event_handler(Events.COMPLETED, PyTorchIgnitePruningHandler(trial, "level", trainer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([level + 0.1 * trainer.state.epoch]))
    try:
        trainer.run([0], max_epochs=5)
    finally:
        epochs.append(trainer.state.epoch)
    return evaluator.state.metrics["level"]


pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=2)
study = optuna.create_study(direction="maximize", pruner=pruner)
for level in (0.5, 0.2, 0.9):
    study.enqueue_trial({"level": level})
study.optimize(objective, n_trials=3)
states = [trial.state.name for trial in study.trials]
print(
    json.dumps(
        {"engine": ignite.engine.Engine.__module__, "epochs": epochs, "states": states, "best": study.best_value}
    )
)
