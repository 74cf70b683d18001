"""One cell of a sweep: a job (plain JSON values) in, the files of one logged run out.

`run_cell` exports the bundle if it is missing and measures it, each in a fresh process,
and returns the log files of that run, which the caller writes. A measurement that fails
is logged as `failed` with the reason and the end of its stderr."""

import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

from workbench import export as exporting
from workbench import log, paths
from workbench.adopt import validate as adopted_validate
from workbench.adopt.decoder import open_decoder, open_folder
from workbench.adopt.folder import Adopted
from workbench.ane import placement
from workbench.bundle import Bundle, Options
from workbench.bundle.manifest import MANIFEST_VERSION
from workbench.check import golden
from workbench.check.gates import jsonable
from workbench.check.validate import Validation, validate_stored
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.files import locked
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import ioreport, plans, process, runs, timing

MEASURE_FUNCTION = "workbench.sweep.cell:measure_cell"


def run_cell(job: dict, measure: str = MEASURE_FUNCTION) -> dict[str, bytes]:
    """Exports a missing bundle, measures it, and returns the run's log files (path →
    contents).

    Args:
        job: {checkpoint, checkpoint_hash, bundle, identity, golden, options, run,
            setting, round, cell, judge_ids, max_kl, experiment, bundles, timeout_s,
            attempt, worker (an index; None: 0)}.
        measure: the function that a fresh process calls; it logs one run into
            job["root"].
    """
    started = time.time()
    with tempfile.TemporaryDirectory() as root, process.awake():
        inner = job | {"root": root, "started": started, "worker": job["worker"] or 0}
        outcome = process.Outcome()
        if not job["identity"] and not _is_cached(_path(job)):
            prepare = "workbench.sweep.cell:prepare"
            outcome = process.call(prepare, inner, timeout_s=job["timeout_s"])
        if outcome.failure is None:
            time.sleep(job["run"]["cool_down_s"])
            threads = job["run"]["threads"]
            outcome = process.call(
                measure, inner, threads=threads, timeout_s=job["timeout_s"]
            )
        if outcome.failure is not None:
            failed(inner, outcome.failure, outcome.lines)
        return log.files(root)


def prepare(job: dict) -> None:
    """In a child: exports the bundle of a job."""
    bundle_for(_checkpoint(job), Options(**job["options"]), _path(job).parent)


def measure_cell(job: dict) -> None:
    """In a child: times a bundle, validates it if the job has ids, logs the run to
    job["root"]."""
    began = time.time()
    before = runs.state_before()
    bundle = _bundle(job)
    how = runs.pick(
        job["run"], "runtime", "precision", "fast", "compute_units", "hints"
    )
    decoder = open_decoder(bundle, **how)
    counts = runs.counted(job["run"]) | runs.pick(job["run"], "repetitions")
    counts.pop("threads")
    with ioreport.metered() as energy:
        samples = timing.measure_speed(decoder, **counts)
    row = runs.describe(bundle, decoder) | _identity(job) | before
    fidelity = None
    row |= runs.pick(energy, "ane_joules", "ane_active_ms")
    config = _config(job) | {
        "not_timed": timing.NOT_TIMED,
        "flags": log.flags(samples),
        "load_average": os.getloadavg()[0],
    }
    if energy["reason"]:
        config["energy"] = f"not measured: {energy['reason']}"
    if decoder.fault:
        config["fault"] = decoder.fault
    if messages := process.core_ml_messages():
        config["stderr"] = messages
    # it ran, and not where it was meant to
    if errors := process.invalidating(messages):
        row |= {"status": "invalid", "reason": errors[0]}
    if job["judge_ids"]:
        validation = _validation(job, decoder)
        fidelity, row["verdict"] = validation.rows, validation.verdict
        config["gates"] = [g.json() for g in validation.gates]
        config["price"] = validation.price and jsonable(validation.price.json())
    runs.record_run(
        job["experiment"],
        row | {"config": config},
        root=job["root"],
        fidelity=fidelity,
        samples=samples,
        layers=timing.layer_table(samples, decoder),
        rest=lambda: _placement(
            decoder, row, config, job["timeout_s"] - (time.time() - began)
        ),
    )


def _validation(job: dict, decoder: Decoder) -> Validation:
    """The job's bundle against its golden.

    Bug gates and budget need the checkpoint, which a job of a finished bundle lacks.
    Adopted packages have gates of their own."""
    checkpoint = None if job["identity"] else _checkpoint(job)
    path = None
    if job["golden"]:
        path = find(job["golden"], log.default_root())
        reference = golden.Golden.load(path)
    if isinstance(decoder.bundle, Adopted):
        how = runs.pick(job["run"], "runtime", "precision", "compute_units")
        return adopted_validate.validate(decoder.bundle, reference, **how)
    if not job["golden"]:
        folder = _path(job).parent.with_name("golden")
        path = golden.golden_path(checkpoint, job["judge_ids"], folder)
        reference = golden.stored_golden(checkpoint, job["judge_ids"], folder)
    return validate_stored(
        decoder, reference, checkpoint, path=path, max_kl=job["max_kl"]
    )


def _placement(decoder: Decoder, row: dict, config: dict, seconds: float) -> dict:
    """Columns of a run on Core ML that its compute plan decides.

    These are the placement, and the status `invalid` if the compute units name the
    Neural Engine and nothing was planned there. If Core ML gives no plan within half of
    the `seconds` that are left, `config` has the reason."""
    if decoder.runtime in ("portable", "coreai") or isinstance(decoder.bundle, Adopted):
        return {}
    shards = [model.shard for model in (*decoder.layers, *decoder.heads)]
    how = decoder.runtime, decoder.compute_units, decoder.fault, max(1, seconds / 2)
    try:
        placements = plans.planned_placement(decoder.bundle, shards, *how)
    except InputError as problem:
        return {"config": config | {"placement": str(problem)}}
    columns = placement.columns(placements)
    reason = placement.off_engine(placements, decoder.compute_units)
    if reason and "reason" not in row:
        columns |= {"status": "invalid", "reason": reason}
    return columns


def failed(job: dict, reason: str, lines: tuple[str, ...] = ()) -> None:
    """Logs a run that failed; its runtime stays null where the grid says auto."""
    row = {}
    if job["run"]["runtime"] != "auto":
        row = runs.executed(**job["run"])
    row |= {
        "checkpoint": paths.model_name(Path(job["checkpoint"])),
        "checkpoint_hash": job["checkpoint_hash"],
        "status": "failed",
        "reason": reason,
        "config": _config(job) | {"stderr": list(lines)},
    }
    row = runs.exported(job["options"]) | row | _identity(job)
    runs.record_run(job["experiment"], row, root=job["root"])


def _identity(job: dict) -> dict:
    columns = {"command": "sweep"} | runs.pick(job, "setting", "round")
    return columns | runs.counted(job["run"])


def _config(job: dict) -> dict:
    where = runs.pick(job, "worker", "started", "attempt") | {"ended": time.time()}
    return {
        "cell": job["cell"],
        "export": job["options"],
        "run": job["run"],
        "measured": where,
    }


def _checkpoint(job: dict) -> Checkpoint:
    """The job's checkpoint, at its path or at the same path of this process's
    project."""
    checkpoint = Checkpoint(find(job["checkpoint"], log.default_root()))
    if checkpoint.sha256 != job["checkpoint_hash"]:
        raise InputError(
            f"checkpoint {checkpoint.path}",
            checkpoint.sha256[:12],
            f"the sweep's, {job['checkpoint_hash'][:12]}",
            "copy the same checkpoint to every worker",
        )
    return checkpoint


def find(path: str, root: Path) -> Path:
    """The place of a grid's path.

    This is the path itself if it exists, else the path in the project of the log at
    `root`, since notebooks run elsewhere. The name of a model on the Hub stands for its
    folder in the local cache."""
    project = log.project(root)
    if Path(path).exists():
        return Path(path)
    if not (project / path).exists() and paths.hub_id(path, project):
        return paths.hub_snapshot(path) or Path(path)
    return project / path


def lacks(checkpoint: str) -> str | None:
    """The message that refuses this path of a checkpoint on this machine; None if it is
    usable."""
    try:
        paths.checkpoint(find(checkpoint, log.default_root()))
    except InputError as problem:
        return str(problem)
    return None


def _bundle(job: dict) -> Bundle | Adopted:
    bundle = open_folder(_path(job))
    if job["identity"] not in (None, bundle.identity):
        raise InputError(
            f"bundle {job['bundle']}",
            bundle.identity[:12],
            f"the sweep's, {job['identity'][:12]}",
            "remove it, and start the sweep again",
        )
    return bundle


def _path(job: dict) -> Path:
    """The folder of a job's bundle on this machine."""
    if job["identity"]:
        return find(job["bundle"], log.default_root())
    folder = Path(job["bundles"] or log.project() / "data" / "bundles")
    model = paths.model_name(Path(job["checkpoint"]))
    options = Options(**job["options"])
    return folder / _bundle_name(model, job["checkpoint_hash"], options)


def _bundle_name(checkpoint: str, sha256: str, options: Options) -> str:
    """Checkpoint and a hash of everything that decides a bundle's bytes."""
    parts = [MANIFEST_VERSION, sha256, options.model_dump(), exporting.versions()]
    text = json.dumps(parts, sort_keys=True)
    return f"{checkpoint}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(
    checkpoint: Checkpoint, options: Options, folder: Path, progress: bool = False
) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at
    a time.

    An existing bundle is opened; a damaged one is exported again, with a warning that
    has the reason."""
    path = folder / _bundle_name(checkpoint.name, checkpoint.sha256, options)
    with locked(_lock(path)):
        return _cached(path) or exporting.export(
            checkpoint.path, path, progress=progress, **options.model_dump()
        )


def _is_cached(path: Path) -> bool:
    """Whether the cache holds something at `path`; `measure_cell` refuses an unreadable
    bundle."""
    with locked(_lock(path)):
        try:
            return _cached(path) is not None
        except InputError:
            return True


def _cached(path: Path) -> Bundle | None:
    """The bundle at `path` of the cache, None if there is none. A damaged bundle is
    removed."""
    if not os.path.lexists(path):
        return None
    try:
        return Bundle.open(path)
    except InputError as problem:
        if isinstance(problem.__cause__, OSError):  # it may be whole
            raise
        warnings.warn(
            f"the cached bundle {path.name} is exported again: {problem}", stacklevel=3
        )
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
    return None


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
