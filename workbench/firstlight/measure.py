"""Runs the stages of first light on a runtime and returns one result, which `archive`
packs.

Each stage runs in a process of its own. If the process dies, the running case becomes a
`failed` row, and another process continues with the next case until the stage's time is
up."""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

from workbench import log
from workbench.errors import InputError
from workbench.firstlight import EXPERIMENT, SCHEMA
from workbench.firstlight.job import write_line
from workbench.firstlight.stages import STAGES
from workbench.log.scrub import scrubbed
from workbench.runtime import named, resolve
from workbench.sweep import process, runs

LOGGED = {
    "measured": "ok",
    "stand-in": "ok",
    "not_measured": "skipped",
    "failed": "failed",
}
"""Status of a stage → status in the log; `measured` is Core ML alone."""


def default_runtime() -> str:
    """Core ML on macOS, whatever its version, elsewhere the stand-in."""
    return "coreml" if platform.system() == "Darwin" else "stand-in"


def first_light(
    folder: Path,
    runtime: str | None = None,
    *,
    stages: dict | None = None,
    lines: Path | None = None,
    progress: Callable[[dict], None] = lambda stage: None,
) -> dict:
    """Runs every stage.

    Args:
        folder: for bundles, stderr, and the log with the rows of this run.
        runtime: coreml, stand-in or stand-in:FAULT (default: `default_runtime`).
        stages: the stages to run, by name (default: all).
        lines: file of JSON lines to which every row is appended at once, with its
            stage, so that rows survive the end of this process (default: a file in
            `folder`).
        progress: called with each finished stage.

    Returns:
        {schema, commit, runtime, simulated, machine, stages: [{stage, says, status,
        reason, seconds, rows}], not_measured: [{what, reason}], run_ids}. A failed
        stage has the rows of the cases before.
    """
    runtime = runtime or default_runtime()
    name, fault = named(runtime)
    simulated = bool(fault)
    facts = log.environment()
    missing = _missing(runtime)
    results = []
    run_ids = []
    lines = lines or folder / "rows.jsonl"
    for stage, about in (stages or STAGES).items():
        result = {"stage": stage, "says": about.says}
        if missing and stage != "facts":
            result |= {"status": "not_measured", "reason": missing}
            result |= {"seconds": 0.0, "rows": []}
        else:
            result |= run_stage(stage, runtime, folder, about.timeout_s, lines)
        row = {"command": f"first-light {stage}", "status": LOGGED[result["status"]]}
        row |= {"reason": result["reason"], "runtime": name}
        settings = {"simulated": simulated, "runtime": runtime}
        row["config"] = {"first_light": result | settings}
        run_ids.append(runs.record_run(EXPERIMENT, row, root=folder / "log"))
        results.append(result)
        progress(result)
    return {
        "schema": SCHEMA,
        "commit": facts["commit"],
        "runtime": runtime,
        "simulated": simulated,
        "machine": facts | {"time": facts["time"].isoformat()},
        "stages": results,
        "not_measured": _not_measured(results),
        "run_ids": run_ids,
    }


def _missing(runtime: str) -> str | None:
    """The reason why this machine lacks a runtime; None if it has it."""
    try:
        resolve(runtime)
    except InputError as problem:
        return str(problem)
    return None


def run_stage(
    stage: str, runtime: str, folder: Path, timeout_s: float, lines: Path
) -> dict:
    """The rows and the status of one stage, with the reason if it failed. Rows are also
    appended to the file `lines`, the stderr of the stage's processes is written to
    `folder`."""
    start, deaths, notes = time.monotonic(), [], []
    job = {"stage": stage, "runtime": runtime}
    job |= {"folder": str(folder), "lines": str(lines)}
    function = "workbench.firstlight.stages:stage_main"
    cases, rows = STAGES[stage].cases(), []
    while len(rows) < len(cases):
        left = timeout_s - (time.monotonic() - start)
        if left <= 1:
            missing = len(cases) - len(rows)
            death = f"{missing} of {len(cases)} cases not reached in {timeout_s} s"
            deaths.append(death)
            break
        argument = job | {"skip": len(rows)}
        outcome = process.call(function, argument, timeout_s=round(left, 1))
        notes += outcome.value or outcome.lines
        rows = read_lines(lines, stage)
        if outcome.failure is not None and len(rows) < len(cases):
            died = cases[len(rows)] | {"status": "failed", "reason": outcome.failure}
            write_line(lines, {"stage": stage} | died)
            deaths.append(outcome.failure)
            rows = read_lines(lines, stage)
    (folder / f"{stage}.stderr").write_text("".join(f"{line}\n" for line in notes))
    status = "stand-in"
    if deaths:
        status = "failed"
    elif named(runtime)[0] == "coreml":
        status = "measured"
    return {
        "status": status,
        "reason": scrubbed("; ".join(dict.fromkeys(deaths))) or None,
        "seconds": round(time.monotonic() - start, 1),
        "rows": rows,
    }


def read_lines(path: Path, stage: str) -> list[dict]:
    """A stage's rows in a file of JSON lines; an incomplete last line is removed."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if row.pop("stage") == stage]


def _not_measured(results: list[dict]) -> list[dict]:
    """The missing measurements, one row for each stage and reason."""
    missing = {}
    for stage in results:
        if stage["status"] != "measured":
            why = stage["reason"] or "ran over the stand-in, which is not Core ML"
            missing[stage["stage"], why] = None
        for row in stage["rows"]:
            if row["status"] != "ok":
                missing[stage["stage"], row["reason"]] = None
            if row.get("energy_reason"):
                missing[f"{stage['stage']}, energy", row["energy_reason"]] = None
    return [{"what": what, "reason": reason} for what, reason in missing]


def check_runtime(runtime: str | None) -> str:
    """The runtime of first light; refuses one that is neither Core ML nor its stand-in,
    or that this machine lacks."""
    if runtime is None:
        return default_runtime()
    if named(runtime)[0] not in ("coreml", "stand-in"):
        step = "leave it out: Core ML is taken where it is"
        raise InputError("--runtime", runtime, "coreml or stand-in", step)
    return resolve(runtime)
