# Every target first creates the virtual environment .venv, if it does not exist.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    ?= runs/demo
export OMP_NUM_THREADS ?= 1
# Python writes bytecode even if the shell disables it, because the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# Print only pip's downloads of large files and the start of the installation. pip's exit code is kept.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PROGRESS = sed -nu -E "s/^ *Downloading ([^ ]+) \(([0-9.]+ [MG]B)\).*/install    loading \1, \2/p; s/^Installing collected packages.*/install    unpacking/p"
# Scripts write their results and measurements to this folder.
EVIDENCE := docs/evidence
# Run files in alphabetical order. pytest-xdist's own order, by number of tests, starts the longest files last.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10
# mypy checks the programs that no test runs completely: their calls must match the toolkit's signatures.
PROGRAMS := $(filter-out tests/test_%,$(wildcard tests/*.py))
LOOSE := $(foreach code,arg-type assignment dict-item func-returns-value misc operator str-unpack union-attr var-annotated,--disable-error-code $(code))

.DEFAULT_GOAL := help
.PHONY: help install demo demo-finetune test test-slow test-all test-faults test-plans test-rest test-long check format docs bench results gpu architectures layouts rehearsals versions soak clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=")'
	@echo 'install    1 of 2: a virtual environment, $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@echo 'install    2 of 2: the toolkit and its packages, with torch (about 3 GB with CUDA): minutes'
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt --editable '.[dev]' | $(PROGRESS)
	@touch $@
	@echo 'install    done: $(BIN)/toolkit'

# torchao, for the tests of float8 only: transformers and PEFT would import it from the environment.
$(VENV)/extras/.float8: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade --target $(@D)/float8 torchao
	@touch $@

install: $(VENV)/.installed  ## Create .venv with the toolkit and its dependencies

demo: install  ## Train a small model, export it, reload it, generate text (FRESH=1 starts from scratch)
	@$(BIN)/python recipes/demo.py --run $(RUN) $(if $(FRESH),--fresh)

demo-finetune: install  ## Fine-tune the demo's model with LoRA, merge it, compare answers before and after
	@$(BIN)/python recipes/demo.py --finetune --run $(RUN) $(if $(FRESH),--fresh)

test: install  ## Run the fast tests (minutes)
	$(PYTEST) -m 'not slow and not faults and not plans'

test-slow: install $(VENV)/extras/.float8  ## Run the slow tests: real launches, many repeats
	$(PYTEST) -m 'slow and not long'

test-all: test test-slow  ## Run the fast and the slow tests

test-faults: install  ## Run tests with kills, signals, hangs, lost hosts, full disks, hostile files (make soak: longer versions)
	$(PYTEST) -m 'faults and not long'

test-plans: install  ## Run plans and rehearsals of full-size models
	$(PYTEST) -m 'plans and not long'

test-rest: install $(VENV)/extras/.float8  ## Run the slow tests, faults and plans
	$(PYTEST) -m '(slow or faults or plans) and not long'

test-long: install  ## Run the longest tests: a dry run of make gpu, plans of most ready configs, two guides, more kinds of parallel runs
	$(PYTEST) -m long

check: install  ## Check lint, format, names, import layers and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/check_names.py toolkit recipes
	$(BIN)/lint-imports
	$(BIN)/mypy
	MYPYPATH=benchmarks:tests $(BIN)/mypy $(LOOSE) benchmarks $(PROGRAMS)

format: install  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install  ## Write the reference, then build the documentation as a site (site/index.html)
	$(BIN)/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'docs       built: open site/index.html'

bench: install  ## Measure against peers; writes docs/evidence/benchmarks/ (quiet machine, minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/python benchmarks/tokenise.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/streams.py
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/guards.py
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/loss_head.py
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/preference.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/consolidate.py
	$(BIN)/python benchmarks/sharding.py

results: install  ## Measure published figures and a real model next to peers; writes docs/results.md (an hour, resumes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/python benchmarks/results.py $(if $(DATA),--data $(DATA)) $(if $(MODEL),--model $(MODEL))

gpu: install  ## Prove it on one GPU, beside peers; goes on where the last call ended (15 minutes)
	$(BIN)/python benchmarks/gpu.py --out runs/gpu --results $(EVIDENCE)/benchmarks/gpu_results.jsonl --write $(EVIDENCE)/benchmarks/gpu.md

architectures: install  ## Check every architecture sharded against plain; writes docs/evidence/architectures.md
	$(BIN)/python tests/architectures.py --packing $(EVIDENCE)/packing_types.md
	$(BIN)/python tests/architectures.py --write $(EVIDENCE)/architectures.md

layouts: install  ## Check today's published layouts from load to export; writes docs/evidence/layouts.md
	$(BIN)/python tests/published_layouts.py --write $(EVIDENCE)/layouts.md

rehearsals: install  ## Rehearse every ready config; writes docs/evidence/rehearsals.md
	$(BIN)/python tests/rehearsals.py --write $(EVIDENCE)/rehearsals.md

versions: install  ## Run the tests on the oldest and newest releases allowed; writes docs/evidence/versions.md (15 GB of disk)
	$(BIN)/python tests/versions.py --write $(EVIDENCE)/versions.md

soak: install  ## Kills, signals, hangs, lost hosts, dead disks, damage; writes docs/evidence/soak.md and others
	$(BIN)/python -W ignore tests/soak.py --write $(EVIDENCE)/soak.md
	$(BIN)/python -W ignore tests/damage.py --write $(EVIDENCE)/damage.md
	$(BIN)/python -W ignore tests/mutations.py --write $(EVIDENCE)/mutations.md
	$(BIN)/python -W ignore tests/rank_faults.py --write $(EVIDENCE)/rank_faults.md
	$(BIN)/python -W ignore tests/chaos.py --write $(EVIDENCE)/chaos.md
	$(BIN)/python -W ignore tests/hosts.py --write $(EVIDENCE)/hosts.md

clean:  ## Remove the virtual environment and the demo's run
	rm -rf $(VENV) $(RUN)
