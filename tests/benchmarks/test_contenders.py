"""All contenders do the same work: the requested number of steps and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from benchmarks import engine_overhead, training
from benchmarks.measuring import Contender


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count steps, handler calls, and losses."""
    counts = {"steps": 0, "handlers": 0, "losses": 0}

    def counting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            counts[what] += 1
            return function(*arguments)

        return count

    handlers = [counting("handlers", lambda engine: None)]
    monkeypatch.setattr(engine_overhead, "empty_step", counting("steps", lambda engine, batch: None))
    monkeypatch.setattr(engine_overhead, "empty_handlers", lambda count: handlers * count)
    monkeypatch.setattr(training, "cross_entropy", counting("losses", cross_entropy))
    return counts


def contender(row: int, name: str) -> Contender:
    return next(one for one in engine_overhead.ROWS[row].contenders([]) if one.name == name)


@pytest.mark.parametrize("name", ["bare loop", "camshaft"])
@pytest.mark.parametrize(("row", "handled"), [(1, 0), (2, 20_000)])
def test_a_run_takes_all_steps_and_calls_the_handlers(name: str, row: int, handled: int, calls: dict[str, int]) -> None:
    assert contender(row, name).run(2000) > 0
    assert calls == {"steps": 2000, "handlers": handled, "losses": 0}


@pytest.mark.parametrize(("name", "handled"), [("bare loop", 0), ("camshaft", 200)])
def test_handlers_with_a_filter_are_called(name: str, handled: int, calls: dict[str, int]) -> None:
    contender(3, name).run(2000)
    assert calls == {"steps": 2000, "handlers": handled, "losses": 0}


@pytest.mark.parametrize("name", ["bare loop", "camshaft"])
def test_a_run_trains_on_each_batch(name: str, calls: dict[str, int]) -> None:
    assert contender(4, name).run(7) > 0
    assert calls["losses"] == 7


@pytest.mark.parametrize("name", ["bare loop", "camshaft"])
@pytest.mark.parametrize("row", engine_overhead.ROWS)
def test_a_second_run_repeats_the_first(name: str, row: int, calls: dict[str, int]) -> None:
    tested = contender(row, name)
    tested.run(1000)
    once = dict(calls)
    tested.run(1000)
    assert calls == {what: 2 * count for what, count in once.items()}
