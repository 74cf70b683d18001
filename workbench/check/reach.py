"""Which positions the program is asked about, and what Hugging Face's model computes there.

A head of calls from position 0; then the caches of both sides are extended by the same rows, resampled from the head's K
and V, so that the position jumps near max_seq_len; then a tail of calls. Every row of the cache is written or read once,
windows and rings are passed, and the number of computed positions does not grow with the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.bundle import Bundle, Manifest
from workbench.bundle.names import CONV_STATE, K_STATE, V_DELAYED_STATE, V_STATE, split_layer
from workbench.check.golden import Golden, ReferenceModel, stored_weights
from workbench.decode import Decoder
from workbench.decode.snapshot import put
from workbench.models.checkpoint import Checkpoint

HEAD, TAIL, STAGGER = 20, 8, 3  # positions; STAGGER between the tails of two sequences
LayerStates = list[dict[str, np.ndarray]]  # per layer, by leaf name, K and V in token order


@dataclass(frozen=True)
class Reach:
    """Sequence b computes positions 0 … head − 1 and, on a cache filled up to there, starts[b] … starts[b] + tail − 1."""

    head: int
    tail: int
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Positions that are computed, of all sequences."""
        return len(self.starts) * (self.head + self.tail)

    def __str__(self) -> str:
        places = ", ".join(f"{start} to {start + self.tail - 1}" for start in self.starts)
        tails = f" and {places} on a filled cache" if self.tail else ""
        return f"{self.count} positions: 0 to {self.head - 1}{tails}"


@dataclass(frozen=True)
class Stretch:
    """Consecutive positions of one sequence from `start` on: the golden, and the states `before` and `after` it."""

    golden: Golden
    start: int
    before: LayerStates
    after: LayerStates


def plan_reach(manifest: Manifest) -> Reach:
    """The default positions of a bundle; tails of a batch begin at positions of their own unless a slice writes the cache."""
    options = manifest.options
    S, t_max, B = options.max_seq_len, options.t_max, options.batch
    unit = t_max if options.t == "fixed" else 1  # no dummy columns where a slice writes
    tail = min(max(TAIL, t_max), S // 2) // unit * unit
    room = S - tail
    stagger = 0 if options.kv_write == "slice" else min(STAGGER, (room - unit) // B)
    starts = tuple(room - seq * stagger for seq in range(B))
    head = min(max(HEAD, t_max + 1), starts[-1] if tail else S) // unit * unit
    return Reach(max(head, unit), tail, starts)


def reach_prompts(manifest: Manifest, plan: Reach, seed: int = 0) -> np.ndarray:
    """Token ids [B, head + tail], other ones for every sequence, behind the checkpoint's BOS where it has one."""
    shape = (len(plan.starts), plan.head + plan.tail)
    ids = np.random.default_rng(seed).integers(0, manifest.dims.V, shape)
    if manifest.tokens.bos is not None:
        ids[:, 0] = manifest.tokens.bos
    return ids


def reach_stretches(
    bundle: Bundle, checkpoint: Checkpoint, plan: Reach, seed: int = 0
) -> list[list[Stretch]]:
    """The heads of all sequences, and their tails if there are any, as Hugging Face's model with the weights that `bundle`
    stores computes them."""
    reference = ReferenceModel(checkpoint, stored_weights(checkpoint, bundle), "stored")
    prompts = reach_prompts(bundle.manifest, plan, seed)
    pairs = [
        _sequence(reference, ids, plan.head, start, np.random.default_rng([seed, seq]))
        for seq, (ids, start) in enumerate(zip(prompts, plan.starts, strict=True))
    ]
    return [list(stretches) for stretches in zip(*pairs, strict=True)]


def _sequence(
    reference: ReferenceModel, ids: np.ndarray, head: int, start: int, rng: np.random.Generator
) -> list[Stretch]:
    cache, L = reference.cache(), len(reference.records)
    golden = reference.run(ids[:head], cache)
    after = [{K_STATE: golden.k[i], V_STATE: golden.v[i]} | _sides(cache, i) for i in range(L)]
    first = Stretch(golden, 0, [{} for _ in after], after)
    if len(ids) == head:
        return [first]
    before = []
    for layer, states in enumerate(after):
        fill = {
            # row 0 is left out: many copies of an attention sink would hide every other row
            name: states[name][:, rng.integers(min(1, head - 1), head, start - head)]
            for name in (K_STATE, V_STATE)
        }
        if start > head:
            rows = [torch.from_numpy(fill[name])[None] for name in (K_STATE, V_STATE)]
            cache.layers[layer].update(*rows)
        before.append(states | _joined(states, fill))
    golden = reference.run(ids[head:], cache)
    after = [
        _joined(states, {K_STATE: golden.k[i], V_STATE: golden.v[i]}) | _sides(cache, i)
        for i, states in enumerate(before)
    ]
    return [first, Stretch(golden, start, before, after)]


def _joined(states: dict[str, np.ndarray], rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([states[name], new], 1) for name, new in rows.items()}


def _sides(cache, layer: int) -> dict[str, np.ndarray]:
    """Side states of a layer of Hugging Face's cache, as the bundle's states are."""
    if not getattr(cache.layers[layer], "conv_states", None):
        return {}
    conv = cache.get_conv_state(layer, state_idx=0)[0].T
    delayed = cache.get_recurrent_state(layer, state_idx=0)
    return {CONV_STATE: conv.numpy().copy(), V_DELAYED_STATE: delayed.numpy().copy()}


def write_states(decoder: Decoder, stretches: Sequence[Stretch]) -> None:
    """Fresh states of the decoder that hold what each sequence has before its stretch."""
    decoder.begin()
    for state in decoder.states if any(stretch.start for stretch in stretches) else ():
        for name in state.shard.states:
            values = [
                expected_value(state.shard.states[name].shape[1:], name, s.before, s.start)
                for s in stretches
            ]
            state.write(name, np.stack(values))


def expected_value(shape: Sequence[int], name: str, states: LayerStates, count: int) -> np.ndarray:
    """The value of one sequence's logical state that holds `states` of `count` tokens; a ring holds the last ones."""
    layer, leaf = split_layer(name)
    value = np.zeros(shape, np.float32)
    put(value, name, states[layer][leaf], count)
    return value
