"""The states of metrics of torchmetrics, exchanged between ranks once for all of them.

By itself torchmetrics makes up to four collectives for each state of each metric, and goes wrong where ranks hold lists
of different lengths. Here everything travels together. What a metric does with the states of all ranks stays its own
business: it is handed them through ``dist_sync_fn``, when its ``compute`` asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from camshaft.distributed import all_gather, get_world_size
from camshaft.distributed.encoding import decode, encode

_State = dict[str, Any]


@contextmanager
def over_all_ranks(metrics: Mapping[str, Any]) -> Iterator[None]:
    """Let metrics compute over the states of all ranks in this block.

    Args:
        metrics: the same on all ranks. What is none of torchmetrics is left alone.

    Raises:
        RuntimeError: the ranks do not have the same metrics.
    """
    parts = [part for metric in metrics.values() for part in _parts(metric)] if get_world_size() > 1 else []
    if not parts:
        yield
        return
    bytes_of: dict[int, bytes] = {}  # tensors that several metrics share are sent once
    mine = [_encoded(part.metric_state, bytes_of) for part in parts]
    ranks = all_gather((list(metrics), mine))
    if any(names != ranks[0][0] or len(states) != len(parts) for names, states in ranks):
        raise RuntimeError(f"all ranks must have the same metrics, got {[names for names, _ in ranks]}")
    with ExitStack() as stack:
        for index, part in enumerate(parts):
            states = [rank_states[index] for _, rank_states in ranks]
            if all(state is not None for state in states):
                stack.enter_context(_Gathered(part, states))
        yield


def members(metric: Any) -> list[Any]:
    """List a metric of torchmetrics and all those in it; of others nothing."""
    return list(metric.modules()) if isinstance(metric, nn.Module) else []


def _parts(metric: Any) -> list[Any]:
    """Find the metrics in a metric that have a state, and are to exchange it in the usual way."""
    return [
        module
        for module in members(metric)
        if hasattr(module, "distributed_available_fn")
        and module.metric_state
        and module.sync_on_compute
        and module.dist_sync_fn is None
        and module.process_group is None
    ]


def _encoded(state: _State, bytes_of: dict[int, bytes]) -> _State | None:
    """Write the tensors of a state as bytes; a state of another kind is left to its metric."""
    encoded: _State = {}
    for name, value in state.items():
        tensors = value if isinstance(value, list) else [value]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None
        for tensor in tensors:
            if id(tensor) not in bytes_of:
                bytes_of[id(tensor)] = encode(tensor.detach())
        rows = [bytes_of[id(tensor)] for tensor in tensors]
        encoded[name] = rows if isinstance(value, list) else rows[0]
    return encoded


class _Gathered:
    """Stands in for the collectives of one metric.

    Its lists are put together here, whatever their lengths. Of other states the metric is told all values.
    """

    def __init__(self, metric: Any, states: list[_State]) -> None:
        self._metric = metric
        self._lists: dict[str, list[Tensor]] = {}
        self._tensors: dict[str, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        here = metric.metric_state
        for name, value in here.items():
            if isinstance(value, list):
                self._lists[name] = [_decoded(one, metric) for state in states for one in state[name]]
            else:
                self._tensors[name] = [_decoded(state[name], metric) for state in states]
        self._before = {name: here[name] for name in self._lists}
        self._asks_first = metric.distributed_available_fn

    def __enter__(self) -> None:
        self._set(self._lists)
        self._metric.distributed_available_fn = self._is_available
        self._metric.dist_sync_fn = self._gather

    def __exit__(self, *error: object) -> None:
        self._metric.dist_sync_fn = None
        self._metric.distributed_available_fn = self._asks_first
        self._set(self._before)

    def _set(self, lists: dict[str, list[Tensor]]) -> None:
        for name, value in lists.items():
            setattr(self._metric, name, value)

    def _is_available(self) -> bool:
        """Say that there are other ranks; a metric asks this first, each time, so that its tensors are known now."""
        self._values = {id(getattr(self._metric, name)): values for name, values in self._tensors.items()}
        return True

    def _gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return self._values.get(id(tensor), [tensor])  # elements of lists are those of all ranks already


def _decoded(data: bytes, metric: Any) -> Tensor:
    tensor: Tensor = decode(data)
    return tensor.to(metric.device)
