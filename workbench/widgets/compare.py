"""The widget Compare: the differences in settings and measurements of two runs of one
machine."""

from collections import Counter
from pathlib import Path

import ipywidgets as ui
import matplotlib.pyplot as plt
import pandas as pd

from workbench import log, plots
from workbench.errors import InputError
from workbench.log.machine import machine_names, of_machine
from workbench.log.text import IDENTITIES
from workbench.sweep import runs as runs_
from workbench.widgets.panel import Panel, absent, choice


class Compare(Panel):
    """Ratios of medians with their intervals, above a table of the settings that
    differ. Measurements whose interval contains 1 are left out.

    The runs of one machine are offered, labelled by the settings in which they differ;
    a dropdown chooses the machine.

    Args:
        experiment: only its runs; default: all with times.
        root: the log's folder.
        machine: the machine offered first; default: this machine, else that of the
            newest run.
    """

    def __init__(
        self,
        experiment: str | None = None,
        root: str | Path | None = None,
        machine: str | None = None,
    ):
        self.root = root
        timed = log.load("samples", root)["run_id"].unique()
        runs = runs_.listing(experiment, root)
        runs = runs[runs["run_id"].isin(timed)].sort_values("run_id", ascending=False)
        self.runs = runs[runs.groupby("machine")["run_id"].transform("size") >= 2]
        if self.runs.empty:
            raise InputError(
                "log",
                f"{len(runs)} timed runs",
                "two of one machine",
                "run a sweep first, such as notebook 34",
            )
        start = of_machine(self.runs, machine, runs_.here())["machine"].iloc[0]
        self.settings = ui.HTML()
        names, first, last = self._entries(start)
        controls = [
            choice("machine", machine_names(self.runs), start),
            choice("A", names, first),
            choice("B", names, last),
        ]
        super().__init__(controls, self.settings)
        self.follow(self.controls["machine"], self._offer)
        self.draw()

    def _entries(self, machine: str) -> tuple[list[tuple[str, str]], str, str]:
        """(label, run id) of a machine's runs, the newest first, and the first two
        selections: the newest run of the same T as the newest run, and that one."""
        runs = self.runs[self.runs["machine"] == machine]
        last, *others = runs.to_dict("records")
        alike = (run for run in others if str(run["T"]) == str(last["T"]))
        first = next(alike, others[0])
        return list(zip(_labels(runs), runs["run_id"])), first["run_id"], last["run_id"]

    def _offer(self, machine: str) -> None:
        """Lists the runs of another machine."""
        names, first, last = self._entries(machine)
        for side, run_id in (("A", first), ("B", last)):
            self.controls[side].options = names
            self.controls[side].value = run_id

    def _draw(self) -> None:
        machine = self.value("machine")
        comparison = log.compare(self.value("A"), self.value("B"), self.root)
        measures = comparison.measures.dropna(subset="ratio").query("phase != 'layer'")
        if measures.empty:
            with plots.style():
                figure, ax = plt.subplots(figsize=(6, 1.2))
            absent(ax, "nothing that both runs measured differs")
        else:
            figure = plots.ratios(measures.assign(machine=machine)).figure
        alt = f"ratios of run B to run A with their intervals, on {machine}"
        self.show(figure, alt)
        equal = f"{comparison.indistinguishable} further measurements do not differ"
        self.message.value = f"{equal}: their intervals hold 1."
        settings = comparison.settings
        settings = settings[~settings["setting"].isin(IDENTITIES)]
        self.settings.value = settings.to_html(index=False, border=0)


def _labels(runs: pd.DataFrame) -> list[str]:
    """A label per run: its round and its settings in which some runs differ; equal
    labels also have the run's time, and if these are equal its id."""
    columns = ["experiment", "command", "checkpoint", "checkpoint_hash", *runs_.TIMES]
    columns += ["os_build", "software", "round"]
    varied = runs_.varied(runs, columns)
    if {"os_build", "software"} <= set(varied):
        varied.remove("software")
    hashes = runs["checkpoint_hash"].str[:12]
    rows = runs.assign(checkpoint_hash=hashes).to_dict("records")
    labels = []
    for run in rows:
        labels.append(", ".join(f"{c} {run[c]}" for c in varied if pd.notna(run[c])))
    for suffix in (", {time:%Y-%m-%d %H:%M:%S}", " ({run_id})"):
        counts = Counter(labels)
        for place, run in enumerate(rows):
            if counts[labels[place]] > 1:
                labels[place] += suffix.format(**run)
    return labels
