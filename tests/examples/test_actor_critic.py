"""The pole stays up until the game is won, and the parts of the example compute what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples import actor_critic


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread: on a busy machine, several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.jobs
@pytest.mark.usefixtures("one_thread")
def test_the_game_is_won(capsys: pytest.CaptureFixture[str]) -> None:
    history = actor_critic.training(actor_critic.parse([]))
    assert history[0] < 200
    assert history[-1] > 10 * actor_critic.LONGEST
    assert f"epoch {len(history)}: the pole falls after {history[-1]:,.0f} moves" in capsys.readouterr().out


def test_gains_are_summed_to_the_end_of_each_game() -> None:
    gains = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    over = torch.tensor([[False, True], [False, False], [True, False]])
    assert actor_critic.decayed_sums(gains, over, 0.5).tolist() == [[3.0, 1.0], [4.0, 4.0], [4.0, 4.0]]


def test_a_game_that_is_lost_or_won_starts_again() -> None:
    carts = actor_critic.CartPoles(3)
    carts.states = torch.zeros(3, 4)
    carts.states[0, 2] = 0.5  # radians: the pole has fallen
    carts.moves[1] = actor_critic.LONGEST - 1
    reached, lost, over = carts.step(torch.zeros(3))
    assert lost.tolist() == [True, False, False]
    assert over.tolist() == [True, True, False]
    assert carts.moves.tolist() == [0, 0, 1]
    assert carts.states[:2].abs().max() <= 0.05
    assert reached[0, 2] > 0.2
    torch.testing.assert_close(carts.states[2], reached[2])
