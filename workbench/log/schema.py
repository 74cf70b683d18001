"""The schemas of the log's tables, their allowed words, and the migrations of older
files.

Units stand in the names (``_ms``, ``_db``, ``_bytes``) or, for ``samples.value``, in
the column ``unit``. This module imports nothing of the log and handles neither files
nor DataFrames."""

import json
from collections.abc import Callable

import pyarrow as pa

_TYPES = {
    "text": pa.string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
}


def _schema(lines: str) -> pa.Schema:
    """Schema from lines of ``type: names``; a name that ends in ``!`` is never null."""
    fields = []
    for line in lines.strip().splitlines():
        kind, names = line.split(":")
        for name in names.split():
            nullable = not name.endswith("!")
            fields.append(pa.field(name.rstrip("!"), _TYPES[kind.strip()], nullable))
    return pa.schema(fields)


SCHEMAS: dict[str, pa.Schema] = {
    # One row per run: bundle, machine, settings and status. Runs of one `setting` are
    # its repetitions, each in a process of its own; `round` numbers them. A column
    # `…_before` is the machine's state before the first measurement, the column without
    # it the state when the row was written (see `log.host_state`).
    "runs": _schema("""
        text: run_id!
        time: time
        text: experiment command status! reason verdict
        text: config checkpoint checkpoint_hash bundle bundle_hash family
        text: commit versions platform chip model os_build
        int:  memory_bytes cores performance_cores efficiency_cores
        bool: virtual_machine rosetta low_power
        text: power_source power_source_before thermal thermal_before
        text: thermal_pressure thermal_pressure_before
        int:  swap_bytes swap_bytes_before footprint_bytes
        text: runtime precision compute_units hints placement placement_source
        float: ane_ops_share ane_cost_share ane_joules ane_active_ms
        text: setting
        int:  round min_tokens
        float: min_seconds
        bool: fast
        int:  threads T depth n_gen
        int:  max_seq_len t_max batch layers_per_shard bundle_bytes
        text: compress kv_write layout states moe t sliding functions target program_dtype
        bool: undo state_pair
    """),
    # Raw measurements, warm-ups included: `order` is the place in the whole run,
    # `repetition` the place in its setting. Of calls and their parts, `cpu_ms` is the
    # calling thread's CPU time, `native_ms` Core ML's own (null elsewhere); `elapsed_s`
    # is counted from the first call that was timed.
    "samples": _schema("""
        text:  run_id!
        int:   repetition order
        text:  phase! shard
        int:   depth n_prompt n_gen T
        float: elapsed_s value cpu_ms native_ms
        text:  unit!
        bool:  warmup
    """),
    # Median and median absolute deviation of n timings of one layer.
    "layers": _schema("""
        text:  run_id!
        int:   layer!
        text:  shard
        int:   T depth
        float: layer_ms mad_ms cpu_ms native_ms
        int:   n
    """),
    # One tensor of one layer at one token position against its golden.
    "fidelity": _schema("""
        text:  run_id! shard
        int:   layer position T
        text:  tensor! mode! runtime precision
        float: cosine psnr_db max_abs error budget
        bool:  finite routing_tie
    """),
    # A figure (`plot` names the function that draws it) or a table of a write-up, with
    # the data it shows.
    "exhibits": _schema("""
        text: run_id! name! caption! plot data! options!
    """),
}

JSON_COLUMNS = {"config", "versions", "hints", "placement", "data", "options"}

ALLOWED = {
    "status": {"ok", "invalid", "failed", "skipped"},
    "verdict": {"GREEN", "RED", "not_run"},
    "placement_source": {"measured", "predicted", "simulated"},
    "tensor": {"hidden", "update", "k", "v", "logits"},
    "mode": {"isolated", "chained"},
}


def _settings_of_config(runs: pa.Table) -> pa.Table:
    """`runs` from version 1 to 2: settings that were only in a sweep's `config` become
    columns."""
    for part, names in (("export", "t sliding"), ("run", "threads depth n_gen")):
        options = _of_config(runs, part)
        for name in names.split():
            values = pa.array([row.get(name) for row in options])
            runs = runs.append_column(name, values)
    hints = []
    for row, runtime in zip(options, runs["runtime"].to_pylist()):
        text = None
        if row and runtime == "coreml":
            text = json.dumps(row.get("hints", {}), sort_keys=True)
        hints.append(text)
    return runs.append_column("hints", pa.array(hints, pa.string()))


def _of_config(runs: pa.Table, part: str) -> list[dict]:
    """A part of each row's `config`, empty where there is none."""
    configs = [json.loads(text or "{}") for text in runs["config"].to_pylist()]
    return [config.get(part) or {} for config in configs]


def _state_before_of_config(runs: pa.Table) -> pa.Table:
    """`runs` from version 2 to 3: the machine's state before the run, in a sweep's
    `config`, becomes columns."""
    before = _of_config(runs, "before")
    for name in ("thermal", "power_source"):
        values = pa.array([state.get(name) for state in before], pa.string())
        runs = runs.append_column(f"{name}_before", values)
    return runs


# Table → functions; the i-th lifts an Arrow table from version i+1 to i+2. A new
# nullable column needs none: files that lack it read as null there.
MIGRATIONS: dict[str, tuple[Callable[[pa.Table], pa.Table], ...]] = {
    table: () for table in SCHEMAS
}
MIGRATIONS["runs"] = (_settings_of_config, _state_before_of_config)


def version(table: str) -> int:
    """The table's current schema version: one more than the number of its
    migrations."""
    return 1 + len(MIGRATIONS[table])
