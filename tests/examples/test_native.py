"""The native scripts and camshaft's script over gloo and MPI; tests/horovod and tests/xla run the others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.examples.native import FOLDER, ROOT, assert_same_weights
from tests.examples.ten_steps import command
from tests.mpi.checking import MPI_VARIABLES

TORCHRUN = (command("torchrun"), "--standalone", "--nproc_per_node", "2")
MPIRUN = (command("mpirun"), "-np", "2", sys.executable)
PAGE = ROOT / "docs" / "tutorials" / "every-backend.md"


@pytest.mark.jobs
def test_torch_alone():
    for attempt in range(10):  # without camshaft, gloo's threads may abort a process when Python shuts down
        try:
            return assert_same_weights(TORCHRUN, "with_ddp.py", shows="world size 2, backend gloo")
        except AssertionError as error:
            if attempt == 9 or "SIGABRT" not in str(error):
                raise


@pytest.mark.jobs
def test_mpi4py_alone():
    assert_same_weights(MPIRUN, "with_mpi.py", shows="world size 2, backend mpi", **MPI_VARIABLES)


@pytest.mark.jobs
def test_camshaft_over_gloo():
    assert_same_weights(TORCHRUN, "with_camshaft.py", "--backend", "gloo", shows="world size 2, backend gloo")


@pytest.mark.jobs
def test_camshaft_over_mpi():
    assert_same_weights(
        MPIRUN, "with_camshaft.py", "--backend", "mpi", shows="world size 2, backend mpi", **MPI_VARIABLES
    )


@pytest.mark.jobs
def test_camshaft_in_new_processes():
    arguments = ("--backend", "gloo", "--nproc_per_node", "2")
    assert_same_weights([sys.executable], "with_camshaft.py", *arguments, shows="world size 2, backend gloo")


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.name)
def test_the_page_shows_the_script(script: Path):
    shown = re.findall(rf'^```python title="{script.name}"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "\n".join(shown) == script.read_text()
