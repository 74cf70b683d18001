# On a machine with Python 3.11 to 3.13 and make: `make run` or `make test`, nothing before.
PYTHON ?= python3
BIN = .venv/bin
# Idle OpenMP threads spin; the small tensors of the tests and of the small checkpoints gain nothing from a second one.
export OMP_NUM_THREADS ?= 1

.PHONY: run test lab docs bench judge prove fuzz clean

run: .venv/ready
	$(BIN)/workbench run 05 34 --set EXTRACT=true

test: .venv/ready
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

# notebooks are saved without outputs; a copy with them goes to build/notebooks
lab: .venv/ready
	$(BIN)/jupyter lab notebooks --FileContentsManager.pre_save_hook=workbench.lab.without_outputs

# the API out of the docstrings: build/docs/index.html
docs: .venv/ready
	$(BIN)/python docs/api.py

bench: .venv/ready
	$(BIN)/python tools/bench.py decode
	$(BIN)/python tools/bench.py prompt
	$(BIN)/python tools/bench.py log
	$(BIN)/python tools/bench.py export
	$(BIN)/python tools/bench.py export --compress fp16
	$(BIN)/python tools/bench.py validate
	$(BIN)/python tools/bench.py cell

# coremltools' own op tests with predictions on, through the shim; reports in build/judge
judge: .venv/ready
	rm -f build/judge/ops.jsonl
	$(BIN)/python -m tests.judge ops

# every bug gate on clean and on faulty bundles, tables in docs/verdict.md; 200 random programs of each family; both go
# on where they stopped; then the tests that take minutes and the cases of matrices that `make test` leaves out
prove: .venv/ready
	$(BIN)/python -m tests.prove -j 2
	$(BIN)/python -m tests.decode.programs
	$(BIN)/pytest -n 2 -m exhaustive

fuzz: .venv/ready
	$(BIN)/python -m tests.mil.fuzz 10000
	$(BIN)/python -m tests.mil.mutants 1000

.venv/ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "$(PYTHON) is Python %d.%d, and the packages exist for 3.11 to 3.13; type: make PYTHON=python3.12 $(MAKECMDGOALS)" % v)'
	@echo "Installing the packages of requirements.lock into .venv: one to two minutes, once"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv build data/bundles data/golden data/evaluations
