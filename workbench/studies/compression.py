"""The price and size of each compression preset, the cheapest that passes, and a
planted fault.

A bundle's faults and its price are independent: the planted fault makes a bug gate RED
while the price may stay far below any limit."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from workbench.bundle import Bundle
from workbench.bundle.bundle import MANIFEST_NAME
from workbench.check import gates
from workbench.check.fidelity import measure_fidelity
from workbench.check.golden import Golden
from workbench.check.price import price_rows
from workbench.check.validate import Validation, validate_stored
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.export import options as export_options
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import bundle_for


def preset_prices(
    checkpoint: Checkpoint,
    golden: Golden,
    presets: Iterable[str],
    bundles: Path,
    max_kl: float = gates.MAX_KL,
    how: Mapping[str, str] | None = None,
    **options,
) -> pd.DataFrame:
    """One row per preset, smallest bundle first: bytes, mean KL and its budget (nats),
    same top token, the verdict of the bug gates, and that of all gates.

    Bundles are exported into `bundles` with `options`; `how` has the decoders' runtime
    and compute units. A preset that the checkpoint's sizes do not allow has the reason
    as its verdict."""
    rows = []
    for preset in presets:
        try:
            compressed = export_options(compress=preset, **options)
            bundle = bundle_for(checkpoint, compressed, bundles)
        except InputError as problem:
            reason = f"{problem.actual}: {problem.needed}"
            rows.append({"compress": preset, "verdict": reason})
            continue
        decoder = Decoder(bundle, **how or {})
        result = validate_stored(decoder, golden, checkpoint, max_kl=max_kl)
        row = {
            "compress": preset,
            "bytes": bundle.bytes,
            "kl_mean": float(result.price.kl.mean()),
            "kl_budget": float(result.price.budget_kl.mean()),
            "same_top": result.price.same_top,
            "bug_gates": gates.verdict(result.bug_gates),
            "verdict": result.verdict,
        }
        rows.append(row)
    return pd.DataFrame(rows).sort_values("bytes", ignore_index=True)


def cheapest_conclusion(prices: pd.DataFrame, max_kl: float) -> str:
    """The smallest preset that passes: every gate GREEN and the mean KL within the
    user's limit."""
    passing = prices[(prices["verdict"] == gates.GREEN) & (prices["kl_mean"] <= max_kl)]
    limit = f"a mean KL of at most {max_kl:g}, your limit"
    if passing.empty:
        return f"No preset of {len(prices)} passes every gate with {limit}."
    best = passing.loc[passing["bytes"].idxmin()]
    return (
        f"The cheapest that passes is {best['compress']}: {best['bytes'] / 2**20:.2f} MiB, mean KL "
        f"{best['kl_mean']:.3g} (rounding alone {best['kl_budget']:.3g}), with {limit}."
    )


def price_table(result: Validation) -> pd.DataFrame:
    """Price and budget: mean, median, 99% and largest KL of the bundle and of rounding
    alone."""
    price = result.price.json()
    columns = {"price": price["kl"], "budget": None}
    if price["budget"]:
        columns["budget"] = price["budget"]["kl"]
    return pd.DataFrame(columns).rename_axis("KL (nats)")


def plant_rope_fault(bundle: Bundle, folder: Path, factor: float = 1.02) -> Bundle:
    """A copy of `bundle` in `folder` with its rotary frequencies multiplied by
    `factor`."""
    copy = Path(shutil.copytree(bundle.root, folder / f"{bundle.root.name}-planted"))
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    for rope in manifest["rope"]:
        rope["inv_freq"] = [factor * frequency for frequency in rope["inv_freq"]]
    (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
    return Bundle.open(copy)


def fidelity_of_both(
    sound: Validation, planted: Bundle, golden: Golden, Ts: Iterable[int]
) -> pd.DataFrame:
    """Errors of the updates of a sound bundle and of one with a planted fault, each
    layer fed the golden's input, beside the sound one's budget: rows of `fidelity` with
    the column `bundle`."""
    keys = ["layer", "position", "T", "tensor"]
    updates = sound.rows.query("tensor == 'update' and mode == 'isolated'")
    decoder = Decoder(planted)
    errors = price_rows(decoder, golden, measure_fidelity(decoder, golden, Ts)[1])
    rows = updates.drop(columns="error").merge(errors[[*keys, "error"]], on=keys)
    rows["finite"] = rows["error"].notna()
    both = [updates.assign(bundle="sound"), rows.assign(bundle="planted fault")]
    return pd.concat(both, ignore_index=True)


def beside(sound: Iterable[gates.Gate], planted: Iterable[gates.Gate]) -> pd.DataFrame:
    """Gates of a sound bundle and of one with a planted fault, a row for each name."""
    after = {gate.name: gate for gate in planted}
    rows = []
    for gate in sound:
        other = after[gate.name]
        row = {
            "gate": gate.name,
            "sound": gate.verdict,
            "planted": other.verdict,
            "value": gate.value,
            "planted value": other.value,
            "threshold": gate.threshold,
            "reason": other.reason,
        }
        rows.append(row)
    return pd.DataFrame(rows)
