# Every target makes what it needs in .venv first, so any of them may come first on a machine that
# has Python 3.11 or later, make and a package registry.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What each stamp installs besides the package itself.
EXTRAS_base := [report]
EXTRAS_dev := [all]
EXTRAS_docs := [docs]
EXTRAS_nvflare := [all,nvflare]

.DEFAULT_GOAL := help
.PHONY: help demo test lint install-test newest dist release-check fuzz kill federation-test \
	nvflare-test bench gallery docs clean venv
# Two pips at work in one environment get in each other's way.
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.stamp-base ## train a fair and private model on Adult, from scratch
	$(BIN)/fpfl demo

# A process for each core, each with one thread; a file's tests stay together. In the order of
# tests/conftest.py: by the number of tests, the few long ones would come last, one core idle.
test: $(VENV)/.stamp-dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.stamp-dev ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms \
	  .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml

install-test: $(VENV)/.stamp-dev ## install the wheel into empty environments and use it
	$(BIN)/python scripts/installs.py known newest

newest: $(VENV)/.stamp-dev ## resolve the newest versions of all dependencies anew
	$(BIN)/python scripts/installs.py --refresh

dist: $(VENV)/.stamp-dev ## build the sdist and the wheel, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

release-check: $(VENV)/.stamp-dev ## all that takes too long for each change; writes a results file
	$(BIN)/python scripts/release_check.py $(ARGS)

kill: $(VENV)/.stamp-dev ## kill a run 200 times and resume it
	FPFL_KILLS=200 $(BIN)/python -m pytest tests/runs/test_kill.py

federation-test: $(VENV)/.stamp-dev ## twenty rounds of a real federation on this machine
	OMP_NUM_THREADS=1 FPFL_FEDERATION_ROUNDS=20 \
	FPFL_FEDERATION_RESULTS=docs/results/federation/results.json \
	$(BIN)/python -m pytest tests/federation/test_flower.py

nvflare-test: $(VENV)/.stamp-nvflare ## the same under NVFlare, in its simulator; installs it
	OMP_NUM_THREADS=1 FPFL_RELEASE=1 $(BIN)/python -m pytest -n0 tests/federation/test_nvflare.py

# The first word is a target of fuzz/targets.py or all, the rest are libFuzzer's options.
fuzz: ARGS ?= all -max_total_time=6
fuzz: $(VENV)/.stamp-dev ## feed bad input to all that reads files (ARGS="npz -max_total_time=600")
	$(BIN)/python -m fuzz $(ARGS)

bench: $(VENV)/.stamp-base ## measure speed (peers from a registry; or ARGS=--without-peers)
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.parts
	$(BIN)/python -m benchmarks.journal

gallery: $(VENV)/.stamp-base ## run the gallery's scripts and write its pages
	OMP_NUM_THREADS=1 $(BIN)/python scripts/gallery.py

docs: $(VENV)/.stamp-docs ## build the pages into site/
	$(BIN)/mkdocs build --strict

clean: ## remove caches and build outputs (.venv, out/ and runs/ stay)
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +

venv:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fpfl needs Python 3.11 or later, and '$(PYTHON)' is not that." \
	      "Name another one: make PYTHON=python3.11 ..." >&2; exit 1; }; \
	  $(PYTHON) -m venv $(VENV) || { \
	    echo "'$(PYTHON) -m venv $(VENV)' failed. On Debian or Ubuntu install the package" \
	      "python3-venv; elsewhere name another Python: make PYTHON=python3.11 ..." >&2; exit 1; }; }

# uv installs in a fifth of pip's time, and reads variables of its own. Where it is not to be had, or
# does not see what pip sees (a registry in pip's own settings), pip does it.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt uv || true
	@what='.$(EXTRAS_$*)'; \
	env $${PIP_FIND_LINKS:+UV_FIND_LINKS="$$PIP_FIND_LINKS"} \
	  $${PIP_INDEX_URL:+UV_DEFAULT_INDEX="$$PIP_INDEX_URL"} \
	  $(BIN)/uv pip install --python $(BIN)/python -c constraints.txt -e "$$what" || \
	$(BIN)/python -m pip install -c constraints.txt -e "$$what"
	@touch $@
