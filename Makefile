# The verbs that people and CI both call. Every target does its own set-up:
# a machine needs Python >= 3.11, make and a package index. `make test` as root on Debian also installs
# the programs that some tests need (scripts/ensure-tools).

SHELL := /bin/sh
PY := .venv/bin/python
export PYTHONPATH := $(CURDIR):$(CURDIR)/platform
MANAGE := $(PY) manage.py
# Processes that share the tests; most of them wait for servers and deadlines. 0: one, with its output shown.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install install-dev model tools serve test test-upstream lint format bench bench-stream bench-engine bench-e2e bench-scale bench-start bench-slow-readers soak prove-rollout prove-failover prove-hosts mutants gpu-check clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 28

install: ## create .venv and install what a running installation needs
	@python=$$(scripts/find-python) && "$$python" scripts/install.py

install-dev: ## ... and what tests, checks and benchmarks need
	@python=$$(scripts/find-python) && "$$python" scripts/install.py --dev

model: install ## fetch the default model where it is missing or damaged
	@$(MANAGE) fetchmodel

tools: ## as root on Debian: install the programs that some tests need; else name them
	@scripts/ensure-tools

# exec: Ctrl-C and signals reach the process tree itself, not a shell in between.
serve: install ## run everything here: Valkey, workers, server; ARGS="--port 8001"
	@exec $(MANAGE) up $(ARGS)

test: install-dev model tools ## all checks and tests; ARGS="-k name" chooses, JOBS=0 in one process
	@scripts/check
	@exec $(PY) -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

test-upstream: install-dev model ## the openai engine before llama.cpp's and transformers' own servers
	@$(PY) scripts/install.py --upstream
	@$(MANAGE) fetchmodel --gguf .venv-upstream/models
	@SLUICE_UPSTREAM_PYTHON=$(CURDIR)/.venv-upstream/bin/python \
	 SLUICE_UPSTREAM_GGUF=$$(ls $(CURDIR)/.venv-upstream/models/*.gguf) \
	 $(PY) -m pytest tests/engine/test_real_upstreams.py $(ARGS)

lint: install-dev ## ruff and mypy
	@scripts/check

format: install-dev ## reformat and mend what can be mended
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

bench: bench-stream bench-engine bench-e2e bench-scale bench-start ## all benchmarks, one table each

bench-stream: install-dev ## what the platform costs per token, beside servers that only stream
	@exec $(PY) -m benchmarks.stream $(ARGS)

soak: install-dev model ## 20,000 requests with every ending and fault, then the audit; ARGS="--quick", "--minutes 10"
	@exec $(PY) -m benchmarks.soak $(ARGS)

prove-rollout: install-dev ## rolling updates behind HAProxy under load: no answer may be lost
	@scripts/ensure-tools haproxy
	@exec $(PY) -m proofs.rollout $(ARGS)

prove-failover: install-dev model ## kill the worker of one stream 20 times: the text is the undisturbed one
	@exec $(PY) -m proofs.failover $(ARGS)

prove-hosts: install-dev ## hosts in network namespaces, cut off and healed under load (as root)
	@scripts/ensure-tools haproxy iproute2:ip
	@exec $(PY) -m proofs.hosts $(ARGS)

bench-e2e: install-dev model ## the default model through everything, beside other servers and the bare loop
	@exec $(PY) -m benchmarks.e2e $(ARGS)

bench-scale: install-dev ## how cost grows with streams, processes, requests in flight and prompts; plots
	@exec $(PY) -m benchmarks.scale $(ARGS)

bench-start: install-dev model ## start to ready and to the first token; idle processor time and memory
	@exec $(PY) -m benchmarks.start $(ARGS)

bench-slow-readers: install-dev ## what clients that never read cost the server and everybody else
	@exec $(PY) -m benchmarks.slow_readers $(ARGS)

mutants: install-dev model ## break the code on purpose and see that a test fails
	@exec $(PY) scripts/mutants.py $(ARGS)

bench-engine: install-dev model ## tokens/s of the engine against the loop it is built on
	@exec $(PY) -m benchmarks.bench_engine $(ARGS)

gpu-check: install-dev model ## the checks that need a CUDA device; "skipped" where there is none
	@exec $(PY) scripts/gpu_check.py $(ARGS)

clean: ## remove environments and caches (not var/, not the model)
	rm -rf .venv .venv-upstream .install.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
