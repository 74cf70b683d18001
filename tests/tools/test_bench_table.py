"""Both tables of benchmarks are what their samples say, and the audit names what is not."""

import json
import re

import pytest
from audit_benchmarks import NUMBER, check_benchmarks
from bench import PUBLISHED_RUNS
from bench_record import (
    README_ROWS,
    Comparison,
    Measurement,
    Series,
    TableRow,
    format_number,
    table,
    write_tables,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny import ROOT

CONDITIONS = {
    "machine": "chip, 2 cores",
    "software": "build",
    "versions": {"torch": "2"},
    "commit": "0123456789ab",
    "load_start": 0.1,
    "load_end": 1.9,
    "steal": 0.004,
}
DECODE = Measurement(
    [
        Series("fp16 at 64", "tok/s", [10.0, 12.0, 30.0]),
        Series("HF at 64", "tok/s", [20.0, 20.0, 20.0]),
        Series("llama.cpp F16 at 64", "tok/s", None, "llama_cpp cannot be imported"),
    ],
    [
        Comparison("decode, fp16", "fp16 at 64", "HF at 64"),
        Comparison("decode, fp16", "fp16 at 64", "llama.cpp F16 at 64"),
    ],
)
EXPORT = Measurement(
    [
        Series("export", "s", [8.0, 10.0, 9.0]),
        Series("coremltools", "s", [80.0, 120.0, 90.0]),
        Series("peak", "bytes", [1e9, 1e9, 1e9]),
    ],
    [Comparison("export, fp16", "export", "coremltools")],
)


SHOWN = (
    TableRow("export", "export", "coremltools"),
    TableRow("decode", "fp16 at 64", "llama.cpp F16 at 64"),
)
PAGES = ("README.md", "experiments/benchmarks/README.md")


@pytest.fixture
def project(tmp_path):
    """A project with two benchmarks and both tables of them; the README's has the rows SHOWN."""
    folder = tmp_path / "experiments" / "benchmarks"
    for command, measurement in {"decode": DECODE, "export": EXPORT}.items():
        measurement.save(folder, command, {"rounds": 3}, CONDITIONS)
    for page in PAGES:
        (tmp_path / page).write_text(
            "Before\n<!-- benchmarks -->\n<!-- /benchmarks -->\nAfter\n"
        )
    write_tables(tmp_path, folder, SHOWN)
    return tmp_path


def test_a_ratio_is_the_median_of_paired_rounds_and_above_one_where_it_is_faster():
    assert DECODE.ratio(DECODE.comparisons[0]) == "0.6 (0.5 to 1.5)"
    assert EXPORT.ratio(EXPORT.comparisons[0]) == "10 (10 to 12)"
    first, second, *_ = DECODE.lines()
    assert first == "decode, fp16, beside HF at 64: 0.6 (0.5 to 1.5) times as fast"
    assert second.endswith("beside llama.cpp F16 at 64: not measured")


def test_a_file_has_every_sample_and_null_for_a_missing_peer(project):
    text = (project / "experiments/benchmarks/decode.json").read_text()
    document = json.loads(text)
    assert list(document).index("comparisons") < list(document).index("series")
    by_name = {series["name"]: series for series in document["series"]}
    assert by_name["fp16 at 64"]["samples"] == [10.0, 12.0, 30.0]
    assert by_name["llama.cpp F16 at 64"]["samples"] is None
    assert document.items() >= CONDITIONS.items()


def test_the_tables_replace_themselves_and_the_audit_finds_nothing(project):
    texts = [(project / page).read_text() for page in PAGES]
    readme, page = texts
    for text in texts:
        assert text.startswith("Before\n") and text.endswith("\nAfter\n")
    row = "| decode, fp16 | 0.6 (0.5 to 1.5) | 12 tok/s | HF at 64: 20 tok/s |"
    assert row in page and row not in readme
    assert readme.index("| export, fp16 |") < readme.index("| decode, fp16 |")
    write_tables(project, project / "experiments/benchmarks", SHOWN)
    assert [(project / page).read_text() for page in PAGES] == texts
    assert check_benchmarks(project, SHOWN) == []


def test_the_readme_names_the_machines_of_its_rows_alone(project):
    write_tables(project, project / "experiments/benchmarks", SHOWN[:1])
    readme, page = [(project / page).read_text() for page in PAGES]
    assert "- `export`: chip" in readme and "decode" not in readme
    assert "- `decode`, `export`: chip" in page
    assert check_benchmarks(project, SHOWN[:1]) == []


def test_a_row_of_the_readme_that_no_file_has_is_refused_and_named(project):
    unknown = TableRow("decode", "fp16 at 64", "pandas")
    with pytest.raises(
        SystemExit, match=r"decode\.json: found .* with `pandas`: run `make bench`"
    ):
        write_tables(project, project / "experiments/benchmarks", [*SHOWN, unknown])
    (finding,) = check_benchmarks(project, [*SHOWN, unknown])
    assert finding[:2] == ("benchmarks/decode", "fp16 at 64 beside pandas")


@pytest.mark.parametrize("page", PAGES)
def test_a_row_twice_and_a_row_less_are_named(project, page):
    path = project / page
    text = path.read_text()
    (row,) = [line for line in text.splitlines() if "llama.cpp F16" in line]
    path.write_text(text.replace(row, f"{row}\n{row}"))
    (finding,) = check_benchmarks(project, SHOWN)
    assert (finding[0], finding[3]) == (page, "no benchmark")
    path.write_text(text.replace(f"{row}\n", ""))
    (finding,) = check_benchmarks(project, SHOWN)
    assert finding[2:] == (f"no row in {page}", "a row")


def test_the_readme_has_a_few_rows_of_published_benchmarks():
    assert len(set(README_ROWS)) == len(README_ROWS) <= 8
    assert {row.command for row in README_ROWS} <= set(PUBLISHED_RUNS)


@pytest.mark.parametrize(
    "printed, planted, label",
    [
        ("12 tok/s", "13 tok/s", "value of decode, fp16"),
        ("12 tok/s", "12 ms", "unit of the value of decode, fp16"),
        ("0.6 (0.5 to 1.5)", "1.67 (0.667 to 2)", "ratio of decode, fp16"),
        ("10 (10 to 12)", "0.1 (0.0833 to 0.1)", "ratio of export, fp16"),
        ("HF at 64: 20", "HF at 64: 21", "peer's value of decode, fp16"),
        ("HF at 64: 20", "HF fp32 at 64: 20", "peer of decode, fp16"),
        (
            "llama.cpp F16 at 64: not measured",
            "llama.cpp F16 at 64: 21.7 tok/s",
            "peer's value of decode, fp16",
        ),
        ("| export, fp16 |", "| export, int8 |", "export, fp16"),
        ("chip, 2 cores", "chip, 64 cores", "machine"),
    ],
)
def test_a_planted_fault_of_the_table_is_named(project, printed, planted, label):
    page = project / PAGES[1]
    assert printed in page.read_text()
    page.write_text(page.read_text().replace(printed, planted, 1))
    findings = check_benchmarks(project, SHOWN)
    assert findings and any(finding[1].endswith(label) for finding in findings)


def test_a_planted_fault_of_the_readme_s_table_is_named(project):
    readme = project / "README.md"
    readme.write_text(readme.read_text().replace("10 (10 to 12)", "12 (10 to 12)"))
    (finding,) = check_benchmarks(project, SHOWN)
    assert finding[:2] == ("benchmarks/export", "ratio of export, fp16")


@pytest.mark.parametrize(
    "name, planted", [("unit", "ms"), ("samples", [10.0, -12.0, 30.0])]
)
def test_a_planted_fault_of_the_samples_is_named(project, name, planted):
    path = project / "experiments/benchmarks/decode.json"
    document = json.loads(path.read_text())
    document["series"][0][name] = planted
    path.write_text(json.dumps(document))
    assert any(
        label == "fp16 at 64" for _, label, *_ in check_benchmarks(project, SHOWN)
    )


def test_the_shipped_tables_are_what_the_shipped_samples_say():
    assert check_benchmarks(ROOT) == []
    folder = ROOT / "experiments" / "benchmarks"
    readme, page = [(ROOT / page).read_text() for page in PAGES]
    assert "\n".join(table(folder, README_ROWS)) in readme
    assert "\n".join(table(folder)) in page


@given(st.floats(1e-12, 1e12))
def test_the_audit_reads_every_number_that_the_table_can_have(value):
    text = format_number(value)
    assert re.fullmatch(NUMBER, text)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3)
