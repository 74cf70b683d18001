"""Errors by layer and token position.

`heatmap` selects rows, computes their `value` for every metric (`_with_values`), lays them
out as panels (`_panels`), chooses the colours and cells of a metric (`_scale`), and draws
the panels (`_draw_section`), then the labels of positions, the colour bars and the
legend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

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
    add_height,
    add_legend,
    returns_figure,
    set_height,
    unmeasured_key,
)
from workbench.plots.text import (
    group_by,
    in_code_points,
    label_log,
    measure_line,
    width_of,
    wrap,
    wrap_at,
)

HALF_ULP = 2.0**-11  # of an fp16 number, relative to it
BUDGET_FORMULA = "√(rounding² + 2⁻²²)"
"""The rounding budget of a cell in words: the column `budget`, the error that rounding
alone causes in Hugging Face's model, together with `HALF_ULP`."""
TOLERANCE_FACTOR = 6.0
"""The tolerance of an error over its rounding budget, as in the gate `budget`."""
BIT_FOR_BIT = "equal bit for bit"
NOT_EQUAL = "alike in this picture, not equal"
DIRECTION = "lighter is worse"
"""Of the colours of every metric: the text beside a figure may speak of a cosine, whose
larger values are better."""

# panels
PANEL_GAP = 0.3  # inches between two panels, with a title
MARGIN = 1.1  # inches beside the panels: layers, the colour bar and its labels
MARKED_MARGIN = 1.5  # inches, where the bar names its marks
LEAST_BAR = 1.1  # inches: a lower colour bar has no room for its numbers and its label
# cells
MAX_VECTOR_CELLS = 2500  # of a PDF; more are an image: a cell takes up to 1.5 kB
CELLS_PER_INCH = 70  # of a figure's width: each has a pixel of its own on a screen
MAX_DRAWN_LAYERS = 250  # where there are more, several share a cell
MIN_HATCHED_CELL = 0.05  # inches: a smaller cell cannot show the lines of a hatch
# labels of layers and positions
MAX_LAYER_LABELS = 8
DIGIT_WIDTH = 0.07  # inches, in the label of a position
CHARACTER_WIDTH = 0.06  # inches, in the label of a token
TOKEN_DISTANCE = 0.105  # inches between the labels of two tokens
TOKEN_CHARACTERS = 12  # characters of a token's label for which the figure has room
# colour bars
BAR_LABEL_DISTANCE = 0.8  # inches from a bar to its label, behind the names of marks
BAR_TICK_DISTANCE = 0.15  # inches between two ticks whose labels do not overlap

INDEX = ["layer", "position"]
LOGITS = -1
"""The layer of the logits, above all others in a figure: `log.schema.LOGITS`, written out
because figures import nothing of the log."""


@dataclass(frozen=True)
class Metric:
    """A figure of a cell that a heatmap shows.

    Attributes:
        label: of the colour bar.
        title: of its panels, in a figure that shows several metrics.
        least: the smallest value with a colour of its own; smaller ones are drawn as
            this one.
        marks: values that the colour bar marks and names.
        note: of the legend; "" for none.
    """

    label: str
    title: str
    least: float
    marks: dict[float, str] = field(default_factory=dict)
    note: str = ""


METRICS = {
    # 1 − cosine of equal float32 vectors may differ from 0 by as much
    "cosine": Metric("1 − cosine", "Direction: 1 − cosine from Hugging Face's", 1e-8),
    "error": Metric(
        "error ÷ rounding",
        "Size: error over what rounding causes",
        0.01,
        {1.0: "rounding", TOLERANCE_FACTOR: "tolerance"},
        f"the divisor of an error is {BUDGET_FORMULA}",
    ),
}


@dataclass
class Panel:
    """The cells that are drawn for one or several values of the column `by`: values whose
    cells look alike share a panel."""

    cells: pd.DataFrame
    """`value` and `beyond` by layer and position."""
    names: list[str]
    """The label of each value of the column `by`."""
    parts: list[pd.DataFrame]
    """The rows with each of these values."""
    difference: float = 0.0
    """The largest difference of a cell between these values; 0 where they look alike."""

    @property
    def layers(self) -> pd.Index:
        """The layers, the same for all panels, measured or not."""
        return self.cells.index.levels[0]

    @property
    def positions(self) -> pd.Index:
        """The token positions, the same for all panels, measured or not."""
        return self.cells.index.levels[1]

    @property
    def title(self) -> str:
        """The names, and where there are several, whether their tensors are equal, or
        the largest difference of their cells."""
        if len(self.names) == 1:
            return self.names[0]
        names = f"{'; '.join(self.names[:-1])} and {self.names[-1]}"
        if self.difference:
            difference = f"differ by at most {self.difference:.2g} in a cell"
            return f"the worst of {names}, which {difference}"
        return f"{names}: {_equality(self.parts)}"


@dataclass(frozen=True)
class Section:
    """All that a heatmap shows of one metric."""

    metric: Metric
    rows: pd.DataFrame
    """With the columns `value` and `beyond`."""
    panels: list[Panel]


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


@dataclass(frozen=True)
class DrawnSection:
    """The panels of one metric in a figure."""

    metric: Metric
    axes: list[Axes]
    mesh: QuadMesh
    """The cells of one panel; those of the others have the same colours."""


@returns_figure
def heatmap(
    rows: pd.DataFrame,
    figure: FigureBase,
    *,
    metric: str | Sequence[str] = "cosine",
    by: str | None = "T",
    worst_of: str | None = None,
    tensor: str = "update",
    mode: str = "isolated",
    tokens: Sequence[str] | None = None,
    limits: Sequence[float] = (),
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
        metric: ``cosine`` (1 − cosine) or ``error`` (the relative RMS error over the
            root of budget² + `HALF_ULP`², of which gates judge the RMS over positions);
            or several, whose panels lie one above the other with common axes.
        by: a column of `rows`; None: one panel, each of whose cells is the worst row.
        worst_of: a column whose values share one panel. A cell has the worst of them, and
            the title has the largest difference between them. No other column can then
            have panels: `by` is the same column or None.
        tensor, mode: the values of these columns whose rows are drawn.
        tokens: the text of the token at each position.
        limits: values that the colours of a single metric include, so that several
            figures have one scale (see `find_limits`). Values of `rows` beyond them
            extend the scale.

    Raises:
        ValueError: there are no rows of this tensor and mode, or no such metric;
            several metrics have `limits`; `by` and `worst_of` are two columns.
    """
    metrics = [metric] if isinstance(metric, str) else [*metric]
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"metric {name!r}; needs one of {', '.join(METRICS)}")
    if limits and len(metrics) > 1:
        raise ValueError(f"limits of {len(metrics)} metrics; needs one metric")
    if worst_of and by not in (worst_of, None):
        found = f"panels by {by!r} and one panel of the worst of {worst_of!r}"
        raise ValueError(f"{found}; needs one of both: set by=None, or no worst_of")
    rows = rows[(rows["tensor"] == tensor) & (rows["mode"] == mode)]
    if rows.empty:
        raise ValueError(f"no rows of the {tensor}, {mode}")
    sections = [_section(rows, name, by, worst_of) for name in metrics]
    all_panels = [panel for section in sections for panel in section.panels]
    layers, positions = all_panels[0].layers, all_panels[0].positions
    panel_height = min(max(0.16 * len(layers), 0.3), 2.5)
    # the panels of a metric are together as high as their colour bar
    count = min(len(section.panels) for section in sections)
    panel_height = max(panel_height, (LEAST_BAR + PANEL_GAP) / count - PANEL_GAP)
    set_height(figure, 1.2 + len(all_panels) * (PANEL_GAP + panel_height))
    axes = figure.subplots(len(all_panels), squeeze=False, sharex=True, sharey=True)
    panel_size = width_of(figure), panel_height
    scales = [
        _scale(section, panel_size, len(all_panels), limits) for section in sections
    ]
    free_axes = iter(axes[:, 0])
    drawn, notes = [], []
    for section, scale in zip(sections, scales):
        section_axes = [next(free_axes) for _ in section.panels]
        title = section.metric.title if len(sections) > 1 else ""
        drawn.append(_draw_section(figure, section_axes, section, scale, title))
        notes += _notes(section, scale)
    has_marks = any(section.metric.marks for section in sections)
    panel_width = width_of(figure) - (MARKED_MARGIN if has_marks else MARGIN)
    _label_positions(figure, axes[-1, 0], positions, tokens, panel_width)
    bars = [_draw_bar(figure, section, panel_height) for section in drawn]
    if not all(DIRECTION in bar.get_ylabel() for bar in bars):
        notes.insert(0, DIRECTION)
    if len(bars) > 1:
        _align_labels(figure, bars)
    # the cells beyond their tolerance and the cells that are not finite are the same
    # ones whatever the metric
    has_gaps = any(panel.cells["value"].isna().any() for panel in all_panels)
    keys = _keys(sections[0].rows, scales[0], has_gaps)
    add_legend(figure, keys, [*dict.fromkeys(notes)])


def find_limits(rows: pd.DataFrame, metric: str) -> tuple[float, ...]:
    """The least and the largest finite value of a metric in rows of `fidelity`, as the
    argument `limits` of `heatmap`; empty where there is none."""
    values = _with_values(rows, metric)["value"]
    finite = values[np.isfinite(values)]
    return () if finite.empty else (float(finite.min()), float(finite.max()))


def _section(
    rows: pd.DataFrame, name: str, by: str | None, worst_of: str | None
) -> Section:
    rows = _with_values(rows, name)
    panels = [_worst_panel(rows, worst_of)] if worst_of else _panels(rows, by)
    return Section(METRICS[name], rows, panels)


def _draw_section(
    figure: FigureBase, axes: list[Axes], section: Section, scale: Scale, title: str
) -> DrawnSection:
    """Draws the panels of a metric, each into its axes.

    Args:
        title: of all of them, before the title of each; may be empty.
    """
    for ax, panel in zip(axes, section.panels):
        mesh = _draw_panel(ax, panel, scale)
        titles = [words for words in (title, panel.title) if words]
        ax.set_title(wrap(figure, "; ".join(titles), 0.85))
    return DrawnSection(section.metric, axes, mesh)


def _draw_bar(figure: FigureBase, section: DrawnSection, panel_height: float) -> Axes:
    """Draws the colour bar beside the panels of a metric, with a line at each of its
    marks; returns its axes.

    Args:
        panel_height: in inches.
    """
    metric, mesh = section.metric, section.mesh
    height = len(section.axes) * (PANEL_GAP + panel_height) - PANEL_GAP
    label = f"{metric.label} ({DIRECTION})"
    if measure_line(label) > height:  # then the legend has the direction
        label = wrap_at(metric.label, height)
    bar = figure.colorbar(mesh, ax=section.axes, label=label)
    label_log(bar.ax.yaxis)
    if not metric.marks:
        return bar.ax
    low, high = np.log10([mesh.norm.vmin, mesh.norm.vmax])
    distance = BAR_TICK_DISTANCE / height * (high - low)
    labels = {mark: f"{mark:g} {name}" for mark, name in metric.marks.items()}
    powers = [10.0**e for e in range(math.ceil(low), math.floor(high) + 1)]
    # the end, the largest value of all cells, before the powers of ten
    for value in (mesh.norm.vmax, *powers):
        if all(abs(np.log10(value / other)) > distance for other in labels):
            labels[value] = f"{float(f'{value:.3g}'):g}"  # 1000, not 1e+03
    bar.ax.yaxis.set_major_locator(FixedLocator([*labels]))
    bar.ax.yaxis.set_major_formatter(FixedFormatter([*labels.values()]))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    for mark in metric.marks:
        bar.ax.axhline(mark, color="white", linewidth=2.5)
        bar.ax.axhline(mark, color="black", linewidth=1)
    return bar.ax


def _align_labels(figure: FigureBase, bars: Sequence[Axes]) -> None:
    """Aligns the labels of colour bars, whatever the width of each bar's numbers and
    marks."""
    for bar in bars:
        beside_bar = bar.transAxes + ScaledTranslation(
            BAR_LABEL_DISTANCE, 0, figure.dpi_scale_trans
        )
        bar.yaxis.set_label_coords(1, 0.5, beside_bar)


def _label_positions(
    figure: FigureBase,
    ax: Axes,
    positions: pd.Index,
    tokens: Sequence[str] | None,
    panel_width: float,
) -> None:
    """Labels the x axis with positions, or with tokens, for which the figure becomes
    higher.

    Args:
        panel_width: in inches.
    """
    if tokens is None:
        ax.set_xlabel("token position")
        # a space between two numbers is as wide as two digits
        label_width = DIGIT_WIDTH * (len(str(positions.max())) + 2)
        max_labels = int(panel_width / label_width)
        label_cells(ax.xaxis, positions, max_labels, round_step=True)
        return
    labels = [tokens[position] for position in positions]
    ax.set_xlabel("token")
    ax.tick_params(axis="x", rotation=90, labelsize=7)
    longest = max(len(in_code_points(label)) for label in labels)
    add_height(figure, CHARACTER_WIDTH * max(0, longest - TOKEN_CHARACTERS))
    label_cells(ax.xaxis, labels, int(panel_width / TOKEN_DISTANCE))


def _with_values(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with the `value` that is drawn, infinite where a result is not finite,
    and with `beyond`, whether the error lies beyond its tolerance."""
    # older rows of the log have no error and no budget
    measured = rows.reindex(columns=["error", "budget"]).astype(float)
    ratio = measured["error"] / np.hypot(measured["budget"], HALF_ULP)
    value = ratio if metric == "error" else 1 - rows["cosine"].astype(float)
    is_broken = ~rows["finite"].fillna(True).astype(bool)
    value = value.clip(lower=METRICS[metric].least).mask(is_broken, np.inf)
    # rows of a validation, which were not read from the log, have null for the logits
    layer = rows["layer"].fillna(LOGITS).astype(int)
    beyond = (ratio > TOLERANCE_FACTOR) | is_broken
    return rows.assign(value=value, beyond=beyond, layer=layer)


def _panels(rows: pd.DataFrame, by: str | None) -> list[Panel]:
    """A panel for each value of the column `by`; values whose cells look alike share
    one. Each cell is the worst of its rows."""
    levels = [np.sort(rows[column].unique()) for column in INDEX]
    all_cells = pd.MultiIndex.from_product(levels)
    panels: list[Panel] = []
    for name, part in group_by(rows, by):
        cells = part.groupby(INDEX)[["value", "beyond"]].max().reindex(all_cells)
        alike = next((panel for panel in panels if panel.cells.equals(cells)), None)
        if alike is None:
            panels.append(Panel(cells, [name], [part]))
        else:
            alike.names.append(name)
            alike.parts.append(part)
    return panels


def _worst_panel(rows: pd.DataFrame, column: str) -> Panel:
    """One panel for all values of a column. Each cell is the worst of its rows."""
    (panel,) = _panels(rows, None)
    groups = group_by(rows, column)
    panel.names = [name for name, _ in groups]
    panel.parts = [part for _, part in groups]
    worst = pd.concat(
        [part.groupby(INDEX)["value"].max() for part in panel.parts], axis=1
    )
    # a cell that is nowhere finite differs in nothing
    with np.errstate(invalid="ignore"):
        differences = worst.max(axis=1) - worst.min(axis=1)
    panel.difference = float(differences.max()) if differences.notna().any() else 0.0
    return panel


def _equality(parts: Sequence[pd.DataFrame]) -> str:
    """The equality of the tensors behind panels that look alike, in words:

    1. Each tensor equals the reference: they are equal bit for bit.
    2. All rows have a digest of their tensor: the digests decide.
    3. Otherwise rounded numbers decide, whose equality proves less.

    A null, as in older rows, proves nothing.
    """
    together = pd.concat(parts).reindex(columns=["digest", "max_abs"])
    if together["max_abs"].eq(0).all():
        return BIT_FOR_BIT
    if together["digest"].notna().all():
        return BIT_FOR_BIT if _are_equal(parts, ["digest"]) else NOT_EQUAL
    rounded = ["cosine", "psnr_db", "max_abs", "error"]
    return "equal figures" if _are_equal(parts, rounded) else NOT_EQUAL


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
    section: Section,
    panel_size: tuple[float, float],
    count: int,
    limits: Sequence[float],
) -> Scale:
    """The look of the cells of a metric.

    Args:
        panel_size: width of the figure and height of a panel, in inches.
        count: of the panels of all metrics.
        limits: values that the colours include.
    """
    width, panel_height = panel_size
    layers, positions = len(section.panels[0].layers), len(section.panels[0].positions)
    marks = section.metric.marks
    finite = section.rows["value"].replace(np.inf, np.nan).dropna()
    values = [*finite, *marks, *limits] or [1.0]
    low, high = min(values), max(values)
    if not marks:
        # a decade at least, so that cells of about the same value look alike
        high = max(high, 10 * low)
    cell_height, cell_width = panel_height / layers, 0.8 * width / positions
    return Scale(
        norm=LogNorm(low, high),
        block=(
            math.ceil(layers / MAX_DRAWN_LAYERS),
            math.ceil(positions / int(CELLS_PER_INCH * width)),
        ),
        is_hatched=min(cell_width, cell_height) >= MIN_HATCHED_CELL,
        is_raster=count * layers * positions > MAX_VECTOR_CELLS,
    )


def _draw_panel(ax: Axes, panel: Panel, scale: Scale) -> QuadMesh:
    """Draws the cells of one panel and labels its layers; returns their mesh."""
    values = panel.cells["value"].unstack()
    mesh = draw_cells(ax, values, scale.norm, scale.block, scale.is_raster)
    beyond = panel.cells["beyond"].unstack().eq(True).to_numpy()
    beyond = worst_of_blocks(beyond.astype(float), scale.block) == 1
    if scale.is_hatched:
        hatch(mesh, beyond, scale.is_raster)
    else:
        recolour(mesh, beyond)
    names = ["logits" if layer == LOGITS else layer for layer in panel.layers]
    label_cells(ax.yaxis, names, MAX_LAYER_LABELS, round_step=True, last=True)
    ax.set_ylabel("layer")
    return mesh


def _keys(rows: pd.DataFrame, scale: Scale, has_gaps: bool) -> list[Patch]:
    """The legend's keys for cells that are not coloured by their value."""
    keys = []
    if rows["beyond"].any():
        if scale.is_hatched:
            style = {"fill": False, "hatch": HATCH}
        else:
            style = {"facecolor": BEYOND_COLOUR}
        label = f"over {TOLERANCE_FACTOR:g} times what rounding causes"
        keys.append(Patch(**style, label=label))
    if np.isinf(rows["value"]).any():
        keys.append(Patch(facecolor="black", label="not finite"))
    if has_gaps:
        keys.append(unmeasured_key())
    return keys


def _notes(section: Section, scale: Scale) -> list[str]:
    """The legend's notes on how the cells of a metric are drawn."""
    notes = []
    for count, things in zip(scale.block, ("layers", "positions")):
        if count > 1:
            notes.append(f"a drawn cell is the worst of {count} {things}")
    metric = section.metric
    if metric.note:
        notes.append(metric.note)
    if (section.rows["value"] == metric.least).any():
        notes.append(
            f"{metric.label} below {metric.least:g} has the colour of {metric.least:g}"
        )
    return notes
