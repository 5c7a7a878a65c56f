# One folder, .venv, holds all that set-up installs; delete it (or `make clean`) to start over.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-all check sbom audit clean demo docs pictures prove bench

PYTHON ?= python3
# Compiled files are kept: without them each process that a test starts would compile all modules first. Set-up compiles
# none: that takes a minute, and most are never imported.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := $(firstword $(wildcard requirements/samefold.txt) requirements/development.txt)
# Three workers, each with a stack of its own: much of a test is waiting, and two leave a third of two cores idle.
PYTEST = $(BIN)/python -m pytest -q -n 3 --dist loadgroup --times
# Fewer examples of each property than in `make test-all`.
QUICK = --hypothesis-profile=quick
# Tools for the supply chain: what they need must not decide what the service runs on.
TOOLS = $(VENV)/supply-chain
# pip can't build PySpark where its cache, in HOME, can't be written.
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet $(shell test -w "$${PIP_CACHE_DIR:-$$HOME}" || echo --no-cache-dir)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  make %-8s %s\n", $$1, $$2 }'

setup: $(VENV)/.installed $(VENV)/kafka/.verified ## install everything into .venv (the first time takes minutes, then nothing)

run: setup ## Kafka, PostgreSQL and all processes of the service on this machine; they follow saved files; Ctrl-C stops all
	@$(BIN)/samefold dev run --watch

test: setup ## the quick tests, on real Kafka, PostgreSQL and Spark: minutes
	@$(PYTEST) $(QUICK) -m "not slow and not prove" $(ARGS)

test-all: setup $(TOOLS)/.installed ## each promise at least once, on the real thing: 25 to 40 minutes (what CI runs)
	@$(PYTEST) -m "not prove" $(ARGS)

check: setup ## lint, format, types, released events and the tests that need no Kafka or PostgreSQL: a minute
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/samefold events check
	@$(PYTEST) $(QUICK) -m "not integration and not slow and not prove" $(ARGS)

sbom: setup $(TOOLS)/.installed ## what the service is made of, as CycloneDX, into sbom.cdx.json
	@$(BIN)/python -m tools.dev.sbom sbom.cdx.json

audit: setup $(TOOLS)/.installed ## known vulnerabilities of the pinned packages; fails where they can't be checked
	@$(BIN)/python -m tools.dev.audit $(addprefix -r ,$(REQUIREMENTS) requirements/build.txt $(wildcard requirements/docs.txt) requirements/supply-chain.txt) $(ARGS)

-include demo/demo.mk docs/docs.mk proofs/proofs.mk benchmarks/bench.mk

clean: ## stop the development stack, remove its data (asks first) and .venv
	@if [ -x $(BIN)/samefold ] && [ -d .samefold ]; then $(BIN)/samefold dev reset; fi
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(TOOLS)/.installed: $(VENV)/.packages requirements/supply-chain.txt
	@echo "tools for make sbom and make audit into $(TOOLS)"
	@$(PYTHON) -m venv $(TOOLS)
	@$(PIP) --python $(TOOLS)/bin/python install --no-compile --require-hashes --requirement requirements/supply-chain.txt
	@touch $@

$(VENV)/.packages: requirements/build.txt $(REQUIREMENTS)
	@sh tools/dev/prerequisites.sh $(PYTHON)
	@echo "setup 1/3: Python packages into $(VENV) (PySpark alone is 450 MB; the first time takes minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --require-hashes --requirement requirements/build.txt
	@$(PIP) install --no-compile --require-hashes --no-build-isolation --requirement $(REQUIREMENTS)
	@touch $@

$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	@echo "setup 2/3: Samefold itself"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/kafka/.verified: $(VENV)/.packages tools/dev/kafka-jars.sha256
	@echo "setup 3/3: Kafka's jars into $(VENV)/kafka (46 jars, 44 MB; about a minute)"
	@$(BIN)/python -m tools.dev.jars
	@$(BIN)/python -m tools.dev.kafka
	@touch $@
