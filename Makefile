# Everything runs in .venv, which is created on first use and again when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pip would compile every module of torch, which takes a minute. Python compiles a module when it is first imported, and
# the export lets it keep the result, also where the environment forbids that.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE =
# Tests run in one process per core. To use a debugger: make test-all ARGS="-n 0 --pdb -k name".
PYTEST := -m pytest --numprocesses auto --dist loadgroup

.PHONY: setup demo test test-all test-oldest bench gpu-check release-check lint docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --constraint requirements/constraints.txt --editable ".[recipes,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m recipes.demo

# Takes minutes: all unit tests, and the first and representative parameter sets of tests with workers. ARGS goes to pytest:
# make test ARGS="-k checkpoint".
test: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not full" $(ARGS)

# Every test. make test-all ARGS="-m full" runs the tests that make test leaves out.
test-all: $(STAMP)
	$(BIN)/python $(PYTEST) $(ARGS)

# Every test with the oldest versions that pyproject.toml allows, in a separate environment. These versions use deprecated
# functions of each other, so deprecation warnings are not errors.
test-oldest: $(VENV)-oldest/.installed
	PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -W ignore::DeprecationWarning" $(VENV)-oldest/bin/python $(PYTEST) $(ARGS)

$(VENV)-oldest/.installed: pyproject.toml requirements/oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python $(INSTALL) --constraint requirements/oldest.txt --editable ".[recipes,dev]"
	touch $@

# Takes minutes to half an hour. Emulated nodes with shaped links need root and Linux. Results go to
# benchmarks/results.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.selection
	$(BIN)/python -m benchmarks.payload
	$(BIN)/python -m benchmarks.scaling --check
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.messages
	$(BIN)/python -m benchmarks.messages --busy
	$(BIN)/python -m benchmarks.step_time --bucket-view
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.chart

# Expected to take under 15 minutes on a machine with one or more GPUs. Writes gpu-report.md.
gpu-check: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

# Builds the wheel and the sdist and tries each in an empty environment. If all checks pass, both are in dist. ARGS=--lent
# is a quick check without downloads, in a few minutes at most.
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
