# On a machine with Python 3.11 or later and make: `make run` or `make test`, nothing before.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: run test lab clean

run: .venv/ready
	$(BIN)/workbench run 05 34

test: .venv/ready
	$(BIN)/pytest

lab: .venv/ready
	$(BIN)/jupyter lab notebooks

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf .venv build data/bundles data/golden
