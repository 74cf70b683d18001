"""How wrong the predicted times are: the tables, scores of any points, packed logs of Macs."""

import json
import shutil

import numpy as np
import pandas as pd
import predictor
import predictor_errors
import predictor_public
import predictor_scores
import predictor_speculation
import pytest
from refusal import refused

from workbench import log
from workbench.ane import chips, features, roofline
from workbench.ane.formula import CONSTANT_NAMES, predict_ms
from workbench.ane.work import ShardWork, Work

POINTS = chips.FIGURE_SOURCES / "ane_points.csv"


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return roofline.calibration().rows


@pytest.fixture(scope="module")
def planting(rows) -> pd.DataFrame:
    return predictor_errors.double_each_source(rows)


def test_left_out_errors_are_those_of_the_goal_and_each_term_lowers_them(rows):
    table = predictor_errors.left_out_errors(rows).set_index(["predictor", "left_out"])
    for by in ("source", "author"):
        formula = table.loc["formula", by]
        assert formula["median_error"] <= 0.10 and formula["no_answer"] == 0
        earlier = table.loc["earlier roofline", by]
        assert earlier["no_answer"] > 0
        assert formula["median_error"] < earlier["median_error"]
        assert formula["factor_90"] < earlier["factor_90"]
    assert (table["rows"] + table["no_answer"] == len(rows)).all()
    # no term goes without a worse median or a wider 90% by source
    formula = table.loc["formula", "source"]
    for name in CONSTANT_NAMES:
        without = table.loc[f"without {name}", "source"]
        worse = without["median_error"] > formula["median_error"]
        assert worse or without["factor_90"] > formula["factor_90"], name


def test_intervals_of_other_groups_contain_their_share(rows):
    covered = predictor_errors.measure_coverage(rows)["covered"]
    assert covered.between(0.82, 0.98).all()


def test_every_constant_has_an_interval_and_rows(rows, monkeypatch):
    monkeypatch.setattr(predictor_errors, "RESAMPLINGS", 12)
    table = predictor_errors.constants_table(rows)
    assert table["constant"].tolist() == list(CONSTANT_NAMES)
    assert (table["low"] <= table["high"]).all() and (table["rows"] >= 3).all()
    assert all(set(ids.split()) <= set(rows["id"]) for ids in table["ids"])


def test_orders_of_formats_chips_and_lengths():
    table = predictor_errors.compare_orders().set_index("orders")
    counts = table[["right", "pairs"]].dropna().astype(int)
    assert counts.loc["five formats of Qwen3-VL-2B"].tolist() == [8, 9]
    assert counts.loc["one package on five chips"].tolist() == [8, 9]
    assert counts.loc["Qwen3-4B by cache", "right"] >= 4
    ratios = table["predicted"].dropna()
    assert ratios.iloc[0] == pytest.approx(1, abs=0.05) and ratios.iloc[1] >= 1.3


def test_orders_count_pairs_that_are_far_apart():
    ms = pd.Series([10.0, 10.2, 20.0])
    names = pd.Series(list("abc"))
    result = predictor_errors.count_pairs_in_order(
        ms, pd.Series([1.0, 1.0, 2.0]), names
    )
    assert (result["right"], result["pairs"]) == (2, 2)
    result = predictor_errors.count_pairs_in_order(
        ms, pd.Series([1.0, 3.0, 2.0]), names
    )
    assert (result["right"], result["wrong"]) == (1, "b and c")


@pytest.mark.slow("a fit without each source, for each source that is doubled")
def test_a_source_with_doubled_times_is_named_and_lies_beyond_the_interval(
    rows, planting
):
    table = planting
    assert len(table) == rows["source"].nunique()
    assert table["named"].sum() >= len(table) - 1 and table["beyond"].all()


def test_rows_beyond_the_interval_have_a_reason_or_are_unknown():
    table = predictor_errors.rows_beyond_interval(roofline.calibration())
    assert (table["reason"] != "").all()
    assert len(table) <= 0.18 * len(roofline.calibration().rows)


def test_speculation_agrees_with_published_verifications_and_losses():
    table = predictor_speculation.speculations()
    computed = table[
        (table["cost_from"] == "formula") & table["published_cost"].notna()
    ]
    assert len(computed) >= 5
    ratio = computed["cost"] / computed["published_cost"]
    assert ratio.between(1 / 1.25, 1.25).all()
    losses = table[table["acceptance"].notna()]
    ratio = losses["gain"] / losses["published_gain"]
    assert len(losses) == 4 and (losses["gain"] < 1).all()
    assert ratio.between(1 / 1.3, 1.3).all()
    gains = table[table["published_gain"].notna() & table["acceptance"].isna()]
    assert len(gains) == 3 and gains["gain"].isna().all()
    assert gains[["implied_acceptance", "pays_from"]].notna().all(axis=None)


# --- scores


def test_a_score_has_every_row_with_its_interval(tmp_path, capsys):
    """Empty times and rows without features are answered as far as they can be."""
    points = pd.read_csv(POINTS)
    points.loc[0, "ms"] = np.nan
    points.to_csv(tmp_path / "points.csv", index=False)
    predictor.score(tmp_path / "points.csv", json=True)
    result = json.loads(capsys.readouterr().out)
    assert len(result["rows"]) == len(points)
    first = result["rows"][0]
    assert first["id"] == "p1" and first["ms"] is None
    assert first["low_ms"] < first["predicted_ms"] < first["high_ms"]
    by_id = {row["id"]: row for row in result["rows"]}
    assert by_id["p7"]["predicted_ms"] is None  # LFM2.5 has no features
    assert 0 < result["median_error"] < 0.3 and result["factor_90"] > 1
    assert 0.8 <= result["covered"] <= 1


def test_a_score_of_fitted_rows_is_the_prediction_of_the_formula(rows):
    points = predictor_scores.read_points(POINTS)
    points = points[points["use"] == "fit"]
    result = predictor_scores.score_points(points)
    expected = predict_ms(rows, roofline.calibration().constants)
    predicted = [row["predicted_ms"] for row in result["rows"]]
    assert predicted == pytest.approx(expected.tolist(), rel=1e-12)
    errors = (expected / rows["ms"] - 1).abs()
    assert result["median_error"] == pytest.approx(errors.median())


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("chip", "M1", "chip"),
        ("chip", "M9 Ultra", "chip"),
        ("format", "int3", "format"),
        ("rows", 65_536, "context"),
        ("calls", 500, "program"),
    ],
)
def test_a_row_unlike_all_others_says_so_and_has_a_wider_interval(column, value, kind):
    points = predictor_scores.read_points(POINTS)
    row = points[points["id"] == "p37"]
    plain, other = (
        predictor_scores.score_points(rows)["rows"][0]
        for rows in (row, row.assign(**{column: value}))
    )
    assert plain["extrapolates"] == {} and kind in other["extrapolates"]
    widths = [r["high_ms"] / r["low_ms"] for r in (plain, other)]
    assert widths[1] > 1.2 * widths[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [("id,ms\n1,2\n", "no column"), ("", "No columns"), (None, "No such file")],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, text, words):
    path = tmp_path / "points.csv"
    if text is not None:
        path.write_text(text)
    with refused(words):
        predictor_scores.read_points(path)


def test_a_feature_that_is_no_number_is_named(tmp_path):
    points = pd.read_csv(POINTS, dtype=str)
    points.loc[3, "streamed_gb"] = "much"
    points.to_csv(tmp_path / "points.csv", index=False)
    with refused("streamed_gb"):
        predictor_scores.read_points(tmp_path / "points.csv")


# --- packed logs


LAYERS = ShardWork("layers", {"int8": 50_000_000}, 10**7, 4 * 10**7, 0, 512)
WORK = Work(tuple([LAYERS] * 8))


def run(number: int, **changed) -> dict:
    row = {
        "command": "sweep",
        "status": "ok",
        "checkpoint": "llama",
        "machine": "Apple M4 Max, Mac16,5, 64 GiB, 16 cores",
        "software": "25A1",
        "setting": "s",
        "runtime": "coreml",
        "compute_units": "CPU_AND_NE",
        "compress": "int8-channel",
        "max_seq_len": 512,
        "T": 1,
        "call_ms": 6.0 + number,
        "ane_ops_share": 0.98,
        "config": {"work": WORK.json()},
    }
    return row | changed


@pytest.fixture
def public(tmp_path, monkeypatch):
    """A folder for packed logs, and a copy of the published figures that may change."""
    sources = shutil.copytree(chips.FIGURE_SOURCES, tmp_path / "sources")
    monkeypatch.setattr(chips, "FIGURE_SOURCES", sources)
    caches = chips.published, chips.chips, features.points, roofline.calibration
    for function in caches:
        function.cache_clear()
    (tmp_path / "public").mkdir()
    yield tmp_path / "public", sources / "public_points.csv"
    monkeypatch.undo()
    for function in caches:
        function.cache_clear()


def test_a_packed_log_goes_into_the_table_the_fit_and_the_page(public, tmp_path):
    folder, points = public
    before = len(roofline.calibration().rows)
    rows = [run(n) for n in range(3)]
    rows += [run(9, setting="cpu", compute_units="CPU_ONLY")]
    rows += [run(9, setting="gone", status="failed")]
    rows += [run(9, setting="fell back", ane_ops_share=0.1)]
    rows += [run(9, setting="older", config={})]
    rows += [run(9, setting="four", T=4)]
    for number, row in enumerate(rows):
        log.append("runs", row, tmp_path / "log", f"{number}-a")
    log.pack(folder / "somebody.zip", tmp_path / "log")
    predictor_public.write_public(folder, points)
    table = pd.read_csv(points)
    assert table["use"].value_counts().to_dict() == {"no": 2, "fit": 1, "check": 1}
    assert table.loc[table["use"] != "fit", "why"].notna().all()
    fitted = roofline.calibration().rows
    assert len(fitted) == before + 1
    mac = fitted[fitted["author"] == "somebody"].iloc[0]
    assert (mac["ms"], mac["chip"], mac["read_cache_mb"]) == (
        7.0,
        "M4 Max",
        mac["cache_mb"],
    )
    text = (folder / "README.md").read_text()
    assert f"| {mac['id']} | llama | int8 | M4 Max | 1 | 7 |" in text


def is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()


def test_the_page_and_the_points_are_those_of_the_packed_logs(public):
    """What is committed is what the script writes, up to the last digit of a fit."""
    _, points = public
    committed = predictor_public.PUBLIC
    rows = predictor_public.public_rows(committed)
    assert rows.to_csv(index=False) == points.read_text()
    text = (committed / "README.md").read_text(encoding="utf-8")
    words, expected = text.split(), predictor_public.format_page().split()
    numbers = [place for place, word in enumerate(expected) if is_number(word)]
    assert len(numbers) > 200 and len(words) == len(expected)
    for place, word in enumerate(expected):
        if place not in numbers:
            assert words[place] == word
    values = [float(words[place]) for place in numbers]
    assert values == pytest.approx([float(expected[n]) for n in numbers], rel=0.02)


def test_a_file_that_is_no_packed_log_is_refused(public):
    folder, points = public
    (folder / "a.zip").write_bytes(b"no zip")
    before = points.read_bytes()
    with refused("a.zip"):
        predictor_public.write_public(folder, points)
    assert points.read_bytes() == before


@pytest.mark.slow("every predictor is fitted without every group")
def test_every_table_is_json(planting, monkeypatch, capsys):
    monkeypatch.setattr(predictor, "double_each_source", lambda rows: planting)
    monkeypatch.setattr(predictor_errors, "RESAMPLINGS", 3)
    predictor.errors(json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == len(roofline.calibration().rows)
    assert result["doubled_beyond"] >= 18 and result["left-out errors"]
