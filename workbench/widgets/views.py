"""The pictures of the Explorer: a heatmap whose cells can be pointed at, and the times
of a setting."""

from typing import NamedTuple

import pandas as pd
from matplotlib.patches import Rectangle

from workbench import plots, sweep
from workbench.log.schema import LOGITS
from workbench.widgets import sentences
from workbench.widgets.controls import STALE, fit_canvas, make_canvas

CHOSEN = {"fill": False, "edgecolor": plots.BEYOND_COLOUR, "linewidth": 2}


class Place(NamedTuple):
    """A cell of a heatmap."""

    layer: int | None
    """None: the logits."""
    position: int

    @property
    def layer_in_log(self) -> int:
        """The layer as the log has it."""
        return LOGITS if self.layer is None else self.layer


class Picture:
    """A figure on a canvas."""

    def __init__(self):
        self.canvas = make_canvas()

    def fit(self, pixels: int) -> bool:
        """Gives the picture the width of the page, in CSS pixels. Returns whether it has
        to be drawn again."""
        return fit_canvas(self.canvas, pixels)

    def mark_stale(self) -> None:
        """Dims the picture in the page until the next one arrives there."""
        self.canvas.add_class(STALE)


class Heatmap(Picture):
    """Rows of `fidelity` on a canvas, by layer and token."""

    def __init__(self):
        super().__init__()
        self.rows = pd.DataFrame()
        self.options = {}
        """Keywords of `plots.heatmap`."""
        self._layers: list[int] = []
        self._positions: list[int] = []

    def draw(
        self, rows: pd.DataFrame, options: dict, subtitle: str, chosen: Place | None
    ) -> None:
        """Draws rows, and a frame around the chosen cell."""
        layers = rows["layer"].fillna(LOGITS).astype(int)
        self.rows = rows.assign(layer=layers)
        self.options = options
        figure = self.canvas.figure
        plots.heatmap(self.rows, **options, figure=figure)
        plots.add_subtitle(figure, subtitle)
        self._layers = sorted(self.rows["layer"].unique())
        self._positions = sorted(self.rows["position"].unique())
        for ax in self.axes():
            ax.format_coord = lambda x, y: self._describe_other(x, y, chosen)
            if chosen and len(self._rows_of(chosen)):
                column = self._positions.index(chosen.position)
                corner = column, self._layers.index(chosen.layer_in_log)
                ax.add_patch(Rectangle(corner, 1, 1, **CHOSEN))
        self.canvas.draw_idle()

    def axes(self) -> list:
        """The axes of the panels; the last axes of the figure are the colour bar's."""
        return self.canvas.figure.axes[:-1]

    def forget_pointer(self) -> None:
        """Removes what the canvas says about the cell under the pointer."""
        self.canvas.send_json({"type": "message", "message": ""})

    def place_at(self, x: float, y: float) -> Place | None:
        """The cell at a point of a panel; None outside of the cells."""
        if not (0 <= y < len(self._layers) and 0 <= x < len(self._positions)):
            return None
        layer = int(self._layers[int(y)])
        position = int(self._positions[int(x)])
        return Place(None if layer == LOGITS else layer, position)

    def describe(self, place: Place | None) -> str:
        """Place and values of a cell at the largest T in the rows, which is the
        setting's or stands for it; "" for a cell that is not drawn."""
        rows = self._rows_of(place)
        if rows.empty:
            return ""
        tokens = self.options.get("tokens")
        token = tokens[place.position] if tokens else None
        # `GridResults.fidelity` sorts by T, the one that stands for the setting's last
        return sentences.describe_cell(rows.iloc[-1], place, token)

    def _describe_other(self, x: float, y: float, chosen: Place | None) -> str:
        """Place and values of the cell at a point; "" for the chosen cell, whose values
        stand in the page already."""
        place = self.place_at(x, y)
        return "" if place == chosen else self.describe(place)

    def _rows_of(self, place: Place | None) -> pd.DataFrame:
        if place is None or self.rows.empty:
            return self.rows[:0]
        is_there = self.rows["layer"].eq(place.layer_in_log)
        return self.rows[is_there & self.rows["position"].eq(place.position)]


def process_times(rates: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second and ms per layer of each process, by T: columns max_seq_len, T,
    quantity, value, and those of the runs.

    Args:
        rates: rows of the table `samples`.
        layers: rows of the table `layers`.
    """
    speed = sweep.per_process(rates, "tokens_per_s").assign(quantity=sentences.SPEED)
    layer = sweep.per_process(layers, "layer_ms").assign(quantity=sentences.LAYER)
    return pd.concat([speed, layer]).sort_values("T")


class Speed(Picture):
    """Tokens per second and ms per layer over max_seq_len and T on a canvas, one value
    for each process."""

    def __init__(self):
        super().__init__()
        self._drawn: tuple[pd.DataFrame, int] | None = None
        """What the canvas shows: the arguments of `draw`."""

    def fit(self, pixels: int) -> bool:
        is_changed = super().fit(pixels)
        if is_changed:
            self._drawn = None
        return is_changed

    def draw(self, times: pd.DataFrame, S: int) -> None:
        """Draws times at any max_seq_len and T (see `process_times`), hollow where other
        work disturbed the processes, and marks the max_seq_len S. A picture of the same
        times stays: another T, tensor or metric changes the heatmap alone."""
        self.canvas.layout.display = None
        if self._drawn and self._drawn[1] == S and self._drawn[0].equals(times):
            self.canvas.remove_class(STALE)
            return
        self._drawn = times, S
        axes = {"x": "max_seq_len", "y": "value", "hue": "T", "col": "quantity"}
        units = {sentences.SPEED: "tok/s", sentences.LAYER: "ms"}
        options = {"xlog": 2, "ylabel": units, "hollow": "disturbed"}
        figure = self.canvas.figure
        plots.lines(times, **axes, **options, figure=figure)
        for ax in figure.axes:
            ax.axvline(S, color="0.8", linewidth=5, zorder=0)
        self.canvas.draw_idle()

    def hide(self) -> None:
        """Hides the canvas, for a setting without times."""
        self.canvas.layout.display = "none"
        self.canvas.remove_class(STALE)  # no next picture arrives
