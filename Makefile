# make demo | examples | test | test-all | bench | lint | format | docs | clean
#
# Each target creates .venv if it is missing, installs what it needs once, and runs. Overrides:
#   PYTHON=python3.12   the interpreter that creates .venv
#   TORCH=2.12.0        another torch than the pinned one (reinstalls; without it the pin comes back)
#   ARGS="-k linearize" further arguments for pytest, the demo or the benchmarks

PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PINS := $(VENV)/constraints-torch-$(TORCH).txt
installed = $(VENV)/installed-$(1)-torch-$(TORCH)

# One thread per process: the tests run in $(WORKERS) processes, and timings compare like with like.
export OMP_NUM_THREADS ?= 1

.PHONY: demo examples test test-all bench lint format docs clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(call installed,examples)
	$(BIN)/python -m lanewise.demo $(ARGS)

examples: $(call installed,examples)
	for name in $$(ls examples | sed -n 's/^\([a-z]\w*\)\.py$$/\1/p'); do $(BIN)/python -m examples.$$name $(ARGS) || exit 1; done

test: $(call installed,test)
	$(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

test-all: $(call installed,test)
	LANEWISE_FULL=1 $(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

bench: $(call installed,test)
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(call installed,test) $(call installed,lint)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(call installed,lint)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(call installed,docs)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site build dist output .pytest_cache .ruff_cache .hypothesis

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# Only the pins of the torch now asked for stay, so a change of TORCH back and forth reinstalls each time.
$(PINS): constraints.txt | $(BIN)/pip
	rm -f $(VENV)/constraints-torch-*.txt
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

$(VENV)/installed-%-torch-$(TORCH): pyproject.toml $(PINS)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(PINS) -e '.[$*]'
	touch $@
