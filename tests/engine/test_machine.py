"""Any history of runs, stops, pauses, errors, saves, and loads reads the samples that a naive model expects."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from camshaft.distributed import auto_dataloader, get_world_size
from camshaft.engine import Engine, Events
from camshaft.engine.loop import Phase
from tests.threads import run_on_threads

SIZE = 11


def loader(batch_size: int) -> Any:
    return auto_dataloader(range(SIZE), batch_size=batch_size, shuffle=True, seed=0)


def order_of(epoch: int) -> list[int]:
    """Return the samples of an epoch in order, whatever the batches are."""
    single = loader(1)
    single.batch_sampler.set_epoch(epoch)
    return [int(batch) for batch in single]


ORDERS = [order_of(epoch) for epoch in range(60)]


class Histories(RuleBasedStateMachine):
    """The model knows the epoch, the samples consumed in it, and the iterations, all of completed steps."""

    @initialize()
    def start(self) -> None:
        self.engine = self.make_engine()
        self.epoch = self.consumed = self.iteration = 0
        self.is_cut = self.is_stopping = False
        self.saved: Any = None
        self.batch_size = 2
        self.loader = loader(2)

    def make_engine(self) -> Engine[Any, Any]:
        self.seen: list[list[int]] = []
        self.stop: tuple[str, int] | None = None

        def step(engine: Engine[Any, Any], batch: Any) -> None:
            if self.stop == ("raise", len(self.seen)):
                raise KeyError("in the step")
            self.seen.append(batch.tolist())

        def obey(engine: Engine[Any, Any]) -> None:
            if self.stop is not None and self.stop[0] != "raise" and self.stop[1] == len(self.seen):
                getattr(engine, self.stop[0])()

        engine = Engine(step)
        engine.add_event_handler(Events.ITERATION_COMPLETED, obey)
        return engine

    @rule(
        epochs=st.integers(1, 3),
        kind=st.sampled_from(["", "raise", "terminate", "terminate_epoch", "interrupt"]),
        after=st.integers(1, 8),
        batch_size=st.integers(1, 4),
    )
    def run(self, epochs: int, kind: str, after: int, batch_size: int) -> None:
        if self.engine.phase is not Phase.PAUSED:
            self.batch_size, self.loader = batch_size, loader(batch_size)
        if self.is_cut:  # the rest of an epoch that was terminated is left out
            self.epoch, self.consumed, self.is_cut = self.epoch + 1, 0, False
        target = self.epoch + epochs
        self.seen.clear()
        self.stop = (kind, after) if kind else None
        try:
            self.engine.run(self.loader, max_epochs=target)
        except KeyError:
            assert kind == "raise"
        expected = self.expect(target, kind, after)
        assert self.seen == expected
        assert self.engine.state.iteration - (self.is_stopping and kind == "raise") == self.iteration
        assert (self.engine.phase is Phase.PAUSED) == (self.is_stopping and kind == "interrupt")

    def expect(self, target: int, kind: str, after: int) -> list[list[int]]:
        """Return the batches of a run, and advance the model; only the sizes of batches are taken as they were."""
        batches: list[list[int]] = []
        sizes = iter([len(batch) for batch in self.seen])
        self.is_stopping = False
        while self.epoch < target:
            while self.consumed < SIZE:
                if kind == "raise" and len(batches) == after:
                    self.is_stopping = True
                    return batches
                size = next(sizes, 1)
                left = SIZE - self.consumed
                assert size <= self.batch_size
                assert -(-(left - size) // self.batch_size) == -(-left // self.batch_size) - 1  # as few as can be
                batches.append(ORDERS[self.epoch][self.consumed : self.consumed + size])
                self.consumed += size
                self.iteration += 1
                if len(batches) == after and kind in ("terminate", "interrupt"):
                    self.is_stopping = True
                    self.is_cut = kind == "terminate"
                    return batches
                if len(batches) == after and kind == "terminate_epoch":
                    break
            self.epoch, self.consumed = self.epoch + 1, 0
        return batches

    @rule()
    def save(self) -> None:
        model = (self.epoch, self.consumed, self.iteration)
        self.saved = copy.deepcopy(self.engine.state_dict()), model

    @precondition(lambda self: self.saved is not None and self.saved[0]["iteration"] > 0)
    @rule()
    def load(self) -> None:
        """Load in another process, which continues in the middle of an epoch."""
        self.engine, self.is_cut = self.make_engine(), False
        state, (self.epoch, self.consumed, self.iteration) = self.saved
        self.engine.load_state_dict(copy.deepcopy(state))
        if self.consumed == SIZE:
            self.epoch, self.consumed = self.epoch + 1, 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)

parts = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=25, deadline=None)
@given(st.lists(parts, min_size=1, max_size=4))
@example([(1, 1, 3), (3, 1, 1), (1, 4, 1)])  # the rest has fewer steps than those of a whole epoch of the same length
def test_a_run_may_continue_on_any_number_of_ranks_with_batches_of_any_size(parts: list[tuple[int, int, int]]) -> None:
    """Each part has a number of ranks, a batch size per rank, and the iterations until it is stopped."""
    state: Any = None
    read: dict[int, list[int]] = {}
    for ranks, batch_size, iterations in [*parts, (1, 1, 1000)]:
        if state is not None and state["epochs_completed"] == 3:
            break

        if state is not None:  # each rank needs a sample of the rest
            ranks = min(ranks, SIZE - state["position"]["consumed"])

        def part(state: Any, batch_size: int, iterations: int) -> tuple[Any, list[tuple[int, list[int]]]]:
            seen: list[tuple[int, list[int]]] = []
            engine: Engine[Any, Any] = Engine(lambda engine, batch: seen.append((engine.state.epoch, batch.tolist())))
            if state is not None:
                engine.load_state_dict(state)
                iterations += state["iteration"]
            stop = Events.ITERATION_COMPLETED(event_filter=lambda engine, count: count == iterations)
            engine.add_event_handler(stop, engine.terminate)
            engine.run(loader(batch_size * get_world_size()), max_epochs=3)
            return engine.state_dict(), seen

        results = run_on_threads(ranks, part, copy.deepcopy(state), batch_size, iterations)
        state = results[0][0]
        for _, seen in results:
            for epoch, samples in seen:
                read.setdefault(epoch, []).extend(samples)
    assert [sorted(read[epoch]) for epoch in (1, 2, 3)] == [list(range(SIZE))] * 3
