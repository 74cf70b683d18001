"""Gate `device`: whether another runtime computes what the portable one does. It needs
no checkpoint, so that a Mac can run it alone.

Every shard is fed the golden's inputs on both. The device may be as far from portable
`declared` arithmetic as `narrow` is, which rounds sums to fp16 after every 32 products:
that distance is measured for each bundle, not chosen."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors import SafetensorError, safe_open

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import HALF_ULP, NEAR_TIE, compare
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.check.hf import Values
from workbench.check.run import default_ts, run_golden
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.files import save_arrays

METADATA = "workbench-reference"
PARTS = ("declared", "narrow")
REFERENCE_FORMAT = 4  # raised when a part is added: older files are made again
# Times the distance declared–narrow. `declared` lies one rounding away from exact
# arithmetic, and a device may lie another one away on the other side. Portable `exact`,
# seen as a device, is 1.44 distances away on the worst sound bundle (fp16, trained
# ZAYA; 1.44 too among random draws). The limit is at least twice that; tests/check/faults.md
# has the margin.
DEVICE_FACTOR = 3.0


def room(moved: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The distance declared–narrow, at least half a unit of an fp16 result."""
    return np.maximum(moved, HALF_ULP * size)


@dataclass(frozen=True)
class Reference:
    """Portable results by name (`hidden.3`, `k.3`, `v.3`, `logits`) in two arithmetics.
    `key`: the bundle and the tokens that they belong to."""

    declared: Values
    narrow: Values
    key: str

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        arrays = {}
        for part in PARTS:
            for name, array in getattr(self, part).items():
                arrays[f"{part}/{name}"] = array
        save_arrays(path, arrays, {METADATA: self.key})

    @classmethod
    def load(cls, path: Path) -> "Reference":
        parts = {part: {} for part in PARTS}
        with safe_open(path, framework="np") as file:
            for name in file.keys():
                part, _, tensor = name.partition("/")
                parts[part][tensor] = file.get_tensor(name)
            return cls(**parts, key=file.metadata()[METADATA])


def make_reference(bundle: Bundle, golden: Golden) -> Reference:
    """Runs `bundle` in portable `declared` and `narrow` arithmetic over the golden's
    tokens and records the values that a device shows. One decoder at a time is in
    memory."""

    def run(precision: str) -> Values:
        decoder = Decoder(bundle, "portable", precision)
        # as on a device: inner layers go on with what the shard computed
        decoder.shows_inner_layers = False
        return _results(decoder, golden)

    return Reference(run("declared"), run("narrow"), _key(bundle, golden))


def reference_path(bundle: Bundle, golden: Path) -> Path:
    """Where the reference of a bundle lies that belongs to the golden at this path:
    beside it."""
    return golden.with_name(
        f"{golden.stem}-{bundle.identity[:10]}.reference.safetensors"
    )


def stored_reference(
    bundle: Bundle, golden: Golden, path: Path, only: bool = False
) -> Reference | None:
    """`make_reference`, once: the file stays beside the golden at `path`, where that
    folder can be written. With `only` nothing is run: None if no file is of this bundle
    and golden."""
    place = reference_path(bundle, path)
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        reference = Reference.load(place)
        if reference.key == _key(bundle, golden):
            return reference
    if only:
        return None
    reference = make_reference(bundle, golden)
    with suppress(OSError, SafetensorError):
        reference.save(place)
    return reference


def device_gate(decoder: Decoder, golden: Golden, reference: Reference) -> Gate:
    """GREEN if every layer's output, K, V and the logits are about as near to portable
    `declared` as `narrow` is.

    The value is the worst tensor's distance in units of that distance, as an RMS over
    positions."""
    if reference.key != _key(decoder.bundle, golden):
        raise InputError(
            "reference of the device gate",
            "another bundle's, or another golden's",
            "one of this bundle and this golden",
            "make it again: workbench.check.device.make_reference",
        )
    values = _results(decoder, golden)
    rows = compare(
        reference.declared, values, reference.narrow, room=room, similar=False
    )
    rows = rows[~_tied(decoder, golden, rows)]
    squares = (rows["ratio"] ** 2).groupby([rows["tensor"], rows["layer"]]).mean()
    ratios = []
    for (tensor, layer), square in squares.items():
        ratios.append((square**0.5, tensor if layer < 0 else f"{tensor}.{layer}"))
    reason = "distance from portable declared over that of portable narrow, worst: "
    return gates.all_at_most("device", ratios or [(0.0, "")], DEVICE_FACTOR, reason)


def _results(decoder: Decoder, golden: Golden) -> Values:
    """What a runtime shows of a pass over the golden's tokens: calls of every T in
    turn, each shard fed the golden's input, the head the golden's last hidden state."""
    values = run_golden(decoder, golden, default_ts(decoder.options))
    shown = ("hidden.", "k.", "v.", "T")
    values = {name: x for name, x in values.items() if name.startswith(shown)}
    last = golden[f"hidden.{golden.layers - 1}"] / decoder.manifest.stream_scale
    hidden = np.tile(last.T, (decoder.options.batch, 1, 1))
    return values | {"logits": decoder.logits(hidden)[0]}


def _tied(decoder: Decoder, golden: Golden, rows: pd.DataFrame) -> pd.Series:
    """Rows that a near-tied choice of an expert, in their own shard, can have turned."""
    tied = pd.Series(False, rows.index)
    for model in decoder.layers:
        before = np.zeros(len(golden.ids), bool)
        for layer in range(*model.shard.layers):
            own = rows["layer"] == layer
            caches = own & rows["tensor"].isin(["k", "v"])
            tied[caches] = before[rows.loc[caches, "position"]]
            if f"margin.{layer}" in golden:
                before = before | (golden[f"margin.{layer}"][:, 0] < NEAR_TIE)
            others = own & ~caches
            tied[others] = before[rows.loc[others, "position"]]
    return tied


def _key(bundle: Bundle, golden: Golden) -> str:
    """The bundle and the golden that a reference belongs to."""
    names = [REFERENCE_FORMAT, bundle.identity, golden.meta["checkpoint"]]
    digest = hashlib.sha256(json.dumps(names).encode())
    for array in (golden.ids, golden["x.0"], golden["logits"]):
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()
