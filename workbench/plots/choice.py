"""What to choose and what to believe: speed against fidelity of whole configurations, predicted against published times."""

import pandas as pd
from matplotlib.axes import Axes

from workbench.plots.figure import PALETTE, axes, heading, on_machine, style

_VERDICTS = {"GREEN": ("o", PALETTE[2]), "RED": ("X", PALETTE[5]), "not_run": ("s", "0.6")}


@style()
def speed_against_fidelity(configurations: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Every configuration as a point: tokens per second over 1 − its worst update cosine, the fastest that passes ringed.

    `configurations`: ``tokens_per_s``, ``worst_cosine`` and ``verdict`` (GREEN, RED or not_run), one row each. A column
    ``machine`` goes into the title and must name one.
    """
    title = on_machine("speed against fidelity", configurations)
    ax = axes(ax, 5.5, 3.2)
    error = (1 - configurations["worst_cosine"].astype(float)).clip(lower=1e-9)
    for verdict, (marker, colour) in _VERDICTS.items():
        points = configurations[configurations["verdict"] == verdict]
        if len(points):
            ax.plot(
                error[points.index],
                points["tokens_per_s"],
                marker,
                color=colour,
                label=verdict,
                alpha=0.8,
            )
    passing = configurations[configurations["verdict"] == "GREEN"]
    if len(passing):
        best = passing["tokens_per_s"].astype(float).idxmax()
        ax.plot(
            error[best],
            passing.loc[best, "tokens_per_s"],
            "o",
            ms=11,
            mfc="none",
            mec="black",
            label="fastest that passes",
        )
    ax.set_xscale("log")
    ax.set(xlabel="1 − worst update cosine", ylabel="tok/s")
    ax.set_ylim(bottom=0)
    ax.grid()
    return heading(ax, title)


@style()
def roofline(predictions: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Published against predicted milliseconds, each predicted by a fit that has not seen it; the band is ± 30%.

    `predictions`: ``figure``, ``published_ms``, ``predicted_ms``; a column ``chip`` goes into the legend.
    """
    ax = axes(ax, 4.2, 3.6)
    ms = predictions[["published_ms", "predicted_ms"]]
    low, high = ms.min(axis=None) / 2, ms.max(axis=None) * 2
    ax.plot([low, high], [low, high], color="black", marker="", lw=0.8, label="equal")
    ax.fill_between(
        [low, high], [low * 0.7, high * 0.7], [low * 1.3, high * 1.3], color="0.9", label="± 30%"
    )
    names = predictions["figure"].str.split(",").str[0] + (
        ", " + predictions["chip"] if "chip" in predictions else ""
    )
    for name, rows in predictions.groupby(names, sort=False):
        ax.plot(rows["published_ms"], rows["predicted_ms"], ls="none", label=name)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="published ms",
        ylabel="predicted ms",
        xlim=(low, high),
        ylim=(low, high),
    )
    ax.set_title(
        f"roofline, median misfit {(predictions['predicted_ms'] / predictions['published_ms'] - 1).abs().median():.0%}"
    )
    ax.legend(loc="upper left")
    return ax
