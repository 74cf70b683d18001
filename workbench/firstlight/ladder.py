"""Measures each rung of the ladder on a compute unit: compiling, loading, values,
times, and Core ML's plan."""

import numpy as np

from workbench.ane import placement
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import X
from workbench.check import device
from workbench.errors import InputError
from workbench.firstlight import rungs
from workbench.firstlight.job import Job
from workbench.firstlight.times import median, time_calls
from workbench.runtime import Model, named
from workbench.sweep.plans import plan_job

REPEATED_CALLS = 10  # of a rung, for its time on a unit


def ladder_cases() -> list[dict]:
    """Every rung on CPU_ONLY and CPU_AND_NE, two of them on all units; then the plans,
    which may abort the process."""
    cases = []
    for name in rungs.ladder():
        for units in ("CPU_ONLY", "CPU_AND_NE"):
            cases.append({"rung": name, "units": units})
    for name in ("state", "range"):
        for units in ("ALL", "CPU_AND_GPU"):
            cases.append({"rung": name, "units": units})
    plans = []
    for case in cases:
        if case["units"] == "CPU_AND_NE":
            plans.append(case | {"ask": "plan"})
    return [case | {"ask": "run"} for case in cases] + plans


def measure_rung(case: dict, job: Job) -> dict:
    """The result of one shard on one compute unit: sizes, distances from the portable
    results, times; or Core ML's plan for it."""
    rung = rungs.ladder()[case["rung"]]
    bundle = rungs.bundle_of(rung, job.folder)
    shard = rungs.shard_of(rung, bundle)
    units = case["units"]
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
        about |= _times(bundle, model) | _nan(bundle, model)
    except InputError as problem:
        return about | {"status": "refused", "reason": str(problem)}
    ms = model.loading_ms  # `cold_load`: where the runtime distinguishes the first load
    cold = ms.get("cold_load") or ms["load"]
    about |= {"compile_ms": ms["compile"], "cold_load_ms": cold}
    return about | {"warm_load_ms": again.loading_ms["load"]}


def _plan(bundle: Bundle, shard: Shard, units: str, job: Job) -> dict:
    runtime, fault = named(job.runtime)
    planned = placement.plan_main(plan_job(bundle, [shard], runtime, units, fault))
    counts = {}
    for name in ("ops", "ane", "cpu", "gpu"):
        counts[name] = sum(p[name] or 0 for p in planned)
    return counts | {"cost_ane": planned[0]["cost_ane"], "source": planned[0]["source"]}


def _compared(
    calls: list[tuple[int, np.ndarray]], expected: list[rungs.Expected]
) -> dict:
    """The largest distances at T = 1 and at T > 1, relative to the distance of fp16
    sums."""
    one, more = [], []
    finite = True
    for (T, output), result in zip(calls, expected, strict=True):
        (one if T == 1 else more).append(result.ratio(output))
        finite = finite and bool(np.isfinite(output).all())
    near = finite and all(ratio <= device.DEVICE_FACTOR for ratio in one + more)
    worst = {"ratio_t1": max(one, default=None), "ratio_t": max(more, default=None)}
    return worst | {"finite": finite, "verdict": "GREEN" if near else "RED"}


def _times(bundle: Bundle, model: Model) -> dict:
    samples = time_calls(
        bundle, model, rungs.tokens_per_call(bundle)[0], REPEATED_CALLS, 5.0
    )
    return {name: median(samples[name]) for name in ("wall_ms", "native_ms", "cpu_ms")}


def _nan(bundle: Bundle, model: Model) -> dict:
    """Whether a NaN in the input gives a NaN in the output, as on the portable
    runtime."""
    T = rungs.tokens_per_call(bundle)[0]
    inputs = rungs.call_inputs(bundle, model.shard, T, 0, 1)
    inputs[X].flat[0] = np.nan
    state = model.make_state() if model.shard.states else None
    outputs = model.predict(inputs, state)
    return {
        "nan_comes_out": not all(np.isfinite(value).all() for value in outputs.values())
    }
