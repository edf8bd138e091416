# One command per intent; `make help` lists them. Everything runs in a virtual environment that is made on first use.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz check bench bench-launcher bench-parallel bench-faults bench-agents matrix checkpoint-kills \
	chaos chaos-nodes simulate docs clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: Python 3.10 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "make: no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,examples]'
	@touch $@

setup: $(READY)  ## make the virtual environment (the other commands do it by themselves)

demo: $(READY)  ## train a classifier on two workers, kill one on the way, see the job go on (ARGS=--no-chaos: straight)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(READY)  ## run the tests (under 10 minutes on two cores; ARGS=... goes to pytest)
	$(BIN)/python -m pytest $(ARGS)

fuzz: $(READY)  ## look at random for cases that break the property tests, which the tests play alike each time
	$(BIN)/python -m pytest -q --hypothesis-profile=fuzz $(or $(ARGS),$$(grep -rlE '^@given' tests))

check: $(READY)  ## lint, format, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: bench-launcher bench-parallel  ## all on one node: against torchrun, and against torch's DDP and FSDP

bench-launcher: $(READY)  ## measure against torchrun in one run: ratios, medians (ARGS=--help for a part of it)
	$(BIN)/python benchmarks/launcher.py $(ARGS)

bench-parallel: $(READY)  ## steps and memory of our DDP, FSDP and DataParallel beside torch's (ARGS="--world-size 2")
	$(BIN)/python benchmarks/parallel_ddp.py $(ARGS)
	$(BIN)/python benchmarks/parallel_fsdp.py $(ARGS)
	$(BIN)/python benchmarks/parallel_ddp.py --memory $(ARGS)
	$(BIN)/python benchmarks/parallel_fsdp.py --memory $(ARGS)
	$(BIN)/python benchmarks/parallel_dp.py

matrix: $(READY)  ## every feature of our DDP and FSDP alone and in pairs, fifty steps (hours)
	$(BIN)/python benchmarks/parallel_ddp_matrix.py $(ARGS)
	$(BIN)/python -m tests.parallel.fsdp.matrix

checkpoint-kills: $(READY)  ## kill a process that saves checkpoints a thousand times; no good one may be lost
	$(BIN)/python benchmarks/checkpoint_kills.py --kills 1000 --kind sampler $(ARGS)
	$(BIN)/python benchmarks/checkpoint_kills.py --kills 1000 --kind stream $(ARGS)

chaos: $(READY)  ## 200 seeded kills and stops of real processes; nothing may be left (SEED=1 COUNT=200)
	$(BIN)/python benchmarks/chaos.py --seed $(or $(SEED),1) --count $(or $(COUNT),200) $(ARGS)

chaos-nodes: $(READY)  ## seeded faults of several nodes and a real three-member etcd (SEED=1 COUNT=100)
	$(BIN)/python benchmarks/chaos_nodes.py --seed $(or $(SEED),1) --count $(or $(COUNT),100) $(ARGS)

simulate: $(READY)  ## whole clusters on a virtual clock: every rule, every step (SEED=1 COUNT=1000 AGENTS=5)
	$(BIN)/python -m dlaunch.simulation --seed $(or $(SEED),1) --count $(or $(COUNT),1000) --agents $(or $(AGENTS),5) $(ARGS)

bench-faults: $(READY)  ## from each fault of a node, of etcd or of the network to the next training step
	$(BIN)/python benchmarks/faults.py $(ARGS)

bench-agents: $(READY)  ## a thousand agents on one real etcd: time to form a round, reads and writes of each
	$(BIN)/python -m benchmarks.thousand_agents $(ARGS)

docs: $(READY)  ## write the generated parts of the docs anew (the tests fail when they are stale)
	$(BIN)/python docs/generate.py

clean:  ## remove what the commands above made
	rm -rf $(VENV) .demo bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis dlaunch.egg-info build
