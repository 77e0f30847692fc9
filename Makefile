# The commands of this clone. Each brings .venv up to date first (tools/setup_env.py), which takes a blink when
# nothing has changed. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Set-up, checks and measurements one after another; the compilation inside the set-up uses all cores.
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?=
NP ?= 2
DATA ?=
CONFIG ?=
SECONDS ?= 3600
TENSORFLOW ?= 2.21.0
KERAS ?= 3
TIMES ?=

# Commands of benchmarks/ with --quick and --json.
BENCHMARKS := train_step keras attention table checkpoint ops papers.sequence_batching scale overlap planner schedule_quality negatives balance serving

# Tests that reach these rooms; the fuzzers and the soak among them.
COVERING := tests/checkpoint tests/saved_model tests/embedding tests/tfra tests/ops tests/exchange tests/soak tests/fuzz tests/golden

override BIN := .venv/bin

override LINT := echo "lint: ruff, mypy ..." && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy

# pytest under Keras 3, with two workers. One worker under tf_keras runs the tests marked `legacy` or `both` beside it,
# and ends first. Fails if either fails. $(1): options. $(2): markers.
override PYTEST = $(BIN)/python -m pytest -q --dist worksteal $(1)
override UNDER_BOTH = mkdir -p build; \
	TF_USE_LEGACY_KERAS=1 $(PYTEST) --numprocesses 1 -m "$(2) and (legacy or both)" >build/tf_keras.log 2>&1 & legacy=$$!; \
	trap "kill $$legacy 2>/dev/null || true" EXIT; \
	status=0; $(PYTEST) --numprocesses 2 -m "$(2)" || status=$$?; \
	wait $$legacy || status=$$?; \
	echo "test: pytest with TF_USE_LEGACY_KERAS=1 ..."; cat build/tf_keras.log; \
	exit $$status

# Values of a user reach recipes as environment variables, as they were written: neither make nor the shell reads a
# command in them.
TAKEN := PYTHON NP DATA CONFIG BENCHMARKS SECONDS TENSORFLOW KERAS TIMES
$(foreach name,$(TAKEN),$(eval override $(name) := $$(value $(name))))
# bash counts in SECONDS.
override SOAK_SECONDS := $(value SECONDS)
export $(TAKEN) SOAK_SECONDS

.PHONY: help setup runtime train test test-on wheels quick nightly lint sanitize soak coverage bench docs wheel clean

help: ## This list.
	@echo "make <target> [NAME=value ...]"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' Makefile | expand -t 12
	@echo "PYTHON=path/to/python3.11 chooses the interpreter of .venv."

setup: ## Creates .venv, installs the requirements, builds Horovod, compiles the custom ops.
	@python=$$(tools/find_python.sh) && "$$python" -m tools.setup_env

runtime: ## Like setup, with no more than training on NP processes needs: no tools, and no Horovod for one process.
	@python=$$(tools/find_python.sh) && "$$python" -m tools.setup_env --train="$$NP"

train: runtime ## Trains, evaluates and exports [NP=2 processes] [DATA=folder of MovieLens-1M or KuaiRand] [CONFIG=configs/x.yaml].
	@$(BIN)/python -m tf_fusedrec.cli.main train --ranks="$$NP" $${DATA:+--data="$$DATA"} -- $${CONFIG:+"$$CONFIG"}

lint: setup ## Checks the style (ruff) and the types (mypy).
	@$(LINT)

sanitize: setup ## Runs the C++ tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
	@$(BIN)/python -m tools.sanitizers

soak: setup ## Looks for what no test has thought of, with fresh seeds [SECONDS=3600]; says how to see a violation again.
	@$(BIN)/python -m tests.soak --seconds="$$SOAK_SECONDS"

coverage: setup ## Branch coverage of checkpoint, saved_model, tables and exchange by the tests of these rooms (long).
	@mkdir -p build/coverage
	@rm -f build/coverage/data*
	@TF_USE_LEGACY_KERAS=1 $(BIN)/python -m coverage run -m pytest -q --numprocesses 2 --dist worksteal $(COVERING)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report --show-missing

test: setup ## Checks style and types, runs the C++ tests under sanitizers, then all tests but the nightly ones [TIMES=1: seconds by cause].
# mypy uses one core, so the C++ tests are compiled beside it.
	@{ $(LINT); } & lint=$$!; $(BIN)/python -m tools.sanitizers; wait $$lint
	@echo "test: pytest ..."
	@$(call UNDER_BOTH,$${TIMES:+-p tests.support.times},not nightly)

nightly: setup ## Runs the tests that `make test` leaves out, then 15 minutes of the soak with fresh seeds.
	@$(call UNDER_BOTH,,nightly)
	@$(BIN)/python -m tests.soak --seconds=900

test-on: ## Tests with other versions, and builds their wheels into dist/: TENSORFLOW=2.21.0 KERAS=3 (or legacy) PYTHON=3.12.
	@python=$$(PYTHON= tools/find_python.sh) && "$$python" -m tools.versions --tensorflow="$$TENSORFLOW" --keras="$$KERAS" $${PYTHON:+--python="$$PYTHON"}

wheels: ## Builds the wheels of every TensorFlow from 2.16 to 2.22, for any Python, and Horovod's, into dist/ (an hour).
	@python=$$(PYTHON= tools/find_python.sh) && "$$python" -m tools.versions --wheels

quick: setup ## Runs the tests of one process: no ranks, no emulation, no benchmarks, nothing slow; two minutes on 2 cores.
	@$(BIN)/python -m pytest -q --numprocesses 2 -m "not (ranks or processes or emulation or benchmarks or slow or nightly)"

bench: setup ## Runs the quick benchmarks; results in build/bench/*.json.
	@mkdir -p build/bench
	@for name in $$BENCHMARKS; do \
	  echo "bench: $$name -> build/bench/$$name.json ..."; \
	  $(BIN)/python -m "benchmarks.$$name" --quick --json "build/bench/$$name.json"; \
	done

docs: setup ## Builds the documentation into build/site; begin with build/site/index.html.
	@$(BIN)/python -m mkdocs build --quiet --strict
	@echo "docs: build/site/index.html"

wheel: setup ## Builds the wheels for the TensorFlow of .venv into dist/: this package with the compiled ops, and Horovod.
	@echo "wheel: building into dist/ ..."
	@$(BIN)/python -m tools.wheel

clean: ## Removes what was built; keeps .venv (rm -rf .venv removes it) and the user's cache (Horovod, objects of ops).
	@echo "clean: build/ dist/ the compiled ops and caches ..."
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	@rm -f tf_fusedrec/ops/_fusedrec_ops.so tf_fusedrec/ops/libfusedrec_cuda.so tf_fusedrec/ops/_build_info.py
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
