# Everything runs from a fresh clone with only python3.11 or newer; `.venv` is made on first use and reused.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo test test-all lint eval-tiny fuzz bench aot clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.venv/.made:
	@test -n "$(PYTHON)" || { echo "sensorium needs python3.11 or newer: PYTHON=/path/to/python make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"sensorium needs python 3.11 or newer, this is {v[0]}.{v[1]}")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	touch $@

.venv/.runtime: .venv/.made constraints.txt pyproject.toml $(wildcard kernels/cpu/*)
	$(PIP) -q setuptools torch
	$(PIP) -q --no-build-isolation -e .
	touch $@

# torchvision is here only for transformers' own processors, which the tests compare with.
.venv/.test: .venv/.runtime
	$(PIP) -q --no-build-isolation -e '.[test]'
	$(PIP) -q --no-deps torchvision==0.28.0
	touch $@

setup: .venv/.runtime  ## install what it takes to run, into .venv
setup-test: .venv/.test  ## the same, and what the tests and checkers need

demo: .venv/.runtime  ## read the shipped images and the clip with the shipped model
	@$(BIN)/sensorium demo $(ARGS)

test: .venv/.test  ## the test suite, minutes
	$(BIN)/python $(if $(ARGS),-m pytest,tests/helpers/report.py) -m "not full" $(ARGS)

test-all: .venv/.test  ## every test, and tests/RESULTS.md
	$(BIN)/python tests/helpers/report.py

lint: .venv/.test  ## style, the law of imports, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	mkdir -p .types && ln -sfn .. .types/sensorium
	MYPYPATH=.types $(BIN)/mypy -p sensorium

eval-tiny: .venv/.test  ## how well the shipped model reads held-out data
	$(BIN)/python -m training.evaluate $(ARGS)

fuzz: .venv/.test  ## 10,000 mutated files of each kind, fresh seed
	$(BIN)/python -m pytest -m full -s tests/mm/media/test_fuzz.py $(ARGS)

bench: .venv/.test  ## throughput, peers, processors, sampler, batch invariance and start-up time
	$(BIN)/python -m benchmarks.throughput $(ARGS)
	$(BIN)/python -W ignore -m benchmarks.processors
	$(BIN)/python -W ignore -m benchmarks.sampler
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.invariance
	$(BIN)/python -m benchmarks.startup

aot: .venv/.test  ## compile every Triton kernel for GPUs that are not here, record what it takes of them
	$(BIN)/python -m benchmarks.aot

gpu: .venv/.test  ## what the GPU at hand proves, in three sections of under 4 minutes: ARGS="--only ops"
	$(BIN)/python -m benchmarks.gpu $(ARGS)

clean:  ## remove what the other commands made, .venv included
	rm -rf .venv out .types build dist kernels/*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
