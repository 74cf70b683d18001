"""Times of calls of one shard, by its number of layers and in a long series; each
setting is a run of the log."""

import time
from itertools import product

import pandas as pd

from workbench.ane import placement
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError
from workbench.firstlight import EXPERIMENT, rungs
from workbench.firstlight.job import Job
from workbench.runtime import Model, named
from workbench.sweep import ioreport, plans, runs

CALLS, WARMUP_CALLS = 300, 3
SECONDS_PER_TIMING = 8.0  # limit of a case of the stage `timing`
SOAK_CALLS, SOAK_SECONDS = 400, 30.0


def time_calls(
    bundle: Bundle, model: Model, T: int, calls: int, seconds: float
) -> pd.DataFrame:
    """Times of at most `calls` repeated calls of T tokens in at most `seconds`, without
    warm-ups.

    Returns:
        wall_ms, native_ms (Core ML's own), cpu_ms (of this thread), elapsed_s (from the
        start of the first call to the end of each).
    """
    state = rungs.fresh_state(model)
    room = bundle.manifest.options.max_seq_len // T
    cycle = []
    for i in range(min(room, calls)):
        cycle.append(rungs.call_inputs(bundle, model.shard, T, i * T, i + 1))
    for call in range(-WARMUP_CALLS, 0):
        model.predict(cycle[call % len(cycle)], state)
    rows = []
    begin = time.perf_counter()
    for call in range(calls):
        start = time.perf_counter()
        cpu = time.thread_time()
        model.predict(cycle[call % len(cycle)], state)
        end = time.perf_counter()
        cpu_ms = (time.thread_time() - cpu) * 1e3
        wall_ms = (end - start) * 1e3
        rows.append((wall_ms, model.last_native_ms, cpu_ms, end - begin))
        if end - begin > seconds:
            break
    frame = pd.DataFrame(rows, columns=["wall_ms", "native_ms", "cpu_ms", "elapsed_s"])
    return frame.astype(float)


def timing_cases() -> list[dict]:
    cases = product(("CPU_AND_NE", "CPU_ONLY"), (1, 2, 4), (1, 4))
    return [dict(zip(("units", "layers", "T"), case)) for case in cases]


def measure_timing(case: dict, job: Job) -> dict:
    """Times and Neural Engine energy of calls of one shard of 1, 2 or 4 layers with the
    dimensions of a 0.5B model."""
    source = rungs.seeded_checkpoint("half_b", job.folder, num_hidden_layers=4)
    shape = {"t": "fixed", "t_max": case["T"], "layers_per_shard": case["layers"]}
    bundle = rungs.exported(source, job.folder, compress="int8-tensor", **shape)
    shard = bundle.shards("layers")[0]
    model = job.model(bundle, shard, case["units"])
    samples, about = _metered(bundle, model, case["T"], CALLS, SECONDS_PER_TIMING)
    return _timed(case, job, bundle, shard, samples, about) | _loading(model)


def soak_cases() -> list[dict]:
    return [{"units": "CPU_AND_NE", "rung": "large-lut4"}]


def measure_soak(case: dict, job: Job) -> dict:
    """Times of a compressed shard with state in back-to-back calls, with the medians of
    the first and the last quarter."""
    bundle, shard = rungs.opened(rungs.ladder()[case["rung"]], job.folder)
    model = job.model(bundle, shard, case["units"])
    samples, about = _metered(bundle, model, 1, SOAK_CALLS, SOAK_SECONDS)
    quarter = max(1, len(samples) // 4)
    first = samples["wall_ms"][:quarter].median()
    last = samples["wall_ms"][-quarter:].median()
    row = _timed(case | {"T": 1}, job, bundle, shard, samples, about) | _loading(model)
    return row | {"first_quarter_ms": first, "last_quarter_ms": last}


def _metered(
    bundle: Bundle, model: Model, T: int, calls: int, seconds: float
) -> tuple[pd.DataFrame, dict]:
    """`time_calls`, and columns of `runs`: the machine's state before, the Neural
    Engine's energy and active time, and the `reason` if one of these is None."""
    before = runs.state_before()
    with ioreport.metered() as energy:
        samples = time_calls(bundle, model, T, calls, seconds)
    return samples, before | energy


def _loading(model: Model) -> dict:
    return {f"{name}_ms": ms for name, ms in model.loading_ms.items()}


def _timed(
    case: dict,
    job: Job,
    bundle: Bundle,
    shard: Shard,
    samples: pd.DataFrame,
    about: dict,
) -> dict:
    """Logs samples as a run and returns a row of their medians; `about` is from
    `_metered`."""
    reason, units = about.pop("reason"), case["units"]
    columns, note = _planned(job, bundle, shard, units)
    config = {"case": case} | note
    if reason:
        config["energy"] = f"not measured: {reason}"
    calls = samples.rename(columns={"wall_ms": "value"}).assign(
        phase="call",
        order=range(len(samples)),
        shard=shard.name,
        repetition=0,
        T=case["T"],
        unit="ms",
        warmup=False,
    )
    row = runs.describe(bundle) | about | columns | {"config": config}
    row |= runs.executed(job.runtime, "declared", False, units, {})
    row |= {"command": "first-light times", "T": case["T"]}
    run_id = runs.record_run(EXPERIMENT, row, root=job.folder / "log", samples=calls)
    energy = runs.pick(about, "ane_joules", "ane_active_ms")
    return medians(samples) | {
        "wall_p90_ms": float(samples["wall_ms"].quantile(0.9)),
        "calls": len(samples),
        "run_id": run_id,
        "ane_ops_share": columns.get("ane_ops_share"),
        "invalid": columns.get("reason"),
        **energy,
        "energy_reason": reason,
    }


def _planned(job: Job, bundle: Bundle, shard: Shard, units: str) -> tuple[dict, dict]:
    """The columns of `runs` from a shard's compute plan, made in a child process; and
    the reason if there is no plan."""
    runtime, fault = named(job.runtime)
    if units != "CPU_AND_NE":
        return {}, {}
    try:
        planned = plans.planned_placement(bundle, [shard], runtime, units, fault, 30)
    except InputError as problem:
        return {}, {"placement": str(problem)}
    columns = placement.columns(planned)
    if reason := placement.off_engine(planned, units):
        columns |= {"status": "invalid", "reason": reason}
    return columns, {}


def medians(samples: pd.DataFrame) -> dict[str, float | None]:
    """The medians of `time_calls` by column; None if all values are null."""
    values = dict.fromkeys(("wall_ms", "native_ms", "cpu_ms"))
    for name in values:
        if samples[name].notna().any():
            values[name] = float(samples[name].median())
    return values
