"""The roofline: work counted from the exported program, published figures predicted by fits that
have not seen them."""

import numpy as np
import pandas as pd
import pytest

from workbench.ane import memory, roofline
from workbench.bundle import PRESETS
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint


def test_published_figures_are_predicted_without_having_been_seen():
    judged = roofline.misfits()
    assert len(judged) >= 6 and judged["misfit"].abs().median() <= 0.30
    assert np.allclose(
        judged["predicted_ms"] / judged["published_ms"] - 1, judged["misfit"]
    )


def test_a_model_is_predicted_without_all_of_its_figures():
    every, misfits = roofline.figures(), []
    for model, work, chip, ms in every:
        fit = roofline.fit(figure for figure in every if figure[0] != model)
        misfits.append(fit.ms(work, chip) / ms - 1)
    assert np.median(np.abs(misfits)) <= 0.30


def test_a_figure_is_predicted_by_the_others_alone(monkeypatch):
    """Planted: one published time ten times too long must not move its own prediction, and must
    show as a misfit."""
    true, before = roofline.figures(), roofline.misfits()
    wrong = [(*f[:3], f[3] * 10) if i == 11 else f for i, f in enumerate(true)]
    monkeypatch.setattr(roofline, "figures", lambda: wrong)
    after = roofline.misfits()
    assert after.loc[11, "predicted_ms"] == before.loc[11, "predicted_ms"]
    assert after.loc[11, "misfit"] < -0.9


def test_figures_of_another_chip_do_not_move_the_calibration(monkeypatch):
    """Planted: every time that another chip published, ten times too long."""
    true, before = roofline.figures(), roofline.misfits()
    elsewhere = [f[2].name != roofline.CALIBRATED_ON for f in true]
    assert any(elsewhere) and not all(elsewhere)
    wrong = [
        (*f[:3], f[3] * 10) if other else f
        for f, other in zip(true, elsewhere, strict=True)
    ]
    monkeypatch.setattr(roofline, "figures", lambda: wrong)
    assert (
        roofline.misfits()["predicted_ms"].tolist() == before["predicted_ms"].tolist()
    )


def test_a_fit_finds_the_numbers_that_made_the_figures():
    made = roofline.LinearFit(0.5, 0.8)
    works = [
        roofline.Work("", w, s, 0, n)
        for w, s, n in (
            (5e6, 2e6, 1),
            (2e8, 0, 1),
            (3e9, 3e8, 8),
            (3e9, 3e8, 32),
            (6e8, 0, 4),
        )
    ]
    found = roofline.fit(
        [
            ("m", w, roofline.chip("M4 Max"), made.ms(w, roofline.chip("M4 Max")))
            for w in works
        ]
    )
    assert found.dispatch_ms == pytest.approx(0.5) and found.share == pytest.approx(0.8)


def test_work_is_what_the_exported_program_holds(tiny_llama, llama_bundle):
    d, options = llama_bundle.manifest.dims, llama_bundle.manifest.options
    config = Checkpoint(tiny_llama.path).config
    one, *_, head = memory.work(llama_bundle)
    matrices = (
        d.C * (d.H + 2 * d.H_kv) * d.D
        + d.H * d.D * d.C
        + 3 * d.C * config.intermediate_size
    )
    assert one.flops == one.weight_bytes  # of fp16: two flops for each weight's 2 bytes
    assert one.state_bytes == 2 * d.H_kv * options.max_seq_len * d.D * 2
    assert (
        2 * matrices <= one.weight_bytes <= 2 * matrices * 1.1 and one.dispatches == 1
    )
    assert (head.name, head.state_bytes) == ("head", 0)
    assert head.flops == pytest.approx(2 * d.C * d.V, rel=0.1)
    assert memory.work(llama_bundle, T=2)[0].flops == 2 * one.flops


def test_more_bytes_states_dispatches_and_slower_chips_take_longer():
    base = roofline.Work("", 10**9, 10**7, 10**9, 4)
    ms = lambda w, chip="M4 Max": roofline.predict_ms([w], chip)  # noqa: E731
    for more in (
        {"weight_bytes": 2 * 10**9},
        {"state_bytes": 10**8},
        {"dispatches": 40},
        {"flops": 1e12},
    ):
        assert ms(roofline.Work(**(vars(base) | more))) > ms(base)
    assert ms(base, "M1") > ms(base)


def test_routed_experts_read_one_of_a_layer(exports):
    path = exports.checkpoint("zaya")
    dense, routed = (
        memory.work(exports.bundle(path, moe=kind)) for kind in ("dense", "routed")
    )
    assert sum(w.weight_bytes for w in routed) < sum(w.weight_bytes for w in dense)
    assert (
        sum(w.dispatches for w in routed) == 2 * 3 + 1
        and sum(w.dispatches for w in dense) == 3 + 1
    )


@pytest.mark.parametrize("family", ["llama", "zaya"])
def test_the_planner_agrees_with_the_exported_bundle(exports, family):
    """From tensor shapes alone, within what padding, vectors and norms add."""
    path = exports.checkpoint(family)
    for kind in ("dense", "routed") if family == "zaya" else ("dense",):
        bundle = exports.bundle(path, moe=kind)
        planned, made = (
            memory.work(Checkpoint(path), bundle.manifest.options),
            memory.work(bundle),
        )
        for name in ("weight_bytes", "state_bytes", "dispatches"):
            sums = [sum(getattr(w, name) for w in works) for works in (planned, made)]
            assert sums[0] == pytest.approx(sums[1], rel=0.15), (kind, name)


def test_rates_that_nobody_published_are_marked():
    table = roofline.by_chip([roofline.Work("", 10**9, 0, 0)]).set_index("chip")
    assert (
        table.loc["M4 Max", "assumed"] == ""
        and "states_gb_s" in table.loc["M3 Max", "assumed"]
    )
    assert isinstance(table, pd.DataFrame) and (table["tokens_per_s"] > 0).all()
    with pytest.raises(InputError, match="M9"):
        roofline.chip("M9")


@pytest.mark.parametrize(
    ("compress", "chip", "streamed"),
    [
        ("int8-tensor", "M1", "fp16"),
        ("int8-channel", "M1 Max", "fp16"),
        ("int8-channel", "M2", "int8-channel"),
        ("lut4", "M1", "lut4"),
        ("int4-block32", "M4 Max", "fp16"),
        ("int4-block32", "M5", "int4-block32"),
        ("fp16", "M6", "fp16"),
    ],
)
def test_a_chip_streams_a_format_as_stored_or_as_fp16(compress, chip, streamed):
    """Compression that the chip unpacks when it loads saves no time: its ms are those of fp16."""
    elements, on = 10**9, roofline.chip(chip)
    work, plain, packed = (
        roofline.Work(
            "", int(elements * PRESETS[stored].stored_bits / 8), 0, 0, 1, stored
        )
        for stored in (compress, "fp16", streamed)
    )
    assert roofline.streams_as(compress, on) == streamed
    assert roofline.streamed_bytes(work, on) == packed.weight_bytes
    ms = [roofline.predict_ms([w], chip) for w in (work, plain)]
    assert (ms[0] == ms[1]) == (streamed == "fp16")


def test_every_preset_has_a_published_stream():
    assert set(roofline._table("weight_streams.csv")["compress"]) == set(PRESETS)


def test_the_bytes_streamed_stand_beside_the_prediction(exports):
    bundle = exports.bundle(exports.checkpoint("llama"), compress="int8-tensor")
    table = roofline.by_chip(memory.work(bundle)).set_index("chip")
    assert table.loc["M1", "weights"] == "int8-tensor streamed as fp16"
    assert table.loc["M2", "weights"] == "int8-tensor streamed as int8-tensor"
    assert table.loc["M1", "streamed_mib"] == pytest.approx(
        2 * table.loc["M2", "streamed_mib"]
    )
    assert set(roofline.misfits()["weights"]) == {
        "int8-tensor streamed as int8-tensor",
        "lut4 streamed as lut4",
    }
