# Every target works as the first command in a fresh clone: it makes .venv when that is missing or out of date.
# Other versions: make VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt test; or the newest: VENV=.venv-newest CONSTRAINTS=

VENV        := .venv
CONSTRAINTS := constraints.txt
# Stamps of what is installed: the package with what `make demo` needs, and the tools for development.
PACKAGE     := $(VENV)/.installed-package
STAMP       := $(VENV)/.installed
BIN         := $(VENV)/bin
PIP_INSTALL  = $(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS))
# The first of these that runs and is new enough; override with `make PYTHON=/path/to/python ...`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# xdist workers share the cores; each keeps to one thread. The tests of a file compile much the same, so they
# run in one worker; the files that take longest come first (tests/order.txt).
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of programs, each of which would compile the packages again where a container says so.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo conformance check test test-changed test-slow test-all test-gpu test-kernels mutants lint docs docs-site stories wheel-test release-check bench bench-gpu bench-all clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(PACKAGE) ## Show in two minutes what the library does: a run that dies, and three diagnoses
	$(BIN)/stablenum demo

conformance: $(PACKAGE) ## Run unstable trainings on every backend and show that they agree
	$(BIN)/stablenum compare --jobs 2 --json conformance.json --html conformance.html

# The linters use one core and take less time than the tests, so they run beside them and are heard at the end.
check: $(STAMP) ## Check style, types and import contracts, and run the tests (what CI runs)
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	  $(MAKE) --no-print-directory test; tests=$$?; \
	  wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests + lint))

test: $(STAMP) ## Run the tests that CI runs (some minutes)
	JAX_PLATFORMS=cpu $(PYTEST)

test-changed: $(STAMP) ## Run the tests that reach the lines changed since the last recording (see CONTRIBUTING)
	$(BIN)/python -m tests.changed

# PART=all runs every part, for hours. Without a part, the table says when each last ran whole.
test-slow: $(STAMP) ## Run a part of what `make test` leaves out: PART=..., each at most an hour on two cores
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.parts $(PART)

test-all: $(STAMP) ## Run every test, the slow and the repeated ones too (hours)
	JAX_PLATFORMS=cpu $(PYTEST) -m "not gpu" tests stablenum stablenum_jax stablenum_torch

test-gpu: $(STAMP) ## Run the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

test-kernels: $(STAMP) ## Run the kernels for GPUs under Triton's interpreter, and compile them (installs Triton, 1 GB)
	$(BIN)/pip install -q -c constraints.txt triton
	$(PYTEST) tests/kernels

mutants: $(STAMP) ## Put small faults into the library and see that the tests find them (about an hour)
	$(BIN)/python -m tests.mutants $(MUTANTS)

lint: $(STAMP) ## Check style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 86 docs/*.md docs/*/*.md
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## Check figures against their pages, and build the documentation
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n auto --maxprocesses 4 tests/documents
	JAX_PLATFORMS=cpu $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# One folder for each version, beside a list that the pages read. Where SITE is hosted is for the one who uploads it.
SITE ?= docs/_build/site
docs-site: docs ## Put the built pages into SITE, beside those of other versions
	$(BIN)/python docs/versions.py $(SITE)

stories: $(STAMP) ## Run the notebooks of docs/stories, and write them with their outputs (some minutes)
	$(BIN)/python docs/notebooks.py

# The tests that are left out, because they read pages, benchmarks or sources of the repository, are named in the script.
wheel-test: $(STAMP) ## Build the sdist and the wheel, and run the tests on the installed wheel without the source tree
	JAX_PLATFORMS=cpu $(BIN)/python .ci/wheel_test.py -n auto --maxprocesses 4 --dist loadfile tests

release-check: $(STAMP) ## Check what would be released: metadata, contents, and the README in an empty environment
	$(BIN)/python .ci/release_check.py $(addprefix --constraint ,$(CONSTRAINTS)) $(RELEASE)

bench: $(STAMP) ## Measure what a guarded step costs beside the usual tools (about an hour, on a quiet machine)
	$(BIN)/python -m benchmarks steps

bench-gpu: $(STAMP) ## The same on an NVIDIA GPU
	$(BIN)/python -m benchmarks gpu

bench-all: $(STAMP) ## Every measurement of the documentation
	$(BIN)/python -m benchmarks

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) docs/_build conformance.json conformance.html stablenum-demo.html

# A stamp is written last, so an interrupted installation is begun again.
$(PACKAGE): pyproject.toml $(CONSTRAINTS)
	@rm -f $@
	@if [ -z "$(PYTHON)" ]; then \
	  echo "No Python 3.11 or newer (with venv) found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@# Dependency groups need pip 25.1.
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(PIP_INSTALL) --editable '.[all]'
	@touch $@

$(STAMP): $(PACKAGE)
	@rm -f $@
	$(PIP_INSTALL) --editable '.[all]' --group dev
	@touch $@
