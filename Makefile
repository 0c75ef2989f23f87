# One-line targets. `make demo` and `make test` need nothing but make and Python 3.11 or later.
PYTHON ?= $(firstword $(foreach name,python3.12 python3.11 python3,$(if $(shell $(name) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>&1 || echo no),,$(name))))
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TESTS ?=

.PHONY: demo test test-slow lint types docs format check clean

demo: .venv/.installed  ## measure resnet18 on this machine, end to end
	$(BIN)/farm run resnet18

test: .venv/.installed-dev  ## run the tests, without the slow ones
	$(BIN)/python -m pytest -n auto $(TESTS)

test-slow:  ## run also the slow tests: before a release
	FARM_SLOW_TESTS=1 $(MAKE) test

lint: .venv/.installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/mypy

docs: .venv/.installed-dev  ## build the site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: .venv/.installed-dev
	$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format --quiet .

check: test lint types docs

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later was found. Name one: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "No virtual environment. On Debian or Ubuntu, install the package python3-venv."; exit 1; }
	@echo "Installing the versions of constraints.txt into .venv/: some minutes; PyTorch with CUDA has several GB."
	@sed '/^# Extras/,$$d; /^torch/d' constraints.txt > .venv/requirements.txt  # the large packages last
	$(PIP_INSTALL) --no-deps --requirement .venv/requirements.txt
	$(PIP_INSTALL) --constraint constraints.txt torch torchvision  # with the CUDA libraries of this build of torch, if any
	$(PIP_INSTALL) --no-deps --editable .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP_INSTALL) --no-deps --requirement constraints.txt
	@touch $@
