# Every target sets up what it needs: a fresh clone with python3 (3.11+) and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
COMPILED := $(VENV)/.compiled
DEMO_VENV := .venv-demo
DEMO_READY := $(DEMO_VENV)/.ready
FLOORS_VENV := .venv-floors
FLOORS_READY := $(FLOORS_VENV)/.ready
NODE := $(VENV)/node
SEED ?= 1
SECONDS ?= 300
RUNS ?= 5000
COUNT ?= 20
# In virtual time, or of the source alone.
FAST := tests/conformance/test_lock.py tests/test_architecture.py tests/test_exports.py tests/test_glossary.py \
	tests/test_parity.py tests/test_named_tests.py tests/errors/test_args.py tests/protocol/test_replies.py
# The suite that every engine must pass, and the engines (tests/engine_choices.py) beside the usual server.
CONFORMANCE := tests/conformance tests/rlock/test_semantics.py tests/pools/test_semantics.py tests/pools/test_conformance.py \
	tests/multi/test_semantics.py tests/latch/test_semantics.py tests/election/test_semantics.py \
	tests/handover/test_semantics.py tests/handover/test_kinds.py tests/handover/test_race.py tests/cache/test_semantics.py \
	tests/inspection/test_semantics.py tests/inspection/test_breaking.py
ENGINES := local resp2 redis7 sentinel sentinel-redis7 cluster cluster-redis7 etcd etcd-minority-dead memcached
# What depends on the version of a library: its errors, TLS, and what it is asked to do on each engine.
FLOORS := $(CONFORMANCE) tests/security tests/connections/test_targets.py tests/sentinel/test_tls.py \
	tests/cluster/test_tls.py tests/etcd/test_secured.py tests/cli/test_operate.py tests/cli/test_printable.py \
	tests/events/test_metrics.py tests/events/test_otel.py
# What needs servers that come in no wheel, or several of them.
SERVERS := tests/sentinel tests/cluster tests/etcd tests/memcached tests/hostile/test_fleets.py tests/cli/test_doctor_redis7.py
BENCHES := uncontended events keeper crowd memory latch_election market primitives guard stampede

# Tests start some hundred programs, and five processes collect all tests: none is to compile what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo check test test-long test-engines test-floors servers hostile lint format lab bench bench-before bench-contention mutants hostile-fleets \
	bench-mixed bench-engines bench-outage bench-busy failover clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

# On an embedded server of its own. When its directory is removed, the server ends.
demo: $(DEMO_READY)  ## four processes draw a lottery, without a lock and with one
	@directory=$$(mktemp -d /tmp/holdfast-demo-XXXXXX) && trap 'rm -rf "$$directory"' EXIT && trap 'exit 130' INT TERM && \
		HOLDFAST_URL="local://$$directory" $(DEMO_VENV)/bin/python -m examples.lottery

# Tests on real servers mostly wait, so there are more processes than cores.
test: $(COMPILED)  ## the test suite (about 5 minutes on 2 cores)
	@$(BIN)/python -m pytest -q -n 7 --dist worksteal -m "not long" $(SERVERS:%=--ignore %)

test-long: $(READY)  ## searches of the lab, planted mistakes, faults at random, storms and crowds (about 8 minutes)
	@$(BIN)/python -m pytest -q -n 3 --dist loadgroup -m long

test-engines: $(READY) servers  ## the conformance suite on each engine, and failovers (about 20 minutes; installs their servers)
	@failed=0; \
	for engine in $(ENGINES); do \
		echo "conformance on $$engine"; \
		case $$engine in etcd*) processes=4 ;; *) processes=7 ;; esac; \
		$(BIN)/python -m pytest -q -n $$processes --dist worksteal --engine $$engine $(CONFORMANCE) || failed=1; \
	done; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(SERVERS) || failed=1; exit $$failed

# Without the simulated world, which no library but lupa has a part in, and without mypy.
test-floors: $(FLOORS_READY) servers  ## conformance, TLS and security with the oldest libraries that are allowed (about 3 minutes)
	@failed=0; \
	$(FLOORS_VENV)/bin/python -m pytest -q -n 5 -k "not world" --ignore tests/conformance/test_typing.py $(FLOORS) || failed=1; \
	for engine in etcd memcached; do \
		$(FLOORS_VENV)/bin/python -m pytest -q -n 2 --engine $$engine tests/conformance/test_lock.py || failed=1; \
	done; exit $$failed

# Those that come in no wheel.
servers:
	@for server in redis-server memcached; do \
		command -v $$server >/dev/null || \
		{ apt-get update -q && apt-get install -q -y --no-install-recommends $$server; } || \
		{ echo "$$server is needed: install it, and run this again"; exit 1; }; \
	done

# Without SEED= those that are kept, each first in the test that has found it.
mutants: $(READY)  ## plant mistakes one at a time, those that are kept or COUNT= others of SEED= (20 of a seed: 20 minutes)
	@$(BIN)/python -m tests.mutants $(if $(filter command,$(origin SEED)),--seed $(SEED) --count $(COUNT))

check: lint  ## the edit loop: lint and the fast tests
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile -k "not asyncio and not blocking" $(FAST)

hostile: $(READY)  ## faults at random on real servers, then a fuzz of replies (about 10 minutes; SEED= SECONDS= RUNS=)
	@failed=0; \
	$(BIN)/python -m tests.hostile --seed $(SEED) --seconds 40 --total $(SECONDS) || failed=1; \
	$(BIN)/python -m tests.hostile --fuzz --seed $(SEED) --runs $(RUNS) || failed=1; exit $$failed

hostile-fleets: SECONDS = 900
hostile-fleets: $(READY)  ## faults at random on Sentinel, Cluster and etcd; writes a table into docs/hostile.md (about 15 minutes; SEED= SECONDS=)
	@$(BIN)/python -m tests.hostile --fleets --seed $(SEED) --seconds 95 --total $(SECONDS) --page docs/hostile.md

lint: $(READY)  ## ruff, mypy --strict, and whether holdfast.blocking is what is derived from holdfast.aio
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/derive_blocking.py --check
	@$(BIN)/python scripts/derive_engines.py --check

format: $(READY)  ## let ruff lay out the code
	@$(BIN)/ruff check --fix -q .
	@$(BIN)/ruff format -q .
	@$(BIN)/python scripts/derive_blocking.py
	@$(BIN)/python scripts/derive_engines.py

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

bench-engines: $(BENCH_READY)  ## Sentinel and Cluster beside one server; etcd beside tooz (about 3 minutes)
	@failed=0; for one in engines etcd; do $(BIN)/python -m benchmarks.$$one || failed=1; done; exit $$failed

bench-outage: $(READY)  ## a web service whose lock server goes away, beside redis-py's lock; writes a table into docs/web-service.md (about 6 minutes)
	@$(BIN)/python -m benchmarks.outage --page docs/web-service.md

bench-busy: $(READY)  ## locks that many want, on a healthy server: no call may fail as if it were down (about 20 minutes)
	@$(BIN)/python -m benchmarks.busy

failover: $(READY)  ## failovers and reshardings under load, beside redis-py's lock (about 25 minutes)
	@$(BIN)/python -m benchmarks.failover

bench-before: $(BENCH_READY)  ## this tree beside an earlier revision, in turn: make bench-before REV=... (about 6 minutes)
	@$(BIN)/python -m benchmarks.before $(or $(REV),$(error say which revision: make bench-before REV=v0.1.0))

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(DEMO_VENV) $(FLOORS_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: python
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Holdfast needs Python 3.11 or newer; try: make PYTHON=python3.12 ..."; exit 1; }

$(READY): pyproject.toml | python
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]' --group dev
	@touch $@

# What a user installs, and no more: some 30 MB. The tools of $(VENV) would be 400 MB.
$(DEMO_READY): pyproject.toml | python
	@echo "setting up $(DEMO_VENV) (once)"
	@$(PYTHON) -m venv --clear $(DEMO_VENV)
	@$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[local]'
	@$(DEMO_VENV)/bin/python -m pip uninstall -qq --disable-pip-version-check --yes pip setuptools
	@touch $@

$(FLOORS_READY): pyproject.toml scripts/floors.py | python
	@echo "setting up $(FLOORS_VENV) (once)"
	@test -x $(FLOORS_VENV)/bin/python || $(PYTHON) -m venv $(FLOORS_VENV)
	@$(FLOORS_VENV)/bin/python scripts/floors.py > $(FLOORS_VENV)/floors.txt
	@$(FLOORS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(FLOORS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[all]' --group test \
		--constraint $(FLOORS_VENV)/floors.txt
	@touch $@

# Once, by one process, before five of them compile all tests at the same time.
$(COMPILED): $(READY)
	@$(BIN)/python -m pytest -qq --collect-only tests >/dev/null || true
	@touch $@

$(BENCH_READY): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@touch $@
