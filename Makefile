# Every target sets up what it needs: a fresh machine with python3, pip and make is enough.
SHELL := /bin/bash
.DEFAULT_GOAL := help

UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
PY := .venv/bin/python
LOCK := requirements/lock.txt
DEMO_DIR ?= build/demo
DEMO_ROWS ?= 64
DEMO_STEPS ?= 20
MINUTES ?= 10
PYTHON ?= 3.12

# Where nothing compiled is kept, every process compiles half of torch and megatron-core anew: 15 s instead of 5.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test explore adapters browser check docs bench wheel newest lowest lock clean

help:
	@echo "make demo    draw receipts and clips, make shards, verify, plan, look at them, train on them  ($(DEMO_DIR))"
	@echo "make test    the whole test suite (what .ci/run calls)"
	@echo "make explore the property tests with other examples each time, for MINUTES=$(MINUTES)"
	@echo "make adapters  the scripts of docs/frameworks.md under trainers that CI does not have (NAMES='trl swift')"
	@echo "make check   ruff, mypy strict, import boundaries"
	@echo "make docs    the documentation as a site, in build/docs; a broken link is an error"
	@echo "make bench   benchmarks; results are written under benchmarks/results/"
	@echo "make wheel   build the wheel into build/dist, and try README's lines with it in an environment without the lock"
	@echo "make env     only make .venv, with .venv/bin/vlmdata in it"
	@echo "make newest  the suite with the newest versions that pyproject.toml allows; PYTEST_ARGS chooses tests"
	@echo "make lowest  the suite with the lowest versions that it allows"
	@echo "make lock    resolve $(LOCK) anew"
	@echo "make clean   remove build products (not .venv)"

# uv, unless the machine has it. --target works with a bare pip, also where the system Python is locked (PEP 668).
.uv/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --target .uv uv

.venv/bin/python: | $(filter .uv/bin/uv,$(UV))
	$(UV) venv --quiet --python $(PYTHON) --allow-existing .venv

.venv/.stamp-base: pyproject.toml $(LOCK) | .venv/bin/python
	$(UV) pip install --quiet --python $(PY) --constraint $(LOCK) --editable .
	@touch $@

.venv/.stamp-train: pyproject.toml $(LOCK) | .venv/bin/python
	$(UV) pip install --quiet --python $(PY) --constraint $(LOCK) --editable '.[train]'
	@touch $@

.venv/.stamp-dev: pyproject.toml $(LOCK) | .venv/bin/python
	$(UV) pip install --quiet --python $(PY) --constraint $(LOCK) --editable '.[dev,train]'
	@touch $@

env: .venv/.stamp-base
	@echo "ready: .venv/bin/vlmdata --help"

demo: .venv/.stamp-train
	.venv/bin/vlmdata preprocess demo --limit $(DEMO_ROWS) --rows-per-shard 16 --out $(DEMO_DIR)
	.venv/bin/vlmdata verify $(DEMO_DIR)
	.venv/bin/vlmdata plan $(DEMO_DIR) --capacity 8192 --global-batch 4 --dp 2
	.venv/bin/vlmdata inspect $(DEMO_DIR) --html $(DEMO_DIR).html
	$(PY) -m vlmdata.preprocess.demo.clips $(DEMO_DIR)-clips
	.venv/bin/vlmdata preprocess $(DEMO_DIR)-clips/chats.jsonl --tokenizer embedded --video-max-pixels 2000000 --out $(DEMO_DIR)-videos
	.venv/bin/vlmdata inspect $(DEMO_DIR)-videos --html $(DEMO_DIR)-videos.html
	rm -rf $(DEMO_DIR)-run
	$(PY) train.py --data $(DEMO_DIR) --preset tiny --steps $(DEMO_STEPS) --capacity 3072 --global-batch 1 --lr 2e-3 \
	  --set optimizer.warmup_steps=3 --out $(DEMO_DIR)-run
	@echo "the dataset is in $(DEMO_DIR) (docs/data-format.md), pages to look at in $(DEMO_DIR).html and $(DEMO_DIR)-videos.html, the trained model in $(DEMO_DIR)-run"

# Debian's browser for the tests of `vlmdata inspect`. Where it may not be installed they are skipped, and say so.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no chromium here and no way to install it: the browser tests will be skipped"

# Collecting imports almost all that tests do. Once before the workers start: on a fresh environment, all of them would
# compile the same modules at the same time, 19 CPU seconds each. Errors are left to the tests, which show them.
.venv/.stamp-compiled: .venv/.stamp-dev
	-@HF_HUB_OFFLINE=1 $(PY) -m pytest --collect-only -qq -p no:cacheprovider >/dev/null 2>&1
	@touch $@

# Many tests wait for processes and clocks: four at a time keep two cores busy, each with one thread.
test: .venv/.stamp-compiled browser
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

explore: .venv/.stamp-compiled
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m tests.explore --minutes $(MINUTES) $(TESTS)

# An environment for each trainer, of some GB, in build/adapters.
adapters: | .venv/bin/python
	$(PY) -m tests.integrations.adapters --uv "$(UV)" $(NAMES)

check: .venv/.stamp-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

.venv/.stamp-docs: pyproject.toml $(LOCK) | .venv/bin/python
	$(UV) pip install --quiet --python $(PY) --constraint $(LOCK) --editable '.[docs]'
	@touch $@

docs: .venv/.stamp-docs
	$(PY) -m mkdocs build  # without --quiet, which would also hide warnings from "strict"
	@echo "the site is in build/docs/index.html"

bench: .venv/.stamp-dev
	$(UV) pip install --quiet --python $(PY) --constraint $(LOCK) --editable '.[bench]'
	$(PY) benchmarks/preprocess.py
	$(PY) benchmarks/packing.py
	$(PY) benchmarks/loader.py
	$(PY) benchmarks/sources.py
	$(PY) benchmarks/codecs.py

# As a user has it: away from the checkout, and without the lock, what README says (tests/readme_lines.py). Needs the network.
wheel: | .venv/bin/python
	rm -rf build/dist build/wheel-env
	$(UV) build --quiet --wheel --out-dir build/dist
	$(UV) venv --quiet --python $(PYTHON) build/wheel-env
	$(UV) pip install --quiet --python build/wheel-env/bin/python build/dist/*.whl
	HF_HUB_OFFLINE=1 build/wheel-env/bin/python tests/readme_lines.py
	@ls build/dist

# What a user gets who installs today, and with the oldest environment that pyproject.toml allows. Both print the versions
# that are not those of the lock.
newest: RESOLUTION := highest
lowest: RESOLUTION := lowest-direct
newest lowest: | $(filter .uv/bin/uv,$(UV))
	mkdir -p build
	$(UV) pip compile --quiet --upgrade --python-version 3.12 --resolution $(RESOLUTION) --no-emit-index-url --no-header \
	  --no-annotate --extra dev --extra train pyproject.toml --output-file build/$@.txt
	$(UV) venv --quiet --python 3.12 --allow-existing build/$@-env
	$(UV) pip install --quiet --python build/$@-env/bin/python --constraint build/$@.txt --editable '.[dev,train]'
	@awk -F == 'NR == FNR { locked[$$1] = $$2; next } $$2 != locked[$$1] \
	  { print $$1 ": " $$2 ", in the lock " (locked[$$1] ? locked[$$1] : "none") }' $(LOCK) build/$@.txt
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/$@-env/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# No index URL and no host stands in the lock; wheels come from whatever index the user's uv is set to.
lock: | $(filter .uv/bin/uv,$(UV))
	$(UV) pip compile --quiet --upgrade --python-version 3.12 --no-emit-index-url --no-header --no-annotate \
	  --extra dev --extra train --extra docs --constraint requirements/pins.txt pyproject.toml --output-file $(LOCK)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
