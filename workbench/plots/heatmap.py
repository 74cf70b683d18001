"""Errors by layer and token position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workbench.plots.cells import (
    HATCH,
    draw_cells,
    hatch,
    label_cells,
    recolour,
    worst_of_blocks,
)
from workbench.plots.styled import (
    BEYOND_COLOUR,
    add_legend,
    returns_figure,
    unmeasured_key,
)
from workbench.plots.text import group_by, in_code_points, label_log, wrap

HALF_ULP = 2.0**-11  # of an fp16 number, relative to it
BUDGET = "√(rounding² + 2⁻²²)"
"""The rounding budget of a cell in words: the column `budget`, the error that rounding
alone causes in Hugging Face's model, together with `HALF_ULP`."""
TOLERANCE_FACTOR = 6.0
"""The tolerance of an error over its rounding budget, as in the gate `budget`."""
LEAST_VALUE = 1e-8
"""Smaller values are drawn as this one: 1 − cosine of equal float32 vectors may
differ from 0 by as much."""
LABELS = {"cosine": "1 − cosine", "error": "error ÷ its tolerance"}
BIT_FOR_BIT = "equal bit for bit"
NOT_EQUAL = "alike in this picture, not equal"

CHARACTER_WIDTH = 0.06  # inches, of a token's label
TOKEN_CHARACTERS = 12  # characters of a token's label for which the figure has room
MAX_VECTOR_CELLS = 2500  # more cells are an image: a vector cell takes up to 1.5 kB
CELLS_PER_INCH = 70  # of a figure's width: each has a pixel of its own on a screen
MAX_DRAWN_LAYERS = 250  # where there are more, several share a cell
MIN_HATCHED_CELL = 0.05  # inches: a smaller cell cannot show the lines of a hatch

INDEX = ["layer", "position"]
LOGITS = -1
"""The layer of the logits, above all others in a figure: `log.schema.LOGITS`, written out
because figures import nothing of the log."""


@dataclass
class Panel:
    """The cells of a heatmap, which may be those of several names."""

    cells: pd.DataFrame
    """`value` and `beyond` by layer and position."""
    names: list[str]
    parts: list[pd.DataFrame]
    """The rows of each name."""

    @property
    def title(self) -> str:
        """The names; of several, whether their tensors are equal too."""
        if len(self.names) == 1:
            return self.names[0]
        names = f"{'; '.join(self.names[:-1])} and {self.names[-1]}"
        return f"{names}: {_equality(self.parts)}"


@dataclass(frozen=True)
class Scale:
    """The look of the cells of a heatmap."""

    norm: LogNorm
    """Value → colour, the same for all panels."""
    block: tuple[int, int]
    """Layers and positions that share a drawn cell."""
    is_hatched: bool
    """Whether cells beyond their tolerance are hatched; otherwise they are
    recoloured."""
    is_raster: bool
    """Whether the cells are an image even in a vector format."""


@returns_figure
def heatmap(
    rows: pd.DataFrame,
    figure: Figure,
    *,
    metric: str = "cosine",
    by: str | None = "T",
    tensor: str = "update",
    mode: str = "isolated",
    tokens: Sequence[str] | None = None,
) -> None:
    """Layer × token position against Hugging Face's values, on a log scale; a panel for
    each value of the column `by`, or one panel of the worst.

    Panels that look alike are drawn once, and their title says whether their tensors
    are equal. A hatched cell has an error beyond its tolerance, which is
    `TOLERANCE_FACTOR` times the root of budget² + `HALF_ULP`². A black cell is not
    finite. Where there are more positions than pixels, a drawn cell is the worst of
    several. A cell that is too small for a hatch has a colour of its own beyond its
    tolerance.

    Args:
        rows: the log's table `fidelity`: layer (null or −1: the logits), position, T,
            tensor, mode, cosine, finite; for the tolerances error and budget; and
            digest, which names the values of a tensor.
        metric: ``cosine`` (1 − cosine) or ``error`` (relative RMS error ÷ its
            tolerance).
        tokens: the text of the token at each position.

    Raises:
        ValueError: there are no rows of this tensor and mode, or no such metric.
    """
    if metric not in LABELS:
        raise ValueError(f"metric {metric!r}; needs one of {', '.join(LABELS)}")
    rows = rows[(rows["tensor"] == tensor) & (rows["mode"] == mode)]
    if rows.empty:
        raise ValueError(f"no rows of the {tensor}, {mode}")
    cells = _with_values(rows, metric)
    panels = _panels(cells, by)
    layers, positions = next(iter(panels.values())).index.levels
    panel_height = min(max(0.16 * len(layers), 0.3), 2.5)
    figure.set_figheight(1.2 + len(panels) * (0.3 + panel_height))
    axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    scale = _scale(cells, panels, figure.get_figwidth(), panel_height)
    for ax, (title, panel) in zip(axes, panels.items()):
        mesh = _draw_panel(ax, panel, scale)
        names = ["logits" if layer == LOGITS else layer for layer in layers]
        label_cells(ax.yaxis, names, 8)
        ax.set(title=wrap(figure, title, 0.85), ylabel="layer")
    _label_positions(figure, ax, positions, tokens)
    bar = figure.colorbar(mesh, ax=axes, label=LABELS[metric])
    label_log(bar.ax.yaxis)
    if metric == "error":
        bar.ax.axhline(1, color="black")
    has_gaps = pd.concat(panels)["value"].isna().any()
    keys = _keys(cells, scale, has_gaps)
    add_legend(figure, keys, _notes(cells, scale, metric))


def _label_positions(
    figure: Figure, ax: Axes, positions: pd.Index, tokens: Sequence[str] | None
) -> None:
    """Labels the x axis with positions, or with tokens, for which the figure becomes
    higher."""
    if tokens is None:
        labels = positions
        ax.set_xlabel("token position")
    else:
        labels = [tokens[position] for position in positions]
        ax.set_xlabel("token")
        ax.tick_params(axis="x", rotation=90, labelsize=7)
        longest = max(len(in_code_points(label)) for label in labels)
        extra_height = CHARACTER_WIDTH * max(0, longest - TOKEN_CHARACTERS)
        figure.set_figheight(figure.get_figheight() + extra_height)
    label_cells(ax.xaxis, labels, int(7.5 * figure.get_figwidth()))


def _with_values(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with the `value` that is drawn, infinite where a result is not finite,
    and with `beyond`, whether the error lies beyond its tolerance."""
    # older rows of the log have no error and no budget
    measured = rows.reindex(columns=["error", "budget"]).astype(float)
    budget = np.hypot(measured["budget"], HALF_ULP)
    ratio = measured["error"] / (TOLERANCE_FACTOR * budget)
    value = ratio if metric == "error" else 1 - rows["cosine"].astype(float)
    is_broken = ~rows["finite"].fillna(True).astype(bool)
    value = value.clip(lower=LEAST_VALUE).mask(is_broken, np.inf)
    # rows of a validation, which were not read from the log, have null for the logits
    layer = rows["layer"].fillna(LOGITS).astype(int)
    return rows.assign(value=value, beyond=(ratio > 1) | is_broken, layer=layer)


def _panels(cells: pd.DataFrame, by: str | None) -> dict[str, pd.DataFrame]:
    """`value` and `beyond` by layer and position for each value of the column `by`, the
    worst of several rows. Panels that look alike are one panel, whose title has the
    names of all and says whether their tensors are equal."""
    all_cells = pd.MultiIndex.from_product([np.sort(cells[i].unique()) for i in INDEX])
    panels: list[Panel] = []
    for name, part in group_by(cells, by):
        drawn = part.groupby(INDEX)[["value", "beyond"]].max().reindex(all_cells)
        alike = next((panel for panel in panels if panel.cells.equals(drawn)), None)
        if alike is None:
            panels.append(Panel(drawn, [name], [part]))
        else:
            alike.names.append(name)
            alike.parts.append(part)
    return {panel.title: panel.cells for panel in panels}


def _equality(parts: Sequence[pd.DataFrame]) -> str:
    """The equality of the tensors behind panels that look alike, in words. The figures of
    rows without a digest are rounded, and prove less than the tensors would."""
    # a null in either column, as in older rows, proves nothing
    together = pd.concat(parts).reindex(columns=["digest", "max_abs"])
    if together["max_abs"].eq(0).all():  # each tensor equals the reference
        return BIT_FOR_BIT
    if together["digest"].notna().all():
        return BIT_FOR_BIT if _are_equal(parts, ["digest"]) else NOT_EQUAL
    figures = ["cosine", "psnr_db", "max_abs", "error"]
    return "equal figures" if _are_equal(parts, figures) else NOT_EQUAL


def _are_equal(parts: Sequence[pd.DataFrame], columns: Sequence[str]) -> bool:
    """Whether all parts have equal values of the columns in every cell."""
    columns = [*INDEX, *columns]
    tables = [
        part.reindex(columns=columns)
        .drop_duplicates()
        .sort_values(columns, ignore_index=True)
        for part in parts
    ]
    return all(table.equals(tables[0]) for table in tables[1:])


def _scale(
    cells: pd.DataFrame,
    panels: dict[str, pd.DataFrame],
    width: float,
    panel_height: float,
) -> Scale:
    """The look of the cells of panels.

    Args:
        width: of the figure, in inches.
        panel_height: of a panel, in inches.
    """
    layers, positions = map(len, next(iter(panels.values())).index.levels)
    finite = cells["value"].replace(np.inf, np.nan)
    low, high = finite.agg(["min", "max"]).fillna(1)
    cell_height, cell_width = panel_height / layers, 0.8 * width / positions
    return Scale(
        # a decade at least, so that cells of about the same value look alike
        norm=LogNorm(low, max(high, 10 * low)),
        block=(
            math.ceil(layers / MAX_DRAWN_LAYERS),
            math.ceil(positions / int(CELLS_PER_INCH * width)),
        ),
        is_hatched=min(cell_width, cell_height) >= MIN_HATCHED_CELL,
        is_raster=len(panels) * layers * positions > MAX_VECTOR_CELLS,
    )


def _draw_panel(ax: Axes, panel: pd.DataFrame, scale: Scale):
    """Draws the cells of one panel; returns their mesh."""
    values = panel["value"].unstack()
    mesh = draw_cells(ax, values, scale.norm, scale.block, scale.is_raster)
    beyond = panel["beyond"].unstack().eq(True).to_numpy()
    beyond = worst_of_blocks(beyond.astype(float), scale.block) == 1
    if scale.is_hatched:
        hatch(mesh, beyond, scale.is_raster)
    else:
        recolour(mesh, beyond)
    return mesh


def _keys(cells: pd.DataFrame, scale: Scale, has_gaps: bool) -> list[Patch]:
    """The legend's keys for cells that are not coloured by their value."""
    keys = []
    if cells["beyond"].any():
        if scale.is_hatched:
            style = {"fill": False, "hatch": HATCH}
        else:
            style = {"facecolor": BEYOND_COLOUR}
        keys.append(Patch(**style, label=f"error > {TOLERANCE_FACTOR:g} × {BUDGET}"))
    if np.isinf(cells["value"]).any():
        keys.append(Patch(facecolor="black", label="not finite"))
    if has_gaps:
        keys.append(unmeasured_key())
    return keys


def _notes(cells: pd.DataFrame, scale: Scale, metric: str) -> list[str]:
    """The legend's notes on how cells are drawn."""
    notes = []
    if metric == "error" and not cells["beyond"].any():
        notes.append(f"tolerance: {TOLERANCE_FACTOR:g} × {BUDGET}")
    for count, things in zip(scale.block, ("layers", "positions")):
        if count > 1:
            notes.append(f"a drawn cell is the worst of {count} {things}")
    if (cells["value"] == LEAST_VALUE).any():
        least = f"{LEAST_VALUE:g}"
        notes.append(f"{LABELS[metric]} below {least} has the colour of {least}")
    return notes
