"""Search a learning rate with Optuna, which stops trials that are worse than the others early.

python examples/optuna_pruning.py
"""

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.utils import manual_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="of each trial that is not pruned (%(default)s)")
    config = parser.parse_args()
    scans, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    scans = scans.float() / 16
    train, new = slice(0, 1400), slice(1400, None)
    batches = list(zip(scans[train].split(50), digits[train].split(50), strict=True))

    def accuracy_of(trial: optuna.Trial) -> float:
        manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        rate = trial.suggest_float("learning rate", 1e-4, 10.0, log=True)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)

        @trainer.on(Events.EPOCH_COMPLETED)
        def report(engine: Engine) -> None:
            with torch.inference_mode():
                engine.state.accuracy = (model(scans[new]).argmax(1) == digits[new]).float().mean().item()
            trial.report(engine.state.accuracy, engine.state.epoch)
            if trial.should_prune():
                engine.terminate()

        trainer.run(batches, max_epochs=config.epochs)
        epoch, accuracy = trainer.state.epoch, float(trainer.state.accuracy)
        how = "pruned" if epoch < config.epochs else "complete"
        print(f"trial {trial.number}: rate {rate:.4f}, accuracy {accuracy:.1%}, {how} after epoch {epoch}")
        if how == "pruned":
            raise optuna.TrialPruned
        return accuracy

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(accuracy_of, config.trials)
    print(f"best rate {study.best_params['learning rate']:.3f}: accuracy {study.best_value:.1%}")


if __name__ == "__main__":
    main()
