# Commands that set up everything they need, in .venv or out/: `make demo`, `make test`, `make docs`, `make matrix`,
# `make wheel`, `make notebooks`.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-exports docs gallery benchmarks-page bench-smoke matrix wheel notebooks check format screenshots screenshot-serve

demo: .venv/demo.stamp
	$(BIN)/likewise demo --out out/demo

test: check .venv/browser.stamp
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: .venv/test.stamp .venv/browser.stamp
	$(BIN)/python -m pytest -q -m slow

# What `likewise export` writes, read by the receivers' own code, in an environment of its own (about 2 GB more).
test-exports:
	test -x out/exports/bin/python || $(PYTHON) -m venv out/exports
	out/exports/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,exports]"
	out/exports/bin/python -m pytest -q -rs tests/runs/test_exports.py

# The site in out/docs, to be opened without a server. Warnings, broken links and public names without an example fail
# the build; --quiet would let them pass.
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "out/docs/index.html"

# Every figure of likewise.figures, drawn again, and docs/gallery.md with the code that drew it.
gallery: .venv/test.stamp
	$(BIN)/python docs/site/gallery.py

# docs/benchmarks.md and its plots, from benchmarks/results.
benchmarks-page: .venv/test.stamp
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/page.py

# The main ratios of time, taken again inside one run, beside the recorded ones: a minute.
bench-smoke: .venv/test.stamp
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/smoke.py

# Runs the tutorials in notebooks/ and stores their outputs, about a minute.
notebooks: .venv/test.stamp
	$(BIN)/python notebooks/execute.py

# The fast tests on each Python and torch that installs here; writes docs/versions.md.
matrix:
	$(PYTHON) tests/matrix.py

# Wheel and sdist in dist/; then the demo, from the wheel alone in an environment of its own.
wheel:
	test -x out/build/bin/python || $(PYTHON) -m venv out/build
	out/build/bin/python -m pip install --quiet --disable-pip-version-check build twine
	out/build/bin/python -m build --outdir dist
	out/build/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear out/wheel
	out/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd out/wheel && bin/likewise demo --out demo

check: .venv/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pictures of the report in the README and the documentation, from the demo's own: desktop, phone, light, dark.
screenshots: .venv/test.stamp .venv/browser.stamp
	$(BIN)/likewise demo --out out/demo
	$(BIN)/python tests/report/screenshots.py out/demo/report.html docs/images

# The pictures of the live page.
screenshot-serve: .venv/test.stamp .venv/browser.stamp
	PYTHONPATH=tests/report:tests/serve $(BIN)/python tests/serve/screenshot.py out/serve docs/images

.venv/demo.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/test.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[test]"
	touch $@

.venv/docs.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[docs]"
	touch $@

# Chromium: the system's, else by the system's packages, else Playwright's own.
.venv/browser.stamp: .venv/test.stamp
	command -v chromium chromium-browser google-chrome >/dev/null \
		|| (apt-get update -qq && apt-get install -y -qq chromium >/dev/null) \
		|| $(BIN)/playwright install --with-deps chromium
	touch $@
