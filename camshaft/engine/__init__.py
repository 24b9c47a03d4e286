"""The engine and its events, and engines for supervised learning."""

from camshaft.engine.deterministic import DeterministicEngine
from camshaft.engine.engine import Engine
from camshaft.engine.events import (
    CallableEventWithFilter,
    EventEnum,
    Events,
    EventsList,
    OptimizerEvents,
    RemovableEventHandle,
)
from camshaft.engine.state import State
from camshaft.engine.supervised import (
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_evaluation_step,
    supervised_evaluation_step_amp,
    supervised_training_step,
    supervised_training_step_amp,
    supervised_training_step_apex,
    supervised_training_step_tpu,
)
from camshaft.engine.supervised import prepare_batch as _prepare_batch  # noqa: F401  # its name in the public API
from camshaft.engine.update import count_optimizer_steps
from camshaft.tree import convert_tensor

__all__ = [
    "CallableEventWithFilter",
    "DeterministicEngine",
    "Engine",
    "EventEnum",
    "Events",
    "EventsList",
    "OptimizerEvents",
    "RemovableEventHandle",
    "State",
    "convert_tensor",
    "count_optimizer_steps",
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "supervised_evaluation_step",
    "supervised_evaluation_step_amp",
    "supervised_training_step",
    "supervised_training_step_amp",
    "supervised_training_step_apex",
    "supervised_training_step_tpu",
]
