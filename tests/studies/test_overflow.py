"""The rebuilt case: the naive order of scores overflows where the exported one does not, and only
the order differs."""

import numpy as np
import pandas as pd
import pytest

from workbench import plots
from workbench.explain import trace
from workbench.export import export
from workbench.models.checkpoint import Checkpoint
from workbench.studies import fp16_overflow

NORMS, IDS = [921.0], list(range(6))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    checkpoint = Checkpoint(
        fp16_overflow.planted_checkpoint(folder / "checkpoint", NORMS, C=64)
    )
    bundle = export(checkpoint.path, folder / "bundle", progress=False, max_seq_len=32)
    return checkpoint, bundle, fp16_overflow.naive_packages(bundle, checkpoint, folder)


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return fp16_overflow.mask_table(
        fp16_overflow.mask_packages(tmp_path_factory.mktemp("masks"))
    ).set_index(["mask", "case"])


def test_biases_have_the_planted_norm(case):
    bias = case[0].tensor("model.layers.0.self_attn.k_proj.bias")
    assert float(bias.norm()) == pytest.approx(921, rel=1e-3)


def test_both_orders_compute_the_same_in_exact_arithmetic(case):
    _, bundle, packages = case
    logits = []
    for replaced in (packages, None):
        made = fp16_overflow.decoder(bundle, "exact", replaced)
        fp16_overflow.align_queries(made, 32)
        logits.append(made.prefill(IDS))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 * np.abs(logits[1]).max()


def test_only_the_naive_order_overflows_and_it_does_in_the_product(case):
    _, bundle, packages = case
    sweep = fp16_overflow.score_sweep(bundle, packages, IDS, [0, 256])
    assert {g.name: g.verdict for g in fp16_overflow.overflow_gates(sweep)} == {
        "naive_breaks_in_the_score": "GREEN",
        "scaled_stays_finite": "GREEN",
    }
    assert fp16_overflow.first_broken(sweep) == 256
    product = sweep.pivot(index="query_norm", columns="order", values="product")
    assert np.allclose(
        product[fp16_overflow.NAIVE] / product[fp16_overflow.SCALED],
        128**0.5,
        rtol=1e-3,
    )
    assert "softmax" in sweep["nan"].dropna().iloc[0]
    assert "NaN" in fp16_overflow.overflow_conclusion(
        sweep, pd.DataFrame(columns=["mask"])
    )


def test_a_scaled_order_that_overflows_is_red(case):
    sweep = pd.DataFrame(
        [
            {
                "order": order,
                "query_norm": 9.0,
                "layer": 0,
                "headroom_bits": -1.0,
                "inf": "op (matmul, m) of s",
                "nan": None,
                "narrow": None,
            }
            for order in (fp16_overflow.NAIVE, fp16_overflow.SCALED)
        ]
    )
    assert [g.verdict for g in fp16_overflow.overflow_gates(sweep)] == ["GREEN", "RED"]


def test_the_score_is_found_among_other_matmuls(case):
    ranges = trace.trace_decoder(fp16_overflow.decoder(case[1], "exact"), IDS).frame()
    (found,) = fp16_overflow.products(ranges)
    assert found["module"] == "layers.0.self_attn"
    assert found["elements"] == 28 * len(IDS) * 32


@pytest.mark.parametrize(
    ("mask", "case", "low", "high"),
    [
        ("1 and 0, added", "ordinary scores", 0.05, 0.95),
        ("(m − 1) · 1e9", "ordinary scores", 0, 0),
        ("(m − 1) · 1e4", "ordinary scores", 0, 0),
        ("(m − 1) · 1e4", "attended 12,000 lower", 0.99, 1.01),
        ("(m − 1) · 1e4", "a row all blocked", 0.99, 1.01),
    ],
)
def test_what_each_mask_lets_through(masks, mask, case, low, high):
    assert low <= masks.loc[(mask, case), "leak"] <= high


def test_masks_that_overflow_are_named(masks):
    # 0 · inf
    assert masks.loc[("(m − 1) · 3.4e38", "ordinary scores")]["nan"].startswith("mask")
    assert "cast" in masks.loc[("(m − 1) · 1e9", "ordinary scores")]["inf"]
    assert "softmax" in masks.loc[("(m − 1) · 1e9", "a row all blocked")]["nan"]


def test_figures_show_what_the_tables_say(masks):
    leaks = plots.mask_leaks(masks.reset_index())
    assert [t.get_text() for t in leaks.texts].count("NaN ×") == masks[
        "leak"
    ].isna().sum()
    rows = pd.DataFrame(
        {
            "norm": [1, 2, 1, 2],
            "order": ["a", "a", "b", "b"],
            "headroom_bits": [3.0, -1.0, 5.0, 4.0],
        }
    )
    drawn = plots.headroom(rows, x="norm", lines="order")
    assert [list(line.get_ydata()) for line in drawn.get_lines()] == [
        [3.0, -1.0],
        [5.0, 4.0],
    ]
    on_log = plots.headroom(
        rows.assign(norm=[0, 2, 0, 2]), x="norm", lines="order", log=True
    )
    assert [label.get_text() for label in on_log.get_xticklabels()] == ["0", "2"]
    assert all(
        len(line.get_xdata()) == 2 and min(line.get_xdata()) > 0
        for line in on_log.lines
    )
