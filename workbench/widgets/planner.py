"""The widget Planner: memory, predicted speed and lint of an export before it runs on a
device."""

from pathlib import Path

import ipywidgets as ui

from workbench import log, plots, sweep
from workbench.ane import memory, placement, roofline
from workbench.bundle import Options
from workbench.export import options as export_options
from workbench.models.checkpoint import Checkpoint
from workbench.report import tables
from workbench.widgets.panel import BackgroundJob, Panel, choice, slider

MACHINES = {f"{n} GiB": n << 30 for n in (6, 8, 12, 16, 24, 32, 48, 64, 96, 128)}


class Planner(Panel):
    """Memory against a machine, tok/s predicted for a chip, and the lint rules that the
    exported graph breaks.

    Memory and speed are computed from the checkpoint's headers. The rules need a graph,
    which the Run button exports.

    Args:
        checkpoint: a Hugging Face folder.
        bundles: the cache of exports; default: data/bundles of the checkout.
    """

    def __init__(self, checkpoint: str | Path, bundles: Path | None = None):
        self.checkpoint = Checkpoint(checkpoint)
        self.placements = {}
        self.bundles = bundles or log.project() / "data" / "bundles"
        self.misfit = roofline.misfits()["misfit"].abs().median()
        self.rules = ui.HTML()
        super().__init__(
            [
                slider("max_seq_len", [2**n for n in range(6, 16)], 512),
                slider("T", [1, 2, 3, 4, 8, 16, 32], 4),
                choice("compress", list(memory.STORED_BITS)),
                choice("chip", sorted(roofline.chips()), "M4"),
                choice("machine", list(MACHINES), "16 GiB"),
            ],
            self.rules,
        )
        steps = [("export and lint", 1, self._lint)]
        self.job = BackgroundJob(
            lambda: steps * (self.options not in self.placements), self, self.draw
        )
        self.box.children = (*self.box.children, self.job.box)
        for control in self.controls.values():
            self.follow(control, lambda _: self.job.refresh())
        self.draw()

    @property
    def options(self) -> Options:
        length, T, compress = map(self.value, ("max_seq_len", "T", "compress"))
        return export_options(max_seq_len=length, t_max=T, compress=compress)

    def _lint(self) -> None:
        options = self.options
        bundle = sweep.bundle_for(self.checkpoint, options, self.bundles)
        generation = int(self.value("chip")[1])
        predicted = placement.predicted_placement(bundle, generation)
        self.placements[options] = predicted

    def _draw(self) -> None:
        options = self.options
        name = self.checkpoint.name
        machine = self.value("machine")
        chip = self.value("chip")
        size = MACHINES[machine]
        budget = memory.budget_of_checkpoint(self.checkpoint, options, size)
        machines = {machine: size}
        if size >= 50 * budget.total:  # it would make the checkpoint's bar invisible
            machines = {}
        ax = plots.memory_bar(tables.budget(budget, name), machines)
        self.show(ax.figure, f"memory of {name}")
        rates = []
        on = roofline.chip(chip)
        for T in sorted({1, self.value("T")}):
            work = memory.decode_work(self.checkpoint, options, T)
            rate = 1e3 * T / roofline.predict_ms(work, chip)["ms"].sum()
            rates.append(f"{rate:.0f} tok/s at T = {T}")
        stream = roofline.streams_as(options.compress, on)
        fits = "fits" if budget.json()["fits_mac"] else "does not fit"
        share = f"{machine} of a Mac, of which it may take {memory.MAC_SHARE:.0%}"
        model = f"a roofline, calibrated on {roofline.CALIBRATED_ON}"
        misfit = f"on published figures it is off by {self.misfit:.0%} in the median"
        self.message.value = (
            f"{budget.total / 2**20:.1f} MiB {fits} in {share}. "
            f"Predicted on {chip}: {', '.join(rates)} "
            f"({model}; {misfit}; weights streamed as {stream}). Not measured."
        )
        self.rules.value = "Rules: not checked, they need the exported graph."
        if options in self.placements:
            broken = tables.rules_table(self.placements[options])
            self.rules.value = tables.styled(broken).to_html()
