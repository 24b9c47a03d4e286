"""The compared handlers are attached and do their work in each iteration."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from benchmarks import handlers, training
from camshaft.engine import Engine


def registrations(engine: Engine) -> int:
    return sum(len(plan.registrations) for plan in engine._dispatcher.plans.values())


@pytest.mark.parametrize("what", handlers.ALONE)
def test_each_handler_is_attached_and_keeps_running(what: str, tmp_path: Path) -> None:
    engine: Engine = Engine(handlers.constant_step)
    before = registrations(engine)
    with ExitStack() as stack:
        handlers.ALONE[what](handlers.Place("camshaft", engine, training.tiny()[1], str(tmp_path), stack))
        assert registrations(engine) > before
        for _ in range(2):
            assert engine.run(range(150), max_epochs=1).iteration == 150


@pytest.mark.parametrize("attach", [None, handlers.time_limit])
def test_an_engine_takes_all_timed_steps(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(handlers, "constant_step", lambda engine, batch: steps.append(batch))
    with ExitStack() as stack:
        contender = handlers.alone("camshaft", attach, stack)
        assert contender.run(7) > 0
        assert contender.run(7) > 0
    assert steps == [*range(7)] * 2


def test_the_time_of_the_bare_engine_of_the_library_is_subtracted() -> None:
    spreads = handlers.measure_alone("TimeLimit", [], iterations=50, repetitions=2)
    assert set(spreads) == {"camshaft"}


def test_the_training_run_has_all_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    monkeypatch.setattr(handlers, "cross_entropy", lambda *both: losses.append(1) or cross_entropy(*both))
    engines = []
    batches = training.Batches
    monkeypatch.setattr(training, "Batches", lambda count: engines.append(count) or batches(count))
    with ExitStack() as stack:
        contender = handlers.with_set("camshaft", stack)
        assert contender.run(120) > 0
        assert contender.run(120) > 0
    assert (len(losses), engines) == (240, [120, 120])


@pytest.mark.parametrize("arguments", [("--only", "nothing"), ("--repetitions", "0"), ("--iterations", "0")])
def test_invalid_options_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        handlers.main(arguments)
    assert arguments[0] in capsys.readouterr().err
