# `make demo` shows the whole way, `make test` proves it; each makes its own environment first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint format clean

setup: $(VENV)/.ready

# torch comes first and pinned: anything that admits another version may pull gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/myna demo --out demo

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
	rm -rf $(VENV) demo runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
