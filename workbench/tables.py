"""Results as the small DataFrames that notebooks and reports show. Knows no files and draws nothing."""

from collections.abc import Iterable

import pandas as pd

from workbench.bundle import Bundle
from workbench.eval.gates import Gate
from workbench.eval.memory import kv_bytes


def interface(bundle: Bundle, shard: str | None = None) -> pd.DataFrame:
    """Inputs, states and outputs of one shard (default: the first): name, role, shape, dtype, bytes of one call at T = 1."""
    chosen = next(s for s in bundle.manifest.shards if shard in (None, s.name))
    rows = [("input", name, shape) for name, shape in chosen.inputs.items()]
    rows += [("state", name, state.shape) for name, state in chosen.states.items()]
    rows += [("output", name, shape) for name, shape in chosen.outputs.items()]
    frame = pd.DataFrame(rows, columns=["role", "name", "dims"])
    frame["shape"] = ["[" + ", ".join(map(str, dims)) + "]" for dims in frame["dims"]]
    frame["dtype"] = ["int32" if name == "pos" else "fp16" for name in frame["name"]]
    frame["bytes"] = [2 * pd.Series([1 if n == "T" else n for n in dims]).prod() for dims in frame.pop("dims")]
    return frame


def gates(found: Iterable[Gate]) -> pd.DataFrame:
    """One row per gate, RED first."""
    frame = pd.DataFrame([g.json() for g in found])
    order = frame["verdict"].map({"RED": 0, "GREEN": 1, "not_run": 2})
    return frame.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def cache_calls(records: list[dict], slots: int) -> pd.DataFrame:
    """Records of the write probe as `plots.cache_rows` wants them: one row per call, layer and slot."""
    calls = {point: f"T={point[0]}, pos={point[1]}" for point in dict.fromkeys((r["T"], r["pos"]) for r in records)}
    number = {point: i for i, point in enumerate(calls)}
    rows = [
        {"call": number[r["T"], r["pos"]], "T": r["T"], "slot": slot, "layer": r["layer"],
         "changed": slot in r["changed"], "expected": slot in r["expected"]}
        for r in records for slot in range(slots)
    ]  # fmt: skip
    return pd.DataFrame(rows).groupby(["call", "T", "slot", "layer"], as_index=False).agg({"changed": "any", "expected": "any"})


def cache_sizes(cases: dict[str, dict]) -> pd.DataFrame:
    """Cache bytes of several settings, as `plots.memory_bar` wants them; each case holds `kv_bytes`'s keywords."""
    return pd.DataFrame([{"setting": name, "part": "KV cache", "bytes": kv_bytes(**case)} for name, case in cases.items()])


def worst(rows: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The isolated fidelity rows furthest from the golden."""
    judged = rows[(rows["mode"] == "isolated") & rows["tensor"].isin(["update", "k", "v"])]
    columns = ["layer", "position", "T", "tensor", "cosine", "psnr_db", "max_abs", "finite"]
    return judged.sort_values("cosine", na_position="first")[columns].head(count).reset_index(drop=True)
