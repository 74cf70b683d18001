"""How long calls of one shard take: by its layers, and without a pause. Each setting is a run of the log."""

import time
from functools import cache
from pathlib import Path

import pandas as pd

from workbench import log
from workbench.ane import placement
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError
from workbench.firstlight import EXPERIMENT, rungs
from workbench.firstlight.job import Job
from workbench.runtime import Model, named
from workbench.sweep import plans, runs

CALLS, WARMUP_CALLS = 300, 3
SECONDS_PER_TIMING = 8.0  # a case of the stage `timing` ends there, whatever its calls
SOAK_CALLS, SOAK_SECONDS = 400, 30.0
STATE = "thermal", "thermal_pressure", "low_power", "power_source", "swap_bytes"


def machine_state() -> dict:
    """What changes on a machine while it measures, now."""
    return {name: value for name, value in log.environment().items() if name in STATE}


def time_calls(bundle: Bundle, model: Model, T: int, calls: int, seconds: float) -> pd.DataFrame:
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


def _loading(model: Model) -> dict:
    return {f"{name}_ms": ms for name, ms in model.loading_ms.items()}


def _timed(
    case: dict, job: Job, bundle: Bundle, shard: Shard, samples: pd.DataFrame, before: dict
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
    row = runs.describe(bundle) | runs.executed(job.runtime, "declared", False, case["units"], {})
    row |= {"command": "first-light times", "T": case["T"]}
    run_id = runs.record_run(
        EXPERIMENT, row | columns | {"config": config}, root=job.folder / "log", samples=long
    )
    medians = {name: median(samples[name]) for name in phases.values()}
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


def median(values: pd.Series) -> float | None:
    """The median of what there is; None where there is nothing."""
    return None if values.isna().all() else float(values.median())
