"""The six stages of first light, each in a process of its own: one JSON line per case.

A stage is a list of cases and a function that measures one of them. A line is written
as soon as its case is done, so that only the running case is lost if the process is
killed."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from miltorch.quiet import coremltools
from workbench import log
from workbench.check import device
from workbench.check.golden import Golden
from workbench.check.validate import validate
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.firstlight import rungs
from workbench.firstlight.binding import binding_cases, measure_binding
from workbench.firstlight.job import Job, write_line
from workbench.firstlight.ladder import ladder_cases, measure_rung
from workbench.firstlight.times import (
    measure_soak,
    measure_timing,
    soak_cases,
    timing_cases,
)
from workbench.runtime import COMPUTE_UNITS
from workbench.sweep import process, runs

GOLDEN = rungs.DATA / "tiny-llama.golden"


def stage_main(job: dict) -> list[str]:
    """Measures the cases of a stage from `skip` on and writes a JSON line for each.

    Args:
        job: {stage, runtime, folder, lines (the file of JSON lines), skip}.

    Returns:
        Core ML's messages on stderr.
    """
    stage = STAGES[job["stage"]]
    here = Job(job["runtime"], Path(job["folder"]))
    cases, pause = stage.cases(), Pause()
    skip = job["skip"]
    if skip and _on_engine(cases[skip - 1], here):  # a process died of that one
        pause.begin()
    for case in cases[skip:]:
        paused_s = 0.0
        if on_engine := _on_engine(case, here):
            paused_s = pause.wait()
        start, written = time.perf_counter(), os.fstat(2).st_size
        try:
            row = {"status": "ok", "reason": None} | stage.measure(case, here)
        except InputError as problem:
            row = {"status": "refused", "reason": str(problem)}
        if messages := process.messages_behind(written):
            row["messages"] = messages
        if row["status"] == "ok" and (errors := process.invalidating(messages)):
            row |= {"status": "invalid", "reason": errors[0]}
        row["seconds"] = round(time.perf_counter() - start, 3)
        if paused_s:
            row["paused_s"] = round(paused_s, 1)
        write_line(Path(job["lines"]), {"stage": job["stage"]} | case | row)
        if row["status"] != "ok" and on_engine:
            pause.begin()
    return process.core_ml_messages()


def _on_engine(case: dict, job: Job) -> bool:
    """Whether Core ML may run a case on the Neural Engine."""
    return job.runtime == "coreml" and case.get("units") in ("CPU_AND_NE", "ALL")


class Pause:
    """Pauses after a failed compilation for the Neural Engine, before the next case
    that may use it: `PAUSE_S` each, at most `PAUSES_S` in a stage."""

    PAUSE_S, PAUSES_S = 15.0, 120.0  # reports name 15 s

    def __init__(self):
        self.until, self.left = 0.0, self.PAUSES_S

    def begin(self) -> None:
        """Starts a pause."""
        self.until = time.monotonic() + self.PAUSE_S

    def wait(self) -> float:
        """Sleeps for what is left of a pause; returns the seconds."""
        seconds = min(self.left, max(0.0, self.until - time.monotonic()))
        time.sleep(seconds)
        self.left -= seconds
        return seconds


def fact_cases() -> list[dict]:
    return [{"case": "machine"}, {"case": "compute devices"}]


def measure_fact(case: dict, job: Job) -> dict:
    """The machine's columns of the log, or the devices that Core ML lists."""
    if case["case"] == "machine":
        facts = log.environment()
        return facts | {"time": facts["time"].isoformat()}
    if job.runtime != "coreml":
        reason = "Core ML alone lists its compute devices"
        return {"status": "not_measured", "reason": reason}
    kinds = coremltools().models.compute_device
    names, cores = [], []
    for one in kinds.MLComputeDevice.get_all_compute_devices():
        names.append(type(one).__name__)
        cores.append(getattr(one, "total_core_count", None))
    return {"devices": names, "cores": cores}


def golden_cases() -> list[dict]:
    return [{"units": units} for units in COMPUTE_UNITS]


@cache
def _tiny_llama(job: Job):
    source = log.project() / "data" / "tiny-llama"
    bundle = rungs.exported(source, job.folder, compress="int8-tensor")
    golden = Golden.load(GOLDEN)
    return bundle, golden, device.make_reference(bundle, golden)


def measure_golden(case: dict, job: Job) -> dict:
    """data/tiny-llama against the shipped golden, on one compute unit."""
    bundle, golden, reference = _tiny_llama(job)
    decoder = Decoder(bundle, job.runtime, compute_units=case["units"])
    result = validate(decoder, golden, reference=reference)
    names = "name", "verdict", "value", "threshold", "reason"
    gates = []
    for gate in result.gates:
        if gate.verdict != "not_run":
            gates.append(runs.pick(gate.json(), *names))
    worst = result.worst["cosine"]
    return {"verdict": result.verdict, "gates": gates, "worst_cosine": worst}


@dataclass(frozen=True)
class Stage:
    """A stage's description, its cases, the function that measures one of them, and the
    seconds after which the stage is ended."""

    says: str
    cases: Callable[[], list[dict]]
    measure: Callable[[dict, Job], dict]
    timeout_s: float


STAGES = {
    "facts": Stage("the machine and its devices", fact_cases, measure_fact, 45),
    "binding": Stage(
        "what coremltools' native layer takes", binding_cases, measure_binding, 60
    ),
    "ladder": Stage("one-layer shards, step by step", ladder_cases, measure_rung, 370),
    "golden": Stage("data/tiny-llama on four units", golden_cases, measure_golden, 95),
    "timing": Stage("1, 2 and 4 layers in a shard", timing_cases, measure_timing, 270),
    "soak": Stage("400 calls without a pause", soak_cases, measure_soak, 60),
}
