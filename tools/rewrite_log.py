"""Rewrites a log of an older schema once, in place:

    python tools/rewrite_log.py [LOG]

The columns that `log.record` writes today are computed from those of the older rows.
Values that have no column any more go into `config` under the key `older`, so that no
measurement is lost. Files of the current version get the columns that they lack,
as nulls, so that readers that take the schema of one file find all columns; files that
lack none are left as they are. A rewritten file replaces the old one only when it is
whole."""

import hashlib
import json
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from workbench.bundle import Options
from workbench.log import SCHEMAS, SHIPPED, default_root, parquet, store
from workbench.log.machine import machine_name, software_name
from workbench.log.runs import scalars
from workbench.log.schema import VERSION
from workbench.sweep import identity

DEFAULTS = Options().model_dump(mode="json") | {
    "compress": "fp16",
    "states": "separate",
    "undo": False,
    "state_pair": False,
    "target": "coreml",
    "program_dtype": "fp16",
}
CALLS = {"t_max": 4, "t": "range", "functions": []}
"""The options that stood in place of `tokens` up to version 4, and their defaults."""
PLACES = {"run": "", "export": "", "before": "_before"}
"""Parts of the config of older rows whose keys became columns, and their endings."""


def rewrite(root: Path) -> int:
    """Rewrites the log at `root` and its shipped part; returns the number of files."""
    return sum(
        rewrite_file(root, table, path)
        for table in SCHEMAS
        for path in sorted(root.glob(f"{table}/*.parquet"))
    )


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


def tokens(row: dict) -> str | None:
    """The option `tokens` of a row that has its parts."""
    functions = json.loads(row.pop("functions", None) or "[]")
    most, t = row.pop("t_max", None), row.pop("t", None)
    if functions:
        return ",".join(map(str, functions))
    if most is None:
        return None
    return str(int(most)) if t == "fixed" or most == 1 else f"1-{int(most)}"


def from_version_4(row: dict) -> dict:
    """A row of version 4 with `tokens` in place of its parts, and its hashes."""
    row = dict.fromkeys(SCHEMAS["runs"].names) | row
    old = options_hashed(row, DEFAULTS | CALLS)
    row["tokens"] = tokens(row)
    new = options_hashed(row)
    counts = {name: row.get(name) for name in identity.COUNTS}
    if row["setting"]:
        for contents in (row["checkpoint_hash"], row["bundle_hash"]):
            if identity.setting_hash(contents, old, row, counts) == row["setting"]:
                row["setting"] = identity.setting_hash(contents, new, row, counts)
                break
        else:
            raise ValueError(f"run {row['run_id']}: a setting of no known options")
    if row["values"]:
        row["values"] = identity.values_hash(row["checkpoint_hash"], new, row)
    return row


def from_version_1_to_3(row: dict, tables: dict[str, pd.DataFrame]) -> dict:
    """A row of `runs` of version 1, 2 or 3 in the columns of today."""
    config = json.loads(row.get("config") or "{}")
    row = dict.fromkeys(SCHEMAS["runs"].names) | row
    for part, ending in PLACES.items():
        for key, value in (config.get(part) or {}).items():
            if row.get(key + ending) is None and not isinstance(value, list | dict):
                row[key + ending] = value
    row["tokens"] = tokens(row)
    if row["runtime"] == "coreml" and row.get("hints") is None:
        hints = (config.get("run") or {}).get("hints") or {}
        row["hints"] = json.dumps(hints, sort_keys=True)
    if row["runtime"] == "portable":
        row |= {"hints": None, "compute_units": None}
    elif row["runtime"]:
        row |= {"precision": None, "fast": None}
    versions = json.loads(row["versions"] or "{}")
    memory, cores = row.get("memory_bytes"), row.get("cores")
    row["machine"] = machine_name(row.get("chip"), row.get("model"), memory, cores)
    row["software"] = software_name(row.get("os_build"), versions)
    row |= scalars(**tables) | {"kl_mean": kl_mean(config)}
    if row["checkpoint_hash"] and row["runtime"]:
        row["values"] = identity.values_hash(
            row["checkpoint_hash"], options_hashed(row), row
        )
        row["setting"] = row.get("setting") and setting(row, config)
    if prompt := (config.get("cell") or "").split("-")[2:]:
        row["prompt"] = prompt[0]
    return row


def to_present_columns(row: dict) -> dict:
    """A row without the columns that are no more, whose values go to its config."""
    config, names = json.loads(row["config"] or "{}"), SCHEMAS["runs"].names
    older = {k: v for k, v in row.items() if v is not None and k not in names}
    older = {k: v for k, v in older.items() if k not in (config.get("run") or {})}
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


def setting(row: dict, config: dict) -> str:
    contents = row["checkpoint_hash"]
    key = [contents, config.get("export"), config.get("run")]
    text = json.dumps(key, sort_keys=True)
    # the old hash began with the identity of a finished bundle in place of this
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
