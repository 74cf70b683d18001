"""What a pass over a prompt computed, layer by layer: one record for Hugging Face's
model, for a bundle and for the reference of a device.

Only files name the arrays of a trace, as `k.3`; `Trace.arrays` and `Trace.from_arrays`
translate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

Arrays = dict[str, np.ndarray]  # by name
# a layer's arrays in files, each with the layer's number: x.0, hidden.0, k.0
STORED = ("x", "hidden", "k", "v", "router", "expert", "margin", "scalar")
STORED_ONCE = ("normed", "logits", "T")


@dataclass(eq=False)
class LayerTrace:
    """One decoder layer's values, one row [n, W] for each position; None: not visible.

    Attributes:
        x: [n, C], the input of the layer.
        hidden: [n, C], its output.
        k, v: [n, H_kv · D], the rows that it wrote to its cache. A ring has only the
            last of them.
        router: [n, R], the router state that it passes to the next layer.
        expert: [n, 1], the number of the expert that it chose.
        margin: [n, 1], that expert's score less the second best.
        scalar: [n, 1], the number by which the layer multiplies its whole output, the
            same in every row; None: there is none.
        states: by kind (`conv`, `v_delayed`, `matrix`), its recurrent states behind the
            last position, which have no row for each position.
    """

    x: np.ndarray | None = None
    hidden: np.ndarray | None = None
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    router: np.ndarray | None = None
    expert: np.ndarray | None = None
    margin: np.ndarray | None = None
    scalar: np.ndarray | None = None
    states: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def unscaled(self) -> np.ndarray | None:
        """[n, C]: the output before the layer's scalar multiplies it."""
        if self.hidden is None or self.scalar is None:
            return self.hidden
        return self.hidden / self.scalar

    @property
    def update(self) -> np.ndarray | None:
        """[n, C]: what the layer adds to the stream, `hidden / scalar − x`.

        `hidden − x` of a layer with a small scalar s is (s − 1) · x and little else, so
        that it would hide a missing update."""
        if self.hidden is None or self.x is None:
            return None
        with np.errstate(invalid="ignore"):  # inf − inf, beyond the range of fp16
            return self.unscaled - self.x


@dataclass(eq=False)
class Trace:
    """The values of one pass over n positions.

    Attributes:
        final_input: [n, C], what the final norm reads in place of the last layer's
            output; None where it reads that output.
        normed: [n, C], the output of the final norm.
        logits: [n, V].
        T: [n] integers, the most tokens that a sequence had in the call of each
            position; None where there were no calls.
        output: [n, W], what the last shard of layers returned: hidden states, or the
            logits where its packages contain the head.
    """

    layers: list[LayerTrace]
    final_input: np.ndarray | None = None
    normed: np.ndarray | None = None
    logits: np.ndarray | None = None
    T: np.ndarray | None = None
    output: np.ndarray | None = None

    @classmethod
    def empty(cls, L: int) -> "Trace":
        """A trace of L layers that has no value yet."""
        return cls([LayerTrace() for _ in range(L)])

    def value(self, tensor: str, layer: int | None) -> np.ndarray | None:
        """A field by name: a layer's (`update` included), or without a layer the
        trace's."""
        owner = self if layer is None else self.layers[layer]
        return getattr(owner, tensor)

    def arrays(self) -> Arrays:
        """The arrays by the names that they have in files."""
        named = {}
        for layer, values in enumerate(self.layers):
            for tensor in STORED:
                named[f"{tensor}.{layer}"] = getattr(values, tensor)
        for tensor in STORED_ONCE:
            named[tensor] = getattr(self, tensor)
        return {name: array for name, array in named.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], L: int) -> "Trace":
        """The inverse of `arrays`, for a model of L layers.

        Raises:
            ValueError: a name that `arrays` does not give.
        """
        trace = cls.empty(L)
        for name, array in arrays.items():
            tensor, layer = parse_name(name)
            if layer is None and tensor in STORED_ONCE:
                setattr(trace, tensor, array)
            elif layer is not None and tensor in STORED and 0 <= layer < L:
                setattr(trace.layers[layer], tensor, array)
            else:
                raise ValueError(f"an array {name!r}")
        return trace


def parse_name(name: str) -> tuple[str, int | None]:
    """The tensor and the layer in the name of an array: k.3 → (k, 3); logits → (logits,
    None).

    Raises:
        ValueError: what follows the dot is no number.
    """
    tensor, dot, layer = name.partition(".")
    return tensor, int(layer) if dot else None


def stack(traces: Sequence[Trace]) -> Trace:
    """The traces of B sequences as one, whose arrays are [B, n, W]."""
    first = traces[0]
    stacked = Trace.empty(len(first.layers))
    for name, array in _arrays_of(first):
        if array is not None:
            arrays = [getattr(trace, name) for trace in traces]
            setattr(stacked, name, np.stack(arrays))
    for i, layer in enumerate(first.layers):
        for name, array in _arrays_of(layer):
            if array is not None:
                arrays = [getattr(trace.layers[i], name) for trace in traces]
                setattr(stacked.layers[i], name, np.stack(arrays))
    return stacked


def unstack(trace: Trace, B: int) -> list[Trace]:
    """The inverse of `stack`: the traces of B sequences, as views."""
    traces = []
    for seq in range(B):
        layers = [_select(layer, seq) for layer in trace.layers]
        traces.append(replace(_select(trace, seq), layers=layers))
    return traces


def _arrays_of(record: LayerTrace | Trace) -> Iterator[tuple[str, np.ndarray | None]]:
    """The fields of a record that are one array or None."""
    for entry in fields(record):
        if entry.name not in ("layers", "states"):
            yield entry.name, getattr(record, entry.name)


def _select(record: LayerTrace | Trace, seq: int):
    """The record of one sequence of a stacked one."""
    arrays = {
        name: None if array is None else array[seq]
        for name, array in _arrays_of(record)
    }
    return replace(record, **arrays)
