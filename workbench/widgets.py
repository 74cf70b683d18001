"""Sliders over stored results: moving one draws again at once; a button measures what is missing.

An exception in a callback is kept in `errors` and shown in the widget; `check()` raises it, so that a notebook that
ends with it cannot pass with a broken widget.
"""

import io
import traceback
from collections.abc import Callable
from pathlib import Path

import ipywidgets as ui
import matplotlib.pyplot as plt
import pandas as pd

from workbench import plots, sweep, tables
from workbench.eval.gates import LIMITS

WIDTH_PX = 900


class Panel:
    """Controls above a picture, a table and a message; subclasses say what to draw."""

    def __init__(self, controls: dict[str, ui.Widget]):
        self.controls, self.errors, self.figure = controls, [], None
        self.picture = ui.Image(format="png", layout=ui.Layout(width=f"{WIDTH_PX}px"))
        self.table, self.message = ui.HTML(), ui.HTML()
        for control in controls.values():
            control.observe(lambda _: self.draw(), names="value")

    def guarded(self, action: Callable[[], None]) -> None:
        """Runs a callback; what it raises is kept and shown."""
        try:
            action()
        except Exception as problem:  # noqa: BLE001  (shown in the widget, kept, raised by check())
            self.errors.append(problem)
            self.message.value = f"<pre style='color:#b00'>{traceback.format_exc(limit=1)}</pre>"

    def check(self) -> None:
        """Raises the first error of any callback so far."""
        if self.errors:
            raise self.errors[0]

    def draw(self) -> None:
        self.guarded(self._draw)

    def _draw(self) -> None:
        raise TypeError(f"{type(self).__name__} draws nothing")

    def show_figure(self, figure: plt.Figure) -> None:
        if self.figure is not None:
            plt.close(self.figure)
        self.figure, stream = figure, io.BytesIO()
        figure.savefig(stream, format="png", dpi=110)
        plt.close(figure)
        self.picture.value = stream.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


def _slider(name: str, values: list, start=None) -> ui.SelectionSlider:
    return ui.SelectionSlider(options=values, value=start if start in values else values[0], description=name,
                              continuous_update=False, style={"description_width": "initial"})  # fmt: skip


class Explorer(Panel):
    """Fidelity and speed of a sweep over max_seq_len and T.

    Args:
        grid: the sweep (see `workbench.sweep.make_grid`): its max_seq_len and T are the sliders' stops, and the Run
            button runs its missing cells.
        root: the log's folder.
    """

    def __init__(self, grid: dict, root: str | Path | None = None):
        self.grid, self.root = sweep.make_grid(grid), root
        lengths = sorted(self.grid.export.get("max_seq_len", [512]))
        tensors = ui.Dropdown(options=["update", "k", "v", "hidden", "logits"], description="tensor")
        super().__init__({"max_seq_len": _slider("max_seq_len", lengths), "T": _slider("T", sorted(self.grid.run.T)),
                          "tensor": tensors})  # fmt: skip
        self.run_button = ui.Button(description="Run what is missing", icon="play", layout=ui.Layout(width="15em"))
        self.run_button.on_click(lambda _: self.run_missing())
        self.output = ui.Output()
        self.box = ui.VBox([ui.HBox(list(self.controls.values())), ui.HBox([self.run_button, self.message]),
                            self.picture, self.table, self.output])  # fmt: skip
        self.refresh()

    def refresh(self) -> None:
        """Reads the log again and draws."""
        self.stored = sweep.stored(self.grid, self.root)
        self.draw()

    def run_missing(self) -> None:
        """Runs the cells of the grid that the log does not hold, with progress, then draws again."""
        self.run_button.disabled = True
        try:
            with self.output:
                self.guarded(lambda: sweep.sweep(self.grid, root=self.root))
        finally:
            self.run_button.disabled = False
        self.refresh()

    @property
    def chosen(self) -> dict[str, pd.DataFrame]:
        """Stored rows at the sliders' max_seq_len (samples and layers at every one), the newest run of each."""
        length = self.controls["max_seq_len"].value
        fidelity = self.stored["fidelity"]
        return self.stored | {"fidelity": fidelity[fidelity["max_seq_len"] == length]}

    def _draw(self) -> None:
        data, T, tensor = self.chosen, self.controls["T"].value, self.controls["tensor"].value
        fidelity = data["fidelity"][data["fidelity"]["T"] == T]
        length = self.controls["max_seq_len"].value
        with plots.style():
            figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2])
        self._heatmap(fidelity, T, tensor, left)
        self._speed(data["samples"], length, T, right)
        self.show_figure(figure)
        self.table.value = tables.worst(fidelity, 3).to_html(index=False, border=0, float_format="{:.6g}".format) if len(fidelity) else ""
        measured = data["layers"][(data["layers"]["max_seq_len"] == length) & (data["layers"]["T"] == T)]
        ms = f"{measured['layer_ms'].median():.3f} ms per layer" if len(measured) else "not measured: press Run"
        self.message.value = f"max_seq_len {length}, T {T}: {ms}"

    def _heatmap(self, fidelity: pd.DataFrame, T: int, tensor: str, ax) -> None:
        rows = fidelity[(fidelity["tensor"] == tensor) & (fidelity["mode"] == "isolated")]
        if rows.empty:
            ax.set(title="fidelity not measured here", xticks=[], yticks=[])
            return
        run = rows["run_id"].max()
        limit = 1 - LIMITS[rows["compress"].iloc[0]].update_cosine
        plots.fidelity_heatmap(rows[rows["run_id"] == run], T=T, tensor=tensor, threshold=limit, ax=ax)

    def _speed(self, samples: pd.DataFrame, length: int, T: int, ax) -> None:
        rates = samples[samples["phase"] == "tokens_per_s"]
        if rates.empty:
            ax.set(title="speed not measured here", xticks=[], yticks=[])
            return
        plots.speed(rates, ax=ax)
        here = rates[(rates["max_seq_len"] == length) & (rates["T"] == T)]
        if len(here):
            ax.plot([length], [here["value"].median()], "o", ms=11, mfc="none", mec="black", zorder=5)
