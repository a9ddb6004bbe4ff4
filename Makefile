# `make demo` shows the whole way, `make test` proves it; each makes its own environment first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

EARS := .cache/ears/whisper-base

.PHONY: setup demo ears test lint format clean

setup: $(VENV)/.ready

# torch comes first and pinned: anything that admits another version may pull gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: ears
	$(BIN)/myna demo --out demo --recogniser $(EARS)

# What judges speech is not what makes it: `myna evaluate` and `myna demo --voice` name what they could not measure.
ears: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[evaluate]"
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt resemblyzer distillmos xls_r_sqa
	$(BIN)/python tools/fetch_whisper_base.py --out $(EARS)

test: setup
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 -m "not gpu"

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
