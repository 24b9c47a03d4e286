"""Test values, names, steps, attaching and resuming, which all loggers share."""

from __future__ import annotations

import functools
import socket
import socketserver
import threading
from collections import namedtuple
from contextlib import contextmanager, suppress

import numpy
import pytest
import torch

from camshaft.engine import Engine, EventEnum, Events
from camshaft.engine.state import LazyNumber
from camshaft.handlers import Checkpoint, global_step_from_engine
from camshaft.handlers.base_logger import (
    BaseLogger,
    BaseOptimizerParamsHandler,
    BaseOutputHandler,
    BaseWeightsHistHandler,
    BaseWeightsScalarHandler,
    answers,
)
from tests.handlers.parts import Memory, Part, at
from tests.limits import HANG
from tests.ranks import on_ranks

Pair = namedtuple("Pair", "x y")


class OutputHandler(BaseOutputHandler):
    """Writes to a list."""

    def __call__(self, engine, logger, event_name, *extra, **more):
        values = self._setup_output_metrics_state_attrs(engine, key_tuple=False)
        logger.lines.append((self.global_step(engine, event_name), values, *extra, *more.values()))


class ListLogger(BaseLogger):
    def __init__(self):
        self.lines = []
        self.closed = 0

    def close(self):
        self.closed += 1

    def _create_output_handler(self, *args, **kwargs):
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, optimizer):
        return lambda engine, logger, event_name: logger.lines.append(optimizer)


def read(engine, text=False, **options):
    handler = OutputHandler("tag", **options)
    return handler._setup_output_metrics_state_attrs(engine, log_text=text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, {(): 0.5}),
        (True, {(): True}),
        (numpy.float32(0.5), {(): 0.5}),
        (torch.tensor(3), {(): 3}),
        (LazyNumber(torch.tensor(0.5)), {(): 0.5}),
        (torch.tensor([1, 2]), {("0",): 1, ("1",): 2}),
        ([1, (2, 3)], {("0",): 1, ("1", "0"): 2, ("1", "1"): 3}),
        (Pair(1, y=2), {("0",): 1, ("1",): 2}),
        ({"b": {"c": [4]}, 5: 6}, {("b", "c", "0"): 4, ("5",): 6}),
        ({}, {}),
    ],
)
def test_nested_values_are_flattened_with_their_paths(value, expected):
    values = read(at(a=value), metric_names=["a"])
    assert values == {("tag", "a", *path): number for path, number in expected.items()}
    assert all(type(number) in (int, float, bool, numpy.float32) for number in values.values())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        ("text", "str"),
        (b"text", "bytes"),
        (torch.zeros(2, 3), r"tensor of shape \(2, 3\)"),
        ({1, 2}, "set"),
        (numpy.zeros(2), "ndarray"),
    ],
)
def test_other_values_are_skipped_with_a_warning(value, kind):
    with pytest.warns(UserWarning, match=f"a/b is not logged because it is a {kind}"):
        assert read(at(a={"b": value, "c": 1}), metric_names="all") == {("tag", "a", "c"): 1}


def test_the_warning_says_what_to_do_where_the_value_comes_from_and_points_to_the_line_of_the_user():
    table, engine = torch.zeros(2, 3), at(table=torch.zeros(2, 3))
    engine.state.output = engine.state.speeds = table
    for remedy, options in {
        "list the metrics that are numbers in metric_names": {"metric_names": "all"},
        "in output_transform, reduce it to a number, .*": {"output_transform": lambda output: output},
        "set the attribute of engine.state to a number, .*": {"state_attributes": ["speeds"]},
    }.items():
        with pytest.warns(UserWarning, match=rf"shape \(2, 3\): {remedy}$") as seen:
            assert read(engine, **options) == {}
        assert [one.filename for one in seen] == [__file__]
    engine.state.output = None
    with pytest.warns(UserWarning, match="NoneType: return a value from the process function"):
        assert read(engine, output_transform=lambda output: output) == {}
    with pytest.raises(TypeError, match="output_transform needs engine.state.output, which is None"):
        read(engine, output_transform=lambda output: output.mean())


def test_text_is_kept_for_loggers_that_support_it():
    assert read(at(a=["text", 1]), text=True, metric_names="all") == {("tag", "a", "0"): "text", ("tag", "a", "1"): 1}


def test_metrics_come_before_outputs_and_attributes():
    engine = at(loss=1, accuracy=2)
    engine.state.output, engine.state.rate = 4, 5
    options = {"output_transform": lambda output: output * 2, "state_attributes": ["rate"]}
    assert list(read(engine, metric_names="all", **options).items()) == [
        (("tag", "loss"), 1),
        (("tag", "accuracy"), 2),
        (("tag", "output"), 8),
        (("tag", "rate"), 5),
    ]
    assert read(engine, output_transform=lambda output: {"twice": 8}) == {("tag", "twice"): 8}


def test_missing_metrics_and_attributes_are_skipped_with_a_warning():
    with pytest.warns(UserWarning, match=r"metric 'acc' is not logged, as engine.state.metrics has \['loss'\]"):
        assert read(at(loss=1), metric_names=["acc", "loss"]) == {("tag", "loss"): 1}
    with pytest.warns(UserWarning, match="speed is not logged because it is a NoneType"):
        assert read(at(), state_attributes=["speed"]) == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "at least one of metric_names, output_transform and state_attributes"),
        ({"metric_names": "loss"}, TypeError, "metric_names must be a list of names or 'all', got 'loss'"),
        ({"metric_names": ("loss",)}, TypeError, "metric_names"),
        ({"output_transform": 3}, TypeError, "output_transform must be callable, got 3"),
        ({"state_attributes": "lr"}, TypeError, "state_attributes must be a list of names, got 'lr'"),
        ({"metric_names": "all", "global_step_transform": 3}, TypeError, "global_step_transform must be callable"),
    ],
)
def test_output_handlers_reject_invalid_arguments(options, error, message):
    with pytest.raises(error, match=message):
        OutputHandler("tag", **options)


def test_steps_must_be_integers_of_any_type():
    steps = iter([7, numpy.int64(7), 7.0, "7", None])
    handler = OutputHandler("tag", "all", global_step_transform=lambda engine, event: next(steps))
    for _ in range(2):
        step = handler.global_step(at(), Events.COMPLETED)
        assert type(step) is int
        assert step == 7
    for _ in range(3):
        with pytest.raises(TypeError, match="global_step_transform must return an integer"):
            handler.global_step(at(), Events.COMPLETED)


# --- attaching ---------------------------------------------------------------------------------------------


def run(engine):
    engine.run(range(4), max_epochs=2)


@pytest.fixture
def trainer():
    return Engine(lambda engine, batch: engine.state.iteration * 10)


def test_events_of_a_list_are_passed_one_by_one_with_the_extra_arguments(trainer):
    logger = ListLogger()
    handler = OutputHandler("t", output_transform=lambda output: output)
    events = Events.EPOCH_COMPLETED | Events.ITERATION_COMPLETED(every=3)
    with logger.attach(trainer, handler, events, "extra", more=1):
        run(trainer)
    run(trainer)  # the handle removed both
    assert logger.lines == [
        (3, {"t/output": 30}, "extra", 1),
        (1, {"t/output": 40}, "extra", 1),
        (6, {"t/output": 60}, "extra", 1),
        (2, {"t/output": 80}, "extra", 1),
    ]


def test_attach_methods_make_handlers_from_the_remaining_arguments(trainer):
    logger = ListLogger()
    logger.attach_output_handler(trainer, Events.COMPLETED, "tag", state_attributes=["epoch"])
    logger.attach_opt_params_handler(trainer, Events.COMPLETED, optimizer="optimizer")
    run(trainer)
    assert logger.lines == [(2, {"tag/epoch": 2}), "optimizer"]


class Own(EventEnum):
    COUNTED = "counted"
    UNCOUNTED = "uncounted"


def test_events_need_a_counter(trainer):
    logger = ListLogger()
    handler = OutputHandler("tag", "all")
    trainer.register_events(*Own, event_to_attr={Own.COUNTED: "words"})
    for event in (Own.UNCOUNTED, Events.EXCEPTION_RAISED, Events.COMPLETED | Own.UNCOUNTED):
        with pytest.raises(RuntimeError, match=r"event_name must be an event with a counter"):
            logger.attach(trainer, handler, event)
    assert not trainer.has_event_handler(handler)
    logger.attach(trainer, handler, Own.COUNTED)
    trainer.state.words = 5
    trainer.fire_event(Own.COUNTED)
    assert logger.lines == [(5, {})]


# --- optimizers, weights and gradients ---------------------------------------------------------------------


class Written(ListLogger):
    def write_values(self, values, step):
        self.lines.append((step, dict(values)))


class Rates(BaseOptimizerParamsHandler):
    """Writes to a list."""


class Norms(BaseWeightsScalarHandler):
    """Writes to a list."""


class Gradients(Norms):
    """Writes to a list."""

    of_gradients = True


def net():
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    for layer in layers:
        torch.nn.init.constant_(layer.weight, 3)
    return layers


def written(handler):
    logger = Written()
    handler(at(iteration=5), logger, Events.ITERATION_COMPLETED)
    ((step, values),) = logger.lines
    assert step == 5
    return values


def test_each_parameter_group_is_logged():
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, torch.tensor(0.25))]
    values = written(Rates(torch.optim.SGD(groups), tag="net"))
    assert values == {("net", "lr", "group_0"): 0.5, ("net", "lr", "group_1"): 0.25}
    assert all(type(value) is float for value in values.values())
    likeness = type("Likeness", (), {"param_groups": [{"size": 3}]})()
    assert written(Rates(likeness, "size")) == {("size", "group_0"): 3.0}


def test_optimizers_must_have_parameter_groups_with_numbers():
    for optimizer in (None, "sgd", type("Odd", (), {"param_groups": 3})()):
        with pytest.raises(TypeError, match="optimizer must have a sequence param_groups, got"):
            Rates(optimizer)
    with pytest.raises(TypeError, match=r"param_name must name a number, got 'betas', which is \(0.9, 0.999\)"):
        Rates(torch.optim.Adam([torch.zeros(1)]), "betas")


def largest(tensor):
    return tensor.max()


class Largest:
    def __call__(self, tensor):
        return float(tensor.max())


@pytest.mark.parametrize(
    ("reduction", "name"),
    [(torch.norm, "norm"), (largest, "largest"), (functools.partial(torch.norm, p=1), "norm"), (Largest(), "Largest")],
)
def test_names_contain_the_reduction_of_weights(reduction, name):
    model = net()
    handler = Norms(model, reduction, tag="net")
    assert handler.weights == tuple(model.named_parameters())
    title = f"weights_{name}"
    assert written(handler) == {("net", title, "0", "weight"): 3, ("net", title, "1", "weight"): 3}


def test_missing_gradients_are_skipped():
    model = net()
    model[1].weight.grad = torch.full((1, 1), -2.0)
    assert written(Gradients(model)) == {("grads_norm", "1", "weight"): 2}


def test_replaced_weights_are_read_and_removed_ones_are_not():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    handler = BaseWeightsScalarHandler(model)
    model[0] = torch.nn.Linear(1, 1, bias=False)
    model.load_state_dict({name: torch.full_like(one, 7.0) for name, one in model.state_dict().items()}, assign=True)
    assert {name: tensor.item() for name, tensor in handler.tensors()} == dict.fromkeys(
        ["0.weight", "1.weight", "1.bias"], 7.0
    )


@pytest.mark.parametrize(
    "whitelist", [["1"], ["1.weight"], lambda name, parameter: parameter.ndim == 2 and "1" in name]
)
def test_a_whitelist_is_a_list_of_prefixes_or_a_predicate(whitelist):
    assert [name for name, _ in Norms(net(), whitelist=whitelist).weights] == ["1.weight"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model",), "model must be a torch.nn.Module, got 'model' of type str"),
        ((net(), 3), "reduction must be callable, got 3"),
        ((net(), lambda tensor: tensor), "reduction must return a number or a 0-d tensor"),
        ((net(), torch.norm, None, "0"), "whitelist must be a list of names or callable, got '0'"),
    ],
)
def test_weights_handlers_reject_invalid_arguments(arguments, message):
    with pytest.raises(TypeError, match=message):
        Norms(*arguments)


def test_numbers_are_fetched_in_one_transfer_per_dtype(monkeypatch):
    fetched, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: fetched.append(tensor.shape) or tolist(tensor))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("one by one"))
    metrics = {"a": torch.tensor(0.5), "b": [torch.tensor(2.0), {"c": torch.tensor(3.0)}], "d": torch.tensor(4)}
    values = read(at(**metrics), metric_names="all")
    assert list(values.values()) == [0.5, 2.0, 3.0, 4]
    assert fetched == [(3,), (1,)]


# --- one writer per job, and resuming -----------------------------------------------------


class Everywhere(ListLogger):
    ranks = None


@on_ranks(2)
def test_only_rank_0_writes_by_default():
    rank = torch.distributed.get_rank()
    for kind in (ListLogger, Everywhere):
        logger, engine = kind(), Engine(lambda engine, batch: batch)
        handler = OutputHandler("t", output_transform=lambda output: output)
        with logger.attach(engine, handler, Events.COMPLETED):
            assert engine.has_event_handler(handler) == (rank == 0 or kind is Everywhere)
            with pytest.raises(RuntimeError, match="event_name must be"):
                logger.attach(engine, handler, Events.TERMINATE)
            engine.run([1])
        assert bool(logger.lines) == (rank == 0 or kind is Everywhere)


class Silent(BaseOutputHandler):
    """Writes to a logger that ignores it."""


class Continued(ListLogger):
    """Records where the log is continued, and the steps and iterations of what is written."""

    def __init__(self):
        super().__init__()
        self.places = []

    def write_values(self, values, step):
        self.lines.append((step, self.iteration))

    def _rewind(self, iteration):
        self.places.append(iteration)

    def _begin(self):
        self.places.append("begin")


def logged(logger, iteration=0):
    """Return a trainer, and an evaluator that also runs after each epoch, with the trainer's steps."""
    trainer, evaluator = Engine(lambda engine, batch: 1.0), Engine(lambda engine, batch: 1.0)
    step = global_step_from_engine(trainer)
    for engine, event, transform in ((trainer, Events.ITERATION_COMPLETED, None), (evaluator, Events.COMPLETED, step)):
        handler = Silent("t", output_transform=lambda output: output, global_step_transform=transform)
        logger.attach(engine, handler, event)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0, 0]))
    if iteration:
        load(trainer, iteration)
    return trainer, evaluator


def load(trainer, iteration):
    trainer.load_state_dict({"iteration": iteration, "epoch_length": 4, "max_epochs": 5})


def test_a_resumed_run_continues_the_log_at_its_iteration_once():
    logger = Continued()
    trainer, _ = logged(logger, iteration=10)
    trainer.run(range(4))
    trainer.run(range(4), max_epochs=6)  # extends the run
    assert logger.places == [10]
    load(trainer, 8)
    trainer.run(range(4))
    assert logger.places == [10, 8]


def test_the_log_is_continued_before_a_handler_writes_at_the_start():
    logger, trainer = Continued(), Engine(lambda engine, batch: None)
    logger.attach(trainer, Silent("t", state_attributes=["epoch"]), Events.STARTED)
    load(trainer, 10)
    trainer.run(range(4))
    assert logger.places == [10]


def test_a_new_job_begins_once():
    logger = Continued()
    trainer, _ = logged(logger)
    trainer.run(range(4))
    trainer.state.max_epochs = None
    trainer.run(range(4))
    assert logger.places == ["begin"]


@pytest.mark.parametrize(("iteration", "place"), [(0, "begin"), (10, 10)])
def test_an_evaluation_before_the_run_continues_the_log_where_the_run_will(iteration, place):
    logger = Continued()
    trainer, evaluator = logged(logger, iteration)
    evaluator.run([0])
    assert logger.places == [place]
    assert [one for _, one in logger.lines] == [iteration]
    trainer.run(range(4))
    assert logger.places == [place]


def test_runs_of_several_trainers_continue_the_log_once():
    logger = Continued()
    first, second = logged(logger, iteration=8)[0], logged(logger)[0]
    first.run(range(4))
    second.run(range(4))
    first.run(range(4), max_epochs=6)
    load(second, 4)
    second.run(range(4))
    assert logger.places == [8]


def test_an_evaluation_in_a_trainer_that_is_not_logged_continues_nothing():
    logger, trainer, evaluator = Continued(), Engine(lambda engine, batch: 1.0), Engine(lambda engine, batch: 1.0)
    logger.attach(evaluator, Silent("t", output_transform=lambda output: output), Events.COMPLETED)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0, 0]))
    trainer.run(range(4))
    assert logger.places == []
    assert logger.lines == [(1, 4)]


def test_each_record_has_the_iteration_of_the_trainer():
    logger = Continued()
    trainer, evaluator = logged(logger)
    trainer.run(range(3))
    evaluator.run([0])
    assert logger.lines == [(1, 1), (2, 2), (3, 3), (1, 3), (1, 3)]


class Failing(ListLogger):
    """Fails where the name of the method says so."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.error = ConnectionError(f"{fails} failed")

    def do(self, name, *args):
        self.lines.append(name)
        if name == self.fails:
            raise self.error

    def write_values(self, values, step):
        self.do("write")

    def write_histograms(self, tensors, step):
        self.do("histograms")

    def close(self):
        self.do("close")

    def _begin(self):
        self.do("begin")

    def _rewind(self, iteration):
        self.do("rewind")

    def _checkpoint_saved(self):
        self.do("flush")


@pytest.mark.parametrize("name", ["write", "histograms", "begin", "rewind", "flush", "close"])
def test_a_failing_backend_warns_once_and_does_not_end_the_run(name):
    logger = Failing(name)
    trainer = Engine(lambda engine, batch: 1.0)
    logger.attach(trainer, Silent("t", output_transform=lambda output: output), Events.ITERATION_COMPLETED)
    logger.attach(trainer, BaseWeightsHistHandler(torch.nn.Linear(1, 1)), Events.ITERATION_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, Checkpoint({"part": Part()}, Memory()))
    if name == "rewind":
        trainer.load_state_dict({"iteration": 2, "epoch_length": 4, "max_epochs": 1})

    def use():
        with logger:
            assert trainer.run(range(4)).iteration == 4
            raise ZeroDivisionError  # which a failing close does not hide

    message = f"^Failing cannot write, values are lost: ConnectionError: {name} failed$"
    with pytest.warns(UserWarning, match=message) as caught, pytest.raises(ZeroDivisionError):
        use()
    assert [warning.filename for warning in caught] == [__file__]
    assert logger.lines.count("write") == logger.lines.count("flush") == (2 if name == "rewind" else 4)
    assert logger.error.__traceback__ is None  # a library that raises it again would make it grow


def test_histograms_of_a_logger_that_shows_none_raise():
    with pytest.raises(NotImplementedError, match="shows no histograms"):
        BaseWeightsHistHandler(torch.nn.Linear(1, 1))(at(), ListLogger(), Events.COMPLETED)


@pytest.mark.parametrize(
    ("error", "has_failed"),
    [
        (None, False),
        (ValueError(), True),
        (KeyboardInterrupt(), True),
        (SystemExit("failed"), True),
        (SystemExit(0), False),
        (SystemExit(), False),
    ],
)
def test_a_logger_knows_when_it_closes_whether_its_block_failed(error, has_failed):
    seen = []

    class Closing(ListLogger):
        def close(self):
            seen.append(self.has_failed)

    with suppress(BaseException), Closing():
        if error is not None:
            raise error
    assert seen == [has_failed]


def test_values_are_read_only_at_logging_events(monkeypatch):
    reads, read_number = [], LazyNumber.read
    monkeypatch.setattr(LazyNumber, "read", lambda number: reads.append(1) or read_number(number))
    trainer = Engine(lambda engine, batch: LazyNumber(torch.tensor(0.5)))
    logger = Written()
    handler = Silent("t", output_transform=lambda output: {"loss": output})
    logger.attach(trainer, handler, Events.ITERATION_COMPLETED(every=5))
    trainer.run(range(20))
    assert logger.lines == [(step, {("t", "loss"): 0.5}) for step in (5, 10, 15, 20)]
    assert len(reads) == 4


def test_tags_must_be_strings_which_output_handlers_need():
    optimizer, model = torch.optim.SGD([torch.zeros(1)]), torch.nn.Linear(1, 1)
    assert [handler.tag for handler in (Rates(optimizer), Norms(model))] == [None, None]
    for make in (
        lambda: Silent(None, "all"),
        lambda: Silent(3, "all"),
        lambda: Rates(optimizer, tag=3),
        lambda: Norms(model, tag=3),
    ):
        with pytest.raises(TypeError, match="tag must be a str"):
            make()


# --- whether services answer ---------------------------------------------------------------------------


@contextmanager
def serving(send):
    """Serve connections with a function of the socket until the block ends."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1000)
            send(self.request)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "scheme"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", "http"),
        (b"HTTP/1.0 401 Unauthorized\r\n\r\n", "http"),
        (b"no TLS here", "https"),
    ],
)
def test_any_response_counts_as_an_answer(monkeypatch, answer, scheme):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(lambda connection: connection.sendall(answer)) as address:
        assert answers(f"{scheme}://{address}/", seconds=HANG)


def test_a_closed_or_silent_port_does_not_answer(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert not answers(address, seconds=0.1)
    assert not answers(address)
