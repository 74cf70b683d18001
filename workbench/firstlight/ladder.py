"""Measures each rung of the ladder on a compute unit: compiling, loading, values,
times, and Core ML's plan."""

from itertools import product

import numpy as np

from workbench.ane import placement
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import X
from workbench.check import device
from workbench.errors import InputError
from workbench.firstlight import rungs
from workbench.firstlight.job import Job
from workbench.firstlight.times import medians, time_calls
from workbench.runtime import Model, named
from workbench.sweep.plans import plan_job

REPEATED_CALLS = 10  # of a rung, for its time on a unit


def ladder_cases() -> list[dict]:
    """Every rung on CPU_ONLY and CPU_AND_NE, two of them on all units; then the plans,
    which may abort the process."""
    names = list(rungs.ladder())
    cases = [
        *product(names, ("CPU_ONLY", "CPU_AND_NE"), ("run",)),
        *product(("state", "range"), ("ALL", "CPU_AND_GPU"), ("run",)),
        *product(names, ("CPU_AND_NE",), ("plan",)),
    ]
    return [dict(zip(("rung", "units", "ask"), case)) for case in cases]


def measure_rung(case: dict, job: Job) -> dict:
    """The result of one shard on one compute unit: sizes, distances from the portable
    results, times; or Core ML's plan for it."""
    rung, units = rungs.ladder()[case["rung"]], case["units"]
    bundle, shard = rungs.opened(rung, job.folder)
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
        T = rungs.tokens_per_call(bundle)[0]
        about |= medians(time_calls(bundle, model, T, REPEATED_CALLS, 5.0))
        about |= _nan(bundle, model, T)
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
    ratios, finite, verdict = {"ratio_t1": [], "ratio_t": []}, True, "GREEN"
    for (T, output), result in zip(calls, expected, strict=True):
        ratio = result.ratio(output)
        ratios["ratio_t1" if T == 1 else "ratio_t"].append(ratio)
        finite = finite and bool(np.isfinite(output).all())
        if not (finite and ratio <= device.DEVICE_FACTOR):
            verdict = "RED"
    worst = {name: max(values, default=None) for name, values in ratios.items()}
    return worst | {"finite": finite, "verdict": verdict}


def _nan(bundle: Bundle, model: Model, T: int) -> dict:
    """Whether a NaN in the input gives a NaN in the output, as on the portable
    runtime."""
    inputs = rungs.call_inputs(bundle, model.shard, T, 0, 1)
    inputs[X].flat[0] = np.nan
    outputs = model.predict(inputs, rungs.fresh_state(model))
    finite = all(np.isfinite(value).all() for value in outputs.values())
    return {"nan_comes_out": not finite}
