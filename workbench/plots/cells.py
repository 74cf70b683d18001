"""Coloured cells: the drawing that `heatmap` and `grid` share."""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import allow_rasterization
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from workbench.plots.styled import BEYOND_COLOUR, UNMEASURED

COLOUR_MAP = "viridis"
"""The colours of values up to the end of the scale. Its lightness rises from end to end, so that
colour-blind readers and grey prints can order the colours. None of them is grey or
black. Source: the default map of matplotlib since 2.0, by van der Walt and Smith."""
COLOUR_ABOVE = "black"
"""The colour of a value above the scale, or of one that is not finite."""
LABEL_SHARE = 0.8
"""Of the distance of two labels at their closest, the share that a label itself takes."""
HATCH = "////"
"""The hatch of a cell beyond its tolerance. It is sparse, so that the colour below it
stays readable."""


class Cells(QuadMesh):
    """Cells without edges, which an SVG has as one image with a pixel for each cell.
    Browsers smooth the edges of shapes, so that the background would shine through
    between two cells, and a shape takes far more bytes than a pixel."""

    @allow_rasterization
    def draw(self, renderer) -> None:
        is_svg = isinstance(self.get_figure(root=True).canvas, FigureCanvasSVG)
        if self.get_rasterized() or not is_svg or not self._is_image():
            super().draw(renderer)
            return
        graphics = renderer.new_gc()
        pixels = self.to_rgba(self.get_array(), bytes=True)
        # the renderer places the pixels in a unit square
        height, width = self.get_coordinates()[-1, -1, ::-1]
        place = Affine2D().scale(width, height) + self.get_transform()
        renderer.draw_image(graphics, 0, 0, pixels, place.frozen())
        graphics.restore()

    def _is_image(self) -> bool:
        """Whether all cells have one size and no edges."""
        corners = self.get_coordinates()
        columns, rows = np.diff(corners[0, :, 0]), np.diff(corners[:, 0, 1])
        is_regular = all(len({*sizes}) == 1 for sizes in (columns, rows))
        return is_regular and not len(self.get_edgecolor())


def draw_cells(
    ax: Axes,
    table: pd.DataFrame,
    norm: Normalize,
    block: tuple[int, int] = (1, 1),
    raster: bool = False,
) -> QuadMesh:
    """Draws a table as coloured cells, row 0 on top. Nulls are dotted.

    Args:
        block: rows and columns of the table that one drawn cell stands for; it shows
            the largest of their values.
        raster: whether the cells are an image even in a vector format.
    """
    ax.spines[:].set_visible(False)
    ax.patch.set(**UNMEASURED)
    colours = matplotlib.colormaps[COLOUR_MAP].with_extremes(over=COLOUR_ABOVE)
    values = worst_of_blocks(table.to_numpy(dtype=float), block)
    # infinite values are drawn in the colour of what lies above the scale
    values = np.where(np.isinf(values), 2 * norm.vmax, values)
    rows, columns = map(_edges, table.shape, block)
    mesh = Cells(
        np.stack(np.meshgrid(columns, rows), axis=-1),
        array=values,
        norm=norm,
        cmap=colours,
        edgecolors="none",
        antialiased=False,
        snap=True,
        rasterized=raster,
    )
    ax.add_collection(mesh, autolim=False)
    ax.set(xlim=(0, len(table.columns)), ylim=(len(table), 0))
    ax.tick_params(length=0)
    return mesh


def worst_of_blocks(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest value of each block of rows and columns; blocks at the ends may be
    smaller. A block that has nothing but nulls is null."""
    gaps = [(0, -length % size) for length, size in zip(values.shape, block)]
    padded = np.pad(values, gaps, constant_values=np.nan)
    rows, columns = (length // size for length, size in zip(padded.shape, block))
    blocks = padded.reshape(rows, block[0], columns, block[1])
    return np.fmax.reduce(np.fmax.reduce(blocks, axis=3), axis=1)


def _edges(length: int, size: int) -> np.ndarray:
    """The edges of blocks of `size` cells along an axis of `length` cells."""
    return np.append(np.arange(0, length, size), length)


def contrasting(mesh: QuadMesh) -> np.ndarray:
    """White or black for each cell, whichever contrasts with the cell's colour."""
    colours = mesh.to_rgba(mesh.get_array())[..., :3]
    return np.where(colours.mean(axis=-1) < 0.45, "white", "black")


def hatch(mesh: QuadMesh, marked: np.ndarray, raster: bool) -> None:
    """Hatches the marked cells. Those of one colour are one shape: a shape for each cell
    would take most of the time of a figure, and most of the bytes of its file."""
    colours = contrasting(mesh)
    corners = mesh.get_coordinates()  # [rows + 1, columns + 1, 2]
    # the outline of each cell: its four corners, and the first again
    outlines = np.stack(
        [
            corners[:-1, :-1],
            corners[1:, :-1],
            corners[1:, 1:],
            corners[:-1, 1:],
            corners[:-1, :-1],
        ],
        axis=2,
    )
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    for colour in ("white", "black"):
        cells = outlines[marked & (colours == colour)]
        if not len(cells):
            continue
        shape = PathPatch(
            Path(cells.reshape(-1, 2), codes * len(cells)),
            hatch=HATCH,
            facecolor="none",
            edgecolor=colour,
            linewidth=0,
            rasterized=raster,
        )
        mesh.axes.add_patch(shape)


def recolour(mesh: QuadMesh, marked: np.ndarray) -> None:
    """Draws the marked cells in `BEYOND_COLOUR`. Cells that are not finite, which
    `draw_cells` drew in the colour above the scale, keep it."""
    finite = mesh.get_array().filled(0) <= mesh.norm.vmax
    cells = np.ma.masked_where(~(marked & finite), marked.astype(float))
    corners = mesh.get_coordinates()
    mesh.axes.pcolormesh(
        corners[..., 0],
        corners[..., 1],
        cells,
        cmap=ListedColormap([BEYOND_COLOUR]),
        rasterized=True,
    )


def label_cells(
    axis,
    labels: Sequence,
    max_labels: int,
    *,
    round_step: bool = False,
    last: bool = False,
) -> None:
    """Labels the cells along an axis: all of them, or every 2nd, 3rd … where there are
    more than `max_labels`.

    Args:
        round_step: label every 2nd, 5th, 10th, 20th … cell, and no other step, so that
            the labels of numbered cells are round numbers.
        last: always label the last cell, if need be in place of the label before it. A
            label with more characters than the one before it needs more room.
    """
    count = len(labels)
    max_labels = max(max_labels, 1)  # a subfigure may have room for none
    step = math.ceil(count / max_labels)
    if round_step:
        power = 10 ** math.floor(math.log10(step))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= step)
    labels = [str(label) for label in labels]
    places = [place for place in range(0, count, step) if labels[place].strip()]
    if last and places and places[-1] != count - 1:
        room = LABEL_SHARE * count / max_labels
        room *= len(labels[-1]) / len(labels[places[-1]])
        if len(places) > 1 and count - 1 - places[-1] < room:
            del places[-1]
        places.append(count - 1)
    ticks = np.array(places) + 0.5
    axis.set_ticks(ticks, labels=[labels[place] for place in places])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)
