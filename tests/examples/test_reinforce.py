"""The example without a data set: the pole stays up longer."""

from __future__ import annotations

import pytest
import torch

from examples import reinforce


def test_the_pole_stays_up_longer(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = reinforce.training(0, reinforce.parse(["--epochs", "3", "--games", "16"]))
    assert len(lengths) == 3
    assert lengths[-1] > 2 * lengths[0]
    assert f"epoch 3: the pole stays up for {lengths[-1]:.0f} moves" in capsys.readouterr().out


def test_training_ends_when_the_game_is_won(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforce, "LONGEST", 8)  # no game is lost that early
    lengths = reinforce.training(0, reinforce.parse(["--epochs", "3", "--games", "4"]))
    assert lengths == [8.0]


def test_a_return_is_the_discounted_number_of_moves_left() -> None:
    on = torch.tensor([[True, True], [True, False], [True, False]])
    assert reinforce.expected_returns(on, discount=0.5).tolist() == [[1.75, 1.0], [1.5, 0.0], [1.0, 0.0]]


def test_a_push_moves_the_cart_and_the_pole_in_opposite_directions() -> None:
    carts = reinforce.CartPoles(2)
    carts.reset()
    carts.states.zero_()
    for _ in range(2):
        states, lost = carts.step(torch.tensor([0, 1]))
    assert not lost.any()
    torch.testing.assert_close(states[0], -states[1])
    assert states[1, 0] > 0
    assert states[1, 2] < 0
    assert any(carts.step(torch.tensor([0, 1]))[1].all() for _ in range(20))


@pytest.mark.jobs
def test_the_carts_of_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")  # as gymnasium does when it is imported
    config = reinforce.parse(["--gymnasium", "--epochs", "1", "--epoch_length", "1", "--games", "4"])
    (length,) = reinforce.training(0, config)
    assert 8 <= length <= reinforce.LONGEST  # no pole of gymnasium falls over earlier

    ours, theirs = reinforce.CartPoles(1), reinforce.Gymnasium(1, seed=0)
    ours.reset()
    ours.states = theirs.reset()
    for push in (1, 0, 0, 1, 0):
        expected, lost = theirs.step(torch.tensor([push]))
        states, ours_lost = ours.step(torch.tensor([push]))
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-6)
        assert lost.tolist() == ours_lost.tolist() == [False]
