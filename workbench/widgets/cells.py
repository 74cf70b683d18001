"""The cells of a heatmap in a picture: their places, and the values of each in
words."""

import pandas as pd
from matplotlib.axes import Axes


def cell_text(row: dict, tokens: list[str]) -> str:
    """The place and the values of a row of `fidelity` in words."""
    figures = {"relative error": row["error"], "1 − cosine": 1 - row["cosine"]}
    figures |= {"largest error": row["max_abs"], "PSNR (dB)": row["psnr_db"]}
    words = []
    for name, value in figures.items():
        if pd.notna(value):
            words.append(f"{name} {value:.4g}")
    if pd.notna(row["budget"]) and row["budget"] > 0:
        share = row["error"] / row["budget"]
        words.append(f"{share:.3g} × budget ({row['budget']:.3g})")
    position = row["position"]
    place = f"layer {row['layer']}, position {position}"
    if position < len(tokens):
        place += f" “{tokens[position]}”"
    return f"{place}, T = {row['T']}: {', '.join(words)}"


def cells_box(ax: Axes, columns: int, rows: int) -> list[float]:
    """[left, top, right, bottom] of a drawn heatmap of that many cells, as fractions of
    its figure from the top left."""
    to_figure = ax.transData - ax.figure.transFigure
    corners = to_figure.transform([(0, 0), (columns, rows)]).tolist()
    (left, top), (right, bottom) = corners
    return [left, 1 - top, right, 1 - bottom]
