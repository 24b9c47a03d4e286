# Each target creates the environment that it needs (scripts/environment.py): minutes the first time, seconds afterwards.
#
#   make demo                        train a small network on handwritten digits
#   make test                        format, lint, types, doctests and tests
#   make test ARGS="-k filter -x"    ARGS is passed to pytest; in other targets, to the script
#   make test PYTHON=python3.12      another Python (3.10 or newer)

PYTHON ?= python3
ARGS ?=
ENVIRONMENT = $(PYTHON) scripts/environment.py
TWO = -n 2 --dist loadgroup  # at a time, because they mostly wait; tests in one xdist_group share a job or a site
FILES = -n 2 --dist loadfile  # the same, where the tests of a file share a job or a server
WITHOUT_TORCH = benchmarks data/test_common_progress.py data/test_orders.py data/test_partition.py data/test_samplers.py \
    distributed/agreement/test_ends.py distributed/failures/test_record.py distributed/failures/test_verdicts.py \
    distributed/test_environments.py distributed/test_main.py distributed/test_topology.py engine/test_dispatch* \
    engine/test_events* engine/test_loop* engine/test_machine.py engine/test_progress.py handlers/checkpoint/test_cli.py \
    handlers/checkpoint/test_crashes.py handlers/checkpoint/test_handler_names.py handlers/checkpoint/test_loading_resume.py \
    handlers/checkpoint/test_retention.py handlers/test_early_stopping.py handlers/test_fbresearch_logger.py \
    handlers/test_file_logger.py handlers/test_steps.py handlers/test_stores.py handlers/test_time* \
    handlers/test_tqdm_logger.py messages test_architecture.py test_base.py test_errors.py test_guards.py test_migrate.py \
    test_output.py test_packaging.py test_page_texts.py test_text.py

.PHONY: demo test test-torch test-gpu test-jobs test-openmpi test-xla test-horovod test-hosts test-slurm test-restarts test-loggers test-clients test-ray test-browser test-docs site bench bench-gpu format clean

# several processes share the cores, and threads that wait for each other would keep them busy
test-torch test-jobs test-openmpi test-xla test-horovod test-hosts test-slurm test-restarts test-loggers test-clients test-ray \
test-browser test-docs: export OMP_NUM_THREADS ?= 1

demo:
	@$(ENVIRONMENT) dev python examples/mnist.py $(ARGS)

test:
	@$(ENVIRONMENT) dev scripts/check $(ARGS)

# tests with another version of torch, next to other libraries that are often installed: make test-torch VERSION=2.15.0
# Only `make test` runs what does not depend on the version of torch: doctests, and tests of files, orders, texts, and verdicts.
test-torch:
	@$(if $(VERSION),,$(error which torch? make test-torch VERSION=2.15.0))
	@$(ENVIRONMENT) torch-$(VERSION) python -m pytest $(FILES) tests $(WITHOUT_TORCH:%=--ignore-glob='tests/%') $(ARGS)

# tests on all GPUs of this machine, with the torch and pytest installed for $(PYTHON); needs no network
test-gpu:
	@$(PYTHON) scripts/gpu.py test $(ARGS)

# tests that start Python: jobs under torchrun and mpirun that fail, end early, or are killed, and benchmarks
test-jobs:
	@$(ENVIRONMENT) dev python -m pytest -m jobs $(FILES) tests $(ARGS)

# MPI tests with Open MPI (with ARGS="-m jobs", those of `make test-jobs`); an environment can hold only one MPI library
test-openmpi:
	@$(ENVIRONMENT) openmpi python -m pytest $(FILES) tests/mpi $(ARGS)
	@$(ENVIRONMENT) openmpi python -m pytest -m jobs tests/mpi/test_conformance.py

# torch_xla with the torch that it needs, on the CPU unless PJRT_DEVICE is set; takes 7 GB of disk space
test-xla: export PJRT_DEVICE ?= CPU
test-xla:
	@$(ENVIRONMENT) xla python -m pytest $(FILES) tests/xla $(ARGS)

# builds Horovod from source for this torch, which takes minutes and requires a C++ compiler; the wheel is cached
test-horovod:
	@scripts/system_packages g++:g++ make:make
	@$(ENVIRONMENT) horovod python -m pytest $(TWO) tests/horovod $(ARGS)

# two hosts in network namespaces, which require root: sudo, or unshare --map-root-user make test-hosts
test-hosts:
	@scripts/system_packages ip:iproute2
	@$(ENVIRONMENT) dev python -m pytest tests/hosts $(ARGS)

# a Slurm cluster of two such hosts, from Debian's packages, installed if missing; SIGNALS=60 preempts a job 60 times instead of 2
test-slurm:
	@scripts/system_packages ip:iproute2 slurmctld:slurmctld slurmd:slurmd srun:slurm-client
	@$(ENVIRONMENT) dev python -m pytest tests/slurm $(ARGS)

# torchrun restarts its workers repeatedly, and nodes join and leave; takes minutes
test-restarts:
	@$(ENVIRONMENT) dev python -m pytest -m restarts -o timeout=4000 -o faulthandler_timeout=4100 tests/torchrun $(ARGS)

# experiment trackers, each with its own server, store, or files on this machine; takes 2 GB of disk space
test-loggers:
	@$(ENVIRONMENT) loggers python -m pytest -m "not browser" $(FILES) tests/loggers $(ARGS)

# MONAI, Optuna, ptan, and others that were written for PyTorch-Ignite, and its examples, on camshaft unmodified
test-clients:
	@$(ENVIRONMENT) clients python -m pytest $(TWO) tests/clients $(ARGS)

# Ray on this machine: workers that fail, other numbers of them, and trials that are stopped
test-ray:
	@$(ENVIRONMENT) ray python -m pytest $(TWO) tests/ray $(ARGS)

# TensorBoard's page in a headless browser, from Debian's packages, installed if missing
test-browser:
	@scripts/system_packages chromium:chromium
	@$(ENVIRONMENT) loggers python -m pytest -m browser tests/loggers $(ARGS)

# runs the code of every page of docs/, builds the site, and opens it in the browser; some pages start jobs that hang on purpose
test-docs:
	@scripts/system_packages chromium:chromium
	@$(ENVIRONMENT) docs python -m pytest $(TWO) tests/docs $(ARGS)

# builds the site of docs/ in ./site
site:
	@NO_MKDOCS_2_WARNING=1 $(ENVIRONMENT) docs python -m mkdocs build --strict --quiet $(ARGS)
	@echo "site/index.html"

bench:
	@$(ENVIRONMENT) bench python benchmarks/engine_overhead.py $(ARGS)
	@$(ENVIRONMENT) bench python benchmarks/collectives.py
	@$(ENVIRONMENT) bench python benchmarks/launching.py
	@$(ENVIRONMENT) bench python benchmarks/import_time.py
	@$(ENVIRONMENT) bench python benchmarks/sampler.py
	@$(ENVIRONMENT) bench python benchmarks/handlers.py
	@$(ENVIRONMENT) bench python benchmarks/compiled.py
	@$(ENVIRONMENT) bench python benchmarks/watching.py
	@$(ENVIRONMENT) bench python benchmarks/checkpoint.py
	@$(ENVIRONMENT) bench python benchmarks/sharded.py
	@$(ENVIRONMENT) bench python benchmarks/networks.py
	@$(ENVIRONMENT) bench python benchmarks/features.py

# on a GPU, with the torch of $(PYTHON); takes at most eight minutes
bench-gpu:
	@$(PYTHON) scripts/gpu.py bench $(ARGS)

format:
	@$(ENVIRONMENT) dev ruff format .
	@$(ENVIRONMENT) dev ruff check --fix .

clean:
	rm -rf .venv .venv-* .venv*.lock build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
