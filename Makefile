# Two commands do everything on a fresh machine: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Versions to install; empty: the newest there are.
CONSTRAINTS := constraints.txt
# Test processes at a time; files stay whole, so fixtures are made once.
JOBS ?= 2
# One arithmetic thread per process: workers and ranks are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint unit test-slow gpu test-trainers test-min test-newest wheel docs reference recording pictures data trainers clean

demo: $(VENV)/.installed
	$(BIN)/forerun demo

test: lint unit

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Tests that failed (exit 1) run once more, alone: they kill and time real processes, which a busy machine can upset. The
# first run's output stands above; a test that passes only alone is a defect to report.
unit: $(VENV)/.installed
	@$(BIN)/pytest -n $(JOBS) --dist loadfile || \
	    { [ $$? -eq 1 ] && echo "make unit: the failed tests once more, alone" && $(BIN)/pytest --last-failed --last-failed-no-failures none; }

# The slow tests, JOBS files at a time. The same command resumes: a file that passed is not run again until a source file changes.
SLOW_LOGS ?= build/slow/none

test-slow: $(VENV)/.installed
	@logs=build/slow/$$(git ls-files -- '*.py' | xargs cat | sha256sum | cut -c1-12); \
	$(MAKE) --no-print-directory --keep-going -j $(JOBS) SLOW_LOGS=$$logs \
	    $$(grep -rl --include='test_*.py' -e 'mark\.slow' tests | sort | sed "s#.*#$$logs/&.passed#")

$(SLOW_LOGS)/%.passed: %
	@mkdir -p $(@D); $(BIN)/pytest -q -m slow $< > $(@:.passed=.log) 2>&1; code=$$?; echo "$<: $$(tail -n 1 $(@:.passed=.log))"; \
	    if [ $$code -eq 0 ] || [ $$code -eq 5 ]; then touch $@; else echo "see $(@:.passed=.log)"; exit 1; fi

# Everything for one GPU (benchmarks/gpu/gpu_all.py), with the interpreter given: `make gpu PYTHON=python3`. No .venv, no network.
# Fails where a part failed or is left: the same command resumes from the files in GPU_OUT.
GPU_OUT ?= build/gpu
# After so many seconds nothing is begun; what is under way runs on, so that a call stays under 9 minutes.
GPU_SECONDS ?= 480

gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu needs a CUDA device: torch sees none")'
	@PYTHONPATH=benchmarks/gpu:$$PYTHONPATH $(PYTHON) benchmarks/gpu/gpu_all.py --out $(GPU_OUT) --seconds $(GPU_SECONDS)

# With the oldest versions that pyproject.toml allows, and with the newest there are, each in an environment of its own;
# another interpreter by PYTHON=python3.13. Where torch comes from PyPI, each takes 5 GB more, of CUDA.
test-min:
	$(MAKE) unit VENV=.venv-min CONSTRAINTS=constraints-min.txt

test-newest:
	$(MAKE) unit VENV=.venv-newest CONSTRAINTS=

# What `pip install` takes, into dist/. A build/ of before would put files that are no more into the wheel.
wheel: $(VENV)/.installed
	rm -rf build
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-build-isolation --no-deps -w dist .

# The site, strictly: into build/site, which reads offline.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

# docs/reference as the code has it, and the recorded shapes of answers.
reference: $(VENV)/.installed
	FORERUN_WRITE_REFERENCE=1 $(BIN)/pytest -m slow tests/launcher/cli/test_json_page.py
	PYTHONPATH=docs $(BIN)/python -m reference_pages.writing

# What the pages show of a finished study, which stays as it is; and the README's picture, from the tables of a GPU's runs.
STUDY ?= demo/study

recording: $(VENV)/.installed
	$(BIN)/python docs/recording.py $(STUDY)

pictures: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python docs/readme_picture.py

# What the installed trainers themselves make of the exports; a trainer that is not there is skipped with its command.
test-trainers: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m slow -rs $$(grep -rl --include='test_*.py' trainer_venv tests)

# Public scaling runs for the back-tests, into benchmarks/data; says what could not be had. `make data FROM=DIR` takes the
# same files from a folder, by digest, instead of the network.
data: $(VENV)/.installed
	$(BIN)/python benchmarks/statistics/datasets.py $(if $(FROM),--from "$(FROM)")

# Other people's trainers, each with the versions of trainers/NAME.txt in .venv-trainers/NAME: what `forerun verify` asks
# for proof and the tests of exports run. One alone: make trainers TRAINERS=torchtitan
TRAINERS ?= $(basename $(notdir $(wildcard trainers/*.txt)))
# Where torch comes from; out of reach, it comes from PyPI, with several GB of CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

trainers:
	@$(MAKE) --keep-going --no-print-directory $(TRAINERS:%=.venv-trainers/%/.installed)

.venv-trainers/%/.installed: trainers/%.txt
	$(PYTHON) -m venv .venv-trainers/$*
	@.venv-trainers/$*/bin/python -m pip install --disable-pip-version-check -q --retries 0 --timeout 20 --no-deps \
	    --index-url $(TORCH_INDEX) "$$(grep '^torch==' $<)" || echo "make trainers: no torch from $(TORCH_INDEX), now PyPI"
	@.venv-trainers/$*/bin/python -m pip install --disable-pip-version-check -q -r $< || \
	    { rm -rf .venv-trainers/$*; echo "make trainers: $* is not installed. It needs a network with PyPI, or pip's" \
	    "PIP_INDEX_URL set to a mirror, or a Python that $* supports (PYTHON=python3.12); tests that ask for $* skip" \
	    "until then." >&2; exit 1; }
	touch $@

trainers/%.txt:
	@echo "make trainers: there is no $@; known: $(basename $(notdir $(wildcard trainers/*.txt)))" >&2; exit 2

# torch alone and first, at the pinned version: asked for by mup it would come with several GB of CUDA.
$(VENV)/.installed: $(CONSTRAINTS) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "forerun needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q $(CONSTRAINTS:%=-c %) torch
	$(BIN)/python -m pip install --disable-pip-version-check -q $(CONSTRAINTS:%=-c %) -e '.[dev]'
	# mup asks for torchvision and never imports it; a build that does not fit this torch breaks `import transformers`.
	$(BIN)/python -m pip uninstall --disable-pip-version-check -q -y torchvision
	touch $@

clean:
	rm -rf .venv .venv-min .venv-newest .venv-trainers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
