# Each target sets up by itself what it needs (scripts/environment.py): the first run takes minutes, the next seconds.
#
#   make demo                        train a small network on handwritten digits
#   make test                        format, lint, types, doctests and tests
#   make test ARGS="-k filter -x"    ARGS goes to pytest; in the other targets, to the script
#   make test PYTHON=python3.12      another Python (3.10 or newer)

PYTHON ?= python3
ARGS ?=
ENVIRONMENT = $(PYTHON) scripts/environment.py
PATIENT = -o timeout=180 -o faulthandler_timeout=240  # each of these tests starts several Pythons with torch
TWO = -n 2 --dist worksteal  # at a time, as they mostly wait
MANY = -n $$(($$(getconf _NPROCESSORS_ONLN) + 2)) --dist loadfile  # as in scripts/check

.PHONY: demo test test-torch test-gpu test-jobs test-openmpi test-xla test-horovod test-hosts test-slurm test-restarts test-loggers test-browser test-docs site bench bench-gpu format clean

demo:
	@$(ENVIRONMENT) dev python examples/mnist.py $(ARGS)

test:
	@$(ENVIRONMENT) dev scripts/check $(ARGS)

# the tests with another torch, next to other libraries that many people have installed: make test-torch VERSION=2.15.0
# Format, lint and types are left to `make test`: none of them runs anything with torch.
test-torch:
	@$(if $(VERSION),,$(error which torch? make test-torch VERSION=2.15.0))
	@OMP_NUM_THREADS=1 $(ENVIRONMENT) torch-$(VERSION) python -m pytest $(MANY) --ignore tests/engine/test_typing.py $(ARGS)

# tests on all GPUs of this machine, with the torch and pytest of $(PYTHON) as they are, which may have no network
test-gpu:
	@$(PYTHON) scripts/gpu.py test $(ARGS)

# what starts Python several times: jobs of torchrun and mpirun that fail, end early or are killed, and benchmarks
# (a file stays in one process: all tests of a file may share one job)
test-jobs:
	@$(ENVIRONMENT) dev python -m pytest -m jobs $(PATIENT) -n 2 --dist loadfile tests $(ARGS)

# what `make test` runs with MPICH (ARGS="-m jobs" for what `make test-jobs` runs); an environment holds one MPI library
test-openmpi:
	@$(ENVIRONMENT) openmpi python -m pytest $(PATIENT) tests/mpi $(ARGS)

# torch_xla with the torch that it needs, on the CPU unless PJRT_DEVICE says otherwise: 7 GB on the disk
test-xla: export PJRT_DEVICE ?= CPU
test-xla:
	@$(ENVIRONMENT) xla python -m pytest $(PATIENT) tests/xla $(ARGS)

# Horovod is built from source for this torch, which takes minutes and a C++ compiler; the wheel is kept
test-horovod:
	@scripts/system_packages g++:g++ make:make
	@$(ENVIRONMENT) horovod python -m pytest $(PATIENT) $(TWO) tests/horovod $(ARGS)

# two hosts on a network of their own, which takes root: sudo, or unshare --map-root-user make test-hosts
test-hosts:
	@scripts/system_packages ip:iproute2
	@$(ENVIRONMENT) dev python -m pytest $(PATIENT) tests/hosts $(ARGS)

# a Slurm of two such hosts, from Debian's packages, which are installed if need be; SIGNALS=60 preempts a job 60 times, not 2
test-slurm:
	@scripts/system_packages ip:iproute2 slurmctld:slurmctld slurmd:slurmd srun:slurm-client
	@$(ENVIRONMENT) dev python -m pytest $(PATIENT) tests/slurm $(ARGS)

# torchrun starts its workers again and again, and nodes come and go, which takes minutes
test-restarts:
	@$(ENVIRONMENT) dev python -m pytest -m restarts -o timeout=580 -o faulthandler_timeout=600 tests/torchrun $(ARGS)

# services of experiment trackers, each with its own server, store or files on this machine: 2 GB on the disk
test-loggers:
	@$(ENVIRONMENT) loggers python -m pytest $(PATIENT) -m "not browser" tests/loggers $(ARGS)

# TensorBoard's page in a browser without a screen, from Debian's packages, which are installed if need be
test-browser:
	@scripts/system_packages chromium:chromium
	@$(ENVIRONMENT) loggers python -m pytest $(PATIENT) -m browser tests/loggers $(ARGS)

# the code of every page of docs/ runs, and the site is built and opened in the browser; jobs on some pages hang on purpose
test-docs:
	@scripts/system_packages chromium:chromium
	@$(ENVIRONMENT) docs python -m pytest -o timeout=400 -o faulthandler_timeout=460 $(TWO) tests/docs $(ARGS)

# the pages of docs/ as a site in ./site
site:
	@$(ENVIRONMENT) docs python -m mkdocs build --strict $(ARGS)

bench:
	@$(ENVIRONMENT) bench python benchmarks/engine_overhead.py $(ARGS)
	@$(ENVIRONMENT) bench python benchmarks/collectives.py
	@$(ENVIRONMENT) bench python benchmarks/import_time.py
	@$(ENVIRONMENT) bench python benchmarks/sampler.py
	@$(ENVIRONMENT) bench python benchmarks/handlers.py
	@$(ENVIRONMENT) bench python benchmarks/watching.py
	@$(ENVIRONMENT) bench python benchmarks/checkpoint.py
	@$(ENVIRONMENT) bench python benchmarks/sharded.py
	@$(ENVIRONMENT) bench python benchmarks/networks.py
	@$(ENVIRONMENT) bench python benchmarks/features.py

# on a GPU, at most eight minutes, with the torch of $(PYTHON)
bench-gpu:
	@$(PYTHON) scripts/gpu.py bench $(ARGS)

format:
	@$(ENVIRONMENT) dev ruff format .
	@$(ENVIRONMENT) dev ruff check --fix .

clean:
	rm -rf .venv .venv-* .venv*.lock build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
