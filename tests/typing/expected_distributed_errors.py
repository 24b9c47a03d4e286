"""Uses of camshaft.distributed for a type checker: only the marked lines must be reported.

A mark is the code of the error that mypy reports on that line. This file is read by `tests/engine/test_engine.py`
and never run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD
from typing_extensions import assert_type

import camshaft.distributed as idist


class ResNet(nn.Module):  # type: ignore[misc]  # torch has type Any here
    depth: int = 50


class Momentum(SGD):  # type: ignore[misc]  # as above
    rate: float = 0.9


# --- adapted objects keep their type ----------------------------------------------------------------------------

model = idist.auto_model(ResNet(), sync_bn=True, find_unused_parameters=True)
optimizer = idist.auto_optim(Momentum(model.parameters(), lr=0.1))
assert_type(model, ResNet)
assert_type(model, nn.Module)  # error: assert-type
assert_type(optimizer, Momentum)
depth: int = model.depth
wrong_depth: str = model.depth  # error: assignment
wrong_rate: str = optimizer.rate  # error: assignment
idist.auto_model()  # error: call-arg
idist.auto_dataloader()  # error: call-arg
idist.auto_dataloader([1], batch_size=2)

# --- launching -------------------------------------------------------------------------------------------------


def training(local_rank: int, epochs: int) -> float:
    return local_rank / epochs


with idist.Parallel("gloo", nproc_per_node=2, start_method="fork") as parallel:
    parallel.run(training, 3, epochs=2)
    parallel.run(3)  # error: arg-type
idist.Parallel(nproc_per_node="2")  # error: arg-type
idist.Parallel(master_port="2222")
idist.spawn("gloo", training, (3,), {"epochs": 2}, nproc_per_node=2, timeout=None)
idist.spawn("gloo", training)  # error: call-arg
idist.spawn("gloo", "training", ())  # error: arg-type

# --- one-rank functions keep their arguments and may return None ----------------------------------------------


@idist.one_rank_only()
def save(path: str) -> int:
    return len(path)


saved: int | None = save("a")
wrong_saved: int = save("a")  # error: assignment
save(3)  # error: arg-type
idist.one_rank_only(save)  # error: arg-type
with idist.one_rank_first(local=True):
    pass

# --- messages --------------------------------------------------------------------------------------------------

idist.send("text", dst=1, tag=3)
idist.isend(3, 1).wait()
received: Any = idist.irecv(0).wait()
idist.recv("0")  # error: arg-type

# --- installed backends ------------------------------------------------------------------------------

flags: list[bool] = [idist.has_native_dist_support, idist.has_hvd_support, idist.has_xla_support]
names: tuple[str, ...] = idist.available_backends()
kinds: list[str] = [kind.model_name for kind in idist.registered_computation_models]
rank: Callable[[], int] = idist.get_rank
