"""Speed against fidelity."""

from collections.abc import Hashable, Mapping, Sequence
from math import inf

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from workbench.plots.styled import (
    DASHED,
    MARKERS,
    add_legend,
    looks,
    looks_by_name,
    returns_figure,
    set_height,
    shifted,
)
from workbench.plots.text import describe_unplaced, group_by, label_log, label_of

VERDICTS = ["verdict", "quality"]
LEAST_KL = 1e-8
"""Smaller values are drawn as this one; a logarithmic axis has no 0."""
RED_MARK = "X"
MARKS = MARKERS.replace(RED_MARK, "")
LARGEST_MARK, SMALLEST_MARK = 90, 18
"""Areas of marks without bars, in points². Each group has smaller ones than the group before
it, so that a mark hides none that was drawn at its place."""
MARK_BESIDE_OTHERS = 36
"""Area of a mark that stands beside others of its KL, in points²."""
FASTER = 1.02
"""The median of a numbered configuration is more than this many times those of a lower
KL: smaller differences are noise."""
MARK_DISTANCE = 9
"""Points from a mark to the one of the next group, where both have one KL."""


@returns_figure
def tradeoff(
    configurations: pd.DataFrame,
    figure: FigureBase,
    *,
    hue: str | None = None,
    vocabulary: Sequence[str] = (),
    max_kl: float | None = None,
) -> None:
    """Tokens per second over mean KL. The best configurations that pass both verdicts
    are numbered by their medians, and the legend names them.

    Args:
        configurations: name, kl_mean (nats), tokens_per_s, verdict, quality (absent
            from older data: judged by `max_kl`), the column `hue`, which gives the
            colours, and slowest and fastest, the ends of a bar over the processes of a
            configuration (absent or null: no bar).
        vocabulary: all names that `hue` may have, as in `lines`.
        max_kl: the user's limit on the mean KL, drawn as a dashed line.
    """
    if "quality" not in configurations:
        is_over = configurations["kl_mean"] > (max_kl or inf)
        words = is_over.map({True: "OVER", False: "WITHIN"})
        configurations = configurations.assign(quality=words)
    measured = configurations.dropna(subset=["kl_mean", "tokens_per_s"])
    clipped_count = (measured["kl_mean"] < LEAST_KL).sum()
    measured = measured.assign(kl_mean=measured["kl_mean"].clip(lower=LEAST_KL))
    measured = measured.reset_index(drop=True)  # a number for each mark
    set_height(figure, 3.2)
    ax = figure.subplots()
    groups = group_by(measured, hue)
    has_bars = not _rows_with_range(measured).empty
    stands_side_by_side = has_bars and measured["kl_mean"].duplicated().any()
    areas = np.linspace(LARGEST_MARK, SMALLEST_MARK, len(groups) + 1)[1:]
    shifts = [0.0] * len(groups)  # points to the right
    if stands_side_by_side:
        areas = [MARK_BESIDE_OTHERS] * len(groups)
        middle = (len(groups) - 1) / 2
        shifts = [MARK_DISTANCE * (place - middle) for place in range(len(groups))]
    look_of = looks_by_name((name for name, _ in groups), vocabulary, looks(MARKS))
    # verdicts that all configurations share are said once, and not behind every name
    verdicts = {_verdicts(*row) for row in measured[VERDICTS].itertuples(index=False)}
    has_one_verdict = hue is not None and len(groups) > 1 and len(verdicts) == 1
    for (name, group), area, shift in zip(groups, areas, shifts):
        shown_name = name if hue else ""
        label_verdicts = not has_one_verdict
        _draw_points(ax, group, look_of[name], area, shift, shown_name, label_verdicts)
        _draw_ranges(ax, group, look_of[name], shift)
    if stands_side_by_side:
        several = measured.loc[measured["kl_mean"].duplicated(), "kl_mean"]
        for kl in several.unique():
            ax.axvline(kl, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    # marks that are shifted count for no limits of the axes
    ax.update_datalim(measured[["kl_mean", "tokens_per_s"]].astype(float))
    ax.autoscale_view()
    best = _pareto_front(measured)
    shift_of = {
        index: shift
        for (_, group), shift in zip(groups, shifts)
        for index in group.index
    }
    _annotate_numbers(ax, best, shift_of)
    if max_kl:
        ax.axvline(max_kl, **DASHED, label=f"your limit, {max_kl:g} nats")
    ax.grid()
    ax.margins(0.1)
    ax.set(xscale="log", ylabel="tokens per second")
    # all of the highest mark and of its number is inside
    highest = measured.reindex(columns=["tokens_per_s", "fastest"]).max().max()
    ax.set_ylim(0, 1.15 * highest if len(measured) else None)
    ax.set_xlabel("mean KL from Hugging Face's model (nats)")
    label_log(ax.xaxis)
    facts = []
    if has_bars:
        facts.append("bars: the slowest to the fastest process")
    if stands_side_by_side:
        facts.append("marks of one KL stand side by side about its dotted line")
    if has_one_verdict:
        facts.append(f"all configurations: {verdicts.pop()}")
    notes = ["; ".join(facts)] if facts else []
    short_names = []
    if len(best):
        short_names = _shorten_names(best["name"], measured["name"])
    numbered = [f"{number}: {name}" for number, name in enumerate(short_names, 1)]
    if len(best) > 1:
        share = f"{FASTER - 1:.0%}"
        notes.append(
            f"numbered: GREEN and WITHIN, with a median more than {share} above all of a lower "
            "KL (no test of the order)"
        )
    if numbered:
        notes.append("; ".join(numbered))
    if clipped_count:
        notes.append(
            f"{clipped_count} with a KL below {LEAST_KL:g} are drawn at {LEAST_KL:g}"
        )
    notes += describe_unplaced(configurations, ["kl_mean", "tokens_per_s"])
    add_legend(figure, ax.get_legend_handles_labels()[0], notes)


def _draw_points(
    ax: Axes,
    group: pd.DataFrame,
    look: tuple[str, str],
    area: float,
    shift: float,
    name: str,
    names_verdicts: bool,
) -> None:
    """Draws configurations in one colour, with another mark where the verdict is RED and
    an open one where the quality is OVER.

    Args:
        look: colour and mark.
        area: of a mark, as in `Axes.scatter`.
        shift: points from the place of a mark to the right.
        name: of the group; "" for none.
        names_verdicts: whether the labels have the verdicts behind the name.
    """
    colour, marker = look
    for (verdict, quality), points in group.groupby(VERDICTS, dropna=False):
        style = {"color": colour, "marker": RED_MARK if verdict == "RED" else marker}
        style["s"] = area
        if quality == "OVER":
            style |= {"facecolors": "none", "edgecolors": colour}
            del style["color"]
        words = _verdicts(verdict, quality) if names_verdicts else ""
        style["label"] = ", ".join(filter(None, [name, words]))
        if shift:
            style["transform"] = shifted(ax, shift)
        ax.scatter("kl_mean", "tokens_per_s", data=points, **style)


def _rows_with_range(configurations: pd.DataFrame) -> pd.DataFrame:
    """The configurations whose processes differ, with the ends of their bars."""
    columns = ["kl_mean", "tokens_per_s", "slowest", "fastest"]
    rows = configurations.reindex(columns=columns)
    return rows[rows["fastest"] > rows["slowest"]]


def _draw_ranges(
    ax: Axes, group: pd.DataFrame, look: tuple[str, str], shift: float
) -> None:
    """Draws a bar from the slowest to the fastest process of each configuration through
    its mark, `shift` points to the right."""
    rows = _rows_with_range(group)
    if rows.empty:
        return
    colour, _ = look
    ends = rows["slowest"], rows["fastest"]
    style = {"color": colour, "linewidth": 1, "transform": shifted(ax, shift)}
    ax.vlines(rows["kl_mean"], *ends, **style)


def _verdicts(verdict: str | None, quality: str | None) -> str:
    """Both verdicts in words; "verdict not set" where nothing was validated."""
    words = label_of("verdict", verdict)
    if verdict == "GREEN":
        words += f", {label_of('quality', quality)}"
    return words


def _shorten_names(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Names of configurations without the parts, such as "T 1", that all configurations
    have. A name of nothing else stays as it is."""
    shared = set.intersection(*({*name.split(", ")} for name in all_names))
    short = [
        ", ".join(p for p in name.split(", ") if p not in shared) for name in names
    ]
    return [part or name for part, name in zip(short, names)]


def _annotate_numbers(
    ax: Axes, best: pd.DataFrame, shift_of: Mapping[Hashable, float]
) -> None:
    """Numbers the best configurations. `shift_of`: points from the place of a mark to the
    right, by the index of its row."""
    for number, row in enumerate(best.itertuples(), 1):
        point = (row.kl_mean, row.tokens_per_s)
        offset = {"textcoords": "offset points", "ha": "right"}
        ax.annotate(str(number), point, (shift_of[row.Index] - 3, 4), **offset)


def _pareto_front(configurations: pd.DataFrame) -> pd.DataFrame:
    """The rows that are GREEN and WITHIN, and more than `FASTER` times as fast as all
    such rows of a lower KL; sorted by KL."""
    passes = configurations["verdict"].eq("GREEN")
    passes &= configurations["quality"].eq("WITHIN")
    passing = configurations[passes].sort_values(
        ["kl_mean", "tokens_per_s"], ascending=[True, False]
    )
    fastest_before = passing["tokens_per_s"].cummax().shift(fill_value=0)
    return passing[passing["tokens_per_s"] > FASTER * fastest_before]
