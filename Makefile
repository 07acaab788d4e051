# Every target sets up what it needs: a fresh clone with python3 (3.11+) and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
NODE := $(VENV)/node
SEED ?= 1
SECONDS ?= 300
RUNS ?= 5000
BENCHES := uncontended keeper crowd memory latch_election market primitives guard stampede

.DEFAULT_GOAL := help
.PHONY: help demo test hostile lint format lab bench bench-before bench-contention bench-mixed clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

demo: $(READY)  ## four processes draw a lottery, without a lock and with one
	@$(BIN)/python -m examples.lottery

test: $(READY)  ## the whole test suite (about 9 minutes on 2 cores)
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile

hostile: $(READY)  ## faults at random on real servers, then a fuzz of replies (about 10 minutes; SEED= SECONDS= RUNS=)
	@failed=0; \
	$(BIN)/python -m tests.hostile --seed $(SEED) --seconds 40 --total $(SECONDS) || failed=1; \
	$(BIN)/python -m tests.hostile --fuzz --seed $(SEED) --runs $(RUNS) || failed=1; exit $$failed

lint: $(READY)  ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)  ## let ruff lay out the code
	@$(BIN)/ruff check --fix -q .
	@$(BIN)/ruff format -q .

lab: $(READY)  ## how far the lab comes: the matrix, the fenced lock, the primitives (about 15 minutes)
	@$(BIN)/python -m benchmarks.lab

bench: $(BENCH_READY)  ## figures beside other libraries; each bench in one run on one server (about 10 minutes)
	@failed=0; for one in $(BENCHES); do $(BIN)/python -m benchmarks.$$one || failed=1; done; exit $$failed

bench-contention: $(BENCH_READY)  ## a lock that many want, beside other libraries; writes docs/contention.{md,svg}
	@$(BIN)/python -m benchmarks.contention

bench-mixed: $(BENCH_READY)  ## what polling clients of other libraries get beside busy Holdfast processes (about 2 minutes)
	@if command -v npm >/dev/null; then \
		npm install --silent --no-audit --no-fund --prefix $(NODE) redlock redis-semaphore ioredis || true; \
	fi
	@$(BIN)/python -m benchmarks.mixed --node-modules $(NODE)/node_modules

bench-before: $(BENCH_READY)  ## this tree beside an earlier revision, in turn: make bench-before REV=... (about 6 minutes)
	@$(BIN)/python -m benchmarks.before $(or $(REV),$(error say which revision: make bench-before REV=v0.1.0))

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Holdfast needs Python 3.11 or newer; try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]' --group dev
	@touch $@

$(BENCH_READY): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@touch $@
