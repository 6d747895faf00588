# Everything runs in .venv, which is made on first use and again only when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := -m pip install --quiet --disable-pip-version-check
# Each test runs in one of as many processes as there are cores; for a debugger: make test-all ARGS="-n 0 --pdb -k name".
PYTEST := -m pytest --numprocesses auto --dist loadgroup

.PHONY: setup demo test test-all test-oldest bench gpu-check release-check lint docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --constraint requirements/constraints.txt --editable ".[recipes,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m recipes.demo

# In minutes: all unit tests, and of each table of tests with workers the first row. ARGS goes to pytest:
# make test ARGS="-k checkpoint". What workers import is compiled once, also where files that Python compiles are not
# wanted elsewhere.
test test-all test-oldest: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not full" $(ARGS)

# Everything; make test-all ARGS="-m full": what make test leaves out.
test-all: $(STAMP)
	$(BIN)/python $(PYTEST) $(ARGS)

# The same with the oldest versions that pyproject.toml allows, in an environment of their own. What they use of each
# other is deprecated in places, which is no failure of ours.
test-oldest: $(VENV)-oldest/.installed
	PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -W ignore::DeprecationWarning" $(VENV)-oldest/bin/python $(PYTEST) $(ARGS)

$(VENV)-oldest/.installed: pyproject.toml requirements/oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python $(INSTALL) --constraint requirements/oldest.txt --editable ".[recipes,dev]"
	touch $@

# Minutes to half an hour; needs root and Linux for hosts with shaped links. Results go to benchmarks/results.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.selection
	$(BIN)/python -m benchmarks.payload
	$(BIN)/python -m benchmarks.scaling --check
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.messages
	$(BIN)/python -m benchmarks.messages --busy
	$(BIN)/python -m benchmarks.step_time --exchange-only
	$(BIN)/python -m benchmarks.step_time --bucket-view
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.chart

# Under 15 minutes on a machine with one or more GPUs; writes gpu-report.md.
gpu-check: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

# Builds the wheel and the sdist and tries each in an environment that begins empty; what passed lies in dist. With
# ARGS=--lent in a minute and without a download, as a first look.
release-check: $(STAMP)
	$(BIN)/python -m release $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python $(INSTALL) --constraint requirements/constraints.txt --editable ".[docs]"
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir build/docs docs site

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist site demo_output
