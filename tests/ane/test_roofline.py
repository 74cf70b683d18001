"""The roofline: work counted from the exported program, published figures predicted by fits that
have not seen them."""

import pandas as pd
import pytest
from refusal import refused

from workbench.ane import memory, roofline
from workbench.bundle import PRESETS
from workbench.exporter import make_options
from workbench.models.checkpoint import Checkpoint

WORK = {"name": "", "weight_bytes": 1e9, "state_bytes": 1e7, "flops": 1e9}
WORK |= {"dispatches": 4, "compress": "fp16"}


def work(**changed) -> pd.DataFrame:
    return pd.DataFrame([WORK | changed])


def predicted(chip: str, **changed) -> pd.Series:
    return roofline.by_chip(work(**changed)).set_index("chip").loc[chip]


def test_published_figures_are_predicted_without_having_been_seen():
    judged = roofline.misfits()
    assert len(judged) >= 6 and judged["misfit"].abs().median() <= 0.30


def test_a_prediction_says_what_it_assumes_and_its_worst_misfit():
    judged = roofline.misfits()["misfit"]
    text = roofline.describe_fit()
    assert "assume that every operation runs on the Neural Engine" in text
    worst = judged[judged.abs().idxmax()]
    assert f"{judged.abs().median():.1%} in the median" in text
    assert f"{worst:+.0%} at worst" in text and abs(worst) > 1


def test_a_figure_is_predicted_by_the_others_of_its_chip_alone(monkeypatch):
    """Planted: published times ten times too long, of one figure and of every other chip, must
    not move what they do not enter, and must show as a misfit."""
    true, before = roofline.figures(), roofline.misfits()
    wrong = true.copy()
    others = wrong["chip"] != roofline.CALIBRATED_ON
    assert others.any() and not others[11]
    wrong.loc[others, "ms"] *= 10
    monkeypatch.setattr(roofline, "figures", lambda: wrong)
    predicted = roofline.misfits()["predicted_ms"]
    assert predicted.tolist() == before["predicted_ms"].tolist()
    wrong.loc[11, "ms"] *= 10
    after = roofline.misfits().loc[11]
    assert after["predicted_ms"] == before.loc[11, "predicted_ms"]
    assert after["misfit"] < -0.9


def test_work_is_what_the_exported_program_holds(tiny_llama, llama_bundle):
    d, options = llama_bundle.manifest.dims, llama_bundle.manifest.options
    width = Checkpoint(tiny_llama.path).config.intermediate_size
    one, *_, head = memory.work(llama_bundle).itertuples()
    matrices = d.C * (2 * d.H + 2 * d.H_kv) * d.D + 3 * d.C * width
    assert one.flops == one.weight_bytes  # of fp16: two flops for each weight's 2 bytes
    assert one.state_bytes == 2 * d.H_kv * options.max_seq_len * d.D * 2
    assert 2 * matrices <= one.weight_bytes <= 2 * matrices * 1.1
    assert (head.name, head.state_bytes) == ("head", 0)
    assert head.flops == pytest.approx(2 * d.C * d.V, rel=0.1)
    assert memory.work(llama_bundle, T=2)["flops"][0] == 2 * one.flops


@pytest.mark.parametrize(
    "more",
    [{"weight_bytes": 2e9}, {"state_bytes": 1e8}, {"dispatches": 40}, {"flops": 1e12}],
)
def test_more_bytes_states_dispatches_and_slower_chips_take_longer(more):
    ms = predicted("M4 Max")["ms"]
    assert predicted("M4 Max", **more)["ms"] > ms
    assert predicted("M1")["ms"] > ms


def test_routed_experts_read_one_of_a_layer(exports):
    source = Checkpoint(exports.checkpoint("zaya"))
    dense, routed = (
        memory.work(source, make_options(moe=kind)) for kind in ("dense", "routed")
    )
    assert routed["weight_bytes"].sum() < dense["weight_bytes"].sum()
    assert (len(routed), len(dense)) == (2 * 3 + 1, 3 + 1)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("zaya", {"moe": "routed"}),
        ("zaya", {"compress": "int4-block32"}),
        ("lfm2", {"batch": 3}),  # layers without a cache
    ],
)
def test_a_checkpoint_is_planned_as_it_is_exported(exports, family, how):
    path = exports.checkpoint(family)
    bundle, source = exports.bundle(path, **how), Checkpoint(path)
    chosen = bundle.manifest.options
    planned, made = memory.budget(source, chosen), memory.budget(bundle)
    for name in ("kv", "side_states", "buffers"):
        assert planned[name] == made[name]
    assert planned["embedding"] == pytest.approx(made["embedding"], rel=0.1)
    planned, made = memory.work(source, chosen), memory.work(bundle)
    for column in ("name", "state_bytes"):
        assert planned[column].tolist() == made[column].tolist()
    ratios = planned["weight_bytes"] / made["weight_bytes"]
    assert ratios.between(0.85, 1.15).all()


def test_rates_that_nobody_published_are_marked():
    assert predicted("M4 Max")["assumed"] == ""
    assert "states_gb_s" in predicted("M3 Max")["assumed"]
    with refused("M9"):
        roofline.generation("M9")
    with refused("memory"):
        memory.parse_bytes("9" * 400)


@pytest.mark.parametrize(
    ("compress", "chip", "streamed"),
    [
        ("int8-tensor", "M1", "fp16"),
        ("int8-channel", "M2", "int8-channel"),
        ("lut4", "M1", "lut4"),
        ("int4-block32", "M4 Max", "fp16"),
        ("int4-block32", "M5", "int4-block32"),
    ],
)
def test_a_chip_streams_a_format_as_stored_or_as_fp16(compress, chip, streamed):
    """Compression that the chip unpacks when it loads saves no time: its ms are those of fp16."""

    def of(name):
        size = int(PRESETS[name].stored_bits * 1e8)
        return predicted(chip, compress=name, weight_bytes=size)

    found, plain = of(compress), of("fp16")
    assert (found["ms"] == plain["ms"]) == (streamed == "fp16")
    assert found["weights"] == f"{compress} streamed as {streamed}"


def test_every_preset_has_a_published_stream():
    assert set(roofline.published("weight_streams.csv")["compress"]) == set(PRESETS)
