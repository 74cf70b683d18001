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
    "weight_streams": ["compress"],
    "decode_speeds": ["model", "machine", "condition"],
    "ane_decode": ["model", "part"],
    "other_exporters": ["exporter", "package"],
}


def read(name: str, **how) -> pd.DataFrame:
    return pd.read_csv(FOLDER / f"{name}.csv", keep_default_na=False, **how)


def figure(name: str, quantity: str, condition: str = "", column="value") -> float:
    """A number of the one row of a quantity, or of those with a condition the one with that."""
    rows = read(name, dtype=str).query("quantity == @quantity")
    if condition:
        rows = rows.query("condition == @condition")
    return float(rows[column].item())


def figures(name: str) -> list:
    """`figure` of a document for values, and for corrections."""
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
    known_ms = f("layers per token", experiment) + f("head per token", experiment)
    rows = read("experiment30", dtype=str)
    assert (rows.loc[rows["quantity"] == "decode", "correction"] == "").all()
    text = (FOLDER / "README.md").read_text()
    assert f"{known_ms:g}" in text and f"{unaccounted_ms:g}" in text
    rest = 1000 / f("decode", experiment) - known_ms
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
    rows = read("ane_decode")
    sizes = rows[["weight_bytes", "flops", "dispatches", "ms"]]
    assert (sizes > 0).all(axis=None) and (rows["state_bytes"] >= 0).all()
    ms, states = (rows.set_index("part")[name] for name in ("ms", "state_bytes"))
    f, corrected = figures("experiment30")
    attention = f("attention per layer", "experiment 30")
    layers = f("layers per token", "experiment 30")
    rest = layers - f("attention layers") * attention
    assert corrected("MoE per token") == pytest.approx(rest)
    assert ms["attention shard"] == attention
    assert ms["MoE shard"] == (layers - 40 * attention) / 40
    cache = 2 * f("KV heads") * f("max_seq_len") * f("head_dim") * 2
    assert states["attention shard"] == cache
