"""What each preset costs beside its size, the cheapest that passes, and a fault that compression
would hide.

Is the bundle faulty, and what does compression cost: two questions. A fault planted in a bundle on
disk answers the first with RED while the price may stay far below any limit.
"""

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
    """One row per preset, smallest bundle first: bytes, mean KL and its budget (nats), same top
    token, the verdict of the gates that ask for bugs, and that of all gates. Bundles are exported
    into `bundles` with `options`, and run as `how` says (`runtime`, `compute_units`). A preset that
    the checkpoint's sizes do not allow has the reason in place of a verdict."""
    rows = []
    for preset in presets:
        try:
            bundle = bundle_for(checkpoint, export_options(compress=preset, **options), bundles)
        except InputError as problem:
            rows.append({"compress": preset, "verdict": f"{problem.actual}: {problem.needed}"})
            continue
        result = validate_stored(Decoder(bundle, **how or {}), golden, checkpoint, max_kl=max_kl)
        rows.append(
            {
                "compress": preset,
                "bytes": bundle.bytes,
                "kl_mean": float(result.price.kl.mean()),
                "kl_budget": float(result.price.budget_kl.mean()),
                "same_top": result.price.same_top,
                "bug_gates": gates.verdict(result.bug_gates),
                "verdict": result.verdict,
            }
        )
    return pd.DataFrame(rows).sort_values("bytes", ignore_index=True)


def cheapest_conclusion(prices: pd.DataFrame, max_kl: float) -> str:
    """The smallest preset that passes: every gate GREEN and the mean KL within the user's limit."""
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
    """Price beside budget: mean, median, 99% and largest KL of the bundle, and of what rounding
    alone costs."""
    price = result.price.json()
    if price["budget"]:
        budget = price["budget"]["kl"]
    else:
        budget = dict.fromkeys(price["kl"])
    return pd.DataFrame({"price": price["kl"], "budget": budget}).rename_axis("KL (nats)")


def plant_rope_fault(bundle: Bundle, folder: Path, factor: float = 1.02) -> Bundle:
    """A copy of `bundle` in `folder` whose rotary frequencies are `factor` times what they should
    be."""
    copy = Path(shutil.copytree(bundle.root, folder / f"{bundle.root.name}-planted"))
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    for rope in manifest["rope"]:
        rope["inv_freq"] = [factor * frequency for frequency in rope["inv_freq"]]
    (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
    return Bundle.open(copy)


def fidelity_of_both(
    sound: Validation, planted: Bundle, golden: Golden, Ts: Iterable[int]
) -> pd.DataFrame:
    """Errors of the updates of a sound bundle and of one with a planted fault, each layer fed the
    golden's input, beside the sound one's budget: rows of `fidelity` with the column `bundle`."""
    keys = ["layer", "position", "T", "tensor"]
    updates = sound.rows.query("tensor == 'update' and mode == 'isolated'")
    decoder = Decoder(planted)
    errors = price_rows(decoder, golden, measure_fidelity(decoder, golden, Ts)[1])
    rows = updates.drop(columns="error").merge(errors[[*keys, "error"]], on=keys)
    rows["finite"] = rows["error"].notna()
    return pd.concat(
        [updates.assign(bundle="sound"), rows.assign(bundle="planted fault")], ignore_index=True
    )


def beside(sound: Iterable[gates.Gate], planted: Iterable[gates.Gate]) -> pd.DataFrame:
    """Gates of a sound bundle and of one with a planted fault, a row for each name."""
    after = {gate.name: gate for gate in planted}
    rows = []
    for gate in sound:
        rows.append(
            {
                "gate": gate.name,
                "sound": gate.verdict,
                "planted": after[gate.name].verdict,
                "value": gate.value,
                "planted value": after[gate.name].value,
                "threshold": gate.threshold,
                "reason": after[gate.name].reason,
            }
        )
    return pd.DataFrame(rows)
