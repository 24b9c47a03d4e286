# Each target sets up by itself what it needs (scripts/environment.py): the first run takes minutes, the next seconds.
#
#   make demo                        train a small network on handwritten digits
#   make test                        format, lint, types, doctests and tests
#   make test ARGS="-k filter -x"    ARGS goes to pytest; in the other targets, to the script
#   make test PYTHON=python3.12      another Python (3.10 or newer)

PYTHON ?= python3
ARGS ?=
ENVIRONMENT = $(PYTHON) scripts/environment.py

.PHONY: demo test test-openmpi test-xla bench format clean

demo:
	@$(ENVIRONMENT) dev python examples/mnist.py $(ARGS)

test:
	@$(ENVIRONMENT) dev scripts/check $(ARGS)

# what `make test` runs with MPICH; an environment holds one MPI library
test-openmpi:
	@$(ENVIRONMENT) openmpi python -m pytest tests/mpi $(ARGS)

# torch_xla with the torch that it needs, on the CPU unless PJRT_DEVICE says otherwise: 7 GB on the disk
test-xla: export PJRT_DEVICE ?= CPU
test-xla:
	@$(ENVIRONMENT) xla python -m pytest tests/xla $(ARGS)

bench:
	@$(ENVIRONMENT) bench python benchmarks/engine_overhead.py $(ARGS)
	@$(ENVIRONMENT) bench python benchmarks/import_time.py

format:
	@$(ENVIRONMENT) dev ruff format .
	@$(ENVIRONMENT) dev ruff check --fix .

clean:
	rm -rf .venv .venv-* .venv*.lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
