"""The Compare: two runs of the log side by side, what differs in their settings and in what they measured."""

from pathlib import Path

import ipywidgets as ui
import matplotlib.pyplot as plt
import pandas as pd

from workbench import log, plots
from workbench.errors import InputError
from workbench.widgets.panel import Panel, absent, choice


class Compare(Panel):
    """Ratios of medians with their intervals, over the settings that differ; what the samples cannot tell apart is left out.

    Args:
        experiment: only its runs; default: all that timed something.
        root: the log's folder.
    """

    def __init__(self, experiment: str | None = None, root: str | Path | None = None):
        self.root = root
        timed = log.load("samples", root=root)["run_id"].unique()
        runs = log.load("runs", root=root, where={"status": "ok"} | ({"experiment": experiment} if experiment else {}))
        runs = runs[runs["run_id"].isin(timed)].sort_values("run_id", ascending=False)
        if len(runs) < 2:
            raise InputError("log", f"{len(runs)} timed runs", "two", "run a sweep first, such as notebook 34")
        names = [(_label(run), run["run_id"]) for run in runs.to_dict("records")]
        last, *others = runs.to_dict("records")
        like = next((run for run in others if run["T"] == last["T"]), others[0])
        self.settings = ui.HTML()
        super().__init__({"a": choice("A", names, like["run_id"]), "b": choice("B", names)}, self.settings)
        self.draw()

    def _draw(self) -> None:
        found = log.compare(self.value("a"), self.value("b"), self.root)
        shown = found.measures[found.measures["ratio"].notna() & ~found.measures["phase"].eq("layer")]
        if shown.empty:
            with plots.style():
                figure, ax = plt.subplots(figsize=(6, 1.2))
            absent(ax, "nothing that both runs measured differs")
        else:
            figure = plots.ratios(shown).figure
        self.show(figure, "ratios of run B to run A with their intervals")
        self.message.value = f"{found.hidden} further measurements do not differ: their intervals hold 1."
        self.settings.value = found.settings.to_html(index=False, border=0)


def _label(run: dict) -> str:
    parts = [run["experiment"], run["checkpoint"], run["compress"], f"S {run['max_seq_len']}", f"T {run['T']}", run["precision"]]
    return ", ".join(str(p) for p in parts if pd.notna(p) and "<NA>" not in str(p)) + f" ({run['run_id']})"
