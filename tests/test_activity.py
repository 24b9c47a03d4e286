"""What a process records of its engines: those that run, the runs that ended early, and explanations of errors."""

from __future__ import annotations

import json
import logging
import threading
import time
from functools import partial

import pytest
import torch

from camshaft import activity
from camshaft.engine import Engine, Events
from camshaft.engine.engine import outermost_engine
from camshaft.handlers.stopping import StopTogether
from tests.limits import HANG

HERE = __file__


@pytest.fixture(autouse=True)
def clean():
    activity.early_ends.clear()
    yield
    assert activity.running == []
    activity.explainers.clear()


def idle(engine, batch):
    return batch


def line_of(text, offset=0):
    """The number of the only line of this file that contains a comment."""
    with open(HERE) as file:
        (number,) = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return number + offset


# === engines that run ===


def test_engines_run_from_the_outermost_to_the_innermost():
    trainer, evaluator, seen = Engine(idle), Engine(idle), []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1]))
    for engine in (trainer, evaluator):
        engine.add_event_handler(Events.STARTED | Events.COMPLETED, lambda: seen.append(list(activity.running)))
    trainer.run([1, 2])
    assert seen == [[trainer], [trainer, evaluator], [trainer, evaluator], [trainer]]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Events.STARTED, ValueError("no")),
        (Events.ITERATION_STARTED, KeyboardInterrupt()),
        (Events.COMPLETED, GeneratorExit()),
    ],
)
def test_an_engine_that_failed_does_not_run(error, event):
    def fail():
        raise error

    engine = Engine(idle)
    engine.add_event_handler(event, fail)
    with pytest.raises(type(error)):
        engine.run([1])
    assert activity.running == []


def test_a_paused_engine_does_not_run():
    engine = Engine(idle)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
    engine.run([1, 2])
    assert activity.running == []
    engine.add_event_handler(Events.COMPLETED, lambda: seen.append(list(activity.running)))
    seen = []
    engine.run()
    assert seen == [[engine]]
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), engine.interrupt)
    engine.run([1, 2], max_epochs=2)
    engine.load_state_dict({"iteration": 0, "epoch_length": 2, "max_epochs": 1})  # discards the paused run
    assert activity.running == []


def test_a_run_is_known_by_its_line_and_by_how_often_it_was_called_there():
    first, second, found = Engine(idle), Engine(idle), []
    for _ in range(2):
        for engine in (first, second):
            engine.run([1])  # called four times
            found.append((engine.run_line, engine.run_number))
    first.add_event_handler(Events.EPOCH_COMPLETED, partial(Engine.run, second, [1], 1, None, None))
    first.run([1])  # called once
    name = test_a_run_is_known_by_its_line_and_by_how_often_it_was_called_there.__name__
    line = f"{HERE}:{line_of('called four times')} in {name}"
    start = found[0][1]
    assert found == [(line, start + number) for number in range(4)]
    assert first.run_line.startswith(f"{HERE}:{line_of('called once')} in test_")
    assert second.run_line == first.run_line  # the library called it


def test_engines_of_other_threads_are_kept_apart():
    together, found = threading.Barrier(2), {}

    def work(name):
        trainer, evaluator = Engine(idle), Engine(idle)

        def look():
            together.wait(HANG)
            found[name] = (activity.in_thread() == [trainer, evaluator], outermost_engine() is trainer)
            found[f"all of {name}"] = len(activity.running)
            together.wait(HANG)

        evaluator.add_event_handler(Events.COMPLETED, look)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1]))
        trainer.run([1])

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": (True, True), "b": (True, True), "all of a": 4, "all of b": 4}


# === runs that ended early ===


def end():
    """The only run that ended early."""
    (found,) = activity.early_ends
    return found


def test_a_run_that_reached_its_target_did_not_end_early():
    for target in ({"max_epochs": 2}, {"max_iters": 3}, {"max_iters": 4}):
        engine = Engine(idle)
        engine.run([1, 2], **target)
        engine = Engine(idle)
        engine.run(iter([1, 2]), max_epochs=1)
        engine = Engine(idle)
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
        engine.run([1, 2], **target)
        engine.run()
    assert not activity.early_ends


@pytest.mark.parametrize(
    "event", [Events.ITERATION_COMPLETED(once=4), Events.EPOCH_COMPLETED(once=2), Events.COMPLETED]
)
def test_a_termination_at_the_target_is_none(event):
    engine = Engine(idle)
    if event is Events.COMPLETED:  # a cut epoch may be the last
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), engine.terminate_epoch)
    engine.add_event_handler(event, engine.terminate)
    engine.run([1, 2], max_epochs=2)
    assert not activity.early_ends


@pytest.mark.parametrize("length", [None, 5])
def test_a_terminated_run_names_the_line_that_terminated_it(length):
    engine, seen = Engine(idle), []

    def decide(engine):
        engine.terminate()  # decides

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), decide)
    engine.add_event_handler(Events.TERMINATE, lambda: seen.append(end()))  # already there
    data = iter(range(5)) if length is None else range(5)
    engine.run(data)  # is terminated
    found = end()
    assert seen == [found]
    assert found.line == engine.run_line
    assert found.line.startswith(f"{HERE}:{line_of('is terminated')} in test_")
    assert found.number == engine.run_number
    assert found.how == f"terminate() at {HERE}:{line_of('decides')} in decide"
    assert (found.epoch, found.iteration) == (1, 3)


def assign(engine, batch):
    engine.should_terminate = "skip_completed"  # assigns


def test_other_ways_to_terminate_are_named():
    Engine(assign).run([1, 2])
    engine, stopping = Engine(idle), StopTogether()
    stopping.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), stopping.stop)
    engine.run([1, 2])
    engine = Engine(idle)
    engine.add_event_handler(Events.STARTED, engine.terminate)  # a handler without a line of the user's
    engine.run([1, 2])
    assert [found.how for found in activity.early_ends] == [
        f"terminate() at {HERE}:{line_of('assigns')} in assign",
        "stopped on all ranks together",
        f"terminate() at {engine.run_line}",
    ]


def test_data_that_ran_out_ended_the_run():
    engine = Engine(idle)
    with pytest.warns(UserWarning, match="ran out"):
        engine.run(iter([1, 2]), max_iters=3)
    assert (end().how, end().iteration) == ("the data ran out", 2)


def raising(engine, batch):
    torch.ones(2) @ torch.ones(3)  # multiplies


def decoding(engine, batch):
    json.loads("{")  # decodes


@pytest.mark.parametrize(("step", "comment"), [(raising, "multiplies"), (decoding, "decodes")])
@pytest.mark.parametrize("is_swallowed", [True, False])
def test_a_failed_run_names_the_line_of_the_user(step, comment, is_swallowed):
    engine = Engine(step)
    if is_swallowed:
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
        engine.run([1])
    else:
        with pytest.raises((RuntimeError, ValueError)):
            engine.run([1])
    kind = "RuntimeError: " if step is raising else "JSONDecodeError: "
    assert end().how.startswith(kind)
    assert end().how.endswith(f" at {HERE}:{line_of(comment)} in {step.__name__}")
    assert (end().line, end().number, end().iteration) == (engine.run_line, engine.run_number, 1)


def test_an_error_that_no_line_of_the_user_raised_counts_for_the_run():
    engine = Engine(idle)
    engine.add_event_handler(Events.STARTED, engine.terminate_epoch)
    with pytest.raises(RuntimeError, match="before the first epoch"):
        engine.run([1])
    assert end().how.endswith(f" at {engine.run_line}")


class Silent(Exception):
    def __str__(self):
        raise TypeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Silent(), "Silent at "),
        (KeyboardInterrupt(), "KeyboardInterrupt at "),
        (ValueError("two\n lines"), "ValueError: two lines at "),
        (ValueError("x" * 300), f"ValueError: {'x' * 200}... at "),
    ],
)
def test_the_text_of_an_error_is_one_line(error, text):
    def step(engine, batch):
        raise error

    with pytest.raises(type(error)):
        Engine(step).run([1])
    assert end().how.startswith(text)


def test_the_errors_of_nested_runs_are_recorded_from_the_innermost():
    trainer, evaluator = Engine(idle), Engine(raising)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1, 2]))
    with pytest.raises(RuntimeError):
        trainer.run([1])
    inner, outer = activity.early_ends
    assert (inner.line, outer.line) == (evaluator.run_line, trainer.run_line)
    assert inner.how == outer.how


def test_only_the_last_ends_are_kept():
    for _ in range(20):
        engine = Engine(idle)
        engine.add_event_handler(Events.STARTED, engine.terminate)
        engine.run([1])  # twenty times
    numbers = [found.number for found in activity.early_ends]
    assert numbers == list(range(numbers[0], numbers[0] + 8))
    assert numbers[-1] == engine.run_number


# === explanations ===


class Lost(Exception):
    pass


def failing(engine, batch):
    raise RuntimeError("Connection closed by peer")


def test_an_explanation_replaces_the_error():
    explanation = Lost("rank 3 failed first")
    engine, handled = Engine(idle), []

    def handle(engine):
        failing(engine, 0)

    def explain(error):
        assert str(error) == "Connection closed by peer"
        explanation.__cause__ = error
        return explanation

    activity.explainers.append(explain)
    engine.add_event_handler(Events.ITERATION_COMPLETED, handle)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: handled.append(error))
    engine.run([1])
    assert handled == [explanation]
    where, when = explanation.__notes__
    assert "handle' on " in where
    assert "epoch 1, iteration 1" in when
    assert explanation.__cause__.__notes__ == [where]
    assert end().how.startswith("Lost: rank 3 failed first at ")
    assert end().how.endswith("in failing")


def test_an_explanation_leaves_the_run_with_the_place_of_the_error():
    activity.explainers.append(lambda error: error if isinstance(error, Lost) else Lost())
    trainer, evaluator = Engine(idle), Engine(failing)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1]))
    with pytest.raises(Lost) as caught:
        trainer.run([1])
    assert caught.traceback[-1].name == "failing"
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def broken(error):
    raise KeyError("explainer")


@pytest.mark.parametrize("explain", [broken, lambda error: None, lambda error: Lost, lambda error: "text"])
def test_explainers_that_fail_do_not_hide_the_error(explain, caplog):
    activity.explainers.append(explain)
    with caplog.at_level(logging.CRITICAL), pytest.raises(RuntimeError, match="closed by peer") as caught:
        Engine(failing).run([1])
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def test_explainers_see_what_the_earlier_ones_returned():
    activity.explainers.extend([lambda error: Lost("first"), lambda error: Lost(f"{error}, second")])
    with pytest.raises(Lost, match="first, second"):
        Engine(failing).run([1])


# === errors from another thread ===


def raise_soon(engine, error):
    """Let another thread raise an error in an engine."""
    thread = threading.Thread(target=engine.raise_soon, args=(error,))
    thread.start()
    thread.join()


ALL = [
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
]


@pytest.mark.parametrize("event", ALL, ids=str)
def test_an_error_from_another_thread_is_raised_after_the_event(event):
    error = KeyboardInterrupt() if event is Events.STARTED else Lost("soon")
    engine, after, explained = Engine(idle), [], []
    activity.explainers.append(lambda error: explained.append(error) or error)
    handle = engine.add_event_handler(event, raise_soon, engine, error)
    engine.add_event_handler(event, lambda engine: after.append(engine.last_event_name))
    with pytest.raises(type(error)) as caught:
        engine.run([1], max_epochs=2)
    assert caught.value is error
    assert after == [event]
    assert explained == [error]
    assert caught.value.__context__ is None
    assert end().how == f"{activity.summary(error)} at {engine.run_line}"
    handle.remove()
    engine.run([1], max_epochs=3)  # nothing is left of it


def test_an_error_comes_before_other_requests():
    engine = Engine(idle)

    def request():
        engine.terminate()
        raise_soon(engine, Lost())

    engine.add_event_handler(Events.ITERATION_COMPLETED, request)
    engine.add_event_handler(Events.TERMINATE, lambda: pytest.fail("it was not terminated"))
    with pytest.raises(Lost):
        engine.run([1, 2])


@pytest.mark.parametrize("event", [Events.TERMINATE, Events.INTERRUPT], ids=str)
def test_an_error_on_the_way_out_is_raised(event):
    engine = Engine(idle)
    engine.add_event_handler(
        Events.ITERATION_STARTED, engine.terminate if event is Events.TERMINATE else engine.interrupt
    )
    engine.add_event_handler(event, raise_soon, engine, Lost())
    with pytest.raises(Lost):
        engine.run([1, 2])


def test_handlers_of_errors_get_it_and_may_swallow_it():
    engine, handled, error = Engine(idle), [], Lost()
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: handled.append(error))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), raise_soon, engine, error)
    engine.run([1, 2], max_epochs=2)
    assert handled == [error]
    assert engine.state.iteration == 3  # the rest of the first epoch was left out


@pytest.mark.parametrize("target", ["trainer", "evaluator"])
def test_it_is_raised_in_the_innermost_engine(target):
    engines = {"trainer": Engine(idle), "evaluator": Engine(idle)}
    trainer, evaluator, trace, error = *engines.values(), [], Lost()
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1, 2]))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: trace.append("iteration"))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=1), raise_soon, engines[target], error)
    for name, engine in engines.items():
        engine.add_event_handler(Events.EXCEPTION_RAISED, reraise(trace, name))
    with pytest.raises(Lost) as caught:
        trainer.run([1])
    assert caught.value is error
    assert trace == ["iteration", "evaluator", "trainer"]


def reraise(trace, name):
    def handle(error):
        trace.append(name)
        raise error

    return handle


def test_an_engine_that_starts_meanwhile_raises_it():
    trainer, evaluator = Engine(idle), Engine(idle)

    def evaluate():
        raise_soon(trainer, Lost())
        evaluator.run([1])

    trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluate)
    evaluator.add_event_handler(Events.EPOCH_STARTED, lambda: pytest.fail("it was not raised"))
    with pytest.raises(Lost):
        trainer.run([1])
    assert [found.line for found in activity.early_ends] == [evaluator.run_line, trainer.run_line]


def test_an_engine_that_ends_meanwhile_leaves_it_to_the_outer_one():
    trainer, error = Engine(idle), Lost()
    evaluator = Engine(lambda engine, batch: (raise_soon(trainer, error), failing(engine, batch)))

    def evaluate():
        with pytest.raises(RuntimeError, match="closed by peer"):
            evaluator.run([1])

    trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluate)
    with pytest.raises(Lost) as caught:
        trainer.run([1])
    assert caught.value is error


def test_an_error_that_was_explained_as_this_one_is_not_raised_again():
    error, handled = Lost(), []
    engine = Engine(lambda engine, batch: (raise_soon(engine, error), failing(engine, batch)))
    activity.explainers.append(lambda found: error)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: handled.append(error))
    engine.run([1])
    assert handled == [error]


def test_nothing_happens_to_an_engine_that_does_not_run():
    engine = Engine(idle)
    engine.raise_soon(Lost())
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), engine.interrupt)
    engine.run([1, 2], max_epochs=2)
    engine.raise_soon(Lost())  # it is paused
    assert engine.run().iteration == 4


def test_a_long_run_in_another_thread_is_ended():
    engine, caught, started = Engine(idle), [], threading.Event()
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=10), started.set)

    def run():
        try:
            engine.run(range(10**9))
        except Lost as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)  # does not end if the test fails
    thread.start()
    assert started.wait(HANG)
    other = Engine(lambda engine, batch: time.sleep(0))
    other.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: engine.raise_soon(Lost()))
    other.run(range(5))
    thread.join(HANG)
    assert len(caught) == 1
    assert other.state.iteration == 5
