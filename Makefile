# Two commands that set up everything they need, in .venv: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow check format

demo: .venv/demo.stamp
	$(BIN)/python examples/digits.py

test: check
	$(BIN)/python -m pytest -q

test-slow: .venv/test.stamp
	$(BIN)/python -m pytest -q -m slow

check: .venv/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[$*]"
	touch $@
