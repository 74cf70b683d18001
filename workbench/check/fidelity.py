"""What a bundle costs: every layer × position × T against a golden, the rows of the log's
table `fidelity`, and the logits of layers in a row.

The cost is the distance of a bundle from a golden, beside the rounding budget, the
distance that rounding alone causes. The budget is measured in Hugging Face's model in
fp32, with the weights that the bundle stores, the stream rounded to fp16 where it enters
and leaves a layer, and the cache rows rounded once. It does not depend on the exported
program: an error far above the budget is a bug, not compression.

`measure_budget` and `measure_rounding` run Hugging Face's model, `measure` runs the bundle
and compares. A `Cost` has all figures, and judges them; `cost` shows its KL as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import (
    errors,
    furthest,
    judged_rows,
    kl,
    with_ratios,
    with_similarity,
    with_ties,
)
from workbench.check.device import ties_in_shards
from workbench.check.gates import Gate
from workbench.check.golden import Golden, StoredWeights, stored_weights
from workbench.check.hf import Reference, SequenceRun, round_stream
from workbench.check.run import trace_bundle
from workbench.check.states import default_ts
from workbench.check.trace import Trace
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

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
            worst = furthest(judged_rows(self.rows))
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
        return [self._check_kl(max_kl), self._budget_gate()]

    def _check_kl(self, max_kl: float) -> Gate:
        if self.logits is None:
            reason = "the packages contain the argmax and output no logits"
            return gates.not_run(gates.MAX_KL_GATE, reason)
        reason = "mean KL from Hugging Face's logits in nats; the limit is the user's"
        if self.budget_kl is not None:
            of_budget = np.mean(self.budget_kl)
            reason += (
                f"; Hugging Face's model on the stored weights has {of_budget:.2g}"
            )
        return gates.quality_at_most(
            gates.MAX_KL_GATE, float(np.mean(self.kl)), max_kl, reason
        )

    def _budget_gate(self) -> Gate:
        if self.budget_kl is None:
            return gates.not_run("budget", "needs --checkpoint")
        rows = judged_rows(self.rows)
        worst = furthest(rows)
        # the `over_rounding` of `Validation.worst`, which is printed beside this gate
        largest_ratio = rows["ratio"].fillna(np.inf).max()
        reason = (
            "RMS over positions of error ÷ √(rounding² + 2⁻²²), rounding: the error that "
            "rounding of weights and stream alone causes in Hugging Face's model: layer "
            f"{worst['layer']}, {worst['tensor']}, T = {worst['T']}; the largest at a "
            f"single position is {largest_ratio:.3g}, which is not judged"
        )
        return gates.at_most("budget", worst["ratio"], BUDGET_FACTOR, reason)


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
    feed = golden.trace if inner else _inputs_of_shards(bundle, golden)
    runs = [
        SequenceRun(perturb=rounded),
        SequenceRun(feed, perturb=rounded, head=False),
    ]
    chained, trace = reference.run_batch(golden.ids, runs)
    stored = stored_stream(trace, golden.trace, bundle.manifest.stream_scale)
    return replace(stored, logits=chained.logits)


def _inputs_of_shards(bundle: Bundle, golden: Golden) -> Trace:
    """A feed of the golden's inputs for the first layer of every shard alone."""
    feed = Trace.empty(golden.layer_count)
    for first in {shard.layers[0] for shard in bundle.manifest.shards}:
        feed.layers[first].x = golden.trace.layers[first].x
        if first:
            feed.layers[first - 1].router = golden.trace.layers[first - 1].router
    return feed


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
    budget_trace: Trace | None = None,
    rounding_kl: np.ndarray | None = None,
) -> Cost:
    """Runs every T isolated and all of them chained, and compares with the golden and,
    isolated, with `budget_trace`. Without it the cells are ranked by the error that rounding
    of the stream alone causes.

    Args:
        Ts: tokens per call (default: `default_ts`).
        budget_trace: of `measure_budget`.
        rounding_kl: of `measure_rounding`, which the cost keeps.

    Returns:
        The cost. Its rows are those of the log's table `fidelity`: `errors` with similarity
        and routing ties, `HEAD_LAYER` as the layer of logits, and mode, runtime, precision
        and shard. Chained rows have no budget.

    Raises:
        InputError: a T above t_max.
    """
    t_max = decoder.options.t_max
    Ts = list(Ts or default_ts(decoder.options))
    if outside := [t for t in Ts if not 1 <= t <= t_max]:
        step = "export with more --tokens"
        raise InputError("T", f"{outside}", f"1 to t_max = {t_max}", step)
    runs = [*((T, "isolated") for T in Ts), (Ts, "chained")]
    *isolated, chained = trace_bundle(decoder, golden, *runs)
    reference = golden.trace
    rounded = None
    if budget_trace is None:
        # rounded as it is stored; no layer computes with the rounded values
        rounded = stored_stream(reference, reference, decoder.manifest.stream_scale)
    tables, ratios = [], []
    for T, trace in zip(Ts, isolated, strict=True):
        table = _rows_of_trace(reference, trace, budget_trace)
        tables.append(table.assign(T=T, mode="isolated"))
        if rounded is not None:
            table = with_ratios(errors(reference, trace), reference, rounded)
        ratios.append(table["ratio"])
    tables.append(_rows_of_trace(reference, chained).assign(mode="chained"))
    rows = pd.concat(tables, ignore_index=True)
    expected, logits = golden["logits"], chained.logits
    kl_nats, same_top = np.full(len(expected), np.nan), np.nan
    if logits is not None:
        kl_nats = kl(expected, logits)
        same_top = float(np.mean(expected.argmax(-1) == logits.argmax(-1)))
    return Cost(
        _label_rows(rows, decoder, golden),
        logits,
        kl_nats,
        same_top,
        # null for the chained rows, which come last
        over_rounding=pd.concat(ratios, ignore_index=True).reindex(rows.index),
        budget_kl=None if budget_trace is None else kl(expected, budget_trace.logits),
        rounding_kl=rounding_kl,
    )


def _label_rows(rows: pd.DataFrame, decoder: Decoder, golden: Golden) -> pd.DataFrame:
    """Rows with runtime, precision and shard, `HEAD_LAYER` as the layer of logits, and
    the routing ties of a runtime that does not show choices of experts."""
    inner = decoder.shows_inner_layers
    if not inner:
        rows["routing_tie"] |= ties_in_shards(decoder, golden, rows)
    precision = decoder.precision if inner else None  # as in `runs`
    rows = rows.assign(runtime=decoder.runtime, precision=precision)
    shard_names = {}
    for model in decoder.layer_shards:
        shard_names |= dict.fromkeys(model.shard.layer_range, model.shard.name)
    rows["shard"] = rows["layer"].map(shard_names).fillna("head")
    rows["layer"] = rows["layer"].fillna(HEAD_LAYER).astype(int)
    return rows


def _rows_of_trace(
    reference: Trace, actual: Trace, budget_trace: Trace | None = None
) -> pd.DataFrame:
    """The columns of `measure` that follow from a trace."""
    rows = errors(reference, actual)
    if budget_trace is not None:
        rows = with_ratios(rows, reference, budget_trace)
    rows = with_ties(rows, reference, actual, budget_trace)
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
