"""The log as a table of speeds beside what they cost, and two runs side by side, from a log made
here."""

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest

from workbench import log
from workbench.errors import InputError
from workbench.log import text
from workbench.report import summary
from workbench.report.difference import run_difference

COMMON = {
    "status": "ok",
    "checkpoint": "tiny",
    "checkpoint_hash": "c" * 64,
    "chip": "M4",
    "runtime": "portable",
    "precision": "declared",
    "max_seq_len": 64,
    "batch": 1,
}
CONFIG = {"price": {"kl": {"mean": 0.01}}, "gates": []}


def rates(*values: float, **about) -> list[dict]:
    row = {
        "phase": "tokens_per_s",
        "unit": "tok/s",
        "n_gen": 24,
        "T": 1,
        "depth": 64,
    } | about
    return [row | {"repetition": i, "value": v} for i, v in enumerate(values)]


def prompts(*ms: float) -> list[dict]:
    row = {"phase": "prefill", "unit": "ms", "n_prompt": 64}
    return [
        row | {"repetition": i, "value": v, "warmup": i == 0} for i, v in enumerate(ms)
    ]


def updates(cosines: list[float], errors=None, T: int = 1, **about) -> list[dict]:
    errors = errors or [None] * len(cosines)
    row = {
        "tensor": "update",
        "mode": "isolated",
        "layer": 0,
        "T": T,
        "finite": True,
    } | about
    return [
        row | {"position": i, "cosine": cosine, "error": error}
        for i, (cosine, error) in enumerate(zip(cosines, errors, strict=True))
    ]


def put(root, run_id: str, samples=(), fidelity=(), **row) -> None:
    for table, rows in (("samples", samples), ("fidelity", fidelity)):
        if rows:
            log.append(table, list(rows), root, run_id)
    log.append("runs", COMMON | row, root, run_id)


@pytest.fixture
def root(tmp_path):
    fp16 = {"compress": "fp16", "bundle_hash": "f", "bundle_bytes": 3 << 20}
    int8 = {"compress": "int8-tensor", "bundle_hash": "i", "bundle_bytes": 2 << 20}
    validated = {"verdict": "GREEN", "config": CONFIG}
    put(tmp_path, "1", [*rates(100, 104, 108), *prompts(999, 10, 20)], **fp16)
    put(tmp_path, "2", rates(112), **fp16)
    put(tmp_path, "3", [], updates([0.999, 0.9999]), **fp16, **validated)
    put(tmp_path, "4", rates(300, T=4, depth=0), updates([0.9]), **int8, **validated)
    put(tmp_path, "5", rates(50, 52), **fp16 | {"chip": "M1"})
    put(tmp_path, "6", **int8 | {"status": "failed", "reason": "killed", "chip": "M1"})
    return tmp_path


def test_a_row_per_configuration_machine_and_test(root):
    rows = summary.summary_rows(root).set_index(["compress", "machine", "test"])
    tg = rows.loc[("fp16", "M4", "tg24 @ d64")]
    assert (tg["tokens_per_s"], tg["n"], tg["runs"]) == (106, 4, 2)
    assert tg["sd"] == pytest.approx(np.std([100, 104, 108, 112], ddof=1))
    assert tg["worst_update"] == pytest.approx(1e-3) and tg["kl_mean"] == 0.01
    assert (tg["verdict"], tg["bundle_bytes"], tg["run_id"]) == ("GREEN", 3 << 20, "2")
    pp = rows.loc[("fp16", "M4", "pp64")]
    # no warm-up
    assert (pp["tokens_per_s"], pp["n"]) == (pytest.approx((6400 + 3200) / 2), 2)
    assert rows.loc[("int8-tensor", "M4", "tg24 T4"), "tokens_per_s"] == 300
    assert set(rows.index.get_level_values("machine")) == {"M4", "M1"}
    # machines are not mixed
    assert rows.loc[("fp16", "M1", "tg24 @ d64"), "tokens_per_s"] == 51
    failed = rows.reset_index().query("verdict == 'failed'")
    assert (
        failed["test"].isna().all()
        and failed["tokens_per_s"].isna().all()
        and len(failed) == 1
    )
    # run 3 timed nothing, and its bundle's rows hold what it found
    assert len(rows) == 5


def test_only_settings_in_which_rows_differ_are_columns(root):
    assert "kv_write" not in summary.summary_rows(root)
    put(root, "7", rates(90), compress="fp16", bundle_hash="s", kv_write="slice")
    assert "kv_write" in summary.summary_rows(root)


def test_a_filter_takes_rows_away_and_no_verdict(root):
    """The validation of a bundle is another run than the one that timed it."""
    rows = summary.summary_rows(root, "run_id in ['1', '2']")
    assert set(rows["verdict"]) == {"GREEN"} and set(rows["compress"]) == {"fp16"}
    ranked = text.sorted_rows(summary.summary_rows(root), "-tokens_per_s")[
        "tokens_per_s"
    ]
    assert ranked.dropna().is_monotonic_decreasing and ranked.isna().iloc[-1]
    with pytest.raises(InputError, match="--sort"):
        text.sorted_rows(rows, "speed")


def test_an_update_that_is_not_finite_is_the_worst(root):
    fidelity = [*updates([0.99]), *updates([0.999], T=2, finite=False)]
    put(
        root,
        "7",
        rates(1),
        fidelity,
        compress="lut4",
        bundle_hash="l",
        verdict="RED",
        config="{}",
    )
    row = summary.summary_rows(root, "compress == 'lut4'").iloc[0]
    assert row["worst_update"] == np.inf and row["verdict"] == "RED"


def test_every_format_says_the_same(root):
    rows = summary.summary_rows(root)
    as_json = json.loads(summary.text_table(rows, "json"))
    as_csv = list(csv.DictReader(io.StringIO(summary.text_table(rows, "csv"))))
    assert [r["tokens_per_s"] for r in as_json] == [
        float(r["tokens_per_s"]) if r["tokens_per_s"] else None for r in as_csv
    ]
    markdown, latex = (summary.text_table(rows, name) for name in ("md", "tex"))
    for words in ("106.0 ± 5.2", "3.0 MiB", "tg24 T4", "0.001", "GREEN", "failed"):
        assert words in markdown and words in latex
    assert "tg24 @ d64" in markdown and markdown.count("\n") == len(rows) + 1
    assert latex.startswith("\\begin{tabular}") and "\\toprule" in latex
    with pytest.raises(InputError, match="--format"):
        summary.text_table(rows, "xlsx")


def test_what_a_sample_does_not_say_is_left_out_of_its_test(root):
    put(root, "7", rates(1, T=None, depth=None), compress="lut4", bundle_hash="l")
    assert summary.summary_rows(root, "compress == 'lut4'")["test"].tolist() == ["tg24"]


def test_an_empty_log_is_an_empty_table(tmp_path):
    rows = summary.summary_rows(tmp_path)
    assert rows.empty and summary.text_table(rows, "md").startswith("| model")


def test_a_comparison_keeps_to_a_hundred_columns_and_says_what_is_common_once(root):
    for run_id, compress, ms in (("8", "fp16", 10.0), ("9", "lut4", 20.0)):
        shards = [
            {"phase": "layer", "unit": "ms", "shard": f"{compress}_{i:02}", "value": ms}
            for i in range(12)
        ]
        samples = rates(ms, ms, ms) + shards + prompts(ms, ms)
        put(
            root,
            run_id,
            samples,
            compress=compress,
            setting=run_id,
            bundle_hash=run_id * 64,
        )
    lines = "\n".join(text.comparison_lines(log.compare("8", "9", root))).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 16
    assert [line.split() for line in lines[:2]] == [
        ["setting", "a", "b"],
        ["compress", "fp16", "lut4"],
    ]
    (speed,) = [line.split() for line in lines if "tokens_per_s" in line]
    assert speed[-4:] == ["tok/s", "10", "20", "2"]
    words = " ".join(lines)
    assert words.count("not enough runs") == words.count("on one side only") == 1
    assert "lut4_11" in words and "bundle_hash" not in words


def test_a_comparison_of_a_run_with_itself_differs_in_nothing(root):
    lines = text.comparison_lines(log.compare("4", "4", root))
    assert lines[0] == "no setting differs"


# --- A − B


GATES = [
    {"name": n, "verdict": v, "value": 1.0} for n, v in (("a", "GREEN"), ("b", "RED"))
]


@pytest.fixture
def validated(tmp_path):
    other = [GATES[0] | {"verdict": "RED"}, GATES[1], GATES[0] | {"name": "c"}]
    a = [*updates([1, 1, 1], [0.1, 0.2, 0.3]), *updates([1, 1], [0.5, 0.0], T=4)]
    b = [*updates([1, 1], [0.1, 0.5]), *updates([1, 1], [0.1, 0.1], T=4)]
    put(tmp_path, "a", [], a, compress="fp16", verdict="RED", config={"gates": GATES})
    put(tmp_path, "b", [], b, compress="lut4", verdict="RED", config={"gates": other})
    return tmp_path


def test_a_difference_has_the_cells_and_T_that_both_runs_have(validated):
    found = run_difference("a", "b", validated)
    cells = found.cells.set_index("position")
    assert (found.metric, found.Ts) == ("error", (1, 4))
    assert cells["a"].to_dict() == {0: 0.5, 1: 0.2} and cells["b"].to_dict() == {
        0: 0.1,
        1: 0.5,
    }
    assert cells["difference"].round(6).to_dict() == {0: 0.4, 1: -0.3}
    gates = found.gates.set_index("gate")[["a", "b"]]
    assert gates.to_dict("index") == {
        "a": {"a": "GREEN", "b": "RED"},
        "c": {"a": None, "b": "GREEN"},
    }
    assert found.settings.set_index("setting").loc["compress"].tolist() == [
        "fp16",
        "lut4",
    ]


def test_the_difference_is_saved_as_a_figure_with_its_runs(validated, tmp_path):
    paths = run_difference("a", "b", validated).save(validated, tmp_path / "figure")
    assert [p.name for p in paths] == [
        f"figure.{s}" for s in ("svg", "pdf", "png", "json")
    ]
    assert json.loads(paths[-1].read_text())["run_ids"] == ["a", "b"]
    words = paths[0].read_text()
    assert "update of tiny, A − B, worst over T = 1, 4" in words
    assert "A: compress fp16" in words and "B: compress lut4" in words


def test_runs_that_have_nothing_in_common_are_refused(validated):
    put(validated, "c", [], updates([1]), checkpoint_hash="d" * 64)
    put(validated, "d")
    for run_id, message in (
        ("c", "two checkpoints"),
        ("d", "0 rows of the update"),
        ("e", "e"),
    ):
        with pytest.raises(InputError, match=message):
            run_difference("a", run_id, validated)
    with pytest.raises(InputError, match="--tensor"):
        run_difference("a", "b", validated, "queries")


def test_without_an_error_in_both_runs_cosines_are_compared(validated):
    put(validated, "c", [], updates([0.5, 1.0]), config="{}")
    found = run_difference("a", "c", validated)
    assert found.metric == "1-cosine" and found.Ts == (1,)
    assert found.cells["difference"].tolist() == [-0.5, 0.0]
    assert isinstance(found.gates, pd.DataFrame) and set(found.gates["gate"]) == {
        "a",
        "b",
    }
