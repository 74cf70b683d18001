"""The sources' own figures: well formed, and every correction that is arithmetic recomputed from
the other rows."""

import math
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).parents[2] / "data" / "sources"
DOCUMENTS = ["chapter5", "experiment30", "batch2_cache_bug", "llama_ane"]
COLUMNS = [
    "quantity",
    "value",
    "unit",
    "condition",
    "source",
    "correction",
    "correction_reason",
]


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(FOLDER / f"{name}.csv", dtype=str, keep_default_na=False)


class Figures:
    """The rows of one document by quantity and, where needed, condition: `f("decode", "experiment
    29")`."""

    def __init__(self, name: str):
        self.rows = read(name)

    def row(self, quantity: str, condition: str | None) -> pd.Series:
        found = self.rows[self.rows["quantity"] == quantity]
        found = found if condition is None else found[found["condition"] == condition]
        assert len(found) == 1, f"{len(found)} rows of {quantity!r}, {condition!r}"
        return found.iloc[0]

    def __call__(self, quantity: str, condition: str | None = None) -> float:
        return float(self.row(quantity, condition)["value"])

    def corrected(self, quantity: str, condition: str | None = None) -> float:
        return float(self.row(quantity, condition)["correction"])


# --- form
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_figure_says_where_it_is_from_and_a_correction_says_why(name):
    rows = read(name)
    assert list(rows) == COLUMNS
    assert (rows[["quantity", "value", "unit", "source"]] != "").all(axis=None)
    assert ((rows["correction"] != "") == (rows["correction_reason"] != "")).all()
    assert (rows["correction"] != rows["value"]).all()
    assert not rows.duplicated(["quantity", "condition"]).any()
    assert rows["source"].str.split(": ").str[0].nunique() == 1


@pytest.mark.parametrize("name", DOCUMENTS)
def test_values_with_a_unit_are_numbers(name):
    rows = read(name)
    assert (
        pd.to_numeric(rows.loc[rows["unit"] != "text", "value"], errors="coerce")
        .notna()
        .all()
    )


def test_chip_figures_are_ranges_with_a_source():
    rows = pd.read_csv(FOLDER / "chips.csv", keep_default_na=False)
    assert list(rows) == [
        "chip",
        "quantity",
        "low",
        "high",
        "unit",
        "condition",
        "source",
    ]
    assert (
        (rows["low"] > 0) & (rows["low"] <= rows["high"]) & (rows["source"] != "")
    ).all()
    assert not rows.duplicated(["chip", "quantity", "condition"]).any()
    assert (rows.groupby("quantity")["unit"].nunique() == 1).all()


def test_streams_name_a_format_a_generation_and_a_source():
    rows = pd.read_csv(FOLDER / "weight_streams.csv", keep_default_na=False)
    assert list(rows) == ["compress", "from_generation", "condition", "source"]
    assert rows["compress"].is_unique and rows["from_generation"].between(1, 6).all()
    assert (rows[["condition", "source"]] != "").all(axis=None)


def test_published_decode_speeds_name_model_machine_and_source():
    rows = pd.read_csv(FOLDER / "decode_speeds.csv", keep_default_na=False)
    assert list(rows) == ["model", "machine", "value", "unit", "condition", "source"]
    assert (rows[["model", "machine", "unit", "source"]] != "").all(axis=None) and (
        rows["value"] > 0
    ).all()


def test_what_other_exporters_packages_compute_names_a_commit_and_every_fault_a_cause():
    rows = read("other_exporters")
    columns = [
        "exporter",
        "commit",
        "package",
        "executed",
        "against_hf",
        "fault",
        "cause",
    ]
    assert list(rows) == columns
    assert (rows[columns[:5]] != "").all(axis=None)
    assert rows["commit"].str.fullmatch("[0-9a-f]{8}").all()
    faulty = rows["fault"] != ""
    assert (faulty == (rows["cause"] != "")).all() and faulty.sum() == 4


def test_the_readme_lists_every_file():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {f"`{path.name}`" in readme for path in FOLDER.glob("*.csv")} == {True}


# --- chapter 5
# ------------------------------------------------------------------------------------------------


def test_the_prefix_counts_four_times_the_kv_heads():
    f, where = Figures("chapter5"), "prefix as inputs"
    per_head = 2 * f("prefix length") * f("head_dim", where)
    quantity = "prefix passed per layer and step"
    assert f(quantity) == per_head * f("heads counted in the prefix")
    assert f.corrected(quantity) == per_head * f.corrected(
        "heads counted in the prefix"
    )


def test_the_kv_cache_is_half_a_gibibyte_an_eighth_of_the_estimate():
    f, where = Figures("chapter5"), "memory example"
    names = ("layers", "KV heads", "max_seq_len", "head_dim", "bytes per element")
    size = 2 * math.prod(f(name, where) for name in names)
    assert size == 0.5 * 2**30
    assert f.corrected("KV cache memory") == size / 1e9
    assert f("KV cache memory") / f.corrected("KV cache memory") == pytest.approx(
        8, rel=0.1
    )


# --- experiments 29 and 30
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "unaccounted_ms"), [("experiment 29", 16.4), ("experiment 30", 5.8)]
)
def test_layers_and_head_do_not_add_up_to_the_time_of_a_token(
    experiment, unaccounted_ms
):
    f = Figures("experiment30")
    known_ms = f("layers per token", experiment) + f("head per token", experiment)
    assert f.corrected("decode", experiment) == pytest.approx(
        1000 / known_ms, abs=0.005
    )
    assert 1000 / f("decode", experiment) - known_ms == pytest.approx(
        unaccounted_ms, abs=0.05
    )
    assert f"{unaccounted_ms} ms" in f.row("decode", experiment)["correction_reason"]


def test_moe_takes_what_attention_leaves():
    f = Figures("experiment30")
    rest = f("layers per token", "experiment 30") - f("attention layers") * f(
        "attention per layer", "experiment 30"
    )
    assert f.corrected("MoE per token") == pytest.approx(rest)
    assert rest / 40 == pytest.approx(2.2, abs=0.05)


# --- batch-2 cache bug
# -----------------------------------------------------------------------------------------------


def test_fifteen_failures_are_five_configurations():
    f = Figures("batch2_cache_bug")
    assert f("failing configurations") == f.corrected("failing configurations") * f(
        "passes per configuration"
    )
    before = f.rows["condition"].str.fullmatch(r"before the fix, .*, 0 tokens")
    assert before.sum() == f.corrected("failing configurations")


def test_the_slot_after_merge_follows_from_the_tokens_that_ran():
    f = Figures("batch2_cache_bug")
    assert f("_idx after merge", "context 1024") == f("context", "called 1K") - 1
    assert (
        f.corrected("_idx after merge", "context 1024")
        == f.corrected("context", "called 1K") - 1
    )


def test_times_on_the_neural_engine_say_what_ran_and_where_they_are_from():
    rows = pd.read_csv(FOLDER / "ane_decode.csv", keep_default_na=False)
    assert not rows.duplicated(["model", "part"]).any() and (
        rows[["condition", "source"]] != ""
    ).all(axis=None)
    assert (rows[["weight_bytes", "flops", "dispatches", "ms"]] > 0).all(
        axis=None
    ) and (rows["state_bytes"] >= 0).all()
    ms, states, weights = (
        rows.set_index("part")[n] for n in ("ms", "state_bytes", "weight_bytes")
    )
    f = Figures("experiment30")
    layers, attention = (
        f("layers per token", "experiment 30"),
        f("attention per layer", "experiment 30"),
    )
    assert (
        ms["MoE shard"] == (layers - 40 * attention) / 40
        and ms["attention shard"] == attention
    )
    assert (
        states["attention shard"]
        == 2 * f("KV heads") * f("max_seq_len") * f("head_dim") * 2
    )
    assert (
        math.isclose(ms["token"], 1000 / 37.2, rel_tol=1e-4)
        and states["token"] == 2 * 32 * 4 * 512 * 128 * 2
    )
    assert states["8 layer shards"] == 2 * 32 * 8 * 2048 * 128 * 2 and math.isclose(
        ms["64-token window"], 1000 / 7.02, rel_tol=1e-4
    )
    assert weights["head"].tolist() == [262272 * 2048, 200064 * 3072] and set(
        weights[weights.index.str.endswith("layer shards")]
    ) == {3_075_000_000}
