# Two commands do everything on a fresh machine: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes at a time; files stay whole, so fixtures are made once.
JOBS ?= 2
# One arithmetic thread per process: workers and ranks are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint unit test-slow test-gpu data clean

demo: $(VENV)/.installed
	$(BIN)/forerun demo

test: lint unit

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist loadfile

test-slow: $(VENV)/.installed
	$(BIN)/pytest -m slow

test-gpu: $(VENV)/.installed
	$(BIN)/pytest -m gpu

# Public scaling runs for the back-tests, into benchmarks/data; says what could not be reached.
data: $(VENV)/.installed
	$(BIN)/python benchmarks/datasets.py

# torch alone and first, at the pinned version: asked for by mup it would come with several GB of CUDA.
$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "forerun needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	# mup asks for torchvision and never imports it; a build that does not fit this torch breaks `import transformers`.
	$(BIN)/python -m pip uninstall --disable-pip-version-check -q -y torchvision
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
