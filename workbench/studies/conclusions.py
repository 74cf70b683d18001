"""Tables and conclusions of single notebooks, made from their results."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from workbench.ane import roofline
from workbench.ane.memory import kv_bytes
from workbench.bundle import Bundle, Options
from workbench.check.gates import Gate
from workbench.log.machine import only_machine
from workbench.log.stats import MIN_ROUNDS
from workbench.studies import cache_bug
from workbench.studies.cache_reuse import Matrix

_WAYS = ("runtime", "precision", "fast", "compute_units", "hints", "depth")


def source_figures(project: Path, pattern: str) -> pd.DataFrame:
    """The published figures of experiments 29 and 30 whose column `source` matches
    `pattern`."""
    table = pd.read_csv(project / "data" / "sources" / "experiment30.csv")
    return table[table["source"].str.contains(pattern)].fillna("")


def cache_calls(records: list[dict], slots: int) -> pd.DataFrame:
    """Records of the write probe for `plots.cache_rows`: one row per call, layer and
    slot."""
    probes = pd.DataFrame(records)
    probes["call"] = probes.groupby(["T", "pos"], sort=False).ngroup()
    rows = probes.merge(pd.Series(range(slots), name="slot"), how="cross")
    for name in ("changed", "expected"):
        rows[name] = [
            slot in written for slot, written in zip(rows["slot"], rows[name])
        ]
    calls = rows.groupby(["call", "T", "slot", "layer"], as_index=False)
    return calls[["changed", "expected"]].any()


def cache_sizes(cases: dict[str, dict]) -> pd.DataFrame:
    """Cache bytes of several settings for `plots.memory_bar`; each case has
    `kv_bytes`'s keywords."""
    rows = [(name, "KV cache", kv_bytes(**case)) for name, case in cases.items()]
    return pd.DataFrame(rows, columns=["setting", "part", "bytes"])


def worst(rows: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The isolated cells (layer, position, tensor) with the largest errors, each at its
    worst T."""
    isolated = rows.query("mode == 'isolated' and tensor in ['update', 'k', 'v']")
    ranked = isolated.sort_values("cosine", na_position="first", ignore_index=True)
    ranked = ranked.drop_duplicates(["layer", "position", "tensor"]).head(count)
    columns = [
        "layer",
        "position",
        "T",
        "tensor",
        "1 − cosine",
        "psnr_db",
        "max_abs",
        "finite",
    ]
    return ranked.assign(**{"1 − cosine": 1 - ranked["cosine"]})[columns]


def valid(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of valid runs, whose column `invalid` is null or missing."""
    if "invalid" in rows:
        return rows[rows["invalid"].isna()]
    return rows


def speed_conclusion(rates: pd.DataFrame, layers: pd.DataFrame) -> str:
    """The conclusion of a sweep over max_seq_len and T on one machine, from medians."""
    machine = only_machine(pd.concat([rates, layers]))
    reasons = rates.get("invalid")
    rates = valid(rates)
    layers = valid(layers)
    if rates.empty:
        return f"No valid run on {machine}: {'; '.join(reasons.dropna().unique())}."
    median = rates.groupby(["max_seq_len", "T"])["value"].median()
    (S, T), runtimes = median.idxmax(), ", ".join(sorted(rates["runtime"].unique()))
    fastest = f"{median.max():.0f} tok/s at max_seq_len {S}, T = {T} ({runtimes}), on {machine}"
    lines = [f"Fastest: {fastest}."]
    lengths = median.index.unique("max_seq_len")
    Ts = median.index.unique("T")
    short = lengths.min()
    long = lengths.max()
    few = Ts.min()
    many = Ts.max()
    for T in (few, many):
        ratio = median[short, T] / median[long, T]
        going = f"going from max_seq_len {short} to {long}"
        lines.append(f"At T = {T}, {going} costs a factor of {ratio:.2f}.")
    ratio = median[long, many] / median[long, few]
    carries = f"carries {ratio:.2f} times the tokens per second of T = {few}"
    lines.append(f"At max_seq_len {long}, T = {many} {carries}.")
    typical = layers.groupby("T")["layer_ms"].median()
    words = ", ".join(f"T = {T}: {ms:.3f}" for T, ms in typical.items())
    lines.append(f"Median ms per layer: {words}.")
    return "\n".join(lines)


def both_paths(fast: pd.DataFrame, literal: pd.DataFrame) -> pd.DataFrame:
    """Samples of calls on the decode path and of the literal program, with a column
    `path`."""
    literal = literal.assign(path="every operation of the program")
    rows = pd.concat([fast.assign(path="decode path"), literal])
    columns = ["run_id", "machine", "max_seq_len", "T", "value", "unit", "invalid"]
    return rows[[*columns, "path"]]


def path_conclusion(calls: pd.DataFrame) -> str:
    """The conclusion on the cost of a longer cache and of more tokens per call on each
    path, from medians in ms."""
    lines = []
    for path, rows in valid(calls).groupby("path", sort=False):
        ms = rows.groupby(["max_seq_len", "T"])["value"].median()
        (short, few), (long, many) = ms.index.min(), ms.index.max()
        longer = (
            f"{ms[long, few] / ms[short, few]:.2f} times the time of one at {short}"
        )
        wider = f"{ms[long, many] / ms[long, few]:.2f} times that of T = {few}"
        lines.append(
            f"{path}: at T = {few}, a call at max_seq_len {long} takes {longer}; "
            f"at {long}, one of T = {many} {wider}."
        )
    return "\n".join(lines)


def choice_conclusion(rows: pd.DataFrame) -> str:
    """The conclusion of a sweep on one machine: the fastest configuration that passes,
    the fastest of all, and the median speed of each value of each axis."""
    machine = only_machine(rows)
    rows = valid(rows)
    passing = rows[rows["verdict"] == "GREEN"]
    if passing.empty:
        return f"None of {len(rows)} configurations passes the gates."
    best = passing.iloc[0]
    first = rows.iloc[0]

    def summary(row) -> str:
        speed = f"{row['tokens_per_s']:.0f} tok/s"
        return f"{row['name']}, {speed}, worst update cosine {row['worst_cosine']:.6f}."

    of = f"{len(passing)} configurations that pass (of {len(rows)})"
    lines = [f"Fastest of {of} on {machine}: {summary(best)}"]
    if first["verdict"] != "GREEN":
        lines += [f"Faster, and not passing: {summary(first)}"]
    if rows["n"].min() < MIN_ROUNDS:
        runs = f"{rows['n'].min()} of the {MIN_ROUNDS} runs that a ranking needs"
        lines.insert(0, f"Preliminary: some configuration has {runs}.")
    axes = [*Options.model_fields, *_WAYS]
    for axis in rows:
        if axis not in axes or rows[axis].nunique(dropna=False) < 2:
            continue
        speeds = rows.groupby(axis, dropna=False)["tokens_per_s"].median()
        speeds = speeds.sort_values(ascending=False)
        words = [f"{value} {speed:.0f} tok/s" for value, speed in speeds.items()]
        lines.append(f"{axis}: {', '.join(words)} (medians).")
    return "\n".join(lines)


def routing_prediction() -> pd.DataFrame:
    """The roofline's prediction for ZAYA1's MoE layer on an M4 Max: dense (all experts
    in one shard) and routed (a router's and one expert's shard). `programs` is the
    number that the whole model loads, which lint rule G3 limits."""
    experts = 16
    layers = 40
    head_slices = 17
    works = {work.name: work for _, work, _, _ in roofline.figures()}
    dense = works["ZAYA1-8B, MoE shard"]
    weights = dense.weight_bytes // experts
    flops = dense.flops / experts
    one = replace(dense, weight_bytes=weights, flops=flops, dispatches=2)
    rows = []
    for name, shards, work in (("dense", 1, dense), ("routed", 1 + experts, one)):
        row = {
            "experts": name,
            "programs": layers * shards + head_slices,
            "weight_bytes": work.weight_bytes,
            "predicted_ms": roofline.predict_ms([work], "M4 Max")["ms"].sum(),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def profile_parts(profile: pd.DataFrame) -> dict[str, float]:
    """ms per token by part of the layer, all layers together."""
    return profile.groupby("part")["ms"].sum().to_dict()


def probe_shares(profile: pd.DataFrame) -> pd.DataFrame:
    """ms per token of experiment 29's probe (q_proj and o_proj), of the rest of
    attention, and of the other parts."""
    leaf = profile["module"].str.rsplit(".", n=1).str[-1]
    probe = profile["part"].eq("attention") & leaf.isin(["q_proj", "o_proj"])
    names = {
        "probe": "probe: q_proj and o_proj",
        "attention": "rest of attention",
        "moe": "router and experts",
        "mlp": "MLP",
        "rest": "norms and residual",
    }
    ms = profile["ms"].groupby(profile["part"].mask(probe, "probe")).sum().rename(names)
    ms = ms.reindex(list(names.values())).dropna()
    frame = ms.rename_axis("part").reset_index()
    return frame.assign(share=frame["ms"] / frame["ms"].sum())


def probe_conclusion(shares: pd.DataFrame, machine: str = "this machine") -> str:
    """The conclusion on the share of attention that a Q→O probe measures on a
    machine."""
    ms = shares.set_index("part")["ms"]
    probe = ms["probe: q_proj and o_proj"]
    attention = probe + ms["rest of attention"]
    return (
        f"The probe's two projections take {probe:.3g} ms of {attention:.3g} ms of attention per "
        f"token ({probe / attention:.0%}) and {probe / ms.sum():.0%} of all layers, on {machine} "
        "and the portable runtime."
    )


def by_layer(results: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Worst and mean 1 − cosine of each layer's isolated update, one pair of columns
    per prompt."""
    columns = {}
    for prompt, rows in results.items():
        updates = rows.query("mode == 'isolated' and tensor == 'update'")
        distance = (1 - updates["cosine"]).groupby(updates["layer"])
        columns[prompt] = distance.agg(worst="max", mean="mean")
    return pd.concat(columns, axis=1)


def gates_by_prompt(gates: dict[str, Iterable[Gate]]) -> list[Gate]:
    """The gates of several prompts: gates that are equal for all prompts once, all
    others with their prompt in the reason."""
    listed = {prompt: list(own) for prompt, own in gates.items()}
    prompts = Counter()
    for own in listed.values():
        prompts.update(own)
    named = []
    for prompt, own in listed.items():
        for gate in own:
            if not 1 < prompts[gate] == len(gates):
                gate = replace(gate, reason=f"prompt {prompt}: {gate.reason}")
            named.append(gate)
    return list(dict.fromkeys(named))


def ablation_conclusion(ablated: pd.DataFrame, threshold: float) -> str:
    """The conclusion on the ingredients that move the update beyond `threshold`, a
    cosine, and on those of them that the hidden state does not show."""
    wide = ablated.pivot(index="ingredient", columns="tensor", values="cosine")
    moved = wide["update"] < threshold
    blind = wide.index[moved & (wide["hidden"] >= threshold)]
    missed = wide.index[wide["update"] >= threshold]
    moving = f"{moved.sum()} of {len(wide)} ingredients, left out, move the update"
    lines = [f"{moving} further than {threshold:.6f}, the bundle's own worst."]
    if len(blind):
        lines += [f"The hidden state would not show: {', '.join(blind)}."]
    if len(missed):
        lines += [f"Too small on this checkpoint to stand out: {', '.join(missed)}."]
    return "\n".join(lines)


def shard_sizes(bundles: dict[str, Bundle]) -> pd.DataFrame:
    """Number and bytes of each kind of shard, by bundle."""
    rows = []
    for name, bundle in bundles.items():
        rows += [(name, shard.kind, shard.bytes) for shard in bundle.manifest.shards]
    sizes = pd.DataFrame(rows, columns=["bundle", "kind", "bytes"])
    by_kind = sizes.groupby(["bundle", "kind"])["bytes"]
    return by_kind.agg(["count", "sum", "max"]).reset_index()


def bench_rows(rows: list[dict], machine: str, samples: bool = False) -> pd.DataFrame:
    """Benchmark rows, with their raw `samples` or without, and the machine they were
    taken on."""
    columns = ["name", "value", "unit", "peer", "peer_value", "ratio", "n"]
    if samples:
        columns += ["samples", "peer_samples"]
    return pd.DataFrame(rows)[columns].assign(machine=machine)


def moe_conclusion(rows: list[dict], experts: int, machine: str) -> str:
    """The conclusion on routed against dense experts on a machine."""
    ratio = {r["name"]: r["ratio"] for r in rows}
    ms = ratio["moe_ms_per_token"]
    time = f"{ms:.2f} times fewer milliseconds"
    if ms < 1:
        why = "experts this small cost less than the calls they need"
        time = f"{1 / ms:.2f} times the milliseconds ({why})"
    return (
        f"Routing reads {ratio['moe_bytes_per_token']:.1f} times fewer expert bytes per token "
        f"(of {experts} experts) and spends {time} in the MoE part, on this checkpoint and "
        f"runtime, on {machine}."
    )


def chip_predictions(bundles: dict[str, Bundle]) -> pd.DataFrame:
    """Predicted ms per token of every bundle on every chip."""
    ms = {}
    for name, b in bundles.items():
        ms[name] = roofline.by_chip(roofline.bundle_work(b)).set_index("chip")["ms"]
    return pd.DataFrame(ms).rename_axis("chip")


def layer_times(layers: pd.DataFrame) -> pd.DataFrame:
    """Median and range of the milliseconds per layer of each run of experiment 30's
    sweep."""
    by = ["machine", "run_id", "states", "T", "depth"]
    ms = valid(layers).groupby(by)["layer_ms"]
    return ms.agg(["median", "min", "max"]).reset_index()


def sweep_counts(counts: dict[str, dict]) -> pd.DataFrame:
    """The counts of several sweeps (see `workbench.sweep.sweep`), a row each."""
    return pd.DataFrame(counts).T.rename_axis("sweep")


def reuse_cells(matrix: Matrix) -> pd.DataFrame:
    """The cells of a cache-reuse matrix, a row each."""
    return pd.DataFrame(matrix.json()["cells"])


def planted_hypotheses() -> pd.DataFrame:
    """Name and wording of every hypothesis of experiment 33."""
    rows = [(name, words) for name, (words, _) in cache_bug.HYPOTHESES.items()]
    return pd.DataFrame(rows, columns=["name", "hypothesis"])


def reuse_damage(rows: pd.DataFrame) -> pd.DataFrame:
    """The damage of failing configurations by hypothesis and format: shares of correct
    first tokens and of unchanged stored sessions, and the largest relative deviation of
    the first logits."""
    failing = rows[~rows["ok"]].groupby(["hypothesis", "format"])
    damage = {"first_token_ok": "mean", "entry_ok": "mean", "apart": "max"}
    return failing.agg(damage).reset_index()
