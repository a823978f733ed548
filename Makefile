# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Test workers: the suite is CPU-bound, and torch's own threads would fight for the same cores.
WORKERS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.PHONY: demo test lint bench clean help

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(VENV)/installed-demo ## see what it does, in under two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m cswe.demo

test: $(VENV)/installed-test ## run the tests and the examples in the documentation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/installed-test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-demo ## time and memory of every way to compute the same thing
	$(BIN)/python -m cswe.bench

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cswe needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: EXTRAS := demo
$(VENV)/installed-test: EXTRAS := test,fast,report,data,train
$(VENV)/installed-demo $(VENV)/installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[$(EXTRAS)]"
	@touch $@

clean: ## remove everything that was built
	rm -rf $(VENV) build dist
