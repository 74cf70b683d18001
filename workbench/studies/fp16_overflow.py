"""Reproduces LlamaANE's case: why Qwen 2.5 gives NaN on one compute unit and not on
another.

Checkpoints with planted biases, two orders of the scores and several mask constants are
converted by coremltools and traced. The naive order is no part of an export; it is
compared with the order that the workbench exports."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

import miltorch
from miltorch.quiet import frozen
from workbench.bundle import Bundle, Options
from workbench.bundle.names import K_STATE, MASKED, V_STATE
from workbench.check import gates
from workbench.decode import Decoder
from workbench.explain import trace
from workbench.explain.weights import replace
from workbench.export import convert, read_plan, shards
from workbench.export.make import absolute_layer_path
from workbench.export.weights import build
from workbench.models import checkpoint as checkpoints
from workbench.models.checkpoint import Checkpoint
from workbench.models.layers import AttentionGeometry, scaled

# Qwen 2.5 7B's
HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
NAIVE = "q kᵀ, then scale"
SCALED = "scale q, then q kᵀ"
# ‖b_k‖ of its two layers with the largest key biases; the median of the others is 22
REPORTED_NORMS = {0: 605.0, 27: 921.0}


def planted_checkpoint(path: Path, norms: Sequence[float], C: int = 256) -> Path:
    """A random Qwen 2.5 checkpoint of Qwen 2.5 7B's heads whose layer i has a key bias
    of norm `norms[i]`.

    The norm is spread evenly over the key heads, in a random direction in each. Width
    and MLP are small: scores depend on neither."""
    from safetensors.torch import load_file, save_file

    checkpoints.random(
        path,
        "qwen2",
        hidden_size=C,
        intermediate_size=2 * C,
        num_hidden_layers=len(norms),
        vocab_size=256,
        use_sliding_window=False,
        **HEADS,
    )
    file = path / "model.safetensors"
    tensors = load_file(file)
    heads = HEADS["num_key_value_heads"]
    for layer, norm in enumerate(norms):
        generator = torch.Generator().manual_seed(layer)
        vectors = torch.randn(heads, HEADS["head_dim"], generator=generator)
        bias = nn.functional.normalize(vectors, dim=-1) * norm / heads**0.5
        tensors[f"model.layers.{layer}.self_attn.k_proj.bias"] = bias.reshape(-1).half()
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@dataclass(frozen=True)
class NaiveShape(AttentionGeometry):
    """Attention that scales after q kᵀ, as Hugging Face's eager code does."""

    scale: float = 1.0

    def attend(self, q, k, v, cache, io):
        k = cache.append(K_STATE, k, io, self.suffix)
        v = cache.append(V_STATE, v, io, self.suffix)
        scores = q.reshape(self.B, self.H_kv, -1, self.D) @ k.transpose(2, 3)
        scores = scaled(scores, self.scale).reshape(self.B, self.H, -1, self.S)
        weights = torch.softmax(scores + io["attn_mask"], dim=-1)
        sums = weights.reshape(self.B, self.H_kv, -1, self.S) @ v
        return sums.reshape(self.B, self.H, -1, self.D)


def decoder(
    bundle: Bundle, precision: str, packages: dict[str, tuple[Path, dict]] | None = None
) -> Decoder:
    """A portable decoder of `bundle`; the programs of its layer shards come from
    `packages` if there are any."""
    decoder = Decoder(bundle, "portable", precision)
    if packages:
        for model in decoder.layers:
            package, names = packages[model.shard.name]
            model.executable = miltorch.Executable(miltorch.read(package), precision)
            model.shard = model.shard.model_copy(update=names)
    return decoder


def naive_packages(
    bundle: Bundle, source: Checkpoint, folder: Path
) -> dict[str, tuple[Path, dict]]:
    """Converts the bundle's layer shards with the naive order of scores.

    Returns:
        Shard name → (package, its `weights` and `modules`), for `decoder`.
    """
    options = bundle.manifest.options
    packages = {}
    plan = read_plan(source, options)
    for spec in shards.specs(plan, options):
        if spec.kind != "layers":
            continue
        module, parts = build(spec, source, plan, options)
        for block in module.blocks:
            attention = block.self_attn
            attention.shape = NaiveShape(**vars(attention.shape), scale=attention.scale)
            attention.scale = 1.0
        compressed = {part.path for part in parts if part.compressed}
        with frozen():
            model = convert.convert(module, spec, options, compressed)
        package = Path(folder) / f"{spec.name}.mlpackage"
        model.save(str(package))
        constants = convert.constants(model)
        weights = {p.tensor: constants[p.path.replace(".", "_")] for p in parts}
        modules = {}
        for value, path in convert.modules(model).items():
            modules[value] = absolute_layer_path(path, spec.layers[0])
        packages[spec.name] = package, {"weights": weights, "modules": modules}
    return packages


def align_queries(decoder: Decoder, norm: float) -> None:
    """Sets every query head's bias to a vector of `norm` along its group's key bias, so
    that a token's own score is the largest that such a query can have; with 0 queries
    have no bias."""
    for layer, model in enumerate(decoder.layers):
        prefix = f"model.layers.{layer}.self_attn."
        weights = model.shard.weights
        keys = model.executable.constant(weights[f"{prefix}k_proj.bias"])
        keys = keys.reshape(HEADS["num_key_value_heads"], -1)
        group = HEADS["num_attention_heads"] // len(keys)
        queries = nn.functional.normalize(keys, dim=-1) * norm
        bias = queries.repeat_interleave(group, 0).reshape(-1).half().float()
        replace(model.executable, weights[f"{prefix}q_proj.bias"], bias)


def score_sweep(
    bundle: Bundle, packages: dict, ids: Sequence[int], query_norms: Sequence[float]
) -> pd.DataFrame:
    """Both orders at each norm of the queries' bias: one row per order, norm and layer.

    `product` is the largest |q kᵀ| of the program in exact arithmetic, with its `headroom_bits`;
    `op` is that operation's MIL name; `inf` and `nan` are the first operations of the run with such
    a result with one rounding per result; `narrow` is the first with either with narrow sums (null:
    none).
    """
    rows = []
    for order, replacements in ((NAIVE, packages), (SCALED, None)):
        decoders = {p: decoder(bundle, p, replacements) for p in miltorch.PRECISIONS}
        for norm in query_norms:
            ranges = {}
            for precision, one in decoders.items():
                align_queries(one, norm)
                ranges[precision] = trace.trace_decoder(one, ids)
            first = _first_faults(ranges["declared"])
            narrow = _first_faults(ranges["narrow"])
            first["narrow"] = narrow["inf"] or narrow["nan"]
            for layer, scores in enumerate(products(ranges["exact"].frame())):
                row = {
                    "order": order,
                    "query_norm": norm,
                    "layer": layer,
                    "product": scores["max_abs"],
                    "headroom_bits": scores["headroom_bits"],
                    "op": scores["op"],
                }
                rows.append(row | first)
    return pd.DataFrame(rows)


def reported(norms: Sequence[float]) -> pd.DataFrame:
    """The planted norms, the reported layers with these norms, and the norms per head
    and channel: one row per layer."""
    heads = HEADS["num_key_value_heads"]
    channels = heads * HEADS["head_dim"]
    rows = []
    layers = {norm: layer for layer, norm in REPORTED_NORMS.items()}
    for i, norm in enumerate(norms):
        row = {
            "layer here": i,
            "norm of the key bias": norm,
            "reported for layer of the 7B": layers.get(norm),
            "norm per key head (spread evenly)": norm / heads**0.5,
            "RMS of one channel": norm / channels**0.5,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def breaking(sweep: pd.DataFrame) -> pd.DataFrame:
    """One row per order and query norm: the layer with the least headroom, and the
    first inf and NaN of the run."""
    settings = sweep.groupby(["order", "query_norm"], sort=False)
    least = sweep.loc[settings["headroom_bits"].idxmin()]
    return least.drop(columns="op").reset_index(drop=True)


def first_broken(sweep: pd.DataFrame) -> float:
    """The least query norm at which the naive order overflows; the largest tried if
    none does."""
    norms = sweep.loc[(sweep["order"] == NAIVE) & sweep["inf"].notna(), "query_norm"]
    return float(min(norms, default=sweep["query_norm"].max()))


def overflow_gates(sweep: pd.DataFrame) -> list[gates.Gate]:
    """Gates: the naive order overflows in q kᵀ, where the notes' NaN began, and the
    exported order is finite at the same norm."""
    norm = first_broken(sweep)
    here = sweep[sweep["query_norm"] == norm]
    naive, good = (here[here["order"] == order].iloc[0] for order in (NAIVE, SCALED))
    faults = good[["inf", "nan", "narrow"]].dropna()
    bad = [f"{what}: {place}" for what, place in faults.items()]
    breaks = "(matmul, " in str(naive["inf"])
    heading = f"query norm {norm:g}, scaled first: "
    reason = f"query norm {norm:g}: first inf at {naive['inf']}"
    fine = f"{heading}every value finite, narrow sums too"
    return [
        gates.holds("naive_breaks_in_the_score", breaks, reason),
        gates.none("scaled_stays_finite", bad, fine, heading),
    ]


def products(frame: pd.DataFrame) -> list[pd.Series]:
    """The row of q kᵀ in each layer: the last matmul before its softmax."""
    softmaxes = np.flatnonzero(frame["kind"] == "softmax")
    matmuls = np.flatnonzero(frame["kind"] == "matmul")
    return [frame.iloc[matmuls[matmuls < at][-1]] for at in softmaxes]


def _first_faults(ranges: trace.Ranges) -> dict[str, str | None]:
    """The place of the first operation that gives an inf, and of the first that gives a
    NaN."""
    places = {}
    for fault in ("inf", "nan"):
        row = ranges.first(fault)
        places[fault] = row and trace.place(row)
    return places


class Masked(nn.Module):
    """softmax(scores + mask); the mask is (allowed − 1) · factor, or `allowed` itself
    (1: attend, 0: blocked) without a factor."""

    def __init__(self, factor: float | None):
        super().__init__()
        self.factor = factor

    def forward(
        self, scores: torch.Tensor, allowed: torch.Tensor
    ) -> tuple[torch.Tensor]:
        mask = allowed
        if self.factor is not None:
            mask = (allowed - 1) * self.factor
        return (torch.softmax(scores + mask, dim=-1),)


MASKS = {
    "1 and 0, added": None,
    "(m − 1) · 1e9": 1e9,
    "(m − 1) · 3.4e38": 3.4e38,
    "(m − 1) · 1e4": -MASKED,
}

MASK_SHAPE = (1, 1, 4, 8)


def mask_packages(folder: Path) -> dict[str, Path]:
    """A package for each of `MASKS`: scores, allowed [1, 1, 4, 8] → weights [1, 1, 4,
    8]."""
    shape = list(MASK_SHAPE)
    inputs = {"scores": shape, "allowed": shape}
    spec = shards.Spec("mask", "layers", inputs, {"weights": shape})
    packages = {}
    for i, (name, factor) in enumerate(MASKS.items()):
        packages[name] = Path(folder) / f"mask_{i}.mlpackage"
        with frozen():
            model = convert.convert(Masked(factor), spec, Options(t_max=1), set())
        model.save(str(packages[name]))
    return packages


def mask_table(packages: dict[str, Path]) -> pd.DataFrame:
    """The effects of each mask: one row per mask and case.

    Cases: ordinary scores; attended scores 12,000 below the blocked ones; a row with
    all positions blocked. `leak` is the largest weight of a row on blocked positions
    (nan: the weights are NaN; 1 is inevitable in a fully blocked row); `inf` and `nan`
    are the first operations with such a result."""
    rng, rows, (T, S) = np.random.default_rng(0), [], MASK_SHAPE[2:]
    # every row has attended and blocked positions
    allowed = np.tri(T, S, S - T - 1, dtype=np.float32)[None, None]
    blocked = allowed.copy()
    blocked[:, :, 1] = 0
    for name, package in packages.items():
        executable = miltorch.Executable(miltorch.read(package), "declared")
        scores = rng.standard_normal(MASK_SHAPE).astype(np.float32)
        cases = {
            "ordinary scores": (scores, allowed),
            "attended 12,000 lower": (scores - np.float32(1.2e4) * allowed, allowed),
            "a row all blocked": (scores, blocked),
        }
        for case, (scored, attended) in cases.items():
            io = {"scores": scored, "allowed": attended}
            ranges = trace.trace_package(package, io).ranges["declared"]
            tensors = {key: torch.from_numpy(value) for key, value in io.items()}
            weights = executable.run(tensors, {})["weights"].numpy()
            leak = float((weights * (1 - attended)).sum(-1).max())
            row = {"mask": name, "case": case, "leak": leak}
            rows.append(row | _first_faults(ranges))
    return pd.DataFrame(rows)


def units(project: Path) -> pd.DataFrame:
    """The documented behaviour of each compute unit for a fault, `shows` or `hides`,
    not measured here.

    `source`: ANEForge's documentation and sweeps on M1–M5, or the LlamaANE notes.
    """
    return pd.read_csv(project / "data" / "sources" / "compute_unit_faults.csv")


def overflow_conclusion(sweep: pd.DataFrame, masks: pd.DataFrame) -> str:
    """The conclusion from the sweep and the masks."""
    naive, good = (sweep[sweep["order"] == order] for order in (NAIVE, SCALED))
    lines = [
        "Key biases of the reported norms alone do not overflow: without a bias on the queries, "
        f"q kᵀ reaches {naive.loc[naive['query_norm'] == 0, 'product'].max():,.0f} of 65,504."
    ]
    broken, also = (
        rows[rows["inf"].notna()].sort_values("query_norm") for rows in (naive, good)
    )
    if broken.empty:
        lines.append("No query norm that was tried makes the naive order overflow.")
    else:
        least = broken.iloc[0]
        bits = (rows["headroom_bits"].to_numpy() for rows in (good, naive))
        gain = np.mean(np.subtract(*bits))
        finite = f"finite at every norm tried, up to {good['query_norm'].max():g}"
        if len(also):
            largest = good.loc[good["inf"].isna(), "query_norm"].max()
            finite = f"finite up to a norm of {largest:g}, "
            finite += f"infinite at {also.iloc[0]['query_norm']:g}"
        lines += [
            "With queries that point along them, q kᵀ before scaling is infinite from a query norm "
            f"of {least['query_norm']:g} per head on: first inf at {least['inf']}, "
            f"first NaN at {least['nan']}.",
            f"Scaling q first, as the export does, leaves {gain:.1f} more bits: {finite}.",
        ]
    for mask, rows in masks.groupby("mask", sort=False):
        cases = "; ".join(f"{row.case}: {_outcome(row)}" for row in rows.itertuples())
        lines.append(f"Mask {mask}: {cases}.")
    lines.append(
        "So another mask constant cannot cure an inf that is there before the mask is added; a "
        "unit whose products are wider than fp16 (GPU) never sees it, and one that drops NaN "
        "(Neural Engine) turns it into a wrong but finite answer. That a device behaves so is "
        "documented, not measured here."
    )
    return "\n".join(f"- {line}" for line in lines)


def _outcome(row) -> str:
    if row.leak != row.leak:
        return f"NaN at {row.nan}"
    if row.leak > 1e-3:
        return f"{row.leak:.0%} of a row's weight on blocked positions"
    return "right"
