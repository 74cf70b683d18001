"""The cells of a heatmap in a picture: their places, and the values of each in
words."""

import pandas as pd
from matplotlib.axes import Axes


def cell_text(row: dict, tokens: list[str]) -> str:
    """The place and the values of a row of `fidelity` in words."""
    position = int(row["position"])
    token = f" “{tokens[position]}”" if position < len(tokens) else ""
    figures = {"relative error": row["error"], "1 − cosine": 1 - row["cosine"]}
    figures |= {"largest error": row["max_abs"], "PSNR (dB)": row["psnr_db"]}
    words = []
    for name, value in figures.items():
        if pd.notna(value):
            words.append(f"{name} {value:.4g}")
    if pd.notna(row["budget"]) and row["budget"] > 0:
        words.append(
            f"{row['error'] / row['budget']:.3g} × budget ({row['budget']:.3g})"
        )
    place = f"layer {int(row['layer'])}, position {position}{token}, T = {row['T']}"
    return f"{place}: {', '.join(words)}"


def cells_box(ax: Axes, columns: int, rows: int) -> list[float]:
    """[left, top, right, bottom] of a drawn heatmap of that many cells, as fractions of
    its figure from the top left."""
    wide, high = ax.figure.get_size_inches() * ax.figure.dpi
    (left, top), (right, bottom) = ax.transData.transform(
        [(0, 0), (columns, rows)]
    ).tolist()
    return [left / wide, 1 - top / high, right / wide, 1 - bottom / high]
