"""Promised names are where scripts import them from, and importing them does nothing else."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from camshaft.engine import DeterministicEngine, Engine
from camshaft.handlers import EarlyStopping, FastaiLRFinder, TerminateOnNan, TimeLimit

# The names of PyTorch-Ignite, and those of camshaft that scripts import from the same modules.
PROMISED = {
    "camshaft.base": "ResettableHandler Serializable",
    "camshaft.base.mixins": "ResettableHandler Serializable",
    "camshaft.contrib.engines": "Tbptt_Events create_supervised_tbptt_trainer",
    "camshaft.contrib.engines.common": """add_early_stopping_by_val_score gen_save_best_models_by_val_score
        save_best_model_by_val_score setup_any_logging setup_clearml_logging setup_common_distrib_training_handlers
        setup_common_training_handlers setup_mlflow_logging setup_tb_logging setup_trains_logging
        setup_wandb_logging""",
    "camshaft.contrib.engines.tbptt": "Tbptt_Events create_supervised_tbptt_trainer",
    "camshaft.distributed": """DistributedProxySampler Parallel all_gather all_gather_tensors_with_shapes all_reduce
        all_to_all auto_dataloader auto_model auto_optim available_backends backend barrier broadcast device finalize
        gather get_data_parallel_rank get_data_parallel_size get_local_rank get_mesh get_nnodes get_node_rank
        get_nproc_per_node get_rank get_world_size has_hvd_support has_native_dist_support has_xla_support hostname
        initialize irecv isend make_mesh model_name new_group one_rank_first one_rank_only recv reduce reduce_scatter
        registered_computation_models scatter send set_local_rank show_config spawn sync use_backend""",
    "camshaft.distributed.auto": "DistributedProxySampler auto_dataloader auto_model auto_optim",
    "camshaft.distributed.comp_models": """has_hvd_support has_native_dist_support has_xla_support
        registered_computation_models""",
    "camshaft.distributed.launcher": "Parallel",
    "camshaft.engine": """CallableEventWithFilter DeterministicEngine Engine EventEnum Events EventsList
        OptimizerEvents RemovableEventHandle State convert_tensor count_optimizer_steps create_supervised_evaluator
        create_supervised_trainer supervised_evaluation_step supervised_evaluation_step_amp supervised_training_step
        supervised_training_step_amp supervised_training_step_apex supervised_training_step_tpu""",
    "camshaft.engine.deterministic": """DeterministicEngine ReproducibleBatchSampler keep_random_state
        update_dataloader""",
    "camshaft.engine.engine": "CallableEventWithFilter Engine EventEnum Events EventsList RemovableEventHandle",
    "camshaft.engine.events": "CallableEventWithFilter EventEnum Events EventsList RemovableEventHandle State",
    "camshaft.exceptions": "DamagedCheckpointError NotComputableError RankDivergenceError RankFailedError",
    "camshaft.handlers": """BaseParamScheduler BasicTimeProfiler BatchSizeScheduler CSVLogger Checkpoint ClearMLLogger
        ConcatScheduler CosineAnnealingScheduler CyclicalScheduler DiskSaver EMAHandler EarlyStopping EpochOutputStore
        ExpStateScheduler FBResearchLogger FastaiLRFinder HandlersTimeProfiler JSONLinesLogger LRScheduler
        LambdaStateScheduler LinearCyclicalScheduler MLflowLogger ModelCheckpoint MultiStepStateScheduler
        ParamGroupScheduler ParamScheduler PiecewiseLinear PiecewiseLinearStateScheduler Preemption ProgressBar
        ReduceLROnPlateauScheduler RunningAverage StateParamScheduler StepStateScheduler Stragglers TensorboardLogger
        TerminateOnNan Throughput TimeLimit Timer TorchProfiler WandBLogger attach_metrics
        create_lr_scheduler_with_warmup global_step_from_engine stop_together""",
    "camshaft.handlers.param_scheduler": """BaseParamScheduler BatchSizeScheduler ConcatScheduler
        CosineAnnealingScheduler CyclicalScheduler LRScheduler LinearCyclicalScheduler ParamGroupScheduler
        ParamScheduler PiecewiseLinear ReduceLROnPlateauScheduler create_lr_scheduler_with_warmup""",
    "camshaft.handlers.state_param_scheduler": """ExpStateScheduler LambdaStateScheduler MultiStepStateScheduler
        PiecewiseLinearStateScheduler StateParamScheduler StepStateScheduler""",
    "camshaft.handlers.time_profilers": "BasicTimeProfiler HandlersTimeProfiler",
    "camshaft.handlers.utils": "global_step_from_engine",
    "camshaft.utils": """apply_to_tensor apply_to_type convert_tensor deprecated hash_checkpoint manual_seed
        setup_logger to_onehot""",
}
PROMISED["camshaft.distributed.utils"] = PROMISED["camshaft.distributed"]
PUBLIC: dict[str, list[str]] = {name: importlib.import_module(name).__all__ for name in PROMISED}


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_public_and_public_names_are_sorted_and_documented(name: str) -> None:
    assert {*PROMISED[name].split()} <= {*PUBLIC[name]}
    assert PUBLIC[name] == sorted({*PUBLIC[name]})
    assert [one for one in PUBLIC[name] if not getattr(sys.modules[name], one).__doc__] == []


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("import camshaft.metrics", "ignite.metrics import"),
        ("from camshaft import metrics", "attach_metrics"),
        ("from camshaft.metrics.regression import MedianAbsoluteError", "attach_metrics"),
        ("import camshaft.contrib.handlers", "camshaft.handlers"),
        ("from camshaft.contrib import handlers", "camshaft.handlers"),
        ("from camshaft.contrib.metrics import ROC_AUC", "ignite.metrics import ROC_AUC"),
        ("from camshaft.contrib.handlers.tqdm_logger import ProgressBar", "camshaft.handlers"),
        ("from camshaft.handlers import VisdomLogger", "VisdomLogger: use TensorboardLogger"),
        ("from camshaft.handlers import Timer, NeptuneSaver", "NeptuneSaver: use WandBLogger"),
        ("from camshaft.contrib.engines.common import setup_plx_logging", "setup_plx_logging: use WandBLogger"),
    ],
)
def test_importing_what_is_missing_names_the_replacement(statement: str, instead: str) -> None:
    with pytest.raises(ImportError, match=instead):
        exec(statement)


@pytest.mark.parametrize("name", ["camshaft.handlers", "camshaft.contrib.engines.common"])
def test_other_names_are_missing_as_in_any_module(name: str) -> None:
    module = importlib.import_module(name)
    assert not hasattr(module, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'ProgresBar' from"):
        exec(f"from {name} import ProgresBar")
    with pytest.raises(AttributeError, match="has no attribute 'ProgresBar'"):
        module.ProgresBar  # noqa: B018


class MyEngine(Engine[Any, Any]):
    pass


class MyStopping(EarlyStopping):
    pass


def step(engine: Engine[Any, Any], batch: Any) -> None: ...


# Users silence or redirect loggers by name, so the names are public: the module of the public class, then the class.
LOGGERS: list[tuple[str, Callable[[], Any]]] = [
    ("camshaft.engine.engine.Engine", lambda: Engine(step)),
    ("camshaft.engine.engine.DeterministicEngine", lambda: DeterministicEngine(step)),
    ("camshaft.engine.engine.MyEngine", lambda: MyEngine(step)),
    ("camshaft.handlers.early_stopping.EarlyStopping", lambda: EarlyStopping(1, lambda engine: 0.0, Engine(step))),
    ("camshaft.handlers.early_stopping.MyStopping", lambda: MyStopping(1, lambda engine: 0.0, Engine(step))),
    ("camshaft.handlers.terminate_on_nan.TerminateOnNan", TerminateOnNan),
    ("camshaft.handlers.time_limit.TimeLimit", TimeLimit),
    ("camshaft.handlers.lr_finder.FastaiLRFinder", FastaiLRFinder),
]


@pytest.mark.parametrize(("name", "make"), LOGGERS, ids=[name for name, _ in LOGGERS])
def test_default_loggers_are_named_after_module_and_class(name: str, make: Callable[[], Any]) -> None:
    assert make().logger is logging.getLogger(name)


# Prints the side effects of importing camshaft after torch.
IMPORT_EVERYTHING = """
import json, logging, os, random, signal, sys, threading, warnings
import torch

def snapshot():
    return {
        "environment": dict(os.environ),
        "root logger": [repr(logging.root.handlers), logging.root.level],
        "random states": [repr(random.getstate()), torch.get_rng_state().tolist()],
        "warning filters": repr(warnings.filters),
        "signal handlers": repr([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]),
        "threads": threading.active_count(),
        "CUDA": torch.cuda.is_initialized(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "sys.path": list(sys.path),
    }

before, modules = snapshot(), set(sys.modules)
import camshaft, camshaft.engine, camshaft.distributed, camshaft.handlers, camshaft.utils
camshaft.distributed.utils, camshaft.distributed.auto, camshaft.distributed.launcher, camshaft.distributed.comp_models
after = snapshot()
loaded = {name.partition(".")[0] for name in set(sys.modules) - modules}
configured = [name for name, logger in logging.Logger.manager.loggerDict.items()
              if name.startswith("camshaft") and getattr(logger, "handlers", [])]
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "libraries": sorted(loaded - set(sys.stdlib_module_names) - {"camshaft", "torch"}),
    "loggers with handlers": configured,
}))
"""


def test_importing_has_no_side_effects_and_loads_no_optional_library() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"changed": [], "libraries": [], "loggers with handlers": []}


# What the standard library lacks on Windows, as far as this package may use it.
IMPORT_WITHOUT_POSIX = """
import multiprocessing.forkserver, os, signal, socket, subprocess, sys
import torch, torch.distributed, torch.distributed.tensor, torch.multiprocessing, torch.utils.data

sys.platform = "win32"
sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios"))
lacking = {
    os: "O_CLOEXEC O_NOFOLLOW O_NONBLOCK WIFSIGNALED fork geteuid killpg pread register_at_fork sched_getaffinity",
    signal: "SIGCHLD SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIG_BLOCK pthread_sigmask sigwaitinfo",
    socket: "AF_UNIX MSG_DONTWAIT TCP_USER_TIMEOUT",
}
for module, names in lacking.items():
    for name in names.split():
        vars(module).pop(name, None)
import camshaft, camshaft.engine, camshaft.distributed, camshaft.handlers, camshaft.contrib.engines.common
import camshaft.distributed.backends, camshaft.distributed.__main__
"""


@pytest.mark.jobs
def test_it_can_be_imported_where_the_parts_of_posix_are_missing() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_POSIX], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
