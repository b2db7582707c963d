# Everything runs from a fresh clone with Python 3.11 or newer; `.venv` is made on first use and reused.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
ARGS ?=
ONLY ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-clients demo test test-all smoke lint eval-tiny train-asr fuzz bench published abridged aot gpu site clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

.venv/.made:
	@test -n "$(PYTHON)" || { echo "sensorium needs python3.11 or newer: PYTHON=/path/to/python make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"sensorium needs python 3.11 or newer, this is {v[0]}.{v[1]}")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	touch $@

INSTALLED := .venv/.made constraints.txt pyproject.toml $(wildcard kernels/cpu/*)

.venv/.runtime: $(INSTALLED)
	$(PIP) -q setuptools torch
	$(PIP) -q --no-build-isolation -e .
	touch $@

# Only transformers' processors, with which the tests compare, need torchvision.
# It does not depend on .runtime, because that would compile the kernels twice.
.venv/.test: $(INSTALLED)
	$(PIP) -q setuptools torch
	$(PIP) -q --no-build-isolation -e '.[test]'
	$(PIP) -q --no-deps torchvision==0.28.0
	touch .venv/.runtime $@

# The extras clients and docs, without which some tests are skipped.
.venv/.clients: .venv/.test
	$(PIP) -q anthropic litellm ollama openai-agents langchain-openai schemathesis basedpyright mkdocs-material
	touch $@

setup: .venv/.runtime  ## install what it needs to run, into .venv
setup-test: .venv/.test  ## install also what the tests and checkers need
setup-clients: .venv/.clients  ## install also the clients and the documentation's tools, which some tests need

demo: .venv/.runtime  ## read the shipped images, video and speech with the shipped models
	@$(BIN)/sensorium demo $(ARGS)

test: .venv/.test  ## run the usual tests and print the slowest files
	$(BIN)/python $(if $(ARGS),-m pytest,tests/helpers/report.py) -m "not full" $(ARGS)

test-all: .venv/.test  ## run every test and write tests/RESULTS.md: ONLY="tests/kernels tests/mm"
	$(BIN)/python tests/helpers/report.py --all $(ONLY)

smoke: .venv/.made  ## install as the README says with the newest Python of the machine, and try it (about 5 minutes, 9 GiB)
	$(BIN)/python tests/helpers/smoke.py

lint: .venv/.test  ## check style, import rules and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	mkdir -p .types && ln -sfn .. .types/sensorium
	MYPYPATH=.types $(BIN)/mypy -p sensorium

eval-tiny: .venv/.test  ## measure how well the shipped models read held-out data (speech needs espeak-ng)
	$(BIN)/python -m training.evaluate $(ARGS)
	$(BIN)/python -m training.asr.evaluate $(ARGS)

train-asr: .venv/.test  ## train and export tiny-asr; stops and resumes (needs espeak-ng): ARGS="--minutes 110"
	$(BIN)/python -m training.asr.dataset
	$(BIN)/python -m training.asr.train $(ARGS)
	$(BIN)/python -m training.asr.export

fuzz: .venv/.test  ## send 10,000 mutated files of each kind through decoding, with a new seed
	$(BIN)/python -m pytest -m full -s tests/mm/media/test_fuzz.py $(ARGS)

bench: .venv/.test  ## measure throughput, peers, processors, sampler, batch invariance and start-up
	$(BIN)/python -m benchmarks.throughput $(ARGS)
	$(BIN)/python -W ignore -m benchmarks.processors
	$(BIN)/python -W ignore -m benchmarks.sampler
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.invariance
	$(BIN)/python -m benchmarks.startup

attack: .venv/.test  ## a hostile client against an engine that serves 8 streams: ARGS="--only decoders"
	$(BIN)/python -W ignore -m benchmarks.attack $(ARGS)

published: .venv/.test  ## compare model folders as published with transformers, without weights: ARGS="DIR --write"
	$(BIN)/python -W ignore -m benchmarks.published $(ARGS)

abridged: .venv/.test  ## compare published widths with few layers and random weights with transformers: ARGS="DIR --write"
	$(BIN)/python -W ignore -m benchmarks.published.abridged $(ARGS)

aot: .venv/.test  ## compile every Triton kernel for absent GPUs and record registers and shared memory
	$(BIN)/python -m benchmarks.aot

gpu: .venv/.test  ## measure the GPU at hand in four sections of under 4 minutes (ARGS="--only ops", e2e, ranks, train)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

site: .venv/.clients  ## build the documentation as a site in out/site
	$(BIN)/mkdocs build --strict

clean:  ## remove what the other commands made, including .venv
	rm -rf .venv out .types build dist kernels/*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
