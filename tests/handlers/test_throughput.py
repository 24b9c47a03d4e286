"""Throughput: amounts, time, ranks, and MFU."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.distributed import get_rank, make_mesh
from camshaft.engine import Engine, Events
from camshaft.handlers import ProgressBar, Throughput, throughput
from tests.handlers.clocks import clock_in
from tests.ranks import on_ranks


@pytest.fixture
def clock():
    with clock_in(Throughput) as clock:
        yield clock


def trainer(clock, seconds=2.0):
    return Engine(lambda engine, batch: clock.take(seconds))


def test_rates_are_of_the_last_iterations_and_computed_once_per_window(clock):
    engine, seen = Engine(lambda engine, batch: clock.take(batch)), []
    Throughput(samples=8, tokens=lambda batch: 100 * batch, window=2).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(dict(engine.state.metrics)))
    engine.run([50.0, 2.0, 4.0, 8.0, 1.0])
    two = {"steps_per_second": 1 / 2, "samples_per_second": 4.0, "tokens_per_second": 100.0}
    four = {"steps_per_second": 2 / 12, "samples_per_second": 16 / 12, "tokens_per_second": 100.0}
    assert all(math.isnan(value) for value in seen.pop(0).values())
    assert seen == [two, two, four, four]
    assert engine.state.metrics["steps_per_second"] == 2 / 9


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 10),
    st.integers(1, 10),
)
def test_rates_are_amounts_over_time(batches, window, length):
    def samples(batch):
        return torch.tensor(batch[0]) if batch[2] else batch[0]

    with clock_in(Throughput) as clock:
        engine = Engine(lambda engine, batch: clock.take(batch[1]))
        meter = Throughput(samples=samples, window=window)
        meter.attach(engine)
        engine.add_event_handler(Events.EPOCH_COMPLETED, clock.taking(1000))
        engine.add_event_handler(Events.EPOCH_STARTED, clock.taking(1000))
        engine.run(batches, max_iters=len(batches), epoch_length=length)
        rates = meter.rates()
    done = batches[1:][-window:]
    seconds = sum(batch[1] for batch in done)
    if not done:
        assert all(math.isnan(value) for value in rates.values())
    else:
        assert rates["samples_per_second"] == pytest.approx(sum(batch[0] for batch in done) / seconds)
        assert rates["steps_per_second"] == pytest.approx(len(done) / seconds)


def test_a_new_run_clears_the_rates_but_not_other_metrics(clock):
    engine = trainer(clock)
    Throughput().attach(engine)
    engine.run(range(5)).metrics["loss"] = 3
    clock.take(1000)
    assert math.isnan(engine.run(range(1)).metrics["steps_per_second"])
    clock.take(1000)
    assert engine.run(range(3)).metrics == {"loss": 3, "steps_per_second": 0.5}


def evaluate_while_paused(engine, meter, clock):
    evaluator = trainer(clock, 100)
    evaluator.add_event_handler(Events.STARTED, meter.pause)
    evaluator.add_event_handler(Events.COMPLETED, meter.resume)
    events = Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED
    engine.add_event_handler(events, lambda: evaluator.run(range(3)))


def forget_to_resume(engine, meter, clock):
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), meter.pause)
    engine.add_event_handler(Events.EPOCH_COMPLETED, clock.taking(1000))


def resume_without_a_pause(engine, meter, clock):
    engine.add_event_handler(Events.ITERATION_STARTED, meter.resume)


def interrupt(engine, meter, clock):
    engine.add_event_handler(Events.ITERATION_STARTED(once=6), engine.interrupt)


@pytest.mark.parametrize("disturb", [evaluate_while_paused, forget_to_resume, resume_without_a_pause, interrupt])
def test_the_time_of_pauses_does_not_count(clock, disturb):
    engine, meter = trainer(clock), Throughput(window=3)
    meter.attach(engine)
    disturb(engine, meter, clock)
    engine.run(range(4), max_epochs=3)
    clock.take(1000)
    if disturb is interrupt:
        engine.run()
    assert engine.state.iteration == 12
    assert engine.state.metrics["steps_per_second"] == 0.5


def test_tensors_are_read_when_results_are_computed_and_not_before(clock, monkeypatch):
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(tensor) or item(tensor))
    engine = trainer(clock)
    Throughput(tokens=lambda batch: batch.sum()).attach(engine, Events.ITERATION_COMPLETED(every=5))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: read.append("four iterations"))
    engine.run(torch.ones(5, 6, dtype=torch.bool))
    assert read[0] == "four iterations"
    assert len(read) == 2
    assert engine.state.metrics["tokens_per_second"] == 3.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GB200", 2.5e15),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert throughput.peak_of(torch.device("cuda", 0)) == peak


def test_an_unknown_peak_warns_once(clock):
    engine = trainer(clock)
    Throughput(flops=1e12).attach(engine)
    with pytest.warns(UserWarning, match="peak FLOPS of 'cpu' unknown"):
        metrics = engine.run(range(4)).metrics
    engine.run(range(4))
    assert metrics == {"steps_per_second": 0.5, "flops_per_second": 5e11}


def test_a_progress_bar_shows_it(clock):
    engine, output = trainer(clock), io.StringIO()
    Throughput(samples=32).attach(engine, Events.ITERATION_COMPLETED)
    ProgressBar(persist=True, bar_format="{postfix}", file=output).attach(engine, ["samples_per_second"])
    engine.run(range(3))
    assert "samples_per_second=16" in output.getvalue()


def test_zero_time_gives_no_rates(clock):
    engine = trainer(clock, 0)
    Throughput().attach(engine)
    assert math.isnan(engine.run(range(4)).metrics["steps_per_second"])


def test_the_handle_detaches_it(clock):
    engine = trainer(clock)
    before = {event: plan.registrations for event, plan in engine._dispatcher.plans.items()}
    Throughput(flops=2.0, peak_flops=1.0).attach(engine).remove()
    assert {event: plan.registrations for event, plan in engine._dispatcher.plans.items()} == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"samples": "many"}, TypeError),
        ({"tokens": True}, TypeError),
        ({"tokens": 0}, ValueError),
        ({"flops": float("nan")}, ValueError),
        ({"peak_flops": -1}, ValueError),
        ({"peak_flops": len}, TypeError),
        ({"window": 0}, ValueError),
    ],
)
def test_bad_arguments(options, error):
    with pytest.raises(error, match=next(iter(options))):
        Throughput(**options)


@on_ranks(2)
def test_ranks_add_up_and_samples_of_tensor_parallel_ranks_count_once():
    def metrics_of(meter):
        engine = trainer(clock)
        meter.attach(engine, Events.ITERATION_COMPLETED(every=5))
        return engine.run(range(5)).metrics

    with clock_in(Throughput) as clock:
        meter = Throughput(samples=10 + get_rank(), flops=6e12, peak_flops=12e12)
        assert metrics_of(meter) == {
            "steps_per_second": 0.5,
            "samples_per_second": 10.5,
            "flops_per_second": 6e12,
            "mfu": 0.25,
        }
        assert meter.rates()["samples_per_second"] == 5 + get_rank() / 2
        make_mesh(tp=2)
        assert metrics_of(Throughput(samples=10)) == {"steps_per_second": 0.5, "samples_per_second": 5}


def test_it_may_be_attached_in_a_run():
    trainer, throughput = Engine(lambda engine, batch: None), Throughput()
    trainer.add_event_handler(Events.EPOCH_STARTED(once=1), lambda: throughput.attach(trainer))
    assert trainer.run(range(3)).metrics["steps_per_second"] > 0
