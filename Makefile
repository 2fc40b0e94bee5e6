PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/python examples/quickstart.py

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cov=dlite_hf --cov-report=term --cov-fail-under=90

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# torch first, by itself: the version pinned here, whichever build of it this machine's pip is set up to prefer.
$(INSTALLED): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist .coverage .mypy_cache .pytest_cache .ruff_cache
