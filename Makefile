# Everything runs in a virtual environment of its own, so that a fresh machine needs Python 3.11+ and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format soak faults clean

# Tokenise real text, train the `tiny` preset, print a sample.
demo: $(VENV)/.core
	$(BIN)/ptxtrain train --preset tiny --run runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -q -m "not slow"

# The crash bench in full; it ends with the table that the README shows. `make test` runs a sample of it, `make soak` more.
faults: $(VENV)/.dev
	PTXTRAIN_FAULTS=full $(BIN)/python -m pytest -n 2 -q -m "not slow" tests/faults

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -q -m slow

lint: $(VENV)/.dev build/types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p ptxtrain.engine -p ptxtrain.data -p ptxtrain.cli -p ptxtrain.ptx

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy and pyright see the packages under their installed names through this tree of links.
build/types:
	mkdir -p build/types/ptxtrain
	for folder in cli data engine presets ptx; do ln -sfn ../../../$$folder build/types/ptxtrain/$$folder; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/.core

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache
