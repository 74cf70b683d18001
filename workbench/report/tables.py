"""Results as the small DataFrames that notebooks and reports show. Knows no files and draws nothing."""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
from pandas.io.formats.style import Styler

from workbench.ane import roofline
from workbench.ane.memory import Budget, kv_bytes
from workbench.ane.placement import Placement
from workbench.bundle import Bundle, Options
from workbench.check.gates import Gate
from workbench.log.machine import only_machine

_SIGNS = {"GREEN": "✓\N{NO-BREAK SPACE}GREEN", "RED": "✗\N{NO-BREAK SPACE}RED", "not_run": "–\N{NO-BREAK SPACE}not_run"}


def shard_interface(bundle: Bundle, shard: str | None = None) -> pd.DataFrame:
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


def shown(frame: pd.DataFrame) -> Styler:
    """A table as notebooks show it: whole sentences, text to the left, six digits, gaps as –, verdicts with a sign."""
    flat = (frame if frame.index.name is None and frame.index.nlevels == 1 else frame.reset_index()).reset_index(drop=True)
    floats = [c for c in flat.columns if pd.api.types.is_float_dtype(flat[c])]
    texts = [c for c in flat.columns if not pd.api.types.is_numeric_dtype(flat[c])]
    look = flat.style.format(lambda v: _SIGNS.get(str(v), v), na_rep="–", subset=texts)
    look = look.format("{:.6g}", subset=floats, na_rep="–").hide(axis="index")
    look = look.set_properties(texts, **{"text-align": "left", "white-space": "normal", "max-width": "44em"})
    return look.set_table_styles([{"selector": "th", "props": "text-align: left"}])


def gates(found: Iterable[Gate]) -> pd.DataFrame:
    """One row per gate, RED first."""
    frame = pd.DataFrame([g.json() for g in found])
    order = frame["verdict"].map({"RED": 0, "GREEN": 1, "not_run": 2})
    return frame.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def cache_calls(records: list[dict], slots: int) -> pd.DataFrame:
    """Records of the write probe as `plots.cache_rows` wants them: one row per call, layer and slot."""
    number = {point: i for i, point in enumerate(dict.fromkeys((r["T"], r["pos"]) for r in records))}
    rows = [{"call": number[r["T"], r["pos"]], "T": r["T"], "slot": slot, "layer": r["layer"],
             "changed": slot in r["changed"], "expected": slot in r["expected"]}
            for r in records for slot in range(slots)]  # fmt: skip
    return pd.DataFrame(rows).groupby(["call", "T", "slot", "layer"], as_index=False).agg({"changed": "any", "expected": "any"})


def cache_sizes(cases: dict[str, dict]) -> pd.DataFrame:
    """Cache bytes of several settings, as `plots.memory_bar` wants them; each case holds `kv_bytes`'s keywords."""
    return pd.DataFrame([{"setting": name, "part": "KV cache", "bytes": kv_bytes(**case)} for name, case in cases.items()])


def budget(found: Budget, setting: str) -> pd.DataFrame:
    """Bytes by part, as `plots.memory_bar` wants them."""
    names = {"weights": "weights", "kv": "KV cache", "side_states": "side states", "embedding": "embedding", "buffers": "buffers"}
    return pd.DataFrame([{"setting": setting, "part": name, "bytes": getattr(found, part)} for part, name in names.items()])


def rules_table(placements: list[Placement]) -> pd.DataFrame:
    """The lint rules that a bundle's shards break, each once: id, confidence, effect, shards, what it says, advice."""
    rows = [{"shard": p.shard, **rule} for p in placements for rule in p.rules]
    frame = pd.DataFrame(rows, columns=["id", "confidence", "effect", "shard", "says", "advice"])
    return (
        frame.groupby(["id", "confidence", "effect", "says", "advice"], as_index=False)["shard"]
        .nunique()
        .rename(columns={"shard": "shards"})
    )


def worst(rows: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The isolated fidelity rows furthest from the golden."""
    judged = rows[(rows["mode"] == "isolated") & rows["tensor"].isin(["update", "k", "v"])]
    columns = ["layer", "position", "T", "tensor", "cosine", "psnr_db", "max_abs", "finite"]
    return judged.sort_values("cosine", na_position="first")[columns].head(count).reset_index(drop=True)


def listing(found: dict) -> pd.DataFrame:
    """A mapping as a two-column table, lists one item a row."""
    rows = [(k, item) for k, v in found.items() for item in (v if isinstance(v, list) else [v])]
    return pd.DataFrame([(k, "not measured" if v is None else v) for k, v in rows], columns=["", "value"]).set_index("")


def verdict_conclusion(bundle: Bundle, found: Iterable[Gate]) -> str:
    """The verdict in words: what was judged, what failed and why, what could not run."""
    found, m = list(found), bundle.manifest
    red, idle = ([g for g in found if g.verdict == verdict] for verdict in ("RED", "not_run"))
    what = f"{m.checkpoint['name']} ({m.family}, {m.dims.L} layers, {m.options.compress}, max_seq_len {m.options.max_seq_len})"
    lines = [f"RED: {what} fails {len(red)} of {len(found)} gates." if red else
             f"GREEN: {what} passes all {len(found) - len(idle)} gates that ran."]  # fmt: skip
    lines += [f"- {g.name}: {g.reason}" for g in red]
    lines += [f"- not run: {g.name}, {g.reason}" for g in idle]
    return "\n".join(lines)


def speed_conclusion(rates: pd.DataFrame, layers: pd.DataFrame) -> str:
    """What a sweep over max_seq_len and T says of its one machine, in words, from medians."""
    machine = only_machine(pd.concat([rates, layers]))
    median = rates.groupby(["max_seq_len", "T"])["value"].median()
    (s_best, t_best), best = median.idxmax(), median.max()
    lengths, Ts = (sorted(median.index.unique(n)) for n in ("max_seq_len", "T"))
    lines = [f"Fastest: {best:.0f} tok/s at max_seq_len {s_best}, T = {t_best} ({', '.join(sorted(rates['runtime'].unique()))}), on {machine}."]
    for T in (Ts[0], Ts[-1]):
        ratio = median[lengths[0], T] / median[lengths[-1], T]
        lines.append(f"At T = {T}, going from max_seq_len {lengths[0]} to {lengths[-1]} costs a factor of {ratio:.2f}.")
    ratio = median[lengths[-1], Ts[-1]] / median[lengths[-1], Ts[0]]
    lines.append(f"At max_seq_len {lengths[-1]}, T = {Ts[-1]} carries {ratio:.2f} times the tokens per second of T = {Ts[0]}.")
    typical = layers.groupby("T")["layer_ms"].median()
    lines.append("Median ms per layer: " + ", ".join(f"T = {T}: {ms:.3f}" for T, ms in typical.items()) + ".")
    return "\n".join(lines)


_WAYS = ("runtime", "precision", "fast", "compute_units", "hints", "depth")


def choice_conclusion(found: pd.DataFrame) -> str:
    """Which configuration of a sweep to take on its one machine, what the fastest of all would cost, and what each axis is
    worth."""
    machine = only_machine(found)
    passing = found[found["verdict"] == "GREEN"]
    if passing.empty:
        return f"None of {len(found)} configurations passes the gates."
    best, first = passing.iloc[0], found.iloc[0]
    tell = lambda row: f"{row['name']}, {row['tokens_per_s']:.0f} tok/s, worst update cosine {row['worst_cosine']:.6f}."  # noqa: E731
    lines = [f"Fastest of {len(passing)} configurations that pass (of {len(found)}) on {machine}: {tell(best)}"]
    lines += [f"Faster, and not passing: {tell(first)}"] if first["verdict"] != "GREEN" else []
    for axis in [c for c in found if c in (*Options.model_fields, *_WAYS) and found[c].nunique() > 1]:
        speeds = found.groupby(axis)["tokens_per_s"].median().sort_values(ascending=False)
        lines.append(f"{axis}: " + ", ".join(f"{value} {speed:.0f} tok/s" for value, speed in speeds.items()) + " (medians).")
    return "\n".join(lines)


def routing_prediction(experts: int = 16) -> pd.DataFrame:
    """What the roofline expects of ZAYA1's own MoE layer on an M4 Max: all experts in one shard, and a router's and one
    expert's shard."""
    (dense,) = (w for model, w, _, _ in roofline.figures() if w.name == "ZAYA1-8B, MoE shard")
    one = replace(dense, weight_bytes=dense.weight_bytes // experts, flops=dense.flops / experts, dispatches=2)
    rows = [{"experts": name, "weight_bytes": w.weight_bytes, "predicted_ms": roofline.predict_ms([w], "M4 Max")["ms"].sum()}
            for name, w in (("dense", dense), ("routed", one))]  # fmt: skip
    return pd.DataFrame(rows)


def profile_parts(profile: pd.DataFrame) -> dict[str, float]:
    """ms per token by part of the layer, all layers together."""
    return profile.groupby("part")["ms"].sum().to_dict()


def probe_shares(profile: pd.DataFrame) -> pd.DataFrame:
    """ms per token of experiment 29's probe (q_proj and o_proj), of the rest of attention, and of the other parts."""
    leaf = profile["module"].str.rsplit(".", n=1).str[-1]
    probe = profile["part"].eq("attention") & leaf.isin(["q_proj", "o_proj"])
    label = profile["part"].replace({"moe": "router and experts", "mlp": "MLP", "rest": "norms and residual"})
    label = label.mask(label.eq("attention"), "rest of attention").mask(probe, "probe: q_proj and o_proj")
    order = ["probe: q_proj and o_proj", "rest of attention", "router and experts", "MLP", "norms and residual"]
    ms = profile["ms"].groupby(label).sum()
    frame = ms.reindex([n for n in order if n in ms]).rename_axis("part").reset_index()
    return frame.assign(share=frame["ms"] / frame["ms"].sum())


def probe_conclusion(shares: pd.DataFrame, machine: str = "this machine") -> str:
    """How much of attention a Q→O probe measures on a machine, in words."""
    ms = shares.set_index("part")["ms"]
    probe, rest = ms["probe: q_proj and o_proj"], ms["rest of attention"]
    return (f"The probe's two projections take {probe:.3g} ms of {probe + rest:.3g} ms of attention per token "
            f"({probe / (probe + rest):.0%}) and {probe / ms.sum():.0%} of all layers, on {machine} and this runtime.")  # fmt: skip


def by_layer(results: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Worst and mean isolated update cosine of each layer, one pair of columns per prompt."""
    columns = {}
    for prompt, rows in results.items():
        judged = rows[(rows["mode"] == "isolated") & (rows["tensor"] == "update")].groupby("layer")["cosine"]
        columns |= {(prompt, "worst"): judged.min(), (prompt, "mean"): judged.mean()}
    return pd.DataFrame(columns)


def ablation_conclusion(ablated: pd.DataFrame, threshold: float) -> str:
    """Which ingredients a gate on the update, and one on the hidden state, would miss."""
    wide = ablated.pivot(index="ingredient", columns="tensor", values="cosine")
    blind = wide.index[(wide["update"] < threshold) & (wide["hidden"] >= threshold)].tolist()
    missed = wide.index[wide["update"] >= threshold].tolist()
    lines = [f"{(wide['update'] < threshold).sum()} of {len(wide)} ingredients, left out, fail the update's gate of {threshold}."]
    lines += [f"A gate on the hidden state would not see: {', '.join(blind)}."] if blind else []
    lines += [f"Too small on this checkpoint for the update's gate: {', '.join(missed)}."] if missed else []
    return "\n".join(lines)


def shard_sizes(bundles: dict[str, Bundle]) -> pd.DataFrame:
    """Number and bytes of each kind of shard, by bundle."""
    rows = [{"bundle": name, "kind": s.kind, "bytes": s.bytes} for name, b in bundles.items() for s in b.manifest.shards]
    return pd.DataFrame(rows).groupby(["bundle", "kind"])["bytes"].agg(["count", "sum", "max"]).reset_index()


def bench_rows(rows: list[dict], machine: str) -> pd.DataFrame:
    """Benchmark rows without their raw samples, and the machine they were taken on."""
    frame = pd.DataFrame(rows)[["name", "value", "unit", "peer", "peer_value", "ratio", "n"]]
    return frame.assign(machine=machine)


def moe_conclusion(rows: list[dict], experts: int, machine: str) -> str:
    """What routing saves against dense on a machine, in words."""
    ratio = {r["name"]: r["ratio"] for r in rows}
    ms = ratio["moe_ms_per_token"]
    time = (f"{ms:.2f} times fewer milliseconds" if ms >= 1 else
            f"{1 / ms:.2f} times the milliseconds (experts this small cost less than the calls they need)")  # fmt: skip
    return (f"Routing reads {ratio['moe_bytes_per_token']:.1f} times fewer expert bytes per token (of {experts} experts) and "
            f"spends {time} in the MoE part, on this checkpoint and runtime, on {machine}.")  # fmt: skip
