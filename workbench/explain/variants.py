"""Finds the variant of Hugging Face's model that a faulty bundle computes.

The bundle's program runs in exact arithmetic on its stored weights. Hugging Face's model
runs on the same weights, as configured and then with one thing changed at a time
(model_changes.py): rope, q/k norms, eps, window, scale, activation, biases, order of
heads. The variant whose updates, K and V equal the bundle's within rounding is the cause;
if there is none, the fault is of another kind. Gate `host` checks the embeddings."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from workbench.bundle import Bundle, Manifest
from workbench.check import compare, gates, golden, hf, run
from workbench.check.program import exact_runtime
from workbench.check.trace import Trace
from workbench.decode import Decoder
from workbench.explain.model_changes import (
    Variant,
    configured_scale,
    describe_tables,
    list_variants,
    variant_with_scale,
    variant_with_tables,
)
from workbench.models import layerwise
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar

CONFIGURED = "as configured"
TABLES = "rope frequencies of the bundle's manifest"
FITS = 1e-5  # relative RMS that fp32 rounding explains
# Relative RMS above which stored weights are not those of a layer. A compressed copy
# differs less.
UNRELATED = 0.5
# An update counts as at least this part of the stream: both sides round the stream in
# fp32, and the rounding enters the update.
STREAM_SHARE = 2.0**-5
# Powers of two that the configured attention scale is multiplied by in a first search, and
# the precision of the exponent in the second.
SCALE_EXPONENTS = -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0
SCALE_PRECISION = 1e-7
# Matrices by which layers are told apart. Every layer of a family has the same one of them.
MATRICES = (
    "mlp.down_proj.weight",
    "shared_mlp.input_linear.weight",
    "feed_forward.w2.weight",
    "self_attn.o_proj.weight",
)


@dataclass(frozen=True)
class Fit:
    """How well variants fit a bundle.

    Attributes:
        errors: every variant's `name` and `relative_rms`, best first.
        variant: the name of the one that fits; None if none does.
        detail: what the name leaves out, such as the values that are wrong.
    """

    errors: pd.DataFrame
    variant: str | None
    detail: str = ""

    @property
    def conclusion(self) -> str:
        """One sentence: what the variant that fits says about the bundle."""
        if self.variant is None:
            cause = "the fault is of another kind, or there are several"
            return f"No variant explains this bundle: {cause}."
        if self.variant == CONFIGURED:
            return "Layers compute what the checkpoint's configuration says."
        detail = f" ({self.detail})" if self.detail else ""
        return f"The bundle computes another model: {self.variant}{detail}."


def find_variant(bundle: Bundle, checkpoint: Checkpoint) -> Fit:
    """Finds the variant that fits a bundle: the best one, if rounding explains its error,
    which is the worst of the updates, K and V of the layers.

    Variants are tried on the first layers, and those that fit there on all layers. No
    variant is tried if the model fits as configured, or if layers store the weights of
    other layers.

    Raises:
        InputError: a bundle of another checkpoint.
    """
    comparison = Comparison.of(bundle, checkpoint)
    fit_limit = largest_fit(bundle)
    configured = comparison.layer_errors(bundle.manifest.dims.L, Variant())
    worst = float(configured.max())
    errors = {CONFIGURED: worst}  # variant → its error
    if order := comparison.layer_order():
        pairs = [f"{layer} has {other}'s weights" for layer, other in order.items()]
        # On the stored weights Hugging Face's model has its layers in that order too, so
        # that the measured error is the one of this variant, not of the model as configured.
        errors = {f"layer order: {', '.join(pairs)}": worst}
    elif worst > fit_limit:
        errors |= _try_variants(comparison, configured, fit_limit)
    frame = pd.DataFrame(errors.items(), columns=["name", "relative_rms"])
    frame = frame.sort_values("relative_rms", kind="stable", ignore_index=True)
    best_name, least = frame.iloc[0]
    if least > fit_limit:
        return Fit(frame, None)
    detail = ""
    if best_name == TABLES:
        tables = describe_tables(bundle.manifest, checkpoint.config)
        detail = f"rope in bundle.json: {tables}"
    return Fit(frame, best_name, detail)


def largest_fit(bundle: Bundle) -> float:
    """The largest relative RMS of a variant that fits a bundle."""
    # the constants of another exporter's programs may be further from the weights
    return max(FITS, bundle.manifest.constants_error)


def one_token_gate(bundle: Bundle, fit: Fit) -> gates.Gate:
    """Gate `one_token_calls`: calls of one token compute what the checkpoint's
    configuration says.

    Args:
        bundle: of other exporters' packages, which are compared in such calls.
        fit: of `find_variant`.
    """
    errors = fit.errors.set_index("name")["relative_rms"]
    # layers in another order are compared with a model of that order alone
    error = float(errors.get(CONFIGURED, np.inf))
    reason = "K and V of calls of one token against Hugging Face on the stored weights"
    if fit.variant != CONFIGURED:
        reason += f", relative RMS. {fit.conclusion}"
    return gates.at_most("one_token_calls", error, largest_fit(bundle), reason)


def _try_variants(
    comparison: "Comparison", configured: np.ndarray, fit_limit: float
) -> dict[str, float]:
    """Variant → its worst error: on all layers if it fits the first ones, and on these if
    it does not.

    Args:
        configured: the errors [L] of the model as configured.
        fit_limit: the largest relative RMS of a variant that fits.
    """
    checkpoint, manifest = comparison.checkpoint, comparison.manifest
    L = len(configured)
    count = _count_first_layers(checkpoint.config, configured, fit_limit)
    variants = list_variants(checkpoint, manifest, comparison.stored)
    errors = {}
    for name in bar(variants, "explain", unit="variant"):
        errors[name] = comparison.worst_error(count, variants[name])
    for name, variant in variants.items():
        if errors[name] <= fit_limit:
            errors[name] = comparison.worst_error(L, variant)
    if min(errors.values()) > fit_limit:
        tables = variant_with_tables(manifest, checkpoint.config)
        errors[TABLES] = comparison.worst_error(L, tables)
    # a scale that no name stands for shows in several layers
    if min(errors.values()) > fit_limit and (configured > fit_limit).sum() > 1:
        scale, factor = _fit_scale(comparison, count)
        name = f"attention scale {scale:.5g}, {factor:.5g} times the configured one"
        errors[name] = comparison.worst_error(L, variant_with_scale(scale))
    return errors


def _fit_scale(comparison: "Comparison", count: int) -> tuple[float, float]:
    """The attention scale with which the first layers are nearest to the bundle's, and
    its factor of the configured one."""
    configured = configured_scale(comparison.checkpoint.config)

    def squared_error(exponent: float) -> float:
        variant = variant_with_scale(configured * 2.0**exponent)
        # the error is proportional to the distance from the scale, its square is smooth
        return comparison.worst_error(count, variant) ** 2

    errors = [squared_error(exponent) for exponent in SCALE_EXPONENTS]
    nearest = SCALE_EXPONENTS[int(np.argmin(errors))]
    step = SCALE_EXPONENTS[1] - SCALE_EXPONENTS[0]
    fitted = minimize_scalar(
        squared_error,
        bounds=(nearest - step, nearest + step),
        method="bounded",
        options={"xatol": SCALE_PRECISION},
    )
    factor = 2.0 ** float(fitted.x)
    return configured * factor, factor


def _count_first_layers(config, configured: np.ndarray, fit_limit: float) -> int:
    """How many of the first layers show every fault: up to the first layer of every kind
    and, if only some layers are wrong, up to the last wrong one; at least two.

    Args:
        configured, fit_limit: as in `_try_variants`.
    """
    L = len(configured)
    kinds = getattr(config, "layer_types", None) or [""] * L
    first_of_each_kind = {kind: kinds.index(kind) for kind in kinds}
    last_needed = max(1, *first_of_each_kind.values())
    wrong = np.flatnonzero(configured > fit_limit)
    if len(wrong) < L:
        last_needed = max(last_needed, int(wrong.max()))
    return min(L, last_needed + 1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Compares variants of Hugging Face's model with a bundle, on the same tokens and the
    same weights.

    Attributes:
        stored: the weights that the bundle stores.
        source: the golden of the model as configured, on these weights.
        outputs: the trace of the bundle over the golden's tokens.
        isolated: whether the layers of the bundle were fed the golden's inputs. Those of
            a variant are fed the same way.
    """

    manifest: Manifest
    checkpoint: Checkpoint
    stored: golden.StoredWeights
    source: golden.Golden
    outputs: Trace
    isolated: bool

    @classmethod
    def of(cls, bundle: Bundle, checkpoint: Checkpoint) -> "Comparison":
        """Runs a bundle, and the model as configured."""
        decoder = Decoder(bundle, exact_runtime(bundle), "exact")
        stored = golden.stored_weights(checkpoint, bundle)
        ids = _prompt(bundle, checkpoint)
        source = golden.make_golden(checkpoint, ids, stored, "stored", head=False)
        # without hidden states only the caches of a chained run can be compared
        isolated = bundle.manifest.shows_hidden
        T, mode = (decoder.options.t_max, "isolated") if isolated else (1, "chained")
        (outputs,) = run.trace_bundle(decoder, source, (T, mode))
        return cls(bundle.manifest, checkpoint, stored, source, outputs, isolated)

    def layer_errors(self, count: int, variant: Variant) -> np.ndarray:
        """Relative RMS [count] of the first layers of a variant: in each layer the
        worst of update, K and V; inf where a value is not finite."""
        trace = self._run_variant(count, variant)
        # the RMS that updates count at least
        sizes = [STREAM_SHARE * compare.rms(layer.x) for layer in trace.layers]
        tensors = "update", "k", "v"
        rows = compare.errors(trace, self.outputs, tensors, update_sizes=sizes)
        squares = rows["error"].fillna(np.inf) ** 2
        means = squares.groupby([rows["layer"], rows["tensor"]]).mean()
        layers = means.groupby("layer").max().reindex(range(count), fill_value=0.0)
        return layers.to_numpy() ** 0.5

    def worst_error(self, count: int, variant: Variant) -> float:
        """The largest of `layer_errors`."""
        return float(self.layer_errors(count, variant).max())

    def _run_variant(self, count: int, variant: Variant) -> Trace:
        """Runs the first layers of a variant over the golden's tokens."""
        config = copy.deepcopy(self.checkpoint.config)
        for name, value in variant.config.items():
            setattr(config, name, copy.deepcopy(value))
        model = layerwise.empty_model(config)
        model.model.layers = model.model.layers[:count]
        context = variant.change(model.model) if variant.change else None
        feed = self.source.trace if self.isolated else None
        with context or nullcontext():
            weights = variant.weights or self.stored
            reference = hf.Reference(self.checkpoint, weights, model=model)
            return reference.run(self.source.ids, feed=feed, head=False)

    def layer_order(self) -> dict[int, int]:
        """Layer → the layer before or after it in the checkpoint whose weights it
        stores, for layers that do not store their own."""
        prefix = f"{self.checkpoint.prefix}layers.{{}}."
        names = [prefix + matrix for matrix in MATRICES]
        name = next(name for name in names if name.format(0) in self.checkpoint)
        L = self.manifest.dims.L
        order = {}
        for layer in range(L):
            stored = self.stored(name.format(layer)).numpy()
            distances = {}  # from the weights of the layer and its neighbours
            for other in range(max(0, layer - 1), min(L, layer + 2)):
                values = self.checkpoint.tensor(name.format(other)).numpy()
                if values.shape == stored.shape:
                    distances[other] = compare.relative_rms(values, stored)
            nearest = min(distances, key=distances.get)
            if distances[layer] > UNRELATED > distances[nearest]:
                order[layer] = nearest
        return order


def _prompt(bundle: Bundle, checkpoint: Checkpoint) -> list[int]:
    """Seeded random ids, more than twice the largest window unless the cache is
    shorter."""
    windows = [layer.window or 0 for layer in bundle.manifest.layers]
    windows.append(getattr(checkpoint.config, "sliding_window", None) or 0)
    count = min(max(24, 2 * max(windows) + 8), bundle.manifest.options.max_seq_len)
    ids = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count)
    return ids.tolist()
