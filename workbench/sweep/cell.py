"""One cell of a sweep, measured: a job (plain JSON values) in, the files of one logged run out.

`run` is the whole of it and the same wherever it runs: it exports the bundle that is missing and measures, each in a
fresh process, and gives back the log files of that one run, so that whoever asked writes them. What does not come to an
end is a run too: status `failed`, the reason, and what Core ML said. Knows no grid and no scheduler.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

from workbench import export as exporting
from workbench import log
from workbench.ane import placement
from workbench.bundle import Bundle, Options
from workbench.bundle.manifest import MANIFEST_VERSION
from workbench.check import golden
from workbench.check.validate import validate
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import process, runs, timing

MEASURE_FUNCTION = "workbench.sweep.cell:measure_cell"


def run_cell(job: dict, measure: str = MEASURE_FUNCTION) -> dict[str, bytes]:
    """Exports what is missing, measures in a child, and returns the run's log files: path in the log → contents.

    Args:
        job: {checkpoint, checkpoint_hash, options, run, setting, round, cell, judge_ids, experiment, bundles, timeout_s,
            attempt, worker (an index; None: 0)}.
        measure: the function that a fresh process calls; it logs one run into job["root"].
    """
    started = time.time()
    with tempfile.TemporaryDirectory() as root:
        inner = job | {"root": root, "started": started, "worker": job["worker"] or 0}
        outcome = process.Outcome()
        if not _is_cached(_path(job)):
            outcome = process.call("workbench.sweep.cell:prepare", inner, timeout_s=job["timeout_s"])
        if outcome.failure is None:
            time.sleep(job["run"]["cool_down_s"])
            outcome = process.call(measure, inner, threads=job["run"]["threads"], timeout_s=job["timeout_s"])
        if outcome.failure is not None:
            failed(inner, outcome.failure, outcome.lines)
        return log.files(root)


def prepare(job: dict) -> None:
    """In a child: makes the bundle of a job if it is not there yet."""
    bundle_for(_checkpoint(job), Options(**job["options"]), _path(job).parent)


def measure_cell(job: dict) -> None:
    """In a child: loads the bundle, times it, judges it where the job says so, and logs the run into job["root"]."""
    before, how = log.environment(), job["run"]
    bundle = Bundle.open(_path(job))
    decoder = Decoder(bundle, **{name: how[name] for name in ("runtime", "precision", "fast", "compute_units", "hints")})
    samples = timing.measure_speed(decoder, **{name: how[name] for name in ("T", "depth", "n_gen", "repetitions")})
    row, fidelity = runs.describe(bundle, decoder) | _identity(job), None
    config = _config(job) | {"not_timed": timing.NOT_TIMED, "flags": log.flags(samples), "load_average": os.getloadavg()[0],
                             "before": {name: before[name] for name in ("thermal", "power_source")}}  # fmt: skip
    if lines := process.compiler_errors():  # it ran, and not where it was meant to
        row |= {"status": "invalid", "reason": lines[0]}
        config["stderr"] = lines
    if decoder.runtime == "coreml":
        try:
            row |= placement.columns(placement.measured_placement([*decoder.layers, *decoder.heads]))
        except InputError as problem:
            config["placement"] = str(problem)
    if job["judge_ids"]:
        reference = golden.stored_golden(_checkpoint(job), job["judge_ids"], _path(job).parent.with_name("golden"))
        judged = validate(decoder, reference)
        fidelity, row["verdict"] = judged.rows, judged.verdict
        config["gates"] = [g.json() for g in judged.gates]
    runs.record_run(job["experiment"], row | {"config": config}, root=job["root"], fidelity=fidelity, samples=samples,
                layers=timing.layer_table(samples, decoder))  # fmt: skip


def failed(job: dict, reason: str, lines: tuple[str, ...] = ()) -> None:
    """Logs a run that did not come to an end."""
    row = {"checkpoint": Path(job["checkpoint"]).name, "checkpoint_hash": job["checkpoint_hash"], "status": "failed",
           "reason": reason, "config": _config(job) | {"stderr": list(lines)}}  # fmt: skip
    runs.record_run(job["experiment"], runs.exported(Options(**job["options"])) | row | _identity(job), root=job["root"])


def _identity(job: dict) -> dict:
    counts = {name: job["run"][name] for name in ("threads", "T", "depth", "n_gen")}
    return {"command": "sweep", "setting": job["setting"], "round": job["round"]} | counts


def _config(job: dict) -> dict:
    where = {"worker": job["worker"], "started": job["started"], "ended": time.time(), "attempt": job["attempt"]}
    return {"cell": job["cell"], "export": job["options"], "run": job["run"], "measured": where}


def _checkpoint(job: dict) -> Checkpoint:
    """The job's checkpoint on this machine: the path as given, or the same path in the project this process runs in."""
    found = Checkpoint(find(job["checkpoint"], log.default_root()))
    if found.sha256 != job["checkpoint_hash"]:
        raise InputError(f"checkpoint {found.path}", found.sha256[:12], f"the sweep's, {job['checkpoint_hash'][:12]}",
                         "copy the same checkpoint to every worker")  # fmt: skip
    return found


def find(checkpoint: str, root: Path) -> Path:
    """A checkpoint path as given, or relative to the project that the log belongs to (notebooks run elsewhere)."""
    here = Path(checkpoint)
    return here if here.exists() or here.is_absolute() else log.project(root) / checkpoint


def _path(job: dict) -> Path:
    """Where this machine keeps the bundle of a job."""
    folder = Path(job["bundles"]) if job["bundles"] else log.project() / "data" / "bundles"
    return folder / _bundle_name(Path(job["checkpoint"]).name, job["checkpoint_hash"], Options(**job["options"]))


def _bundle_name(checkpoint: str, sha256: str, options: Options) -> str:
    text = json.dumps([MANIFEST_VERSION, sha256, options.model_dump(), exporting.versions()], sort_keys=True)
    return f"{checkpoint}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(checkpoint: Checkpoint, options: Options, folder: Path, progress: bool = False) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at a time.

    One that is there already is opened; a damaged one is exported again, with a warning that says
    why.
    """
    path = folder / _bundle_name(checkpoint.path.name, checkpoint.sha256, options)
    with _alone(folder, path.name):
        bundle = _cached(path)
        if bundle:
            return bundle
        return exporting.export(checkpoint.path, path, progress=progress, **options.model_dump())


def _is_cached(path: Path) -> bool:
    """Whether `path` of the cache holds a bundle; `measure` refuses one that cannot be read."""
    with _alone(path.parent, path.name):
        try:
            return _cached(path) is not None
        except InputError:
            return True


def _cached(path: Path) -> Bundle | None:
    """The bundle at `path` of the cache; None where there is none. A damaged one is removed."""
    if not os.path.lexists(path):
        return None
    try:
        return Bundle.open(path)
    except InputError as problem:
        if isinstance(problem.__cause__, OSError):  # what cannot be read may be whole
            raise
        warnings.warn(f"the cached bundle {path.name} is exported again: {problem}", stacklevel=3)
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
    return None


@contextmanager
def _alone(folder: Path, name: str):
    """Holds a lock that ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
