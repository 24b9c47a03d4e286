"""The example without a data set: the pole stays up for longer."""

from __future__ import annotations

import pytest
import torch

from examples import reinforce


def test_the_pole_stays_up_for_longer(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = reinforce.training(0, reinforce.parse(["--epochs", "3", "--games", "16"]))
    assert len(lengths) == 3
    assert lengths[-1] > 3 * lengths[0]
    assert f"epoch 3: the pole stays up for {lengths[-1]:.0f} moves" in capsys.readouterr().out


def test_it_ends_when_the_game_is_won(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforce, "LONGEST", 8)  # nobody loses so soon
    lengths = reinforce.training(0, reinforce.parse(["--epochs", "3", "--games", "4"]))
    assert lengths == [8.0]


def test_a_move_is_worth_what_follows_it() -> None:
    on = torch.tensor([[True, True], [True, False], [True, False]])
    assert reinforce.expected_returns(on, discount=0.5).tolist() == [[1.75, 1.0], [1.5, 0.0], [1.0, 0.0]]


def test_a_push_moves_the_cart_one_way_and_the_pole_the_other() -> None:
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
