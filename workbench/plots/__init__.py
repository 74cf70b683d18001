"""Figures for notebooks and write-ups: functions from DataFrames to Axes.

Every function takes the data first and keyword options after, draws into `ax` (or a new
figure) and returns the Axes; none shows a figure or reads a file. Every colour is
repeated by a symbol, a number or a hatch. A function draws the columns that its
docstring names, and raises ValueError if they are ambiguous, such as rows of several
machines."""

from workbench.plots.cache import (
    cache_rows,
    failure_patterns,
    first_token,
    reuse_matrix,
)
from workbench.plots.cost import (
    against_peer,
    layer_ms,
    memory_bar,
    over_time,
    parts_bar,
    ratios,
    roofline,
    speed,
    speed_against_fidelity,
    speed_beside,
)
from workbench.plots.crosscheck import witness_lines
from workbench.plots.difference import fidelity_difference
from workbench.plots.fidelity import (
    error_by_position,
    error_parts,
    fidelity_beside,
    fidelity_grid,
    fidelity_heatmap,
    layer_parts,
    update_cosine_bars,
)
from workbench.plots.figure import save, style, writer
from workbench.plots.first_light import dispatch, host_device, placement_ladder
from workbench.plots.overflow import headroom, mask_leaks
from workbench.plots.recurrent import state_crossover, state_drift, state_prices

__all__ = [
    "against_peer",
    "cache_rows",
    "dispatch",
    "error_by_position",
    "error_parts",
    "failure_patterns",
    "fidelity_beside",
    "fidelity_difference",
    "fidelity_grid",
    "fidelity_heatmap",
    "first_token",
    "headroom",
    "host_device",
    "layer_ms",
    "layer_parts",
    "mask_leaks",
    "memory_bar",
    "over_time",
    "parts_bar",
    "placement_ladder",
    "ratios",
    "reuse_matrix",
    "roofline",
    "save",
    "speed",
    "speed_against_fidelity",
    "speed_beside",
    "state_crossover",
    "state_drift",
    "state_prices",
    "style",
    "update_cosine_bars",
    "witness_lines",
    "writer",
]
