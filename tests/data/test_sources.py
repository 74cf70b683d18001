"""The sources' own figures: well formed, and every correction that is arithmetic recomputed from
the other rows."""

import math
from functools import partial

import pandas as pd
import pytest
from tiny import DATA

FOLDER = DATA / "sources"
DOCUMENTS = ["chapter5", "experiment30", "batch2_cache_bug", "llama_ane"]
KEYS = {
    **dict.fromkeys(DOCUMENTS, ["quantity", "condition"]),
    "chips": ["chip", "quantity", "condition"],
    "weight_streams": ["format"],
    "decode_speeds": ["model", "machine", "condition"],
    "ane_points": ["id"],
    "speculation": ["model", "program", "tokens", "condition"],
    "other_exporters": ["exporter", "package"],
}


def read(name: str, **options) -> pd.DataFrame:
    return pd.read_csv(FOLDER / f"{name}.csv", keep_default_na=False, **options)


def figure(name: str, quantity: str, condition: str = "", column="value") -> float:
    """A number of the row with a quantity, and with a condition where several rows have the
    quantity."""
    rows = read(name, dtype=str).query("quantity == @quantity")
    if condition:
        rows = rows.query("condition == @condition")
    return float(rows[column].item())


def figures(name: str) -> list:
    """`figure` of a document for the column of values, and for that of corrections."""
    return [partial(figure, name, column=column) for column in ("value", "correction")]


@pytest.mark.parametrize("name", KEYS)
def test_a_figure_stands_once_and_says_where_it_is_from(name):
    rows = read(name, dtype=str)
    assert not rows.duplicated(KEYS[name]).any()
    assert (rows["commit" if name == "other_exporters" else "source"] != "").all()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_value_with_a_unit_is_a_number_and_a_correction_says_why(name):
    rows = read(name, dtype=str)
    assert (rows[["quantity", "value", "unit"]] != "").all(axis=None)
    assert ((rows["correction"] != "") == (rows["correction_reason"] != "")).all()
    assert (rows["correction"] != rows["value"]).all()
    values = rows.loc[rows["unit"] != "text", "value"]
    assert pd.to_numeric(values, errors="coerce").notna().all()


def test_chip_figures_are_ranges_in_one_unit():
    rows = read("chips")
    assert ((rows["low"] > 0) & (rows["low"] <= rows["high"])).all()
    assert (rows.groupby("quantity")["unit"].nunique() == 1).all()


def test_every_fault_of_other_exporters_packages_has_a_cause_and_a_commit():
    rows = read("other_exporters", dtype=str)
    assert rows["commit"].str.fullmatch("[0-9a-f]{8}").all()
    faulty = rows["fault"] != ""
    assert (faulty == (rows["cause"] != "")).all() and faulty.sum() == 4


def test_the_readme_lists_every_file():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {f"`{path.name}`" in readme for path in FOLDER.glob("*.csv")} == {True}


def test_the_prefix_counts_four_times_the_kv_heads_and_the_cache_is_half_a_gibibyte():
    f, corrected = figures("chapter5")
    per_head = 2 * f("prefix length") * f("head_dim", "prefix as inputs")
    quantity, heads = "prefix passed per layer and step", "heads counted in the prefix"
    assert f(quantity) == per_head * f(heads)
    assert corrected(quantity) == per_head * corrected(heads)
    names = ("layers", "KV heads", "max_seq_len", "head_dim", "bytes per element")
    size = 2 * math.prod(f(name, "memory example") for name in names)
    bytes_ = corrected("KV cache memory")
    assert size == 0.5 * 2**30 and bytes_ == size / 1e9
    assert f("KV cache memory") / bytes_ == pytest.approx(7.45, abs=5e-3)


@pytest.mark.parametrize(
    ("experiment", "unaccounted_ms"), [("experiment 29", 16.4), ("experiment 30", 5.8)]
)
def test_layers_and_head_do_not_add_up_to_the_time_of_a_token(
    experiment, unaccounted_ms
):
    """The rest is in no figure; a sum of parts corrects no speed."""
    f, _ = figures("experiment30")
    listed_ms = f("layers per token", experiment) + f("head per token", experiment)
    rows = read("experiment30", dtype=str)
    assert (rows.loc[rows["quantity"] == "decode", "correction"] == "").all()
    text = (FOLDER / "README.md").read_text()
    assert f"{listed_ms:g}" in text and f"{unaccounted_ms:g}" in text
    rest = 1000 / f("decode", experiment) - listed_ms
    assert rest == pytest.approx(unaccounted_ms, abs=0.05)


def test_fifteen_failures_are_five_configurations_and_the_slot_follows_from_the_tokens():
    f, corrected = figures("batch2_cache_bug")
    count = corrected("failing configurations")
    assert f("failing configurations") == count * f("passes per configuration")
    conditions = read("batch2_cache_bug")["condition"]
    assert conditions.str.fullmatch(r"before the fix, .*, 0 tokens").sum() == count
    step = f("cache step")
    reported = [
        int(float(value)) % int(step)
        for value in read("batch2_cache_bug", dtype=str).query(
            "quantity == '_idx after merge'"
        )["value"]
    ]
    assert reported == [255] * 4
    assert corrected("_idx after merge", "context 1024") % step == 10
    for value in (f, corrected):
        merged = value("_idx after merge", "context 1024")
        assert merged == value("context", "called 1K") - 1


def test_only_streamed_decode_speeds_leave_the_prefill_out():
    """tok/s of a streamed run are about its tokens over the time after the first one; of the other
    run, over the whole time."""
    f, _ = figures("batch2_cache_bug")
    for kind, seconds in (
        (
            "warm/streaming/2048",
            lambda c: f("end to end", c) - f("time to first token", c),
        ),
        (
            "cold/streaming/1024",
            lambda c: f("end to end", c) - f("time to first token", c),
        ),
        ("warm/non-streaming/2048", lambda c: f("end to end", c)),
    ):
        condition = f"before the fix, {kind}, 64 tokens"
        rate = 64e3 / seconds(condition)
        assert f("decode", condition) == pytest.approx(rate, rel=0.06)
    rows = read("batch2_cache_bug", dtype=str).query("quantity == 'decode'")
    corrected = rows.loc[rows["correction"] != "", "condition"]
    assert corrected.tolist() == ["before the fix, warm/non-streaming/2048, 64 tokens"]


def test_times_on_the_neural_engine_follow_from_experiment_30():
    rows = read("ane_points").set_index("model")
    f, corrected = figures("experiment30")
    attention = f("attention per layer", "experiment 30")
    layers = f("layers per token", "experiment 30")
    rest = layers - f("attention layers") * attention
    assert corrected("MoE per token") == pytest.approx(rest)
    shard = rows.loc["ZAYA1-8B, attention shard"]
    assert float(shard["ms"]) == attention
    moe_ms = float(rows.loc["ZAYA1-8B, MoE shard", "ms"])
    assert moe_ms == (layers - 40 * attention) / 40
    cache = 2 * f("KV heads") * f("max_seq_len") * f("head_dim") * 2
    assert float(shard["cache_mb"]) * 1e6 == pytest.approx(cache, rel=1e-4)


def test_points_have_features_or_say_why_they_calibrate_nothing():
    rows = pd.read_csv(FOLDER / "ane_points.csv")
    assert set(rows["use"]) == {"fit", "check", "route", "no"}
    assert (rows["ms"] > 0).all()
    assert (rows["why"].isna() == (rows["use"] == "fit")).all()
    features = ["streamed_gb", "weights_g", "cache_mb", "spread_mb", "recurrent_mb"]
    used = rows[rows["use"] != "no"]
    assert used[[*features, "format", "calls", "rows"]].notna().all(axis=None)
    fitted = rows[rows["use"] == "fit"]
    assert (fitted["T"] == 1).all() and (fitted["route"] == "Core ML").all()
    assert (used["cache_mb"] <= used["spread_mb"] + 1e-3).all()
    assert not rows["note"].fillna("").str.contains("NEW|HAVE").any()


def test_the_ms_of_a_point_are_those_of_its_published_speed():
    rows = pd.read_csv(FOLDER / "ane_points.csv")
    rows = rows[(rows["decode_tok_s"] > 0) & (rows["use"] != "no")]
    assert len(rows) > 40
    speeds = 1e3 / rows["ms"]
    assert speeds.tolist() == pytest.approx(rows["decode_tok_s"].tolist(), rel=1e-4)


# layers, hidden, query heads, key heads, head size, MLP, vocabulary: public configurations
DENSE = {
    "Qwen3-VL-2B": (28, 2048, 16, 8, 128, 6144, 151936),
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151936),
    "Hy-MT 1.8B": (32, 2048, 16, 4, 128, 6144, 120818),
    "Llama-2-7B": (32, 4096, 32, 32, 128, 11008, 32000),
}


@pytest.mark.parametrize("model", DENSE)
def test_features_follow_from_the_public_configuration(model):
    L, C, H, K, D, F, V = DENSE[model]
    rows = pd.read_csv(FOLDER / "ane_points.csv")
    rows = rows[rows["model"].str.startswith(model) & (rows["use"] != "no")]
    rows = rows[rows["head_g"] > 0]  # not those whose host computes the head
    weights = L * (2 * C * H * D + 2 * C * K * D + 3 * C * F) + C * V
    assert len(rows)
    for row in rows.itertuples():
        assert row.weights_g * 1e9 == pytest.approx(weights, rel=1e-3)
        bits = 16 if row.format == "int4-channel" else row.bits  # unpacked when loaded
        assert row.streamed_gb * 8e9 == pytest.approx(bits * weights, rel=1e-3)
        assert row.cache_mb * 1e6 == pytest.approx(L * K * D * row.rows * 4, rel=1e-3)
        assert row.spread_mb == pytest.approx(row.cache_mb * H / K, rel=1e-3)


def test_speculation_names_points_and_costs_of_its_own_tokens():
    ids = set(read("ane_points")["id"])
    rows = pd.read_csv(FOLDER / "speculation.csv")
    assert all(set(names.split()) <= ids for names in rows["points"])
    assert (rows["tokens"] > 1).all()
    assert rows["acceptance"].dropna().between(0, 1).all()
    losses = rows[rows["acceptance"].notna()]
    assert len(losses) == 4 and (losses["gain"] < 1).all()
