"""The selection of tests, and the fixtures that all of them share."""

import gc
import os
import random
import re
import shutil
import subprocess

# set before torch is imported: tiny tensors gain nothing from a second thread, which spins when idle
os.environ.setdefault("OMP_NUM_THREADS", "1")

# on a Mac too; the tests in tests/mac name Core ML themselves
os.environ.setdefault("WORKBENCH_RUNTIME", "portable")

import sys
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

# a package whose entry points are stand-ins for Core ML with faults; on the path of this process
# and of those that tests start, it counts as installed
STAND_INS = str(Path(__file__).parent / "stand_ins")
sys.path.append(STAND_INS)
paths = [path for path in (os.environ.get("PYTHONPATH"), STAND_INS) if path]
os.environ["PYTHONPATH"] = os.pathsep.join(paths)

# as after `. .venv/bin/activate`: the last line of a command names `workbench` without a path
BIN = str(Path(sys.executable).parent)
os.environ["PATH"] = os.pathsep.join([BIN, os.environ.get("PATH", "")])

import pytest  # noqa: E402
from _pytest.mark import deselect_by_keyword  # noqa: E402

# nbformat does without this optional module, whose import takes two seconds
sys.modules["rfc3987_syntax"] = None

# torch, coremltools and transformers make a million objects that live as long as the
# process; with Python's default thresholds a seventh of all time is spent on traversing them
gc.set_threshold(10_000, 10, 10)

DATA = Path(__file__).parents[1] / "data"
# the environment variable with the command of `forking_python`; pytest's workers inherit it
FORKS = "WORKBENCH_TEST_FORKS"
SLOW_S = 10  # a test that takes longer needs a mark `slow` that says why
# mark → the platform that the test needs, and why it is skipped elsewhere
PLATFORMS = {
    "mac": ("darwin", "only a Mac can show it: there is no Core ML here"),
    "shim": (
        "linux",
        "macOS has Core ML itself; the shim and the stand-ins do not run there",
    ),
}


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="tests in random order")


def pytest_configure(config):
    # on a Mac a process that has loaded the system's frameworks cannot be forked
    if sys.platform == "linux" and FORKS not in os.environ:
        import forks

        stack = ExitStack()
        os.environ[FORKS] = stack.enter_context(forks.start())
        config.add_cleanup(stack.close)


# --- which tests run -------------------------------------------------------------------------------
#
# docs/extend.md ("Add a test") describes circles and matrices. The steps of a selection, in order:
#
# 1. with `-k`, tests that do not match are left out;
# 2. the cases of matrices are put into circles (`draw_from_matrices`);
# 3. tests of circles that `-m` does not name are left out, unless the command line names the test
#    (`is_selected`);
# 4. pytest itself selects by `-m`.

# Marks that put a test into a circle, the outermost one first. Such a test runs only with `-m`.
CIRCLES = "exhaustive", "wide"
LEFT_OUT = pytest.StashKey[Counter]()
"""Circle → how many of its tests the selection left out."""


def wanted_circles(config: pytest.Config) -> list[str]:
    """The circles that `-m` names, the outermost first. `-m "not wide"` counts as naming wide; the
    exact selection is step 4, pytest's own."""
    words = re.findall(r"\w+", config.getoption("markexpr"))
    return [circle for circle in CIRCLES if circle in words]


def is_selected(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test always runs, is in a circle that `-m` names, or is named itself."""
    circle = find_circle(item)
    return circle in ("", *wanted_circles(config)) or is_named(item, config)


def is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line names this test, as FILE::TEST or with its parameters."""
    test = item.nodeid.split("::", 1)[-1]
    for argument in config.args:
        file, _, name = argument.partition("::")
        path = (config.invocation_params.dir / file).resolve()
        if name and item.path == path and test.startswith(name):
            # the name of the test or of its class, not the beginning of a longer name
            if test[len(name) :][:1] in ("", "[", ":"):
                return True
    return False


def draw_from_matrices(items: list[pytest.Item], circle: str) -> None:
    """Puts the cases of each test with a mark `matrix(count, wide=more)` into circles. Of its cases
    in random order the first `count` get the mark `circle`, or none where it is "", the next `more`
    the mark `wide`, and the others the mark `exhaustive`.

    The order depends on the test's name alone, so that a case is in the same circle in every
    run."""
    matrices = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            matrices[item.path, item.originalname].append(item)
    for (_, name), cases in matrices.items():
        matrix = cases[0].get_closest_marker("matrix")
        (count,), wide = matrix.args, matrix.kwargs.get("wide", 0)
        for position, case in enumerate(random.Random(name).sample(cases, len(cases))):
            if position >= count + wide:
                case.add_marker("exhaustive")
            elif position >= count:
                case.add_marker("wide")
            elif circle:
                case.add_marker(circle)


def find_circle(item: pytest.Item) -> str:
    """The outermost circle that a test is marked with; "" for a test that always runs."""
    for circle in CIRCLES:
        if item.get_closest_marker(circle):
            return circle
    return ""


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Puts files, and the tests within them, in a random order."""
    random.Random(seed).shuffle(items)
    # tests of a file stay together, so that its fixtures are made once
    places = {}
    items.sort(key=lambda item: places.setdefault(item.path, len(places)))


def skip_on_other_platforms(item: pytest.Item) -> None:
    marks = {mark.name for mark in item.iter_markers()}
    if "shimmed" in getattr(item, "fixturenames", ()):
        marks.add("shim")
    for mark, (platform, reason) in PLATFORMS.items():
        if mark in marks and sys.platform != platform:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    circle_of_first_cases = ""
    if config.getoption("keyword"):
        # before cases are drawn, so that the drawn ones match `-k`
        deselect_by_keyword(items, config)
        # with a mark, the first cases of a matrix are among those that pytest selects by `-m`
        circle_of_first_cases = next(iter(wanted_circles(config)), "")
    draw_from_matrices(items, circle_of_first_cases)
    if seed := config.getoption("shuffle"):
        shuffle(items, seed)
    selected, left_out = [], []
    for item in items:
        skip_on_other_platforms(item)
        if is_selected(item, config):
            selected.append(item)
        else:
            left_out.append(item)
    items[:] = selected
    config.stash[LEFT_OUT] = Counter(find_circle(item) for item in left_out)
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter, config):
    """Says how many tests a selection by `-k` left out, and which tests took long without a mark
    `slow`."""
    left_out = config.stash.get(LEFT_OUT, Counter())
    if left_out and config.getoption("keyword"):
        parts = [f"{count} with -m {name}" for name, count in sorted(left_out.items())]
        terminalreporter.write_line(f"more tests fit -k: {', '.join(parts)}")
    for report in terminalreporter.stats.get("passed", ()):
        if report.duration > SLOW_S and "slow" not in report.keywords:
            line = f"{report.duration:.0f} s without a mark slow: {report.nodeid}"
            terminalreporter.write_line(line)


# --- fixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ct():
    """coremltools with its torch frontend loaded."""
    from miltorch.coremltools_import import coremltools, quiet

    with quiet():
        module = coremltools()
        from coremltools.converters.mil.frontend.torch import converter as _  # noqa: F401
    return module


@pytest.fixture
def calls_here(monkeypatch):
    """Runs in this process what the workbench runs in child processes."""
    import in_process

    from workbench import process

    monkeypatch.setattr(process, "call", in_process.call)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """An empty checkout of the project, which is the working directory."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "workbench"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def small_project(tmp_path_factory) -> Path:
    """A checkout whose notebooks have small parameters."""
    from experiment import small

    return small.project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def shimmed():
    """The shim in the place of Core ML's native layer."""
    from miltorch import shim
    from miltorch.coremltools_import import frozen_gc

    shim.install()
    with frozen_gc():
        yield
    shim.uninstall()


@pytest.fixture(scope="session")
def forking_python() -> str:
    """A command that takes the arguments of `python` and starts fast: it runs modules and code in
    forks of one server, which all workers share. See forks.py."""
    command = os.environ.get(FORKS, sys.executable)
    # Returns once the server has imported its modules. A notebook's kernel has to start within a
    # minute, which those imports could exceed.
    subprocess.run([command, "-c", ""], check=True)
    return command


@pytest.fixture
def forked(forking_python, monkeypatch):
    """Starts children of this process and kernels as forks."""
    from forks import kernels

    monkeypatch.setattr(sys, "executable", forking_python)
    monkeypatch.setenv("JUPYTER_PATH", str(kernels(forking_python)))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder that all workers of this run of pytest share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def exports(shared_folder):
    """Checkpoints and bundles, each made once per run, and Hugging Face models, each loaded once
    per process."""
    from tiny import Exports

    return Exports(shared_folder / "exports")


@pytest.fixture(scope="session")
def converted_programs() -> dict:
    """What `shared_conversions` has converted in this process."""
    return {}


@pytest.fixture(scope="module")
def shared_conversions(converted_programs):
    """Converts each program once for all tests of a process that use this fixture. It is for tests
    of weights and of texts, which change no module of a shard: the key has what an export knows of
    a program, not the code that makes it."""
    from workbench.exporter import writing

    convert = writing.convert_shard

    def convert_once(spec, plan, options, weights):
        program = writing._program_key(writing.PlannedShard(spec, weights), plan)
        key = program, spec.name, repr(plan), repr(options)
        if key not in converted_programs:
            converted_programs[key] = convert(spec, plan, options, weights)
        return converted_programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "convert_shard", convert_once)
        yield


@pytest.fixture
def checkpoint_copy(exports, tmp_path) -> Path:
    """The folder of a tiny llama that a test may change."""
    return shutil.copytree(exports.checkpoint("llama"), tmp_path / "copy")


@pytest.fixture(scope="session")
def grid() -> dict:
    """A sweep of two cells: one bundle, two T."""
    return {
        "checkpoint": str(DATA / "tiny-llama"),
        "experiment": "34",
        "validate_ids": [1, 4, 69, 173, 13, 4],
        "export": {"max_seq_len": [16], "tokens": ["1-2"]},
        "run": {"T": [1, 2], "depth": [4], "n_gen": 4, "repetitions": 2},
    }


class Swept(NamedTuple):
    """A sweep that has run."""

    folder: Path
    counts: dict
    """What `sweep.sweep` returned."""

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def bundles(self) -> Path:
        return self.folder / "bundles"


@pytest.fixture(scope="session")
def swept(shared_folder, grid) -> Swept:
    """The sweep of `grid`, which runs once for all workers."""
    import pickle

    import in_process
    from tiny import once

    from workbench import process, sweep

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "call", in_process.call)
            counts = sweep.sweep(
                sweep.make_grid(grid),
                root=folder / "log",
                bundles=folder / "bundles",
                progress=False,
            )
        (folder / "counts").write_bytes(pickle.dumps(counts))

    folder = once(shared_folder / "swept", make)
    return Swept(folder, pickle.loads((folder / "counts").read_bytes()))


@pytest.fixture(scope="session")
def tiny_llama():
    from workbench.models.checkpoint import Checkpoint

    return Checkpoint(DATA / "tiny-llama")


@pytest.fixture(scope="session")
def llama_bundle(exports, tiny_llama):
    return exports.bundle(tiny_llama.path, max_seq_len=32)


@pytest.fixture
def other_target(monkeypatch):
    """A target `other` with fp32 programs, and a runtime `other`, as a plug-in would offer them."""
    from types import SimpleNamespace

    from workbench import plugins

    target = SimpleNamespace(
        runtime="other",
        precision="exact",
        arithmetic="exact",
        packages=(),
        check=lambda options: None,
    )
    model = SimpleNamespace(is_device=False, shows_inner_layers=False)
    entries = {"targets": target, "runtimes": model}

    def find_plugins(kind):
        if kind in entries:
            return {"other": SimpleNamespace(load=lambda: entries[kind])}
        return {}

    monkeypatch.setattr(plugins, "find_plugins", find_plugins)
    return target


@pytest.fixture(scope="session")
def llama_golden(tiny_llama):
    """A golden of the first 20 tokens of a held-out prompt: text of the trained kind, on which
    attention differs between positions."""
    from workbench.check import golden, tasks

    prompt = tasks.load_tasks(DATA / "tasks" / "heldout.jsonl")[0]["prompt"]
    ids = tasks.load_tokenizer(tiny_llama.path).encode(prompt)
    return golden.make_golden(tiny_llama, ids[:20])
