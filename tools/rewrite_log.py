"""Rewrites a log of an older schema once, in place:

    python tools/rewrite_log.py [LOG]

The columns that `log.record` writes today are computed from those of the older rows.
Values that have no column any more go into `config` under the key `older`, so that no
measurement is lost. Files of the current version get the columns that they lack,
as nulls, so that readers that take the schema of one file find all columns; files that
lack none are left as they are. A rewritten file replaces the old one only when it is
whole.

Names that only older rows have:

- Options `t_max`, `t` and `functions`, up to version 4: today's `tokens`. `t` is
  `range` or `fixed`; 4, `range` is `1-4`; 4, `fixed` is `4`; functions [1, 64] are `1,64`.
- Option `states`, up to version 3: `packed` held K and V in one state; today they are
  always separate.
- Options `undo` and `state_pair`, up to version 3, of layers with a recurrent state:
  whether tokens could be taken back from it, and whether a second state held the
  remainder of its rounding.
- Option `program_dtype`, up to version 3: today the target decides it.
- Key `price` of `config`: what compression costs, today `cost`."""

import hashlib
import json
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from workbench.bundle import Options
from workbench.log import SCHEMAS, SHIPPED, default_root, parquet, store
from workbench.log.machine import machine_name, software_name
from workbench.log.runs import summary_columns
from workbench.log.schema import VERSION
from workbench.sweep import identity

# option, of today or of an older version → the value that rows leave out of the hashes
DEFAULTS = Options().model_dump(mode="json") | {
    "compress": "fp16",
    "states": "separate",
    "undo": False,
    "state_pair": False,
    "target": "coreml",
    "program_dtype": "fp16",
}
TOKENS_PARTS = {"t_max": 4, "t": "range", "functions": []}
"""The options that stood in place of `tokens` up to version 4, and their defaults."""
CONFIG_PARTS = {"run": "", "export": "", "before": "_before"}
"""Parts of the config of older rows whose keys became columns → what the columns' names end
with."""


def rewrite(root: Path) -> int:
    """Rewrites the log at `root`; returns the number of files that needed it."""
    count = 0
    for table in SCHEMAS:
        for path in sorted(root.glob(f"{table}/*.parquet")):
            if rewrite_file(root, table, path):
                count += 1
    return count


def rewrite_file(root: Path, table: str, path: Path) -> bool:
    """Rewrites one file of the log at `root`; returns whether it needed that."""
    file = pq.read_table(path)
    version = int(file.schema.metadata[parquet.VERSION_KEY])
    if version == VERSION:
        if file.schema.names == SCHEMAS[table].names:
            return False
        parquet.write_rows(path, parquet.with_all_columns(table, file))
        return True
    rows = store.to_frame(file)
    if table == "runs":
        row = store.plain(rows).to_dict("records")[0]
        if version < 4:
            row = from_version_1_to_3(row, tables_of(root, path.name))
        else:
            row = from_version_4(row)
        rows = pd.DataFrame([to_present_columns(row)])
    parquet.write_rows(path, store.to_arrow(table, rows))
    return True


def tables_of(root: Path, name: str) -> dict[str, pd.DataFrame]:
    """The samples and fidelity of a run."""
    tables = {}
    for table in ("samples", "fidelity"):
        if (root / table / name).is_file():
            tables[table] = pd.read_parquet(root / table / name)
    return tables


def pop_tokens(row: dict) -> str | None:
    """Removes the parts of the option `tokens` from a row, and returns the option."""
    functions = json.loads(row.pop("functions", None) or "[]")
    t_max, t = row.pop("t_max", None), row.pop("t", None)
    if functions:
        return ",".join(map(str, functions))
    if t_max is None:
        return None
    has_one_size = t == "fixed" or t_max == 1
    return str(int(t_max)) if has_one_size else f"1-{int(t_max)}"


def from_version_4(row: dict) -> dict:
    """A row of version 4 with `tokens` in place of its parts, and its hashes."""
    row = dict.fromkeys(SCHEMAS["runs"].names) | row
    # before `pop_tokens` removes the options that the row's hash was made of
    options_before = options_hashed(row, DEFAULTS | TOKENS_PARTS)
    row["tokens"] = pop_tokens(row)
    options_now = options_hashed(row)
    if row["setting"]:
        row["setting"] = setting_of_version_4(row, options_before, options_now)
    if row["values"]:
        row["values"] = identity.values_hash(row["checkpoint_hash"], options_now, row)
    return row


def setting_of_version_4(row: dict, options_before: dict, options_now: dict) -> str:
    """The hash `setting` of a row of version 4 for its new options.

    Args:
        options_before: the options that entered the hash, with the parts of `tokens`.
        options_now: those that enter it today, with `tokens`.

    Raises:
        ValueError: the row's hash is not that of its old options.
    """
    counts = {name: row.get(name) for name in identity.COUNTS}
    # the hash began with that of the checkpoint or of a finished bundle
    for contents in (row["checkpoint_hash"], row["bundle_hash"]):
        hash_before = identity.setting_hash(contents, options_before, row, counts)
        if hash_before == row["setting"]:
            return identity.setting_hash(contents, options_now, row, counts)
    raise ValueError(f"run {row['run_id']}: a setting of no known options")


def from_version_1_to_3(row: dict, tables: dict[str, pd.DataFrame]) -> dict:
    """A row of `runs` of version 1, 2 or 3 in the columns of today."""
    config = json.loads(row.get("config") or "{}")
    row = dict.fromkeys(SCHEMAS["runs"].names) | row
    for part, ending in CONFIG_PARTS.items():
        for key, value in (config.get(part) or {}).items():
            if row.get(key + ending) is None and not isinstance(value, list | dict):
                row[key + ending] = value
    # the hashes below are made of today's options, `tokens` among them
    row["tokens"] = pop_tokens(row)
    row |= runtime_columns(row, config)
    versions = json.loads(row["versions"] or "{}")
    memory, cores = row.get("memory_bytes"), row.get("cores")
    row["machine"] = machine_name(row.get("chip"), row.get("model"), memory, cores)
    row["software"] = software_name(row.get("os_build"), versions)
    row |= summary_columns(**tables) | {"kl_mean": kl_mean(config)}
    if row["checkpoint_hash"] and row["runtime"]:
        row["values"] = identity.values_hash(
            row["checkpoint_hash"], options_hashed(row), row
        )
        if row.get("setting"):
            row["setting"] = setting_of_version_1_to_3(row, config)
    if prompt := (config.get("cell") or "").split("-")[2:]:
        row["prompt"] = prompt[0]
    return row


def runtime_columns(row: dict, config: dict) -> dict:
    """The columns of a runtime's settings, which are null where they are another runtime's."""
    if row["runtime"] == "portable":
        return {"hints": None, "compute_units": None}
    columns = {}
    if row["runtime"] == "coreml" and row.get("hints") is None:
        hints = (config.get("run") or {}).get("hints") or {}
        columns["hints"] = json.dumps(hints, sort_keys=True)
    if row["runtime"]:
        columns |= {"precision": None, "fast": None}
    return columns


def to_present_columns(row: dict) -> dict:
    """A row without the columns that are no more, whose values go to its config."""
    config = json.loads(row["config"] or "{}")
    names = SCHEMAS["runs"].names
    in_config = config.get("run") or {}
    older = {}
    for name, value in row.items():
        if value is not None and name not in names and name not in in_config:
            older[name] = value
    if older:
        older = config.get("older", {}) | older
        row["config"] = json.dumps(config | {"older": older}, sort_keys=True)
    return {name: row[name] for name in names}


def options_hashed(row: dict, defaults: dict = DEFAULTS) -> dict:
    """`identity.non_default_options` of the options in a row's columns."""
    options = {}
    for name, default in defaults.items():
        value = row.get(name)
        if name == "functions" and isinstance(value, str):
            value = json.loads(value)
        if value is not None and value != default:
            options[name] = value
    return options


def setting_of_version_1_to_3(row: dict, config: dict) -> str:
    """The hash `setting` of a row of version 1, 2 or 3 as it is computed today."""
    contents = row["checkpoint_hash"]
    key = [contents, config.get("export"), config.get("run")]
    text = json.dumps(key, sort_keys=True)
    # a setting of a finished bundle began with the bundle's identity in place of this
    if hashlib.sha256(text.encode()).hexdigest()[:16] != row["setting"]:
        contents = row["bundle_hash"]
    counts = {name: row.get(name) for name in identity.COUNTS}
    return identity.setting_hash(contents, options_hashed(row), row, counts)


def kl_mean(config: dict) -> float | None:
    """The mean KL in nats that a run's validation measured."""
    gates = {gate["name"]: gate.get("value") for gate in config.get("gates", [])}
    price = (config.get("price") or {}).get("kl") or {}
    return price.get("mean", gates.get("max_kl"))


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default_root()
    for folder in (root, root / SHIPPED):
        print(f"{folder}: {rewrite(folder)} files rewritten")
