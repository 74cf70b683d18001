"""Memory and predicted speed of a checkpoint's exports."""

from pathlib import Path

import ipywidgets as ui
import pandas as pd
from IPython.display import display

from workbench.ane import memory, roofline
from workbench.ane.chips import chips
from workbench.ane.work import call_work
from workbench.bundle import PRESETS
from workbench.experiment import show
from workbench.exporter import make_options
from workbench.models.checkpoint import Checkpoint
from workbench.sweep.grid import locate
from workbench.widgets.controls import make_control

LENGTHS = [1 << exponent for exponent in range(6, 16)]
"""The caches that the planner offers, in tokens."""
SPEEDS = {"tok/s": "ms", "tok/s at least": "high_ms", "tok/s at most": "low_ms"}
"""A column of the planner → the predicted time of a call from which it is computed."""


def planner(checkpoint: str | Path) -> ui.Widget:
    """Memory and predicted speed of a checkpoint's exports, a row for each compression,
    under sliders for max_seq_len, T, chip and memory. Nothing in it is measured."""
    source = Checkpoint(locate(checkpoint))
    caption = (
        f"{source.name} on a Mac, predicted by a formula; nothing here is measured. "
        f"{roofline.describe_fit()}"
    )

    def show_table(S: int, T: int, chip: str, gib: int) -> None:
        rows = []
        # reason why a prediction extrapolates → the presets for which it does
        presets_by_reason: dict[str, list[str]] = {}
        for compress in PRESETS:
            options = make_options(max_seq_len=S, tokens=f"1-{T}", compress=compress)
            sizes = memory.process_bytes(source, options)
            row = {"compress": compress}
            row |= {f"{name}, MiB": size / 2**20 for name, size in sizes.items()}
            row["fits"] = memory.fits(sizes["total"], gib << 30)["fits_mac"]
            speed = roofline.by_chip(call_work(source, options, T), [chip])
            for name, ms in SPEEDS.items():
                row[name] = 1e3 * T / speed[ms].item()
            rows.append(row)
            for reason in speed["extrapolates"].item().values():
                presets_by_reason.setdefault(reason, []).append(compress)
        notes = [
            f"Extrapolated: {', '.join(presets)}: {reason}."
            for reason, presets in presets_by_reason.items()
        ]
        words = " ".join([caption, *notes])
        display(show(pd.DataFrame(rows)).set_caption(words))

    controls = {
        "S": make_control("tokens in the cache (max_seq_len)", LENGTHS, 512),
        "T": make_control("tokens a call (T)", [*range(1, 33)], 4),
        "chip": make_control("chip", sorted(chips()["chip"])),
        "gib": make_control("memory of the Mac, GiB", [*range(4, 193, 4)], 16),
    }
    for widget in controls.values():  # room for a slider beside its label
        widget.layout.width = "32em"
    return ui.interactive(show_table, **controls)
