from __future__ import annotations

import pytest
import torch

from camshaft.types import Stateful

WEIGHTS = [torch.nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize(
    "thing",
    [torch.nn.Linear(1, 1), torch.optim.SGD(WEIGHTS, lr=0.1), torch.amp.GradScaler("cpu", enabled=False)],
    ids=lambda thing: type(thing).__name__,
)
def test_what_torch_saves_is_stateful(thing):
    assert isinstance(thing, Stateful)


def test_half_a_state_is_not_stateful():
    class OnlySaves:
        def state_dict(self):
            return {}

    assert not isinstance(OnlySaves(), Stateful)
