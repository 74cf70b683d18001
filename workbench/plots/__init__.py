"""Eight figures, each a function from a DataFrame to a matplotlib Figure, and `save`.

The data come first; everything else is a keyword. All eight functions have the keywords
`title`, `note` for a sentence in the legend, `width` in inches (`COLUMN` or `PAGE`), and
`figure`, a figure to draw into, such as a widget's canvas, in place of a new one. It may
be a subfigure of a figure with constrained layout, whose width and height it keeps.
pyplot neither keeps nor shows the figure that they return.

Each figure has a module of its own name; `cells` has the coloured cells that `heatmap`
and `grid` share, `styled` the look of every figure, its legend, and `save`, and `text`
labels, groups of rows, and characters that the font lacks. `returns_figure` of `styled`
makes the function that callers see from one that draws into a given figure.

A null is a group of its own, ``not set``. The legend counts the rows that a figure
cannot draw."""

from workbench.plots.bars import bars
from workbench.plots.cache_rows import MAX_CACHE_ROWS as MAX_CACHE_ROWS
from workbench.plots.cache_rows import cache_rows
from workbench.plots.frontier import frontier
from workbench.plots.grid import grid
from workbench.plots.heatmap import BUDGET_FORMULA as BUDGET_FORMULA
from workbench.plots.heatmap import HALF_ULP as HALF_ULP
from workbench.plots.heatmap import METRICS as METRICS
from workbench.plots.heatmap import TOLERANCE_FACTOR as TOLERANCE_FACTOR
from workbench.plots.heatmap import find_limits as find_limits
from workbench.plots.heatmap import heatmap
from workbench.plots.lines import lines
from workbench.plots.predictions import predictions
from workbench.plots.styled import BEYOND_COLOUR as BEYOND_COLOUR
from workbench.plots.styled import COLUMN as COLUMN
from workbench.plots.styled import MARKERS as MARKERS
from workbench.plots.styled import PAGE as PAGE
from workbench.plots.styled import UNDATED as UNDATED
from workbench.plots.styled import StyledFigure as StyledFigure
from workbench.plots.styled import add_subtitle as add_subtitle
from workbench.plots.styled import encode as encode
from workbench.plots.styled import save
from workbench.plots.tradeoff import tradeoff

__all__ = [
    "bars",
    "cache_rows",
    "frontier",
    "grid",
    "heatmap",
    "lines",
    "predictions",
    "save",
    "tradeoff",
]
