import gc
import os
import random
import shutil
import subprocess

# before torch: idle threads spin, and tiny tensors gain nothing from a second
os.environ.setdefault("OMP_NUM_THREADS", "1")

# on a Mac, too: tests/mac names Core ML
os.environ.setdefault("WORKBENCH_RUNTIME", "portable")

import sys
from collections import Counter, defaultdict
from pathlib import Path

# its entry points offer stand-ins that go wrong, in processes that tests start, too
STAND_INS = str(Path(__file__).parent / "stand_ins")
sys.path.append(STAND_INS)
paths = os.environ.get("PYTHONPATH"), STAND_INS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

import pytest  # noqa: E402
from _pytest.mark import deselect_by_keyword  # noqa: E402

# nbformat's schemas could use it, and building its grammar takes two seconds
sys.modules["rfc3987_syntax"] = None

# torch, coremltools and transformers make a million objects that live as long as the
# process; at Python's thresholds, looking at them again takes a seventh of its time
gc.set_threshold(10_000, 10, 10)

DATA = Path(__file__).parents[1] / "data"
IDS = 20

# the variable that names the command of `forks` to workers
FORKS = "WORKBENCH_TEST_FORKS"
SLOW = 10  # seconds; a test that takes longer needs a mark that says why
PLATFORMS = {
    "mac": ("darwin", "only a Mac can show it: there is no Core ML here"),
    "shim": ("linux", "macOS has Core ML itself, which nothing stands in for there"),
}


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="tests in random order")


def pytest_configure(config):
    # a Mac forbids forks of a process that has its frameworks loaded
    if sys.platform == "linux" and FORKS not in os.environ:
        import forks

        started = forks.start()
        os.environ[FORKS] = started.__enter__()
        config.add_cleanup(lambda: started.__exit__(None, None, None))


CIRCLES = "exhaustive", "wide"  # the outermost first
LEFT_OUT = pytest.StashKey[Counter]()


def is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command names this test, as FILE::TEST or with its parameters."""
    for argument in config.args:
        file, *names = argument.split("::")
        path = (config.invocation_params.dir / file).resolve()
        own = item.nodeid.split("::", 1)[-1]
        name = "::".join(names)
        if names and item.path == path and own.startswith(name):
            if own[len(name) :][:1] in ("", "[", ":"):
                return True
    return False


def draw_from_matrices(items: list, also: str) -> None:
    """Marks what is not drawn of a `matrix` as wide or exhaustive; what is drawn, with
    the circle `also`."""
    matrices = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            matrices[item.path, item.originalname].append(item)
    for (_, name), cases in matrices.items():
        matrix = cases[0].get_closest_marker("matrix")
        (count,), wide = matrix.args, matrix.kwargs.get("wide", 0)
        order = random.Random(name).sample(cases, len(cases))
        for place, case in enumerate(order):
            if place >= count + wide:
                case.add_marker("exhaustive")
            elif place >= count:
                case.add_marker("wide")
            elif also:
                case.add_marker(also)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    expression, also = config.getoption("markexpr"), ""
    if config.getoption("keyword"):
        deselect_by_keyword(items, config)  # before cases are drawn, so that some fit
        also = next((name for name in CIRCLES if name in expression), "")
    draw_from_matrices(items, also)  # the same cases in any order
    if seed := config.getoption("shuffle"):
        random.Random(seed).shuffle(items)
        places = {}  # tests of a file stay together: its fixtures are made once
        items.sort(key=lambda item: places.setdefault(item.path, len(places)))
    kept, left = [], []
    config.stash[LEFT_OUT] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        marks |= {"shim"} if "shimmed" in getattr(item, "fixturenames", ()) else set()
        for mark, (platform, reason) in PLATFORMS.items():
            if mark in marks and sys.platform != platform:
                item.add_marker(pytest.mark.skip(reason=reason))
        # a test runs where `-m` names the outermost circle that it is marked with, or
        # where the command names the test
        circle = next((name for name in CIRCLES if name in marks), "")
        if circle in expression or is_named(item, config):
            kept.append(item)
        else:
            left.append(item)
            config.stash[LEFT_OUT][circle] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter, config):
    """Says what a selection by `-k` left out, and names tests that took long without a
    mark `slow` that says why."""
    left = config.stash.get(LEFT_OUT, Counter())
    if left and config.getoption("keyword"):
        parts = [f"{count} with -m {name}" for name, count in sorted(left.items())]
        terminalreporter.write_line(f"more tests fit -k: {', '.join(parts)}")
    for report in terminalreporter.stats.get("passed", ()):
        if report.duration > SLOW and "slow" not in report.keywords:
            line = f"{report.duration:.0f} s without a mark slow: {report.nodeid}"
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def ct():
    """coremltools with its torch frontend loaded."""
    from miltorch.quiet import coremltools, quiet

    with quiet():
        module = coremltools()
        from coremltools.converters.mil.frontend.torch import converter as _  # noqa: F401
    return module


@pytest.fixture
def calls_here(monkeypatch):
    """Calls that the workbench makes in processes of their own are made in this one."""
    import in_process

    from workbench import process

    monkeypatch.setattr(process, "call", in_process.call)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """An empty project, which is the working folder."""
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
    """The shim in place of Core ML's native layer."""
    from miltorch import shim
    from miltorch.quiet import frozen

    shim.install()
    with frozen():
        yield
    shim.uninstall()


@pytest.fixture(scope="session")
def forks() -> str:
    """A command that stands for Python and runs modules in forks of one process, which
    all workers share; a kernel has a minute to start, so its imports come before."""
    command = os.environ.get(FORKS, sys.executable)
    subprocess.run([command, "-c", ""], check=True)
    return command


@pytest.fixture
def forked(forks, monkeypatch):
    """Children of this test's process are forks, and so are kernels."""
    from forks import kernels

    monkeypatch.setattr(sys, "executable", forks)
    monkeypatch.setenv("JUPYTER_PATH", str(kernels(forks)))


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all processes of this run of pytest have in common."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def exports(shared):
    """Checkpoints and bundles, each made once per run; Hugging Face models, once per process."""
    from tiny import Exports

    return Exports(shared / "exports")


@pytest.fixture
def copy(exports, tmp_path) -> Path:
    """A checkpoint that a test may change."""
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


@pytest.fixture(scope="session")
def swept(shared, grid):
    """(folder with log/ and bundles/, counts) of that sweep, run once for all workers."""
    import pickle

    import in_process
    from tiny import once

    from workbench import process, sweep

    def make(folder: Path) -> None:
        where = {"root": folder / "log", "bundles": folder / "bundles"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "call", in_process.call)
            counts = sweep.sweep(sweep.make_grid(grid), progress=False, **where)
        (folder / "counts").write_bytes(pickle.dumps(counts))

    folder = once(shared / "swept", make)
    return folder, pickle.loads((folder / "counts").read_bytes())


@pytest.fixture(scope="session")
def tiny_llama():
    from workbench.models.checkpoint import Checkpoint

    return Checkpoint(DATA / "tiny-llama")


@pytest.fixture(scope="session")
def llama_bundle(exports, tiny_llama):
    return exports.bundle(tiny_llama.path, max_seq_len=32)


@pytest.fixture
def other_target(monkeypatch):
    """A target `other` of fp32 programs and its runtime, as an installed plug-in offers them."""
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

    def offered(kind):
        if kind in entries:
            return {"other": SimpleNamespace(load=lambda: entries[kind])}
        return {}

    monkeypatch.setattr(plugins, "offered", offered)
    return target


@pytest.fixture(scope="session")
def llama_golden(tiny_llama):
    """The first tokens of a held-out prompt: real text, so that attention has something to find."""
    from workbench.check import golden, tasks

    prompt = tasks.load_tasks(DATA / "tasks" / "heldout.jsonl")[0]["prompt"]
    return golden.make_golden(
        tiny_llama, tasks.load_tokenizer(tiny_llama.path).encode(prompt)[:IDS]
    )
