"""Gate `device`: whether a device computes what the portable runtime computes, apart from
rounding.

Another runtime may differ from portable `declared` arithmetic as much as `narrow` does,
which rounds sums to fp16 after every 32 products. That distance is measured for each
bundle and golden (`device_reference`), and stored beside the golden, because a device
may have no room for a second copy of the bundle. `run_device_gate` is the entry."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors import SafetensorError

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import HALF_ULP, NEAR_TIE, errors, furthest, with_ratios
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.check.run import trace_bundle
from workbench.check.states import default_ts
from workbench.check.trace import Arrays, LayerTrace, Trace, parse_name
from workbench.decode import Decoder
from workbench.files import load_arrays, save_arrays, sha256

# The largest ratio of a device's distance to the distance declared–narrow. `declared` is one
# rounding away from exact arithmetic, and a device may be another one away on the other side.
# Portable `exact` in the place of a device reaches 3.7 on the worst of 779 sound bundles (a random
# draw of Qwen 3.5 in fp16, whose recurrent state adds roundings up). Of the 614 planted faults that
# exceed 3, one lies below 6, at 3.06, and gate `program` is RED on it too.
DEVICE_FACTOR = 6.0
REFERENCE_FORMAT = 7  # of the device gate's file: raised when its content changes


def run_device_gate(decoder: Decoder, golden: Golden, single_copy: bool) -> Gate:
    """Gate `device`, or why it cannot run."""
    if not decoder.is_device:
        reason = "needs a Mac: run there with the same bundle and golden"
        if decoder.options.plugin:
            reason = "the portable runtime cannot run the programs of this target"
        return gates.not_run("device", reason)
    reference = device_reference(decoder.bundle, golden, single_copy)
    if reference is None:
        reason = "needs a reference beside the golden: workbench golden CHECKPOINT --out G --for"
        return gates.not_run("device", f"{reason} {decoder.bundle.root.name}")
    return device_gate(decoder, golden, reference)


def reference_path(bundle: Bundle, golden: Golden) -> Path:
    """Path of the file of `device_reference`, next to the golden's."""
    name = f"{golden.file.stem}-{bundle.identity[:10]}.reference.safetensors"
    return golden.file.with_name(name)


@dataclass(frozen=True)
class DeviceReference:
    """What a device would show of a golden's tokens in portable `declared` and
    `narrow` arithmetic; see `trace_device`."""

    declared: Trace
    narrow: Trace

    def arrays(self) -> Arrays:
        """The arrays by their names in the file: `declared/k.3`, `narrow/k.3`."""
        named = {}
        for precision, trace in (("declared", self.declared), ("narrow", self.narrow)):
            for name, array in trace.arrays().items():
                named[f"{precision}/{name}"] = array
        return named

    @classmethod
    def from_arrays(cls, named: Arrays, golden: Golden) -> "DeviceReference":
        """The inverse of `arrays`, for a golden.

        Raises:
            ValueError: arrays of another form, or other ones for the two arithmetics.
        """
        arrays: dict[str, Arrays] = {"declared": {}, "narrow": {}}
        for name, array in named.items():
            precision, _, tensor = name.partition("/")
            if precision not in arrays:
                raise ValueError(f"an array {name!r}")
            arrays[precision][tensor] = array
        for of_precision in arrays.values():
            _check_arrays(of_precision, golden)
        if arrays["declared"].keys() != arrays["narrow"].keys():
            raise ValueError("other arrays in narrow arithmetic")
        traces = {
            precision: Trace.from_arrays(of_precision, golden.layer_count)
            for precision, of_precision in arrays.items()
        }
        if traces["declared"].T is None:
            raise ValueError("no array 'T'")
        return cls(**traces)


def _check_arrays(arrays: Arrays, golden: Golden) -> None:
    """Raises a ValueError for an array whose rows are not those of a golden's tokens."""
    for name, array in arrays.items():
        expected = golden.trace.value(*parse_name(name))
        width = array.shape[1:] if expected is None else expected.shape[1:]
        fits = array.dtype.kind in "fi" and 1 <= array.ndim <= 2
        fits = fits and 1 <= len(array) <= len(golden.ids)
        if not fits or array.shape[1:] != width:
            raise ValueError(f"{name!r} {array.dtype} {[*array.shape]}")


def device_reference(
    bundle: Bundle, golden: Golden, single_copy: bool = False
) -> DeviceReference | None:
    """The reference of gate `device`. It is stored next to the golden's file, if the
    golden has one in a writable folder, and computed only if it is not there. One decoder
    at a time is in memory.

    Args:
        single_copy: compute nothing; return None if no file matches this bundle and golden.
    """
    path = key = None
    if golden.file:
        path = reference_path(bundle, golden)
        key = f"{REFERENCE_FORMAT} {bundle.identity} {sha256(golden.file)}"
    if path and path.is_file():
        with suppress(OSError, SafetensorError, AttributeError, ValueError):
            arrays, metadata = load_arrays(path)
            if metadata.get("key") == key:
                return DeviceReference.from_arrays(arrays, golden)
    if single_copy:
        return None
    declared = trace_device(_device_like(bundle, "declared"), golden)
    narrow = trace_device(_device_like(bundle, "narrow"), golden)
    reference = DeviceReference(declared, narrow)
    if path:
        with suppress(OSError, SafetensorError):
            save_arrays(path, reference.arrays(), {"key": key})
    return reference


def _device_like(bundle: Bundle, precision: str) -> Decoder:
    """A portable decoder that shows no more than a device does: inner layers are neither
    fed nor read."""
    decoder = Decoder(bundle, "portable", precision, keeps_head=False)
    decoder.shows_inner_layers = False  # which this module and `run` read
    return decoder


def trace_device(decoder: Decoder, golden: Golden) -> Trace:
    """The values of a run over the golden's tokens that a device shows too: `hidden`,
    `k`, `v` and `T` of calls of every T in turn, each shard fed the golden's input, and
    the logits that the head computes from the golden's last hidden states. Packages that
    contain the head show the logits of the run itself."""
    Ts = default_ts(decoder.options)
    (trace,) = trace_bundle(decoder, golden, (Ts, "isolated"))
    layers = [LayerTrace(hidden=at.hidden, k=at.k, v=at.v) for at in trace.layers]
    visible = Trace(layers, T=trace.T)
    scale = decoder.manifest.stream_scale
    if decoder.heads:
        hidden = golden.trace.layers[-1].hidden.T / scale
        logits = decoder.logits(np.tile(hidden, (decoder.options.batch, 1, 1)))
        visible.logits = logits[0]
    elif decoder.manifest.gives_logits:
        visible.logits = trace.output / scale
    return visible


def device_unit(perturbed: np.ndarray, size: np.ndarray) -> np.ndarray:
    """A `Unit`: the distance declared–narrow, at least half a unit of an fp16
    result."""
    return np.maximum(perturbed, HALF_ULP * size)


def device_gate(decoder: Decoder, golden: Golden, reference: DeviceReference) -> Gate:
    """GREEN if every layer's output, K, V and the logits are about as near to portable
    `declared` as `narrow` is.

    The value is the worst tensor's distance in units of that distance, at least half a
    unit of an fp16 result, as an RMS over positions."""
    declared = reference.declared
    rows = errors(declared, trace_device(decoder, golden))
    rows = with_ratios(rows, declared, reference.narrow, device_unit)
    rows = rows[~ties_in_shards(decoder, golden, rows)]
    if rows.empty:  # every choice of an expert was close
        return gates.not_run("device", "nothing is comparable")
    worst = furthest(rows.assign(T=0))  # one ratio for all T
    place = worst["tensor"]
    if pd.notna(worst["layer"]):
        place += f" of layer {worst['layer']}"
    reason = (
        f"distance from portable declared over that of portable narrow, worst: {place}"
    )
    return gates.at_most("device", worst["ratio"], DEVICE_FACTOR, reason)


def ties_in_shards(decoder: Decoder, golden: Golden, rows: pd.DataFrame) -> pd.Series:
    """True for rows that a close choice of an expert in the same shard may have
    changed."""
    tied = pd.Series(False, rows.index)
    caches = rows["tensor"].isin(["k", "v"])
    for model in decoder.layer_shards:
        tied_so_far = np.zeros(len(golden.ids), bool)
        for layer in model.shard.layer_range:
            tied_before_layer = tied_so_far
            margin = golden.trace.layers[layer].margin
            if margin is not None:
                tied_so_far = tied_so_far | (margin[:, 0] < NEAR_TIE)
            positions = rows["position"]
            # a layer writes its cache rows before it chooses an expert
            changed = np.where(
                caches, tied_before_layer[positions], tied_so_far[positions]
            )
            tied |= changed & rows["layer"].eq(layer).fillna(False).astype(bool)
    return tied
