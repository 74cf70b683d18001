"""The schemas of the log's tables, and the words that a column allows.

Names contain their unit (``_ms``, ``_db``, ``_bytes``); ``samples.value`` has the
column ``unit``.

To add a column, write its name into a line of its type in `SCHEMAS`; if it takes a JSON
object, into `JSON_COLUMNS`; if it takes fixed words, into `ALLOWED`; if it says what was
run, into `SETTINGS` (docs/extend.md has the writers and readers). A new column needs no
new version: in files without it, it reads as null. `tools/rewrite_log.py` adds it to such
files, for readers other than `load`."""

import pyarrow as pa

VERSION = 5
"""The version of all tables. Files of another version are refused (see
`tools/rewrite_log.py`)."""

_TYPES = {
    "text": pa.string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
}


def _schema(lines: str) -> pa.Schema:
    """Schema from lines of ``type: names``; a name that ends in ``!`` is never null, and a
    line that begins with ``#`` is a comment."""
    fields = []
    for line in lines.strip().splitlines():
        if line.strip().startswith("#"):
            continue
        kind, names = line.split(":")
        for name in names.split():
            nullable = not name.endswith("!")
            fields.append(pa.field(name.rstrip("!"), _TYPES[kind.strip()], nullable))
    return pa.schema(fields)


SCHEMAS: dict[str, pa.Schema] = {
    # One row per run, with the machine's state at the moment the row was written.
    "runs": _schema("""
        text:  run_id!
        time:  time
        # verdict is on the export, quality on its cost (older rows: see `verdicts`)
        text:  experiment command status! reason verdict quality config
        # prompt names the token ids of a validation
        text:  checkpoint checkpoint_hash bundle bundle_hash family prompt
        text:  commit versions platform machine software
        text:  power_source thermal_pressure
        bool:  low_power
        int:   swap_bytes
        # of a run that measured times: the processes that ran or waited to run, averaged
        # over the minute before the first and after the last call; and the share of
        # processor time between them that a hypervisor gave to other machines (null: not
        # on Linux)
        float: load_start load_end steal
        # hashes of everything that decides what a run computes on any machine, and of
        # everything that decides its times on one (see `sweep.identity`)
        text:  values setting
        # runs of a setting, each in a process of its own, are numbered by it
        int:   round
        text:  runtime precision reads compute_units hints
        bool:  fast
        int:   threads T depth n_gen min_tokens
        float: min_seconds
        int:   max_seq_len batch layers_per_shard bundle_bytes
        text:  compress kv_write layout moe tokens sliding target
        text:  placement placement_source
        # cold_s and warm_s are of older rows
        float: ane_ops_share ane_joules tokens_per_s call_ms call_p90_ms cold_s warm_s
        float: worst_update worst_cosine kl_mean
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
    # One tensor of one layer at one token position against its golden. `definition` is
    # the version of what the columns mean (see `definitions`; null: of older rows). Rows
    # with one `digest` have equal values, bit for bit.
    "fidelity": _schema("""
        text:  run_id! shard
        int:   layer position T
        text:  tensor! mode! runtime precision
        float: cosine psnr_db max_abs error budget ratio
        bool:  finite routing_tie
        int:   definition digest
    """),
}

LOGITS = -1
"""The column `layer` of `fidelity` for logits."""

SETTINGS = """checkpoint compress max_seq_len T depth runtime batch layers_per_shard
kv_write layout moe tokens sliding target precision compute_units hints fast reads n_gen
threads min_tokens min_seconds command experiment machine software""".split()
"""Columns of `runs` for the setting and the place of a run; those by which runs are
mostly told apart come first. A new option of an export or of a run belongs here
(tests/sweep/test_grid_options.py). The column `setting` is a hash and not one of them."""

JSON_COLUMNS = {"config", "versions", "hints", "placement"}
"""Text columns whose text is a JSON object."""

ALLOWED = {
    "status": {"ok", "invalid", "failed", "skipped"},
    "verdict": {"GREEN", "RED", "not_run"},
    "quality": {"WITHIN", "OVER", "not_run", "export or limit"},
    "placement_source": {"measured", "predicted", "simulated"},
    "tensor": {"hidden", "update", "k", "v", "logits"},
    "mode": {"isolated", "chained"},
}
"""The words that a text column allows, in every table that has the column."""
