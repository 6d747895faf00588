# Everything runs in .venv, which is made on first use and again only when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test bench lint docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint requirements/constraints.txt --editable ".[recipes,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m recipes.demo

test: $(STAMP)
	$(BIN)/python -m pytest

# Minutes to half an hour; needs root and Linux for hosts with shaped links. Results go to benchmarks/results.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.selection
	$(BIN)/python -m benchmarks.payload
	$(BIN)/python -m benchmarks.scaling --check
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.step_time --exchange-only
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.chart

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint requirements/constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site demo_output
