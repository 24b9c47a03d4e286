"""Run the checks of every backend on one rank, two ranks, and two nodes, and those of this folder on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.conformance import CHECKS
from tests.horovod.checking import horovodrun

pytestmark = pytest.mark.xdist_group("conformance")
# read, not imported: the test process must not import Horovod
FILES = sorted(Path(__file__).parent.glob("check_*.py"))
OF_HOROVOD = [name for file in FILES for name in re.findall(r"^@check\ndef (\w+)", file.read_text(), re.MULTILINE)]
HOSTS = {1: None, 2: None, 4: "localhost:2,127.0.0.1:2"}


@pytest.fixture(scope="module", params=HOSTS, ids=["1_rank", "2_ranks", "2_ranks_on_2_nodes"])
def ran(request: pytest.FixtureRequest) -> tuple[int, str]:
    names = [*CHECKS, *(OF_HOROVOD if request.param == 2 else ())]
    program = ("-m", "tests.horovod.run_checks", "--backend", "horovod", *names)
    return horovodrun(request.param, *program, hosts=HOSTS[request.param])


@pytest.mark.parametrize("name", CHECKS)
def test_horovod_passes(ran: tuple[int, str], name: str) -> None:
    assert f"passed {name}\n" in ran[1], ran[1][-6000:]


@pytest.mark.parametrize("ran", [2], ids=["2_ranks"], indirect=True)
@pytest.mark.parametrize("name", OF_HOROVOD)
def test_two_ranks_pass(ran: tuple[int, str], name: str) -> None:
    assert f"passed {name}\n" in ran[1], ran[1][-6000:]


def test_horovod_lacks_only_messages_and_exits_with_0(ran: tuple[int, str]) -> None:
    lacks = {line.rpartition("does not support ")[2].split(":")[0] for line in ran[1].splitlines() if "lacks " in line}
    assert lacks <= {"send", "recv"}
    assert ran[0] == 0, ran[1][-6000:]
