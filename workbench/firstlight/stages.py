"""The six stages of first light, each run in a process of its own: cases in, one JSON line per case out.

A stage is a list of cases and a function that measures one of them. A line is written as soon as its case is done, so
whatever kills the process costs the case that it was at. Knows nothing of the process that started it.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from miltorch.quiet import coremltools
from workbench import log
from workbench.ane import placement
from workbench.bundle import Bundle
from workbench.bundle.names import K_STATE, X
from workbench.check import device
from workbench.check.golden import Golden
from workbench.check.validate import validate
from workbench.decode import Decoder
from workbench.errors import InputError, one_line
from workbench.export import export
from workbench.firstlight import EXPERIMENT, rungs
from workbench.log.scrub import scrubbed
from workbench.runtime import COMPUTE_UNITS, load_shard, named
from workbench.runtime.standin import installed
from workbench.sweep import plans, process, runs

GOLDEN = rungs.DATA / "tiny-llama.golden"
CALLS, WARMUP_CALLS = 300, 3
SECONDS_PER_TIMING = 10.0  # a case of the stage `timing` ends there, whatever its calls
SOAK_CALLS, SOAK_SECONDS = 400, 30.0
REPEATED_CALLS = 10  # of a rung, to compare its time on two units


@dataclass(frozen=True)
class Job:
    """What a stage's process works on: the `runtime` (`coreml`, `stand-in`, `stand-in:FAULT`) and
    the `folder` for bundles and for the log."""

    runtime: str
    folder: Path

    def model(self, bundle: Bundle, shard, units: str):
        return load_shard(bundle, shard, self.runtime, compute_units=units)

    def native_layer(self) -> AbstractContextManager:
        """Within, coremltools' native layer is there: Core ML's own, or the stand-in's."""
        name, fault = named(self.runtime)
        return installed(fault) if name == "stand-in" else nullcontext()


def stage_main(job: dict) -> list[str]:
    """In a process of its own: the cases of a stage from `skip` on, a line of JSON for each.

    Args:
        job: {stage, runtime, folder, lines (the file they are appended to), skip}.

    Returns:
        What Core ML wrote on stderr.
    """
    stage, here = STAGES[job["stage"]], Job(job["runtime"], Path(job["folder"]))
    for case in stage.cases()[job["skip"] :]:
        start, written = time.perf_counter(), os.fstat(2).st_size
        try:
            row = {"status": "ok", "reason": None} | stage.measure(case, here)
        except InputError as problem:
            row = {"status": "refused", "reason": str(problem)}
        if messages := process.core_ml_messages(written):
            row["messages"] = messages
        if row["status"] == "ok" and (errors := process.invalidating(messages)):
            row |= {"status": "invalid", "reason": errors[0]}
        row["seconds"] = round(time.perf_counter() - start, 3)
        write_line(Path(job["lines"]), case | row)
    return process.core_ml_messages()


def write_line(path: Path, row: dict) -> None:
    """Appends a row to a file of JSON lines; it is on the disk afterwards."""
    with path.open("a") as file:
        file.write(json.dumps(scrubbed(_finite(row)), default=str, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _finite(value):
    """A row without what JSON cannot hold: inf and NaN as text."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


# --- facts ----------------------------------------------------------------------------------------


STATE = "thermal", "thermal_pressure", "low_power", "power_source", "swap_bytes"


def machine_state() -> dict:
    """What changes on a machine while it measures, now."""
    return {name: value for name, value in log.environment().items() if name in STATE}


def fact_cases() -> list[dict]:
    return [{"case": "machine"}, {"case": "compute devices"}]


def measure_fact(case: dict, job: Job) -> dict:
    """The machine as the log names it; the devices that Core ML lists."""
    if case["case"] == "machine":
        facts = log.environment()
        return facts | {"time": facts["time"].isoformat()}
    if job.runtime != "coreml":
        return {"status": "not_measured", "reason": "Core ML alone lists its compute devices"}
    kinds = coremltools().models.compute_device
    devices = kinds.MLComputeDevice.get_all_compute_devices()
    cores = [getattr(one, "total_core_count", None) for one in devices]
    names = [type(one).__name__ for one in devices]
    return {"devices": names, "cores": cores}


# --- binding --------------------------------------------------------------------------------------

# How an array of float32 is handed over, and whether the sources of the binding say that it takes
# it (None: they do not say). Arrays of float16 for inputs are converted by coremltools before.
ARRAYS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], bool | None]] = {
    "float32": (np.copy, True),
    "float64": (np.float64, True),
    "int32": (np.int32, True),
    "float16": (np.float16, False),
    "int64": (np.int64, False),
    "int8": (np.int8, False),
    "uint8": (np.uint8, False),
    "bool": (lambda a: a > 0, False),
    "read-only": (lambda a: np.broadcast_to(a, a.shape), False),
    "strided": (lambda a: np.repeat(a, 2, -1)[..., ::2], None),
    "Fortran order": (np.asfortranarray, None),
}
SPECIAL = {
    "-0": -0.0,
    "subnormal": 2.0**-24,
    "largest subnormal": 2.0**-14 - 2.0**-24,
    "smallest normal": 2.0**-14,
    "65504": 65504.0,
    "65520, which rounds to inf": 65520.0,
    "inf": np.inf,
    "-inf": -np.inf,
    "NaN": np.nan,
}


def binding_cases() -> list[dict]:
    arrays = [
        {"case": f"{to} {name}", "to": to, "array": name} for to in BINDING for name in ARRAYS
    ]
    values = [{"case": f"round trip {name}", "value": name} for name in SPECIAL]
    return [*arrays, *values, {"case": "output"}, {"case": "stdout of compile"}]


@cache
def _state_shard(job: Job):
    """Bundle, loaded model and state of the rung `state` on the CPU, its calls' first inputs."""
    rung = rungs.ladder()["state"]
    bundle = rungs.bundle_of(rung, job.folder)
    model = job.model(bundle, rungs.shard_of(rung, bundle), "CPU_ONLY")
    return bundle, model, model.make_state(), rungs.call_inputs(bundle, model.shard, 1, 0, 1)


def _write_state(model, state, inputs: dict, change: Callable) -> None:
    handle = state.raw.state
    handle.write_state(K_STATE, change(np.array(handle.read_state(K_STATE))))


def _predict(model, state, inputs: dict, change: Callable) -> None:
    model.model.predict(inputs | {X: change(inputs[X])}, state.raw.state)


BINDING = {"state": _write_state, "input": _predict}


def measure_binding(case: dict, job: Job) -> dict:
    """One promise of coremltools' native layer, tried."""
    bundle, model, state, inputs = _state_shard(job)
    if "array" in case:
        change, expected = ARRAYS[case["array"]]
        if (case["to"], case["array"]) == ("input", "float16"):
            expected = True
        accepted, said = True, None
        try:
            BINDING[case["to"]](model, state, inputs, change)
        except Exception as problem:  # whatever the binding raises is the answer
            accepted, said = False, f"{type(problem).__name__}: {one_line(problem)}"
        return {"accepted": accepted, "expected": expected, "said": said}
    if "value" in case:
        value = SPECIAL[case["value"]]
        array = np.array(state.raw.state.read_state(K_STATE))
        array.flat[0] = value
        state.raw.state.write_state(K_STATE, array)
        read = np.float32(state.raw.state.read_state(K_STATE).flat[0])
        with np.errstate(over="ignore"):
            halves = np.float32([value, read]).astype(np.float16)
        bits = [f"{half.view(np.uint16):#06x}" for half in halves]
        alike = bits[0] == bits[1] or (np.isnan(value) and np.isnan(read))
        return {"wrote": bits[0], "read": bits[1], "accepted": bool(alike), "expected": True}
    if case["case"] == "output":
        outputs = model.model.predict(inputs, state.raw.state)
        (output,) = outputs.values()
        about = {"dtype": str(output.dtype), "contiguous": output.flags.c_contiguous}
        return about | {"accepted": about == {"dtype": "float32", "contiguous": True}}
    package, target = bundle.package(model.shard), job.folder / "binding.mlmodelc"
    with tempfile.TemporaryFile() as written:
        before = os.dup(1)
        os.dup2(written.fileno(), 1)
        try:
            with job.native_layer():
                coremltools().models.utils.compile_model(str(package), str(target))
        finally:
            os.dup2(before, 1)
            os.close(before)
        written.seek(0)
        return {"bytes_on_stdout": len(written.read())}


# --- ladder ---------------------------------------------------------------------------------------


def ladder_cases() -> list[dict]:
    """Every rung on the CPU and for the Neural Engine, two of them on all units; the plans, which
    may abort the process, come last."""
    names, pair, more = list(rungs.ladder()), ("CPU_ONLY", "CPU_AND_NE"), ("ALL", "CPU_AND_GPU")
    cases = [{"rung": name, "units": units} for name in names for units in pair]
    cases += [{"rung": name, "units": units} for name in ("state", "range") for units in more]
    return [case | {"ask": ask} for ask in ("run", "plan") for case in cases if _asked(case, ask)]


def _asked(case: dict, ask: str) -> bool:
    return ask == "run" or case["units"] == "CPU_AND_NE"


def measure_rung(case: dict, job: Job) -> dict:
    """One shard on one compute unit: does it compile, load, compute what portable computes, and how
    long does it take; or Core ML's plan for it."""
    rung = rungs.ladder()[case["rung"]]
    bundle = rungs.bundle_of(rung, job.folder)
    shard, units = rungs.shard_of(rung, bundle), case["units"]
    if case["ask"] == "plan":
        return _plan(bundle, shard, units, job)
    digest = rungs.digest(bundle.package(shard))
    about = {"bytes": shard.bytes, "sha256": digest}
    about["as_shipped"] = digest == rungs.shipped_digests().get(rung.name)
    try:
        model = job.model(bundle, shard, units)
        again = job.model(bundle, shard, units)
        calls = list(rungs.run_calls(bundle, model))
        about |= _compared(calls, rungs.shipped_results(rung.name))
        about |= _times(bundle, model, job) | _nan(bundle, model)
    except InputError as problem:
        return about | {"status": "refused", "reason": str(problem)}
    ms = model.loading_ms
    about |= {"compile_ms": ms["compile"], "cold_load_ms": ms["load"]}
    return about | {"warm_load_ms": again.loading_ms["load"]}


def _plan(bundle: Bundle, shard, units: str, job: Job) -> dict:
    runtime, fault = named(job.runtime)
    programs = [(shard.name, function) for function in shard.functions or [None]]
    asked = {"bundle": str(bundle.root), "programs": programs, "runtime": runtime}
    planned = placement.plan_main(asked | {"fault": fault, "compute_units": units})
    counts = {name: sum(p[name] or 0 for p in planned) for name in ("ops", "ane", "cpu", "gpu")}
    return counts | {"cost_ane": planned[0]["cost_ane"], "source": planned[0]["source"]}


def _compared(calls: list[tuple[int, np.ndarray]], expected: list[rungs.Expected]) -> dict:
    """Worst distance at T = 1 and at T > 1, in units of what fp16 sums would leave."""
    pairs = [(T, want.ratio(output)) for (T, output), want in zip(calls, expected, strict=True)]
    finite = all(np.isfinite(output).all() for _, output in calls)
    one, more = [r for T, r in pairs if T == 1], [r for T, r in pairs if T > 1]
    worst = {"ratio_t1": max(one, default=None), "ratio_t": max(more, default=None)}
    near = finite and all(ratio <= device.DEVICE_FACTOR for _, ratio in pairs)
    return worst | {"finite": finite, "verdict": "GREEN" if near else "RED"}


def _times(bundle: Bundle, model, job: Job) -> dict:
    samples = time_calls(bundle, model, rungs.tokens_per_call(bundle)[0], REPEATED_CALLS, 5.0)
    return {name: _number(samples[name].median()) for name in ("wall_ms", "native_ms", "cpu_ms")}


def _nan(bundle: Bundle, model) -> dict:
    """Whether a NaN that goes in comes out, as it does on the portable runtime."""
    T = rungs.tokens_per_call(bundle)[0]
    inputs = rungs.call_inputs(bundle, model.shard, T, 0, 1)
    inputs[X].flat[0] = np.nan
    state = model.make_state() if model.shard.states else None
    outputs = model.predict(inputs, state)
    return {"nan_comes_out": not all(np.isfinite(value).all() for value in outputs.values())}


def time_calls(bundle: Bundle, model, T: int, calls: int, seconds: float) -> pd.DataFrame:
    """Wall, native and CPU milliseconds of repeated calls of T tokens, warm-ups left out, and the
    seconds since the first; ends after `seconds`, whatever `calls`."""
    state = model.make_state() if model.shard.states else None
    room = bundle.manifest.options.max_seq_len // T
    cycle = [
        rungs.call_inputs(bundle, model.shard, T, i * T, i + 1) for i in range(min(room, calls))
    ]
    rows, begin = [], None
    for call in range(-WARMUP_CALLS, calls):
        begin = begin or (time.perf_counter() if call >= 0 else None)
        start, cpu = time.perf_counter(), time.process_time()
        model.predict(cycle[call % len(cycle)], state)
        end, used = time.perf_counter(), time.process_time() - cpu
        if call >= 0:
            rows.append(((end - start) * 1e3, model.last_native_ms, used * 1e3, end - begin))
        if begin and end - begin > seconds:
            break
    frame = pd.DataFrame(rows, columns=["wall_ms", "native_ms", "cpu_ms", "at_s"])
    return frame.astype(float)


# --- golden ---------------------------------------------------------------------------------------


def golden_cases() -> list[dict]:
    return [{"units": units} for units in COMPUTE_UNITS]


@cache
def _tiny_llama(job: Job):
    source = log.project() / "data" / "tiny-llama"
    path = job.folder / "tiny-llama"
    options = {"max_seq_len": 64, "compress": "int8-tensor"}
    bundle = Bundle.open(path) if path.exists() else export(source, path, progress=False, **options)
    golden = Golden.load(GOLDEN)
    return bundle, golden, device.make_reference(bundle, golden)


def measure_golden(case: dict, job: Job) -> dict:
    """data/tiny-llama against the golden that came with the project, on one compute unit."""
    bundle, golden, reference = _tiny_llama(job)
    decoder = Decoder(bundle, job.runtime, compute_units=case["units"])
    result = validate(decoder, golden, reference=reference)
    names = "name", "verdict", "value", "threshold", "reason"
    gates = [runs.pick(gate.json(), *names) for gate in result.gates if gate.verdict != "not_run"]
    return {"verdict": result.verdict, "gates": gates, "worst_cosine": result.worst["cosine"]}


# --- timing and soak ------------------------------------------------------------------------------


def timing_cases() -> list[dict]:
    return [
        {"units": units, "layers": layers, "T": T}
        for units in ("CPU_AND_NE", "CPU_ONLY")
        for layers in (1, 2, 4)
        for T in (1, 4)
    ]


def measure_timing(case: dict, job: Job) -> dict:
    """Calls of one shard of 1, 2 or 4 layers of 0.5B dimensions: wall, Core ML's own duration, CPU
    time."""
    before = machine_state()
    source = rungs.seeded_checkpoint("half_b", job.folder, num_hidden_layers=4)
    shape = {"t": "fixed", "t_max": case["T"], "layers_per_shard": case["layers"]}
    bundle = rungs.exported(source, job.folder, compress="int8-tensor", **shape)
    shard = bundle.shards("layers")[0]
    model = job.model(bundle, shard, case["units"])
    samples = time_calls(bundle, model, case["T"], CALLS, SECONDS_PER_TIMING)
    return _timed(case, job, bundle, shard, samples, before) | _loading(model)


def soak_cases() -> list[dict]:
    return [{"units": "CPU_AND_NE", "rung": "large-lut4"}]


def measure_soak(case: dict, job: Job) -> dict:
    """A compressed shard with state, called as fast as it goes: is it as fast at the end?"""
    before, rung = machine_state(), rungs.ladder()[case["rung"]]
    bundle = rungs.bundle_of(rung, job.folder)
    shard = rungs.shard_of(rung, bundle)
    model = job.model(bundle, shard, case["units"])
    samples = time_calls(bundle, model, 1, SOAK_CALLS, SOAK_SECONDS)
    quarter = max(1, len(samples) // 4)
    first, last = samples["wall_ms"][:quarter].median(), samples["wall_ms"][-quarter:].median()
    row = _timed(case | {"T": 1}, job, bundle, shard, samples, before) | _loading(model)
    return row | {"first_quarter_ms": first, "last_quarter_ms": last}


def _loading(model) -> dict:
    return {f"{name}_ms": ms for name, ms in model.loading_ms.items()}


def _timed(
    case: dict, job: Job, bundle: Bundle, shard, samples: pd.DataFrame, before: dict
) -> dict:
    """A row of times, after its samples are logged as a run of their own; `before` is the machine's
    state before them."""
    columns, note = _planned(job, bundle.root, shard.name, case["units"])
    config = {"case": case, "before": before, "after": machine_state()} | note
    phases = {"call": "wall_ms", "native": "native_ms", "cpu": "cpu_ms"}
    long = pd.concat(
        pd.DataFrame({"phase": phase, "value": samples[name], "order": range(len(samples))})
        for phase, name in phases.items()
    )
    long = long.dropna(subset="value").assign(
        shard=shard.name, repetition=0, T=case["T"], unit="ms", warmup=False
    )
    row = runs.exported(bundle.manifest.options) | runs.executed(
        job.runtime, "declared", False, case["units"], {}
    )
    row |= {"command": "first-light times", "T": case["T"], "checkpoint": bundle.root.name}
    run_id = runs.record_run(
        EXPERIMENT, row | columns | {"config": config}, root=job.folder / "log", samples=long
    )
    medians = {name: _number(samples[name].median()) for name in phases.values()}
    p90 = float(samples["wall_ms"].quantile(0.9))
    share = {"ane_ops_share": columns.get("ane_ops_share"), "invalid": columns.get("reason")}
    return medians | {"wall_p90_ms": p90, "calls": len(samples), "run_id": run_id} | share


@cache
def _planned(job: Job, bundle: Path, shard: str, units: str) -> tuple[dict, dict]:
    """Columns of `runs` that the plan of a shard decides, asked for in a process of its own; and why
    there is none."""
    runtime, fault = named(job.runtime)
    if units != "CPU_AND_NE":
        return {}, {}
    try:
        planned = plans.planned_placement(
            Bundle.open(bundle), [(shard, None)], runtime, units, fault=fault, timeout_s=30
        )
    except InputError as problem:
        return {}, {"placement": str(problem)}
    reason = placement.off_engine(planned, units)
    invalid = {"status": "invalid", "reason": reason} if reason else {}
    return placement.columns(planned) | invalid, {}


def _number(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


@dataclass(frozen=True)
class Stage:
    """What a stage says of itself, its cases, the function that measures one of them, and the
    seconds after which it is ended."""

    says: str
    cases: Callable[[], list[dict]]
    measure: Callable[[dict, Job], dict]
    timeout_s: float


STAGES = {
    "facts": Stage("the machine and its devices", fact_cases, measure_fact, 45),
    "binding": Stage("what coremltools' native layer takes", binding_cases, measure_binding, 60),
    "ladder": Stage("one-layer shards, step by step", ladder_cases, measure_rung, 370),
    "golden": Stage("data/tiny-llama on four units", golden_cases, measure_golden, 95),
    "timing": Stage("1, 2 and 4 layers in a shard", timing_cases, measure_timing, 270),
    "soak": Stage("400 calls without a pause", soak_cases, measure_soak, 60),
}
