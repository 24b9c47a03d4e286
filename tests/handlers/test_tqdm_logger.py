"""Test what ProgressBar shows, when it reads values, and that it is always closed."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import re
import struct
import termios
import weakref

import pytest
import torch
from tqdm import tqdm

from camshaft.engine import Engine, EventEnum, Events
from camshaft.engine.state import LazyNumber
from camshaft.handlers import ProgressBar
from tests.ranks import on_ranks

FORMAT = "{desc}{n_fmt}/{total_fmt}{postfix}"


class Terminal(io.StringIO):
    """Records what was drawn."""

    is_real = True

    def isatty(self):
        return self.is_real

    @property
    def drawn(self):
        """Everything that was drawn, including repetitions."""
        return [text.strip() for text in self.getvalue().replace("\n", "\r").split("\r") if text.strip()]

    @property
    def lines(self):
        """What remains visible at the end, by line."""
        return [line.split("\r")[-1].strip() for line in self.getvalue().split("\n")]


@pytest.fixture
def terminal():
    yield Terminal()
    assert not tqdm._instances, "a bar was left open"


def bar_on(terminal, **options):
    return ProgressBar(**{"persist": True, "bar_format": FORMAT, "file": terminal, **options})


def trainer_of(output=None):
    return Engine(lambda engine, batch: engine.state.iteration if output is None else output)


# --- what it shows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "run", "options", "lines"),
    [
        ({}, {"max_epochs": 2}, {}, ["Epoch [1/2]: 5/5", "Epoch [2/2]: 5/5"]),
        ({}, {"max_epochs": 1}, {}, ["Iteration: 5/5"]),
        ({}, {"max_epochs": 2}, {"desc": "Train"}, ["Train [1/2]: 5/5", "Train [2/2]: 5/5"]),
        ({}, {"max_iters": 10}, {}, ["Epoch [1/2]: 5/5", "Epoch [2/2]: 5/5"]),
        ({}, {"max_iters": 7}, {}, ["Epoch [1/2]: 5/5", "Epoch [2/2]: 2/5"]),
        ({"closing_event_name": Events.COMPLETED}, {"max_epochs": 2}, {}, ["Epoch: 5/5"]),
        (
            {"event_name": Events.EPOCH_COMPLETED, "closing_event_name": Events.COMPLETED},
            {"max_epochs": 3},
            {},
            ["Epoch: 3/3"],
        ),
        ({"event_name": Events.STARTED, "closing_event_name": Events.COMPLETED}, {}, {}, ["Iteration: 1/1"]),
        ({"event_name": Events.ITERATION_STARTED}, {}, {"total": 9}, ["Iteration: 9/9"]),
        ({"event_name": Events.ITERATION_COMPLETED(every=2)}, {}, {}, ["Iteration: 5/5"]),
        ({"event_name": "ITERATION_COMPLETED", "closing_event_name": "EPOCH_COMPLETED"}, {}, {}, ["Iteration: 5/5"]),
        (
            {"event_name": Events.ITERATION_STARTED, "closing_event_name": Events.ITERATION_COMPLETED},
            {"epoch_length": 2},
            {},
            ["Iteration [1/2]: 2/2", "Iteration [2/2]: 2/2"],
        ),
        ({}, {"max_epochs": 2}, {"persist": False}, []),
    ],
)
def test_the_closing_event_fills_the_bar_and_persist_keeps_it(terminal, events, run, options, lines):
    trainer = trainer_of()
    bar_on(terminal, **options).attach(trainer, **events)
    trainer.run(range(5), **run)
    assert terminal.lines == [*lines, ""]


@pytest.mark.parametrize("closing", [Events.EPOCH_COMPLETED, Events.COMPLETED])
def test_an_epoch_that_was_cut_is_not_shown_as_complete_nor_the_next_one_as_cut(terminal, closing):
    trainer = trainer_of()
    bar_on(terminal).attach(trainer, event_name=Events.ITERATION_COMPLETED(every=2), closing_event_name=closing)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.terminate_epoch())
    trainer.run(range(10))
    trainer.run(range(3), max_epochs=2, epoch_length=3)
    first, *_, last, _ = terminal.lines
    assert (first, last.rpartition(" ")[2]) == ("Iteration: 3/10", "3/3")


def test_a_resumed_run_starts_at_its_position(terminal):
    trainer = trainer_of()
    trainer.load_state_dict({"iteration": 7, "epoch_length": 5, "max_epochs": 2})
    bar_on(terminal, mininterval=0, miniters=1).attach(trainer)
    trainer.run(range(5))
    assert terminal.drawn == [f"Epoch [2/2]: {position}/5" for position in (3, 4, 5, 5)]


def test_data_of_unknown_length_have_no_total_until_their_end(terminal):
    trainer = trainer_of()
    bar_on(terminal, mininterval=0, miniters=1).attach(trainer)
    trainer.run(iter(range(3)))
    assert terminal.drawn == ["Iteration: 1/?", "Iteration: 2/?", "Iteration: 3/?", "Iteration: 3/3"]


def test_metrics_outputs_and_attributes_are_the_postfix(terminal):
    trainer = trainer_of({"loss": [0.123456, torch.tensor(2)], "name": "a"})
    trainer.state.metrics, trainer.state.rate = {"accuracy": 0.5, "other": 1}, 1e-3
    bar_on(terminal).attach(trainer, ["accuracy"], lambda output: output, state_attributes=["rate"])
    trainer.run([1])
    assert terminal.lines[0] == "Iteration: 1/1, accuracy=0.5, loss_0=0.123, loss_1=2, name=a, rate=0.001"


def test_all_metrics_are_shown_as_of_the_end_of_the_epoch(terminal):
    trainer = trainer_of()
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(loss=engine.state.epoch)
    )
    bar_on(terminal).attach(trainer, "all")
    trainer.run(range(5), max_epochs=2)
    assert terminal.lines == ["Epoch [1/2]: 5/5, loss=1", "Epoch [2/2]: 5/5, loss=2", ""]


def test_the_default_format(monkeypatch, terminal):
    monkeypatch.setenv("NO_COLOR", "1")
    trainer = trainer_of(0.5)
    ProgressBar(persist=True, file=terminal, ncols=80, ascii=False).attach(
        trainer, output_transform=lambda loss: {"loss": loss}
    )
    trainer.run(range(5), max_epochs=2)
    first, _, _ = terminal.lines
    assert first.startswith("Epoch [1/2]: [5/5] 100%|█")
    assert re.search(r"█, loss=0.5 \[\d\d:\d\d<\d\d:\d\d\]$", first)


def test_tqdm_options_override_those_of_the_bar(terminal):
    trainer = trainer_of()
    bar_on(terminal, leave=False, initial=3).attach(trainer)
    trainer.run(range(5))
    assert terminal.lines == [""]
    assert terminal.drawn[0] == "Iteration: 3/5"


def test_keywords_of_notebooks_and_of_another_tqdm_are_accepted(monkeypatch):
    class Bar(tqdm):
        def __init__(self, *args, theme=None, **kwargs):
            super().__init__(*args, **kwargs)

    assert ProgressBar(display=False, ncols=80).tqdm_kwargs == {"display": False, "ncols": 80}
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    assert ProgressBar(theme="dark").tqdm_kwargs == {"theme": "dark"}


def test_messages_are_written_above_the_bar(terminal):
    trainer = trainer_of()
    bar = bar_on(terminal)
    bar.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: bar.log_message("half of it"))
    trainer.run(range(5))
    assert terminal.lines == ["half of it", "Iteration: 5/5", ""]


# --- how often the values are read -------------------------------------------------------------------------

OFTEN = {"mininterval": 0, "miniters": 1}
RARELY = {"mininterval": 1e6}


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        (RARELY, 2),  # when the bar opens and when it closes
        ({**RARELY, "persist": False}, 1),  # the last values are not visible
        (OFTEN, 101),
        ({"mininterval": 0, "miniters": 10, "maxinterval": 1e6}, 11),  # at 1, 11, ..., 91 and at the end
        ({"disable": True}, 0),
        ({"disable": None}, 0),  # not a terminal
    ],
)
def test_values_are_read_only_for_a_redraw(terminal, monkeypatch, options, reads):
    terminal.is_real = options != {"disable": None}
    waits, read = [], LazyNumber.read
    monkeypatch.setattr(LazyNumber, "read", lambda number: waits.append(number) or read(number))
    trainer = Engine(lambda engine, batch: LazyNumber(torch.tensor(float(engine.state.iteration))))
    shown = []
    bar_on(terminal, **options).attach(trainer, output_transform=lambda loss: shown.append(loss) or {"loss": loss})
    trainer.run(range(100))
    assert len(shown) <= len(terminal.drawn)
    assert len(shown) == reads
    assert len(waits) == len(set(shown))  # each number is fetched once


def test_each_redraw_shows_the_values_of_its_iteration(terminal):
    trainer = trainer_of()
    bar_on(terminal, **OFTEN).attach(trainer, output_transform=lambda iteration: {"i": iteration})
    trainer.run(range(4), max_epochs=2)
    pairs = [text.split(": ")[1].split("/4, i=") for text in terminal.drawn if ", i=" in text]
    assert pairs[:4] == [["1", "1"], ["2", "2"], ["3", "3"], ["4", "4"]]
    assert pairs[5:9] == [["1", "5"], ["2", "6"], ["3", "7"], ["4", "8"]]


def test_one_bar_over_all_epochs_is_redrawn_in_each(terminal):
    trainer = trainer_of()
    bar_on(terminal, **OFTEN).attach(trainer, closing_event_name=Events.COMPLETED)
    trainer.run(range(3), max_epochs=2)
    assert terminal.drawn == [f"Epoch: {position}/3" for position in (1, 2, 3, 1, 2, 3, 3)]


def test_nothing_is_read_during_the_delay(terminal):
    trainer = trainer_of()
    shown = []
    bar_on(terminal, delay=1e6, persist=False, **OFTEN).attach(trainer, output_transform=shown.append)
    trainer.run(range(10))
    assert shown == []
    assert terminal.drawn == []


# --- closing -----------------------------------------------------------------------------------------------


def stop_at_3(how):
    def step(engine, batch):
        if engine.state.iteration == 3:
            how(engine)

    return Engine(step)


def raise_error(error):
    def throw(engine):
        raise error

    return throw


@pytest.mark.parametrize(
    "how",
    [
        lambda engine: engine.terminate(skip_completed=True),
        lambda engine: engine.interrupt(),
        lambda engine: engine.terminate_epoch(skip_epoch_completed=True),
    ],
)
def test_the_bar_closes_at_its_position_when_the_run_stops(terminal, how):
    trainer = stop_at_3(how)
    bar_on(terminal, **OFTEN).attach(trainer, state_attributes=["iteration"])
    trainer.run(range(5))
    assert terminal.lines == ["Iteration: 3/5, iteration=3", ""]


def test_a_run_stopped_while_fetching_keeps_the_last_values(terminal):
    trainer = trainer_of()
    bar_on(terminal, **OFTEN).attach(trainer, output_transform=lambda output: {"twice": output * 2})
    trainer.add_event_handler(Events.GET_BATCH_COMPLETED(once=3), lambda engine: engine.terminate())
    trainer.run(range(5))
    assert terminal.lines == ["Iteration: 3/5, twice=6", ""]


def test_pbar_is_the_last_open_bar(terminal):
    bar, seen = bar_on(terminal), []
    trainer, evaluator = trainer_of(), trainer_of()
    assert bar.pbar is None
    bar.attach(trainer)
    bar.attach(evaluator)

    @trainer.on(Events.ITERATION_COMPLETED)
    def evaluate():
        seen.append((bar.pbar.n, bar.pbar.total))
        evaluator.run([0, 0])

    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append((bar.pbar.n, bar.pbar.total)))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(bar.pbar))
    trainer.run([1, 2, 3])
    inner = [(1, 2), (2, 2)]
    assert seen == [(1, 3), *inner, (2, 3), *inner, (3, 3), *inner, None]
    assert bar.pbar is None


def test_an_interrupted_run_resumes_with_a_new_bar(terminal):
    trainer = stop_at_3(lambda engine: engine.interrupt())
    bar_on(terminal).attach(trainer)
    trainer.run(range(5))
    trainer.run()
    assert terminal.lines == ["Iteration: 3/5", "Iteration: 5/5", ""]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_failing_run_closes_all_bars_and_raises(terminal, error):
    trainer = stop_at_3(raise_error(error))
    for _ in range(2):
        bar_on(terminal).attach(trainer)
    with pytest.raises(type(error)) as raised:
        trainer.run(range(5))
    assert raised.value is error
    assert not tqdm._instances
    assert terminal.lines[-1] == ""


def test_the_bar_does_not_affect_exception_handling(terminal):
    trainer = stop_at_3(raise_error(ValueError("broken")))
    bar_on(terminal).attach(trainer)
    handled = []
    trainer.add_event_handler(Events.EXCEPTION_RAISED, handled.append)
    trainer.run(range(5), max_epochs=2)
    assert len(handled) == 1
    assert terminal.lines == ["Epoch [1/2]: 2/5", "Epoch [2/2]: 5/5", ""]


def test_the_bar_closes_before_exception_handlers_run(terminal):
    trainer = stop_at_3(raise_error(ValueError("broken")))

    @trainer.on(Events.EXCEPTION_RAISED)
    def report(error):
        terminal.write("failed")
        raise error

    bar_on(terminal).attach(trainer)
    with pytest.raises(ValueError, match="broken"):
        trainer.run(range(5))
    assert terminal.lines == ["Iteration: 2/5", "failed"]


def test_the_handle_removes_all_handlers_of_the_bar(terminal):
    trainer = stop_at_3(raise_error(ValueError("broken")))
    handle = bar_on(terminal).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), handle.remove)
    with pytest.raises(ValueError, match="broken") as raised:
        trainer.run(range(5))
    assert len(raised.value.__notes__) == 1  # the bar is no longer involved
    assert terminal.lines == ["Iteration: 2/5", ""]


def test_close_closes_open_bars(terminal):
    trainer = trainer_of()
    with bar_on(terminal) as bar:
        bar.attach(trainer)
        trainer.fire_event(Events.ITERATION_COMPLETED)
        assert len(tqdm._instances) == 1
    assert not tqdm._instances


def test_an_engine_with_a_bar_is_freed_by_reference_counting(terminal):
    trainer = trainer_of()
    bar = bar_on(terminal)
    bar.attach(trainer)
    trainer.run(range(3))
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()
    bar.close()


# --- arguments ---------------------------------------------------------------------------------------------


class Own(EventEnum):
    MINE = "mine"


@pytest.mark.parametrize(
    ("event", "closing", "message"),
    [
        (Own.MINE, Events.COMPLETED, "event_name must be one of STARTED.*got Own.MINE"),
        (Events.ITERATION_COMPLETED | Events.STARTED, Events.COMPLETED, "event_name must be one of STARTED"),
        (Events.ITERATION_COMPLETED, Events.TERMINATE, "closing_event_name must be one of STARTED"),
        (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED(every=2), "closing_event_name must have no filter"),
        (Events.EPOCH_COMPLETED, Events.EPOCH_COMPLETED, "event_name must fire before closing_event_name"),
        (Events.ITERATION_COMPLETED, Events.ITERATION_STARTED, "event_name must fire before closing_event_name"),
    ],
)
def test_invalid_events_are_rejected(event, closing, message):
    trainer = trainer_of()
    trainer.register_events(*Own)
    with pytest.raises(ValueError, match=message):
        ProgressBar().attach(trainer, event_name=event, closing_event_name=closing)


@pytest.mark.parametrize("options", [{"metric_names": "loss"}, {"output_transform": 3}, {"state_attributes": "lr"}])
def test_invalid_arguments_attach_nothing(options):
    trainer = trainer_of()
    with pytest.raises(TypeError, match=next(iter(options))):
        ProgressBar().attach(trainer, **options)
    trainer.run([1])


def test_a_progress_bar_has_the_methods_of_a_logger(terminal):
    trainer = trainer_of()
    bar = bar_on(terminal)
    bar.attach_opt_params_handler(trainer, Events.ITERATION_STARTED, optimizer=None)
    bar.attach_output_handler(trainer, Events.ITERATION_COMPLETED, state_attributes=["epoch"])
    trainer.run(range(2))
    assert terminal.lines == ["Iteration: 2/2, epoch=1", ""]


# --- several ranks, and a real terminal --------------------------------------------------------------------


@on_ranks(2)
def test_only_rank_0_draws_reads_values_and_writes_messages():
    rank, terminal, shown = torch.distributed.get_rank(), Terminal(), []
    trainer = trainer_of()
    bar = bar_on(terminal)
    bar.attach(trainer, output_transform=lambda output: shown.append(output) or {})
    trainer.run(range(5))
    bar.log_message("done")
    assert terminal.lines == (["Iteration: 5/5", "done", ""] if rank == 0 else [""])
    assert bool(shown) == (rank == 0)


def test_without_a_terminal_complete_lines_are_written(terminal):
    terminal.is_real = False
    trainer = trainer_of()
    with ProgressBar(bar_format=FORMAT, file=terminal) as bar:  # lines cannot be erased
        bar.attach(trainer, output_transform=lambda iteration: {"i": iteration})
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: bar.log_message("half of it"))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=8), trainer.terminate)
        trainer.run(range(5), max_epochs=2)
    assert terminal.getvalue() == "half of it\nEpoch [1/2]: 5/5, i=5\nEpoch [2/2]: 3/5, i=8\n"


def test_without_a_terminal_a_message_does_not_repeat_the_open_bars(terminal):
    terminal.is_real = False
    trainer, evaluator = trainer_of(), trainer_of()
    bar = bar_on(terminal, mininterval=0, miniters=1)
    bar.attach(trainer)
    bar.attach(evaluator)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: bar.log_message("evaluating"))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: evaluator.run([1]))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: tqdm.write("training", file=terminal))
    trainer.run(range(2))
    lines = ["training", "Iteration: 2/2", "evaluating", "Iteration: 1/1", "training"]
    assert terminal.getvalue().splitlines() == lines


def test_a_full_disk_does_not_end_the_run():
    class Full(io.StringIO):
        def write(self, text):
            if text:
                raise OSError(28, "No space left on device")

    trainer = trainer_of()
    bar = bar_on(Full(), mininterval=0, miniters=1)
    bar.attach(trainer)
    with pytest.warns(UserWarning, match="ProgressBar cannot write, values are lost: OSError"):
        bar.log_message("lost")
    assert trainer.run(range(5)).iteration == 5


def test_a_message_is_written_together_with_the_end_of_its_line(monkeypatch):
    writes, terminal = [], Terminal()
    monkeypatch.setattr(terminal, "write", writes.append)
    bar_on(terminal).log_message("half of it")
    assert writes[0] == "half of it\n"  # so that a warning of another rank does not continue it


def test_lines_are_written_at_the_given_interval(terminal):
    terminal.is_real = False
    trainer = trainer_of()
    bar_on(terminal, mininterval=0, miniters=2).attach(trainer, output_transform=lambda iteration: {"i": iteration})
    trainer.run(range(5))
    trainer.run([0])
    lines = ["Iteration: 3/5, i=3", "Iteration: 5/5, i=5", "Iteration: 1/1, i=1", ""]
    assert terminal.getvalue().split("\n") == lines


def read_all(controller):
    seen = b""
    with os.fdopen(controller, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # the end of the file raises
        while part := reader.read(4096):
            seen += part
    return seen


def test_in_a_terminal_the_bar_is_redrawn_in_its_line(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    controller, controlled = os.openpty()
    fcntl.ioctl(controlled, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(controlled, "w", encoding="utf-8") as terminal:
        trainer = trainer_of(0.5)
        bar = ProgressBar(persist=True, file=terminal, dynamic_ncols=True, disable=None, **OFTEN)
        bar.attach(trainer, output_transform=lambda loss: {"loss": loss})
        trainer.run(range(3), max_epochs=2)
        with pytest.raises(ValueError, match="broken"):
            failing = stop_at_3(raise_error(ValueError("broken")))
            bar.attach(failing)
            failing.run(range(4))
    seen = read_all(controller).decode()
    lines = [line.split("\r")[-1] for line in seen.replace("\r\n", "\n").split("\n")]
    assert [line[:25] for line in lines] == [
        "Epoch [1/2]: [3/3] 100%|█",
        "Epoch [2/2]: [3/3] 100%|█",
        "Iteration: [2/4]  50%|███",
        "",
    ]
    assert all("loss=0.5" in line and 50 < len(line) <= 60 for line in lines[:2])
