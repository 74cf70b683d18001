"""Tables show text and values as they are, to readers of HTML, Markdown and LaTeX."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from markdown_it import MarkdownIt
from tiny import ROOT

from workbench.check import gates
from workbench.experiment.headings import heading_of
from workbench.experiment.latex import LINE_WIDTH, latex_table
from workbench.experiment.tables import (
    gate_table,
    html_table,
    markdown_table,
    show,
    show_with_caption,
    words_of,
)

ODD = ["<s>", "a|b", "<|im_end|>", "*x*", "</td>", "`a`", "1e3", "0010", "_", "", "-"]
TEXT = some.sampled_from(ODD) | some.text(
    some.characters(exclude_categories=["Cs", "Cc"])
)


class Cells(HTMLParser):
    """The texts of a table's headings and cells, and its tags."""

    def __init__(self, page: str):
        super().__init__()
        self.cells, self.tags, self.is_cell = [], set(), False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.is_cell = tag in ("td", "th")
        if self.is_cell:
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.is_cell = False

    def handle_data(self, data):
        if self.is_cell:
            self.cells[-1] += data


def squeezed(texts: list[str]) -> list[str]:
    return [" ".join(text.split()) for text in texts]


@settings(deadline=None, max_examples=50)
@given(some.lists(TEXT, min_size=1, max_size=3), TEXT)
def test_every_reader_gets_headings_and_cells_as_given(texts, heading):
    table = pd.DataFrame({heading: texts, heading + "2": range(len(texts))})
    cells = [heading, heading + "2"]
    for place, text in enumerate(texts):
        cells += [text, str(place)]
    page = show(table).to_html()
    assert squeezed(Cells(page).cells) == squeezed(cells)
    assert Cells(page).tags == {"style", "table", "thead", "tbody", "tr", "th", "td"}
    page = MarkdownIt("commonmark").enable("table").render(markdown_table(table))
    assert squeezed(Cells(page).cells) == squeezed(cells)


def test_a_heading_is_aligned_as_its_column():
    table = pd.DataFrame({"text": ["a"], "number": [1.5]})
    page = show(table).to_html()
    styles = re.findall(r"([^{}]+)\{\s*text-align: left", page)
    assert any("th.col_heading.col0" in rule for rule in styles)
    assert not any("col1" in rule for rule in styles)
    assert markdown_table(table).splitlines()[1] == "|:-----|-------:|"


def test_code_in_a_caption_is_code():
    page = show_with_caption(pd.DataFrame({"a": [1]}), "Of `max_kl` <b>").to_html()
    assert "Of <code>max_kl</code> &lt;b&gt;</caption>" in page


def test_values_are_numbers_with_four_digits_and_nulls_a_dash():
    values = [1.23456789, 24, None, float("nan"), pd.NA, "nan", True, [1, 2]]
    words = ["1.235", "24", "–", "–", "–", "nan", "True", "[1, 2]"]
    assert list(map(words_of, values)) == words


def test_a_latex_table_is_ascii_and_long_text_wraps():
    long = "relative RMS against Hugging Face's model − worst of 21068 " * 3
    table = pd.DataFrame({"gate": ["✗ RED"], "xᵀ": [1.5], "reason": [long]})
    text = latex_table(table, "Of `a_b` & −", "tab:07-a")
    assert text.isascii() and r"\caption{Of \texttt{a\_b} \& \ensuremath{-}}" in text
    kinds = re.search(r"\\begin\{tabular\}\{(.*)\}", text)[1]
    points = re.fullmatch(r"lrp\{(\d+)pt\}", kinds)[1]
    assert 200 < float(points) < 340
    assert r"\ensuremath{\times} RED & 1.5 & \raggedright" in text


def test_a_latex_table_has_no_run_ids_and_no_lists():
    table = pd.DataFrame({"name": ["a"], "run_id": ["x1"], "of": [["x2", "x3"]]})
    table["run_ids"] = [("x4",)]
    text = latex_table(table, "Of", "tab:07-a")
    assert r"\begin{tabular}{l}" in text and "x" not in text.partition("tabular")[2]


def test_long_columns_of_a_latex_table_have_a_share_of_the_width_by_their_length():
    texts = {"prompt": 49, "reference": 240, "bundle": 159, "cause": 11}
    table = pd.DataFrame({n: ["word " * (c // 5)] for n, c in texts.items()})
    table[["agreed", "ties", "first"]] = 12.0
    text = latex_table(table.drop(columns=["agreed", "ties"]), "Of", "tab:07-a")
    prompt, reference, bundle = map(int, re.findall(r"p\{(\d+)pt\}", text))
    assert prompt < bundle < reference and reference > 80
    short = latex_table(table[["prompt", "reference"]], "Of", "tab:07-a")
    prompt, reference = map(int, re.findall(r"p\{(\d+)pt\}", short))
    assert r"\small" in short and reference > 3 * prompt and prompt + reference < 340


def test_a_number_of_a_latex_table_has_a_true_minus_sign_and_a_power_of_ten():
    numbers = [4.556e-06, -2.256, -2.25e4, float("-inf"), None, 0.5]
    table = pd.DataFrame({"ids": ["1e3", "-1", *"abcd"], "value": numbers})
    table["counts"] = [-3, 4, 5, 6, 7, 8]
    table["reason"] = ["1.5e-05 at most", *"abcde"]
    text = latex_table(table, "At most 2e-05", "tab:07-a")
    rows = [line.split(" & ") for line in text.splitlines() if line.count(" & ") == 3]
    cells = dict(zip(rows[0], zip(*rows[1:])))
    powers = r"$4.556\times10^{-6}$", r"$-2.25\times10^{4}$"
    assert cells["value"] == (
        *(powers[0], "$-2.256$", powers[1]),
        *(r"$-\infty$", r"\textendash{}", "0.5"),
    )
    assert cells["counts"][:2] == ("$-3$", "4")
    assert cells["ids"][:2] == ("1e3", "-1")  # texts
    assert r"1.5\ensuremath{\times}10$^{-5}$ at most" in text
    assert r"\caption{At most 2\ensuremath{\times}10$^{-5}$}" in text


def test_numbers_of_html_have_powers_of_ten_and_texts_stay_as_they_are():
    values = {"value": [7.95e-07, -2.5, None], "text": ["--max-kl 1e-3", "-1", "x"]}
    table = pd.DataFrame(values)
    for text in (html_table(table), show(table).to_html()):
        assert "7.95×10⁻⁷<" in text and "−2.5<" in text and "–<" in text
        assert "--max-kl 1e-3<" in text and ">-1<" in text and "e-07" not in text


def test_a_column_of_a_latex_table_is_named_in_words_with_its_unit():
    names = {
        "kl_p99": "99% KL, nats",
        "load_wait_ms": "load wait, ms",
        "mib": "matrices, MiB",
        "bundle_mib": "bundle, MiB",
        "update_moved": "change of update by rounding",
        "stated, MB": "stated, MB",
        "new_thing": "new thing",
        "fp16 a_b": "fp16 a_b",
    }
    assert {name: heading_of(name) for name in names} == names
    table = pd.DataFrame(dict.fromkeys(["H_kv", "others_moved", "same_top"], [0.5]))
    head = latex_table(table, "Of", "tab:07-a").partition(r"\midrule")[0]
    assert r"$H_{\mathrm{kv}}$" in head and r"\_" not in head


def test_a_latex_table_wider_than_the_line_is_split_and_not_set_in_tiny_type():
    table = pd.DataFrame({"layer": [0, 0, 1], "position": [0, 1, 0]})
    for number in range(16):
        table[f"quantity {number}"] = 1.234e-5
    text = latex_table(table, "Of `a`.", "tab:07-a")
    parts = text.split(r"\begin{table}")[1:]
    assert len(parts) > 1 and r"\tiny" not in text and r"\scriptsize" not in text
    for number, part in enumerate(parts, 1):
        assert f"Part {number} of {len(parts)}." in part
        (head,) = re.findall(r"\\toprule\n(.*)", part)
        assert head.startswith("layer & position & ")
        widest = 0.8 * len("1.234×10⁻⁵") * head.count("quantity") * 4.3
        assert widest < LINE_WIDTH
    assert re.findall(r"quantity(?: |\\\\)(\d+)", text) == [*map(str, range(16))]
    assert text.count(r"\label{tab:07-a}") == text.count(r"\label{tab:07-a-2}") == 1


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*/tables/*.parquet"))
)
def test_no_shipped_table_needs_tiny_type(path):
    text = latex_table(pd.read_parquet(path), "Of", "tab:07-a")
    assert r"\tiny" not in text
    headings = map(heading_of, pd.read_parquet(path).columns)
    assert not [name for name in headings if re.fullmatch(r"[a-z]\w*_\w+", name)]
    assert not re.search(r"\d\.?\d*e[+-]\d\d", text)


def compile_latex(folder: Path, tables: list[str]) -> str:
    """What pdflatex prints for a document with these tables, which it must end."""
    lines = [r"\documentclass{article}", r"\usepackage{booktabs}", r"\begin{document}"]
    for table in tables:
        lines += [table, r"\clearpage"]
    (folder / "tables.tex").write_text("\n".join([*lines, r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
    printed = ended.stdout.decode(errors="replace")
    assert ended.returncode == 0 and (folder / "tables.pdf").exists(), printed[-1500:]
    return printed


def has_booktabs() -> bool:
    if not shutil.which("pdflatex"):
        return False
    return (
        subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True).stdout != b""
    )


needs_latex = pytest.mark.skipif(
    not has_booktabs(), reason="pdflatex with booktabs is not installed"
)


@needs_latex
def test_pdflatex_compiles_cells_of_odd_text(tmp_path):
    """Behind the end of a row, `[42` would be a length, and `*` would vanish."""
    texts = [
        *ODD,
        "[42, 100]",
        "* a",
        "[",
        "#1 %",
        "a\\b",
        "x^2_3",
        "{",
        "~",
        "中 é 3 × 10⁻²",
    ]
    table = pd.DataFrame(
        {"[ids]": texts, "*": [1.5] * len(texts), "long": ["word " * 60] * len(texts)}
    )
    compile_latex(tmp_path, [latex_table(table, "Of `[a_b]` & −", "tab:07-a")])


TENSOR = "model.layers.17.self_attn.q_proj.weight"


@needs_latex
@pytest.mark.parametrize("count", [1, 3])
def test_long_cells_and_headings_stay_within_the_line(tmp_path, count):
    """Sentences, names of tensors, hashes, and headings longer than their numbers."""
    table = pd.DataFrame({"gate": ["✓ GREEN", "✗ RED"]})
    for number in range(count):
        text = f"worst of 129,910: {TENSOR}, layer 6, SHA-256 {'0123456789abcdef' * 4}"
        table[f"reason {number}"] = [text, "in words alone " * 9]
        table[f"error over_rounding {number}"] = [1.234e-5, 7.0]
    printed = compile_latex(tmp_path, [latex_table(table, "Gates", "tab:07-a")])
    beyond = re.findall(r"Overfull \\hbox \((\d+)", printed)
    assert not [points for points in beyond if int(points) > 3], printed[-1500:]


@needs_latex
def test_pdflatex_compiles_every_shipped_table(tmp_path):
    paths = sorted((ROOT / "experiments").glob("*/tables/*.tex"))
    assert paths
    compile_latex(tmp_path, [path.read_text() for path in paths])


def test_gates_that_compare_no_figures_show_none():
    results = [
        gates.holds("host", True, "it agrees"),
        gates.at_most("interface", 0.0, 0.0, "no fault"),
        gates.at_most("max_kl", 0.01, 0.05, "mean KL"),
        gates.holds("undo", False, "it differs"),
    ]
    table = gate_table(results)
    assert list(table["gate"]) == ["undo", "host", "interface", "max_kl"]
    numbers = table.set_index("gate")[["value", "limit"]]
    assert numbers.loc[["undo", "host", "interface"]].isna().all(axis=None)
    assert numbers.loc["max_kl"].tolist() == [0.01, 0.05]
