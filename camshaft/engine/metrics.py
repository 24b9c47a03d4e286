"""Metrics over the epochs of an engine, exact over batches, ranks, and meshes: those of torchmetrics, and others."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from camshaft.arguments import check_is_no_class, check_takes, check_type, described
from camshaft.base import Serializable
from camshaft.distributed import all_gather, get_world_size
from camshaft.distributed.collectives.values import decode, encode
from camshaft.distributed.models.mesh import output_place
from camshaft.dtensors import full_value
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, Order, RemovableEventHandle
from camshaft.engine.state import check_has_output, fetch, peek
from camshaft.errors import annotate
from camshaft.interop import ignite_class


def attach_metrics(
    engine: Engine[Any, Any],
    metrics: Mapping[str, Any],
    output_transform: Callable[[Any], Any] | None = None,
) -> AttachedMetrics:
    """Compute metrics over each epoch of an engine, and put the results into ``engine.state.metrics``.

    They are reset when an epoch starts, updated with each output, and computed before the other handlers of
    ``EPOCH_COMPLETED``. The ranks exchange the states of all metrics in one collective, so that the results cover all
    samples, however they are partitioned. With a mesh, ranks that differ only along ``tp`` count once; those along
    ``cp`` each count, with their part of the sequences. Metrics are moved to the device of their arguments; arguments
    that are DTensors are gathered first. Those of torchmetrics synchronize with the device to check their arguments,
    unless made with ``validate_args=False``.

    Args:
        engine: usually an evaluator.
        metrics: by name, objects of torchmetrics: metrics, collections, sums and the like; or other objects with
            ``reset()``, ``update(...)`` and ``compute()``, which synchronize ranks themselves. A metric that was
            made with a ``process_group`` or a ``dist_sync_fn`` keeps using it.
        output_transform: called with the output of an iteration, returns the arguments of ``update``: a tuple or a
            list of them, a mapping of their names, or a single one. By default the output itself, such as the
            ``(y_pred, y)`` of an evaluator.

    Returns:
        A handle: to be removed, or saved if the epochs of a trainer may be resumed in the middle.

    Raises:
        TypeError: an argument has the wrong type.

    >>> class Largest:
    ...     def reset(self):
    ...         self.value = 0
    ...
    ...     def update(self, y_pred, y):
    ...         self.value = max(self.value, abs(y_pred - y))
    ...
    ...     def compute(self):
    ...         return self.value
    >>> evaluator = Engine(lambda engine, batch: batch)
    >>> attached = attach_metrics(evaluator, {"largest error": Largest()})
    >>> evaluator.run([(1, 2), (5, 2), (3, 3)]).metrics
    {'largest error': 3}
    """
    check_type("engine", engine, Engine, "an Engine")
    if output_transform is not None:
        check_takes("output_transform", output_transform, "(output)")
    check_type("metrics", metrics, Mapping, "a mapping of names to metrics")
    for name, metric in metrics.items():
        check_is_no_class(f"metrics[{name!r}]", metric)
        if ignite_class(metric) is not None:
            raise TypeError(
                f"metrics[{name!r}] must be a metric of torchmetrics, or have its methods, got {metric!r}, which comes "
                f"from PyTorch-Ignite: attach it by its own method, metric.attach(engine, {name!r})"
            )
        if not all(callable(getattr(metric, method, None)) for method in ("reset", "update", "compute")):
            raise TypeError(
                f"metrics[{name!r}] must have reset(), update() and compute(), as those of torchmetrics, got "
                f"{described(metric)}; an object with attach(engine, name) attaches itself"
            )
    return AttachedMetrics(engine, dict(metrics), output_transform)


class AttachedMetrics(Serializable):
    """Metrics attached to an engine; made by :func:`attach_metrics`.

    Save it with an engine that may be resumed in the middle of an epoch: the results then cover the whole epoch.
    Otherwise, and with several ranks, they cover the rest of it, with a warning.

    Attributes:
        metrics: by name.
    """

    _state_dict_all_req_keys = ("epoch", "iteration", "metrics")

    def __init__(
        self, engine: Engine[Any, Any], metrics: dict[str, Any], output_transform: Callable[[Any], Any] | None
    ) -> None:
        self.metrics = metrics
        self._output_transform = output_transform
        self._updates = [metric.update for metric in metrics.values()]
        self._epoch: int | None = None
        self._iteration = 0
        self._is_placed = False
        for member in (member for metric in metrics.values() for member in _members(metric)):
            if callable(getattr(member, "persistent", None)):
                member.persistent(True)  # include the states of torchmetrics in state_dict()
        add = engine.add_event_handler
        self._handles: list[RemovableEventHandle] = [
            add(Events.EPOCH_STARTED, self._begin, order=Order.RESULTS),
            add(Events.ITERATION_COMPLETED, self._update, order=Order.RESULTS),
            add(Events.EPOCH_COMPLETED, self._finish, order=Order.RESULTS),
        ]

    def remove(self) -> None:
        """Detach the metrics from the engine."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, engine: Engine[Any, Any]) -> None:
        state = engine.state
        self._is_placed = False
        if engine.iteration_in_epoch > 0:  # the run resumes in this epoch
            if self._epoch == state.epoch and 0 <= state.iteration - self._iteration <= 1:
                return
            warnings.warn(
                f"the metrics {list(self.metrics)} leave out the first iterations of epoch {state.epoch}, in which the "
                "run resumes; in a single process, save and load the return value of attach_metrics",
                stacklevel=2,
            )
        self._epoch, self._iteration = state.epoch, state.iteration
        for metric in self.metrics.values():
            metric.reset()

    def _update(self, engine: Engine[Any, Any]) -> None:
        output = engine.state._output  # `state.output` synchronizes
        try:
            self._update_with(output if self._output_transform is None else self._output_transform(output))
        except Exception as error:
            check_has_output(f"attach_metrics of {list(self.metrics)}", engine.state, error)
            raise
        self._iteration = engine.state.iteration

    def _update_with(self, output: Any) -> None:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        if isinstance(output, Mapping):
            named = {name: full_value(peek(one)) for name, one in output.items()}
        else:
            positional = [full_value(peek(one)) for one in (output if isinstance(output, (tuple, list)) else (output,))]
        if not self._is_placed:  # move the metrics to the device of the first arguments of the epoch
            self._is_placed = True
            arguments = (*positional, *named.values())
            device = next((one.device for one in arguments if isinstance(one, Tensor)), None)
            for metric in self.metrics.values():
                if device is not None and callable(getattr(metric, "to", None)):
                    metric.to(device)
        try:
            for update in self._updates:
                update(*positional, **named)
        except TypeError as error:
            hint = "output_transform makes its arguments"
            if self._output_transform is None and not isinstance(output, (Mapping, tuple, list)):
                hint = "the output is a single value, as that of a trainer; that of an evaluator is (y_pred, y)"
            annotate(error, f"in update() of the metrics {list(self.metrics)}: {hint}")
            raise

    def _finish(self, engine: Engine[Any, Any]) -> None:
        with _over_all_ranks(self.metrics):
            results = {name: metric.compute() for name, metric in self.metrics.items()}
        engine.state.metrics.update(_as_numbers(results))

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the states of the metrics within the epoch; empty if several ranks share the work."""
        complete = output_place()[1] == 1 and all(hasattr(metric, "state_dict") for metric in self.metrics.values())
        states = {name: metric.state_dict() for name, metric in self.metrics.items()} if complete else {}
        return OrderedDict(epoch=self._epoch, iteration=self._iteration, metrics=states)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume in the middle of an epoch.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            ValueError: a key is missing, or the state belongs to other metrics.
        """
        super().load_state_dict(state_dict)
        states = state_dict["metrics"]
        if states and set(states) != set(self.metrics):
            raise ValueError(f"state_dict must be that of the metrics {list(self.metrics)}, got {list(states)}")
        self._epoch, self._iteration = (state_dict["epoch"] if states else None), state_dict["iteration"]
        for name, metric in self.metrics.items():
            metric.reset()
            if states and output_place()[0] == 0:  # the other ranks start empty, so that the total is right
                metric.load_state_dict(states[name])


def _as_numbers(results: Mapping[str, Any]) -> dict[str, Any]:
    """Replace 0-d tensors by numbers, also in the results of collections."""
    scalars = {name: one.detach() for name, one in results.items() if isinstance(one, Tensor) and one.ndim == 0}
    fetch(scalars)
    nested = {name: _as_numbers(one) for name, one in results.items() if isinstance(one, Mapping)}
    return {**results, **scalars, **nested}


# --- one exchange for the states of all metrics ---------------------------------------------------------------------
# By itself torchmetrics makes up to four collectives for each state of each metric, and is wrong where ranks hold lists
# of different lengths. How a metric combines the states of all ranks is up to the metric: it gets them through
# ``dist_sync_fn`` when its ``compute`` asks for them.


@contextmanager
def _over_all_ranks(metrics: Mapping[str, Any]) -> Iterator[None]:
    """Make metrics of torchmetrics compute over the states of all ranks in this block.

    Raises:
        RuntimeError: the ranks have different metrics.
    """
    members = [one for metric in metrics.values() for one in _members(metric)] if get_world_size() > 1 else []
    members = [one for one in members if _is_synchronized(one)]
    if not members:
        yield
        return
    encoded: dict[int, bytes] = {}  # tensors that several metrics share are sent once
    mine = (list(metrics), [_encoded(one.metric_state, encoded) for one in members])
    gathered = all_gather((output_place()[0], mine))
    ranks = list(dict(reversed(gathered)).values())[::-1]  # of tensor-parallel peers, which have the same, the first
    if any(names != mine[0] or len(states) != len(members) for _, (names, states) in gathered):
        raise RuntimeError(f"all ranks must have the same metrics, got {[names for _, (names, _) in gathered]}")
    with ExitStack() as stack:
        for index, member in enumerate(members):
            states = [rank_states[index] for _, rank_states in ranks]
            if all(state is not None for state in states):
                stack.enter_context(_synchronized(member, states))
        yield


def _members(metric: Any) -> list[Any]:
    """Return a metric of torchmetrics and all metrics in it; nothing for other metrics."""
    return list(metric.modules()) if isinstance(metric, nn.Module) else []


def _is_synchronized(member: Any) -> bool:
    """Return whether a metric has a state and the default synchronization."""
    if not (hasattr(member, "distributed_available_fn") and member.metric_state and member.sync_on_compute):
        return False
    return member.dist_sync_fn is None and member.process_group is None


def _encoded(state: Mapping[str, Any], encoded: dict[int, bytes]) -> dict[str, Any] | None:
    """Serialize the tensors of a state; a state with other values is left to its metric."""
    rows: dict[str, Any] = {}
    for name, value in state.items():
        tensors = value if isinstance(value, list) else [value]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None
        for tensor in tensors:
            if id(tensor) not in encoded:
                encoded[id(tensor)] = encode(tensor.detach())
        row = [encoded[id(tensor)] for tensor in tensors]
        rows[name] = row if isinstance(value, list) else row[0]
    return rows


@contextmanager
def _synchronized(metric: Any, states: list[dict[str, Any]]) -> Iterator[None]:
    """Replace the collectives of a metric: its lists are joined here, and it receives all values of other states."""
    here = metric.metric_state
    lists = {name: value for name, value in here.items() if isinstance(value, list)}
    values = {name: [decode(state[name]).to(metric.device) for state in states] for name in here if name not in lists}
    values_of: dict[int, list[Tensor]] = {}
    is_available = metric.distributed_available_fn

    def identify() -> bool:
        """Return that there are other ranks; a metric asks this just before it synchronizes its current tensors."""
        values_of.clear()  # an id may have been reused
        values_of.update((id(getattr(metric, name)), gathered) for name, gathered in values.items())
        return True

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return values_of.get(id(tensor), [tensor])  # elements of lists come from all ranks already

    for name in lists:
        setattr(metric, name, [decode(one).to(metric.device) for state in states for one in state[name]])
    metric.distributed_available_fn, metric.dist_sync_fn = identify, gather
    try:
        yield
    finally:
        metric.distributed_available_fn, metric.dist_sync_fn = is_available, None
        for name, value in lists.items():
            setattr(metric, name, value)
