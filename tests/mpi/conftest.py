"""These tests need mpi4py and the mpirun of its MPI library; the environment of `make test` has both."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("mpi4py") else ["test_*.py"]
