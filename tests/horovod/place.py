"""Print this rank's topology, with Horovod initialized by the user or by camshaft.

horovodrun -np 2 python -m tests.horovod.place {adopted,initialized}
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import pytest

import camshaft.distributed as idist
from camshaft.distributed.job import current


def write_place(how: str) -> None:
    place = current().topology
    suffix = f" assuming {', '.join(current().assumed)}" if current().assumed else ""
    assert idist.all_gather(idist.get_rank()) == list(range(idist.get_world_size()))
    os.write(1, f"{how}: {place}: {idist.backend()} {idist.model_name()} {idist.device()}{suffix}\n".encode())


def try_new_group() -> str:
    try:
        idist.new_group([0])
    except RuntimeError as error:
        return str(error)
    return "a group"


def alone() -> None:
    assert (idist.model_name(), idist.get_world_size()) == ("serial", 1)


def adopt() -> None:
    assert "horovod.torch" not in sys.modules
    import horovod.torch as hvd

    alone()
    hvd.init()
    write_place("adopted")
    assert idist.get_world_size() == 1 or "hvd.init(process_sets='dynamic')" in try_new_group()
    idist.barrier()
    hvd.shutdown()
    alone()


def initialize() -> None:
    alone()
    idist.initialize("horovod")
    write_place("initialized")
    assert try_new_group() == "a group"
    backend, size = current(), idist.get_world_size()
    idist.barrier()
    idist.finalize()
    alone()
    assert not backend.is_alive()
    expected = nullcontext() if size == 1 else pytest.raises(RuntimeError, match="initialized only once")
    with expected:
        idist.initialize("horovod", comm=None, process_sets=[])
    idist.finalize()
    alone()


if __name__ == "__main__":
    for way in sys.argv[1:]:
        {"adopted": adopt, "initialized": initialize}[way]()
