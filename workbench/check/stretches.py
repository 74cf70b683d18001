"""Gate `program`, the side of Hugging Face's model: the stretches of positions that are
compared, and what the model computes in them with the weights of a bundle.

Each sequence first runs its start: some positions from 0 on. Then both caches are
extended by the same rows, drawn from the start's, and it runs its end, whose last
position is the last of the cache. So every row of the cache is written or read once,
windows and rings are passed, and the number of computed positions does not grow with the
cache. Rows without a token hold garbage, which must neither be read nor change.

A norm's epsilon shows only where its input is as small as the epsilon's root. So every
layer and the final norm are also fed inputs whose RMS grows from 2^-44 to 1 in steps of
at most 16 times, if the cache has `SCALES` positions. What a layer's inner norms read
lies between, and passes the root of any usual epsilon (1e-12 to 1e-5) on the way. The
smallest inputs come first, so that no larger value of an earlier position hides a
smaller one. Embeddings that layers read beside their input are multiplied by the same
scales: a norm hides a factor of its input wherever the input is large.

`reference_stretches` is the entry; `plan_positions` says how many positions it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from workbench.bundle import Manifest
from workbench.bundle.names import is_cache, split_layer
from workbench.check.hf import Reference, SequenceRun, nudge, recording_cache
from workbench.check.states import LARGE_GARBAGE, SUBNORMAL_GARBAGE
from workbench.check.trace import Trace
from workbench.decode.snapshot import fill

START_POSITIONS = 20
END_POSITIONS = 8
STAGGER = 3  # positions between the ends of two sequences
SCALES = 12  # positions of scaled inputs
SMALLEST = -44  # exponent of their smallest RMS
GARBAGE = LARGE_GARBAGE, SUBNORMAL_GARBAGE  # magnitudes in rows without a token


@dataclass
class Stretch:
    """Consecutive positions of one sequence.

    Attributes:
        start: the first position.
        ids: [n].
        trace: of Hugging Face's model without logits, with the recurrent states after
            the last position.
        before: the states before the first position; `k` and `v` [start, W] hold all
            rows of the caches.
        perturbed: the trace when the last bit of every layer's input is changed, by mode:
            `isolated`, and `chained` if layers in a row are compared.
        final_input: [n, C], what the final norm reads.
        token_scales: see `SequenceRun`.
    """

    start: int
    ids: np.ndarray
    trace: Trace
    before: Trace
    perturbed: dict[str, Trace]
    final_input: np.ndarray
    token_scales: np.ndarray | None = None

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.ids)

    def expected_state(
        self, shape: Sequence[int], name: str, after: Trace | None = None
    ) -> np.ndarray:
        """The value of a logical state such as `layers.3.k_state`, float32, with garbage
        in cache rows without a token.

        Args:
            shape: of the state without the batch.
            after: the trace whose last position has run, `trace` or a perturbed one;
                None: the state before the first position.
        """
        value = np.zeros(shape, np.float32)
        if is_cache(name):
            value[:] = _garbage_rows(tuple(shape))
        _write_state(value, name, self.before, self.start)
        if after is not None:
            _write_state(value, name, after, self.end)
        return value


@dataclass(frozen=True)
class Stretches:
    """The stretches of all sequences, by kind.

    Attributes:
        start: from position 0 on.
        scaled: the same tokens with scaled inputs.
        end: to the last row of the cache; none where the cache has no room for one.
    """

    start: tuple[Stretch, ...]
    scaled: tuple[Stretch, ...]
    end: tuple[Stretch, ...] = ()


@dataclass(frozen=True)
class StretchSizes:
    """How many positions each kind of stretch has.

    Attributes:
        start: of the start of a sequence.
        end: of its end; 0: the cache has no room for one.
        scaled: of the scaled inputs.
        end_starts: [B], where the end of each sequence begins.
    """

    start: int
    end: int
    scaled: int
    end_starts: list[int]


def plan_positions(manifest: Manifest) -> StretchSizes:
    """The sizes of all stretches. The ends begin at different positions, unless a slice
    writes the cache: it writes every sequence at one position and takes no dummy
    columns."""
    options = manifest.options
    sliced = options.kv_write == "slice"
    # calls of fixed shapes without dummy columns take whole multiples
    unit = options.t_max if sliced and options.fixed_sizes else 1
    S = options.max_seq_len
    t_max = options.t_max
    # a cache too small for a call of t_max tokens in the end has room for it in the start
    end = min(max(END_POSITIONS, t_max), S // 2, S - t_max) // unit * unit
    stagger = 0 if sliced else min(STAGGER, (S - end - t_max) // options.batch)
    end_starts = [S - end - seq * stagger for seq in range(options.batch)]
    start = min(max(START_POSITIONS, t_max + 1), end_starts[-1]) // unit * unit
    scaled = min(SCALES, start) // unit * unit
    return StretchSizes(
        start=max(start, unit), end=end, scaled=max(scaled, unit), end_starts=end_starts
    )


def reference_stretches(
    manifest: Manifest, reference: Reference, chained_end: bool
) -> Stretches:
    """The stretches of all sequences, computed by Hugging Face's model with the weights of
    a bundle. Token ids are random, different for each sequence, and begin with the
    checkpoint's BOS if it has one.

    Args:
        chained_end: whether the end is compared through layers in a row, as the start
            always is.
    """
    sizes = plan_positions(manifest)
    shape = len(sizes.end_starts), sizes.start + sizes.end
    prompts = np.random.default_rng(0).integers(0, manifest.dims.V, shape)
    if manifest.tokens.bos is not None:
        prompts[:, 0] = manifest.tokens.bos
    starts, ends, scaled = [], [], []
    for ids, end_start in zip(prompts, sizes.end_starts, strict=True):
        cache = recording_cache(reference.model.config)
        start = run_stretch(reference, ids[: sizes.start], cache, chained=True)
        starts.append(start)
        if sizes.end:
            before = extend(cache, start.trace, end_start, reference.sources)
            end = run_stretch(
                reference,
                ids[sizes.start :],
                cache,
                end_start,
                before,
                chained=chained_end,
            )
            ends.append(end)
        scales = np.exp2(np.linspace(SMALLEST, 0, sizes.scaled)).astype(np.float32)
        scaled.append(
            run_stretch(
                reference,
                ids[: sizes.scaled],
                recording_cache(reference.model.config),
                feed=scaled_inputs(start, scales),
                token_scales=scales,
            )
        )
    return Stretches(tuple(starts), tuple(scaled), tuple(ends))


def run_stretch(
    reference: Reference,
    ids: np.ndarray,
    cache,
    start: int = 0,
    before: Trace | None = None,
    *,
    feed: Trace | None = None,
    token_scales: np.ndarray | None = None,
    chained: bool = False,
) -> Stretch:
    """Runs `ids` after the `start` tokens of `cache`, updating it in place.

    Hugging Face's model runs them two or three times at once, as copies of one sequence
    in a batch: unperturbed; with the last bit of every layer's unperturbed input changed;
    and, if `chained`, with the last bit changed of what the layer before has output.

    Args:
        before: the states behind the `start` tokens; None: there are none.
        feed: inputs of layers; None: each reads the output of the one before.
        token_scales: see `SequenceRun`.
        chained: whether layers in a row are compared, whose tolerance the third run
            gives.
    """
    # logits are computed slice by slice, by `head_errors`
    make_run = partial(SequenceRun, head=False, token_scales=token_scales)
    # the first sequence of the batch is the one that `reads_first_sequence` reads
    runs = {
        "unperturbed": make_run(feed),
        "isolated": make_run(feed, reads_first_sequence=True, perturb=nudge(start)),
    }
    if chained:
        runs["chained"] = make_run(perturb=nudge(start + 1))
    if start:  # every copy continues the same tokens
        cache.reorder_cache(torch.zeros(len(runs), dtype=torch.long))
    batch = reference.run_batch(ids, [*runs.values()], cache)
    for row, trace in enumerate(batch):
        states = recurrent_states(cache, row)
        for layer, layer_states in zip(trace.layers, states, strict=True):
            layer.states = layer_states
    cache.reorder_cache(torch.zeros(1, dtype=torch.long))
    traces = dict(zip(runs, batch, strict=True))
    trace = traces.pop("unperturbed")
    return Stretch(
        start,
        ids,
        trace,
        before=before or Trace.empty(len(trace.layers)),
        perturbed=traces,
        final_input=feed.final_input if feed else trace.layers[-1].hidden,
        token_scales=token_scales,
    )


def scaled_inputs(stretch: Stretch, scales: np.ndarray) -> Trace:
    """The first inputs of every layer and of the final norm, with an RMS of `scales`
    [n]."""

    def scale(x: np.ndarray) -> np.ndarray:
        x = x[: len(scales)]
        size = np.sqrt(np.mean(np.square(x), -1, keepdims=True))
        # rows of zeros stay zeros
        return np.float32(x / np.maximum(size, 1e-30) * scales[:, None])

    feed = Trace.empty(len(stretch.trace.layers))
    feed.final_input = scale(stretch.final_input)
    for layer, unscaled in zip(feed.layers, stretch.trace.layers):
        layer.x = scale(unscaled.x)
    return feed


def extend(cache, trace: Trace, start: int, sources: dict[int, int]) -> Trace:
    """Extends `cache`, which holds the tokens of `trace`, to `start` tokens with rows
    drawn from its own in random order. Returns all states as a trace. `sources`: see
    `Reference`."""
    before = Trace.empty(len(trace.layers))
    for layer, states in zip(before.layers, recurrent_states(cache), strict=True):
        layer.states = states
    rng = np.random.default_rng(start)
    for i, layer in enumerate(cache.layers):
        if trace.layers[i].k is None or i in sources:
            continue
        count = len(trace.layers[i].k)
        # row 0 is left out: many copies of an attention sink would hide every other row
        drawn = rng.integers(min(1, count - 1), count, start - count)
        planes = []
        for name in ("k", "v"):
            written = getattr(trace.layers[i], name)
            rows = written[drawn]
            setattr(before.layers[i], name, np.concatenate([written, rows]))
            plane = torch.from_numpy(rows).unflatten(1, (layer.keys.shape[1], -1))
            planes.append(plane.transpose(0, 1)[None])
        if start > count:
            layer.update(*planes)
    for i, source in sources.items():
        before.layers[i].k = before.layers[source].k
        before.layers[i].v = before.layers[source].v
    return before


def recurrent_states(cache, row: int = 0) -> list[dict[str, np.ndarray]]:
    """By layer, the convolutions, delayed values and matrices of one sequence of
    Hugging Face's cache, in the layout of the bundle's states (see `LayerTrace.states`)."""
    layers = []
    for i, layer in enumerate(cache.layers):
        states = {}
        layers.append(states)
        if not getattr(layer, "conv_states", None):
            continue
        states["conv"] = cache.get_conv_state(i, state_idx=0)[row].T.numpy().copy()
        if layer.is_recurrent_states_initialized[0]:
            state = cache.get_recurrent_state(i, state_idx=0)[row].numpy().copy()
            if state.ndim == 1:
                states["v_delayed"] = state[None]
            else:
                states["matrix"] = state
    return layers


def state_rows(trace: Trace, name: str) -> np.ndarray | None:
    """The values in a trace of a logical state such as `layers.3.k_state`: rows of a
    cache [n, W], or a recurrent state after the last position; None if it has none."""
    layer, leaf = split_layer(name)
    kind = leaf.removesuffix("_state")
    if is_cache(name):
        return trace.value(kind, layer)
    return trace.layers[layer].states.get(kind)


def _write_state(value: np.ndarray, name: str, trace: Trace, end: int) -> None:
    """Writes what a trace leaves in a logical state into `value`, in place. A ring holds
    the last rows. So does a convolution's state, for which transformers keeps one row
    more.

    Args:
        end: the number of tokens behind the trace's last position.
    """
    rows = state_rows(trace, name)
    if rows is None:  # no state precedes the first token
        return
    if is_cache(name):
        planes = rows.reshape(len(rows), value.shape[0], -1).transpose(1, 0, 2)
        fill(value, planes, end)
    else:
        value[:] = rows[-len(value) :]


@lru_cache(maxsize=2)
def _garbage_rows(shape: tuple[int, ...]) -> np.ndarray:
    """Seeded garbage of a cache of this shape, float32, to be read alone."""
    rng = np.random.default_rng(shape)
    signs = rng.choice([-1, 1], shape)
    rows = np.float32(rng.choice(GARBAGE, (shape[-2], 1)) * signs)
    rows.flags.writeable = False
    return rows
