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
def test_models_optimizers_and_schedulers_are_stateful(thing):
    assert isinstance(thing, Stateful)


def test_state_dict_alone_is_not_stateful():
    class OnlySaves:
        def state_dict(self):
            return {}

    assert not isinstance(OnlySaves(), Stateful)
