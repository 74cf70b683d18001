"""Validates a bundle: whether it is faulty, and what it costs. The limits of the bug
gates follow from arithmetic and do not depend on the compression; their results are
stored in the bundle's verdict.json.

The cost is the distance of a bundle from a golden, beside the rounding budget, the
distance that rounding alone causes. The budget is measured in Hugging Face's model in
fp32, with the weights that the bundle stores, the stream rounded to fp16 where it enters
and leaves a layer, and the cache rows rounded once. It does not depend on the exported
program: an error far above the budget is a bug, not compression."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.bug_gates import load_or_run_gates
from workbench.check.compare import (
    compared,
    errors,
    furthest,
    kl,
    with_ratios,
    with_similarity,
    with_ties,
)
from workbench.check.device import run_device_gate, ties_in_shards
from workbench.check.gates import Gate
from workbench.check.golden import (
    Golden,
    StoredWeights,
    check_exported_from,
    stored_weights,
)
from workbench.check.hf import Reference, SequenceRun, round_stream
from workbench.check.run import trace_bundle
from workbench.check.shared import (
    BudgetKey,
    RoundingKey,
    SharedResults,
    StoredKey,
    find_or_compute,
    golden_digest,
)
from workbench.check.states import default_ts
from workbench.check.trace import Trace
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import stage

# The largest ratio of an error to √(budget² + 2⁻²²). The budget leaves out the rounding of a
# layer's inner results: the worst of 688 sound bundles, a random draw in fp16, reaches 3.5, the
# worst trained checkpoint 2.6; tests/check/faults.md has the margins.
BUDGET_FACTOR = 6.0
HEAD_LAYER = -1  # the layer of logits in the log's table `fidelity`


@dataclass(frozen=True)
class Cost:
    """The cost of compression and fp16: every layer × position × T of a bundle against
    a golden.

    Attributes:
        rows: see `measure`.
        logits: [n, V], of layers in a row; None if the bundle outputs none.
        kl: [n], nats from the golden's logits to these; nan without logits.
        same_top: the share of positions with the same top token; nan without logits.
        over_rounding: by row, what ranks the cells of one bundle: `ratio` or, where no
            budget was measured, the ratio to the rounding of the stream alone; null for
            chained rows.
        budget_kl: [n], nats from the golden's logits to the budget's; None if no budget
            was measured.
        rounding_kl: [n], see `measure_rounding`; None if it was not measured.
    """

    rows: pd.DataFrame
    logits: np.ndarray | None
    kl: np.ndarray
    same_top: float
    over_rounding: pd.Series
    budget_kl: np.ndarray | None = None
    rounding_kl: np.ndarray | None = None

    def summary(self) -> dict[str, float] | None:
        """The figures of the logits for JSON; None if the bundle outputs none."""
        if self.logits is None:
            return None
        cosines = self.rows.loc[self.rows["tensor"] == "logits", "cosine"]
        return {
            "top1_agreement": self.same_top,
            "kl_mean": float(np.mean(self.kl)),
            "kl_max": float(np.max(self.kl)),
            "cosine_min": float(cosines.min(skipna=False)),
        }

    def json(self) -> dict:
        """The field `cost` of `workbench validate --json`."""
        budget = None
        if self.budget_kl is not None:
            worst = furthest(compared(self.rows))
            budget = {"kl": summarize_kl(self.budget_kl), "worst": worst}
        rounding = None
        if self.rounding_kl is not None:
            rounding = {"kl": summarize_kl(self.rounding_kl)}
        return {
            "kl": summarize_kl(self.kl),
            "same_top": self.same_top,
            "budget": budget,
            "rounding": rounding,
        }

    def judge(self, max_kl: float = gates.MAX_KL) -> list[Gate]:
        """The check of quality `max_kl`, the user's limit on the mean KL in nats, and the
        gate `budget`: no error is more than `BUDGET_FACTOR` times the one that rounding
        alone causes."""
        reason = "mean KL from Hugging Face's logits in nats; the limit is the user's"
        if self.budget_kl is not None:
            kl = np.mean(self.budget_kl)
            reason += f"; Hugging Face's model on the stored weights has {kl:.2g}"
        limit = gates.within(gates.MAX_KL_GATE, float(np.mean(self.kl)), max_kl, reason)
        if self.logits is None:
            reason = "the packages contain the argmax and output no logits"
            limit = gates.not_run(gates.MAX_KL_GATE, reason)
        if self.budget_kl is None:
            return [limit, gates.not_run("budget", "needs --checkpoint")]
        worst = furthest(compared(self.rows))
        reason = (
            "error ÷ √(rounding² + 2⁻²²), rounding: the error that rounding of weights "
            "and stream alone causes in Hugging Face's model: layer {layer}, {tensor}, "
            "T = {T}"
        ).format(**worst)
        return [limit, gates.at_most("budget", worst["ratio"], BUDGET_FACTOR, reason)]


@dataclass
class Validation:
    """All gates of a bundle, and its cost."""

    gates: list[Gate]
    cost: Cost

    @property
    def rows(self) -> pd.DataFrame:
        """Rows of the `fidelity` table."""
        return self.cost.rows

    @property
    def verdict(self) -> str:
        """The verdict on the export."""
        return gates.verdict(self.gates)

    @property
    def quality(self) -> str:
        """The verdict on the cost."""
        return gates.quality(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row with the largest `over_rounding`. The worst
        cosine would select a small update beside a huge residual, which rounding alone
        changes much."""
        rows = compared(self.rows.assign(over_rounding=self.cost.over_rounding))
        # a value that is not finite counts as the largest
        row = rows.loc[rows["over_rounding"].fillna(np.inf).idxmax()]
        names = ["layer", "position", "T", "tensor", "mode"]
        names += ["cosine", "psnr_db", "max_abs", "error", "over_rounding"]
        return row[names].to_dict()

    def json(self) -> dict:
        """The JSON of `workbench validate`."""
        rows = compared(self.rows)
        cosines = rows["cosine"].fillna(-1.0)
        updates = cosines[rows["tensor"] == "update"]
        if updates.empty:  # the bundle outputs caches alone
            updates = cosines
        return {
            "verdict": self.verdict,
            "quality": self.quality,
            "gates": [g.json() for g in self.gates],
            "worst": self.worst,
            "min_cosine": float(updates.min()),
            "mean_cosine": float(updates.mean()),
            "rows": len(self.rows),
            "logits": self.cost.summary(),
            "cost": self.cost.json(),
        }


def validate(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    *,
    max_kl: float = gates.MAX_KL,
    run_on_decoder: bool = False,
    single_copy: bool = False,
    ignore_stored: bool = False,
    shared: SharedResults | None = None,
) -> Validation:
    """Validates a bundle: bug gates, every layer × position × T against `golden`, and
    the cost.

    With the golden's `source` the bug gates that the bundle's verdict.json lacks are
    run and stored there, and the budget is measured.

    Args:
        max_kl: the user's limit on the mean KL of the chained logits, in nats.
        run_on_decoder: run the bug gates even where a stored verdict counts, on this
            decoder where its runtime can run them. Otherwise they run on a decoder that
            is opened for them, since this one may have been changed in memory.
        ignore_stored: let no stored verdict count, whoever wrote it.
        single_copy: do not load a second copy of the bundle as portable. Gate `device`
            is then not_run if `device_reference` has no file.
        shared: gives each of several validations the results that they share; None:
            all are computed.
    """
    bundle = decoder.bundle
    source = golden.source
    check_exported_from(golden, bundle)
    # gate `program` and the budget need the same values of the bundle's files
    read_weights = cache(
        partial(stored_weights, source, bundle, keep_dtype=True, head=False)
    )
    bugs = load_or_run_gates(
        decoder,
        source,
        run_on_decoder=run_on_decoder,
        ignore_stored=ignore_stored,
        trusted_hash=golden.verdict_sha256,
        read_weights=read_weights,
        shared=shared,
    )
    budget = rounding_kl = None
    if source is not None:
        stage("validate: rounding of Hugging Face's model")
        shared = shared or SharedResults()
        inner, digest = decoder.shows_inner_layers, golden_digest(golden)
        budget = find_or_compute(
            shared.budgets,
            BudgetKey(StoredKey.of(bundle, source), digest, inner),
            lambda: measure_budget(bundle, source, golden, inner, read_weights()),
        )
        scale = bundle.manifest.stream_scale
        rounding_kl = find_or_compute(
            shared.rounding_kls,
            RoundingKey(source.sha256, digest, scale),
            lambda: measure_rounding(source, golden, scale),
        )
    read_weights.cache_clear()
    stage("validate: every layer and position")
    cost = measure(decoder, golden, Ts, budget, rounding_kl)
    device = run_device_gate(decoder, golden, single_copy)
    return Validation([*bugs, device, *cost.judge(max_kl)], cost)


def measure_budget(
    bundle: Bundle,
    checkpoint: Checkpoint,
    golden: Golden,
    inner: bool = True,
    weights: StoredWeights | None = None,
) -> Trace:
    """Runs Hugging Face's model over the golden's tokens with the weights that `bundle`
    stores and a rounded stream. Returns the trace of layers that are fed the golden's
    inputs, with the `logits` of layers in a row.

    Args:
        inner: whether layers inside a shard are fed too, as on runtimes that show them;
            otherwise each reads the output of the layer before.
        weights: of the bundle's files, in their stored dtype; None: they are read.
    """
    weights = weights or stored_weights(checkpoint, bundle, keep_dtype=True, head=False)
    reference = Reference(checkpoint, weights)
    rounded = round_stream(bundle.manifest.stream_scale)
    feed = golden.trace
    if not inner:
        feed = Trace.empty(golden.layer_count)
        for first in {shard.layers[0] for shard in bundle.manifest.shards}:
            feed.layers[first].x = golden.trace.layers[first].x
            if first:
                router = golden.trace.layers[first - 1].router
                feed.layers[first - 1].router = router
    runs = [
        SequenceRun(perturb=rounded),
        SequenceRun(feed, perturb=rounded, head=False),
    ]
    chained, trace = reference.run_batch(golden.ids, runs)
    stored = stored_stream(trace, golden.trace, bundle.manifest.stream_scale)
    return replace(stored, logits=chained.logits)


def measure_rounding(
    checkpoint: Checkpoint, golden: Golden, stream_scale: float
) -> np.ndarray:
    """The part of a cost that no compression causes: nats [n] from the golden's logits
    to those of Hugging Face's model with the checkpoint's own weights and its stream
    rounded to fp16."""
    rounded = round_stream(stream_scale)
    trace = Reference(checkpoint).run(golden.ids, perturb=rounded)
    return kl(golden["logits"], trace.logits)


def stored_stream(trace: Trace, inputs: Trace, stream_scale: float) -> Trace:
    """A trace with its values rounded as a bundle stores them: the outputs of its layers,
    the inputs of the layers in `inputs`, and the rows of its caches. No layer computes
    with the rounded values."""
    rounded = round_stream(stream_scale)
    layers = []
    for layer, input_layer in zip(trace.layers, inputs.layers, strict=True):
        stored = replace(layer)
        stored.x = rounded(torch.from_numpy(input_layer.x)).numpy()
        stored.hidden = rounded(torch.from_numpy(layer.hidden)).numpy()
        if layer.k is not None:
            stored.k, stored.v = np.float16(layer.k), np.float16(layer.v)
        layers.append(stored)
    return replace(trace, layers=layers)


def measure(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    budget: Trace | None = None,
    rounding_kl: np.ndarray | None = None,
) -> Cost:
    """Runs every T isolated and all of them chained, and compares with the golden and,
    isolated, with the `budget` of `measure_budget`. Without a budget the cells are ranked
    by the error that rounding of the stream alone causes. The cost keeps the
    `rounding_kl` of `measure_rounding`.

    The rows of the cost are those of the log's table `fidelity`: `errors` with
    similarity and routing ties, `HEAD_LAYER` as the layer of logits, and mode, runtime,
    precision and shard. Chained rows have no budget."""
    t_max = decoder.options.t_max
    Ts = list(Ts or default_ts(decoder.options))
    if outside := [t for t in Ts if not 1 <= t <= t_max]:
        step = "export with more --tokens"
        raise InputError("T", f"{outside}", f"1 to t_max = {t_max}", step)
    runs = [*((T, "isolated") for T in Ts), (Ts, "chained")]
    *isolated, chained = trace_bundle(decoder, golden, *runs)
    reference = golden.trace
    frames, ratios = [], []
    if budget is None:
        # rounded as it is stored; no layer computes with the rounded values
        rounded = stored_stream(reference, reference, decoder.manifest.stream_scale)
    for T, trace in zip(Ts, isolated, strict=True):
        frame = _fidelity(reference, trace, budget)
        frames.append(frame.assign(T=T, mode="isolated"))
        if budget is None:
            frame = with_ratios(errors(reference, trace), reference, rounded)
        ratios.append(frame["ratio"])
    frames.append(_fidelity(reference, chained).assign(mode="chained"))
    rows = pd.concat(frames, ignore_index=True)
    over_rounding = pd.concat(ratios, ignore_index=True).reindex(rows.index)
    inner = decoder.shows_inner_layers
    if not inner:
        rows["routing_tie"] |= ties_in_shards(decoder, golden, rows)
    precision = decoder.precision if inner else None  # as in `runs`
    rows = rows.assign(runtime=decoder.runtime, precision=precision)
    names = {}
    for model in decoder.layer_shards:
        names |= dict.fromkeys(model.shard.layer_range, model.shard.name)
    rows["shard"] = rows["layer"].map(names).fillna("head")
    rows["layer"] = rows["layer"].fillna(HEAD_LAYER).astype(int)
    expected, logits = golden["logits"], chained.logits
    kl_nats, top1_agreement = np.full(len(expected), np.nan), np.nan
    if logits is not None:
        kl_nats = kl(expected, logits)
        top1_agreement = float(np.mean(expected.argmax(-1) == logits.argmax(-1)))
    budget_kl = None if budget is None else kl(expected, budget.logits)
    return Cost(
        rows, logits, kl_nats, top1_agreement, over_rounding, budget_kl, rounding_kl
    )


def _fidelity(
    reference: Trace, actual: Trace, budget: Trace | None = None
) -> pd.DataFrame:
    """The columns of `measure` that follow from a trace."""
    rows = errors(reference, actual)
    if budget is not None:
        rows = with_ratios(rows, reference, budget)
    rows = with_ties(rows, reference, actual, budget)
    rows = with_similarity(rows, reference, actual)
    return rows.drop(columns=["distance", "size"])


def summarize_kl(nats: Sequence[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum."""
    return {
        "mean": float(np.mean(nats)),
        "median": float(np.median(nats)),
        "p99": float(np.percentile(nats, 99)),
        "max": float(np.max(nats)),
    }
