"""A − B: the sign by colour and scale, what is missing hatched, what is not finite marked."""

import numpy as np
import pandas as pd
import pytest

from workbench import plots


def cells(*differences: float) -> pd.DataFrame:
    rows = [(0, position, value) for position, value in enumerate(differences)]
    return pd.DataFrame(rows, columns=["layer", "position", "difference"])


def test_the_scale_is_symmetric_and_the_largest_difference_ends_it():
    ax = plots.fidelity_difference(
        cells(0.1, -0.4, 0.0), metric="1-cosine", title="A − B, x"
    )
    (mesh,) = [
        c for c in ax.collections if c.get_array() is not None and len(c.get_array())
    ][:1]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-0.4, 0.4) and ax.get_title(
        "left"
    ) == "A − B, x"
    assert np.allclose(np.ravel(mesh.get_array()), [0.1, -0.4, 0.0])
    orange, purple, middle = (mesh.to_rgba(v) for v in (0.4, -0.4, 0.0))
    assert orange[0] > orange[2] and purple[2] > purple[0] and min(middle[:3]) > 0.9
    assert "1 − cosine" in ax.figure.axes[1].get_ylabel()


def test_runs_that_do_not_differ_have_a_scale_all_the_same():
    assert plots.fidelity_difference(cells(0.0, 0.0)).collections


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_a_difference_that_is_not_finite_is_marked(value):
    ax = plots.fidelity_difference(cells(0.1, value))
    marks = ax.collections[-1].get_offsets()
    assert np.allclose(marks, [[1.5, 0.5]])


def test_a_cell_that_one_run_lacks_is_hatched():
    rows = pd.concat([cells(0.1, 0.2), cells(0.3).assign(layer=1)])
    legend = plots.fidelity_difference(rows).get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["not measured"]
