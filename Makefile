# Two commands do everything: `make train` (the demonstration) and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install train test lint types clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "areal-gym needs Python 3.11 or newer; try: make PYTHON=python3.11 install")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

train: install
	$(BIN)/areal-gym train --env tir

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
