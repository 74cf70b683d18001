"""Results as small DataFrames for notebooks and reports."""

from collections.abc import Iterable
from math import prod

import pandas as pd
from pandas.io.formats.style import Styler

from workbench.ane.memory import Budget
from workbench.ane.placement import Placement
from workbench.bundle import Bundle
from workbench.check.gates import Gate

_SIGNS = {
    "GREEN": "✓\N{NO-BREAK SPACE}GREEN",
    "RED": "✗\N{NO-BREAK SPACE}RED",
    "not_run": "–\N{NO-BREAK SPACE}not_run",
}


def shard_interface(bundle: Bundle) -> pd.DataFrame:
    """Inputs, states and outputs of the first shard: role, name, shape, dtype, and
    bytes of a call at T = 1."""
    shard = bundle.manifest.shards[0]
    states = {name: state.shape for name, state in shard.states.items()}
    roles = {"input": shard.inputs, "state": states, "output": shard.outputs}
    rows = []
    for role, shapes in roles.items():
        for name, dims in shapes.items():
            shape = f"[{', '.join(map(str, dims))}]"
            dtype = {"pos": "int32"}.get(name, "fp16")
            size = 2 * prod(n for n in dims if n != "T")
            rows.append((role, name, shape, dtype, size))
    return pd.DataFrame(rows, columns=["role", "name", "shape", "dtype", "bytes"])


def styled(frame: pd.DataFrame) -> Styler:
    """A table for display in a notebook: text is left-aligned and wrapped, numbers have
    six digits, nulls are –, verdicts have a sign."""
    flat = frame.reset_index(drop=list(frame.index.names) == [None])
    kinds = pd.api.types
    floats = [c for c in flat if kinds.is_float_dtype(flat[c])]
    texts = [c for c in flat if not kinds.is_numeric_dtype(flat[c])]
    look = flat.style.format(lambda v: _SIGNS.get(str(v), v), na_rep="–", subset=texts)
    look = look.format("{:.6g}", subset=floats, na_rep="–").hide(axis="index")
    wrapped = {"text-align": "left", "white-space": "normal", "max-width": "44em"}
    look = look.set_properties(texts, **wrapped)
    return look.set_table_styles([{"selector": "th", "props": "text-align: left"}])


def gates(results: Iterable[Gate]) -> pd.DataFrame:
    """One row per gate, RED first."""
    order = ["RED", "GREEN", "not_run"]
    ranked = sorted(results, key=lambda gate: order.index(gate.verdict))
    return pd.DataFrame([gate.json() for gate in ranked])


def budget(sizes: Budget, setting: str) -> pd.DataFrame:
    """Bytes by part, as `plots.memory_bar` draws them."""
    parts = {
        "weights": sizes.weights,
        "KV cache": sizes.kv,
        "side states": sizes.side_states,
        "embedding": sizes.embedding,
        "buffers": sizes.buffers,
    }
    rows = pd.DataFrame(parts.items(), columns=["part", "bytes"])
    rows.insert(0, "setting", setting)
    return rows


def rules_table(placements: list[Placement]) -> pd.DataFrame:
    """The lint rules that a bundle's shards break, one row each: id, confidence,
    effect, statement, advice, number of shards."""
    rows = []
    for p in placements:
        rows += [rule | {"shard": p.shard} for rule in p.rules]
    by = ["id", "confidence", "effect", "says", "advice"]
    frame = pd.DataFrame(rows, columns=["shard", *by])
    return frame.groupby(by)["shard"].nunique().reset_index(name="shards")


def listing(values: dict) -> pd.DataFrame:
    """A mapping as a two-column table; each item of a list has a row."""
    table = pd.DataFrame(values.items(), columns=["", "value"])
    return table.explode("value").set_index("")


def verdict_conclusion(bundle: Bundle | None, results: list[Gate]) -> str:
    """The verdict in words: the bundle (None: the runs of the figures), the failed
    gates with their reasons, the gates that did not run."""
    red = [f"- {g.name}: {g.reason}" for g in results if g.verdict == "RED"]
    idle = []
    for g in results:
        if g.verdict == "not_run":
            idle.append(f"- not run: {g.name}, {g.reason}")
    what = "every run shown"
    if bundle:
        m = bundle.manifest
        settings = f"{m.options.compress}, max_seq_len {m.options.max_seq_len}"
        what = f"{m.checkpoint['name']} ({m.family}, {m.dims.L} layers, {settings})"
    lines = [f"GREEN: {what} passes all {len(results) - len(idle)} gates that ran."]
    if red:
        lines = [f"RED: {what} fails {len(red)} of {len(results)} gates."]
    return "\n".join([*lines, *red, *idle])
