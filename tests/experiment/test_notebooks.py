"""Notebooks: committed without outputs, 15 to 25 cells, prose without results; their
answers are computed from the tables of the run, and turn when the tables do."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from browser.lab import changes, commit
from experiment import small
from tiny import ROOT

from workbench import log, plots
from workbench.check import gates, states
from workbench.experiment import notebook_parameters, run_notebook

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
RESULTS = re.compile(
    r"\d[\d.,]*\s*(times|×|%|tok/s|ms|nats|MiB|GiB)|"
    r"\b(faster|slower|fewer|cheaper|better|worse|closer|further) than\b"
)


def cells_of(path: Path, kind: str, tag: str | None = None) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == kind]
    if tag:
        cells = [cell for cell in cells if tag in cell["metadata"].get("tags", [])]
    return ["".join(cell["source"]) for cell in cells]


def named(number: str) -> Path:
    return next(path for path in NOTEBOOKS if path.name.startswith(number))


def answer_code(path: Path) -> str:
    """The code that computes the answer and concludes: the cells below `## Answer`, up
    to the one that concludes, and in 32 that of its own gates."""
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    (first,) = (i for i, text in enumerate(sources) if text.startswith("## Answer"))
    (last,) = (i for i, text in enumerate(sources) if "experiment.conclude(" in text)
    gates = [text for text in sources if text.startswith("naive, scaled = ")]
    return "\n".join(gates + sources[first + 1 : last + 1])


@each_notebook
def test_a_notebook_has_few_short_cells_one_of_parameters_and_no_outputs(path):
    """The hook of `make lab` saves notebooks without outputs (`workbench.lab`)."""
    command = ["git", "show", f":notebooks/{path.name}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for cell in json.loads(shown.stdout)["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")
    text = path.read_text()
    assert text == nbformat.writes(nbformat.reads(text, as_version=4)) + "\n"
    code, prose = cells_of(path, "code"), cells_of(path, "markdown")
    assert 15 <= len(code) + len(prose) <= 25
    assert all(len(cell.splitlines()) <= 20 for cell in code)
    # as many characters as a page of 1400 pixels shows
    assert max(len(line) for cell in code for line in cell.splitlines()) <= 105
    assert len(cells_of(path, "code", "parameters")) == 1
    assert notebook_parameters(path.name[:2])


@each_notebook
def test_it_asks_a_question_and_computes_the_answer(path):
    prose = cells_of(path, "markdown")
    assert re.match(rf"# {path.name[:2]} · .*\?\n", prose[0] + "\n")
    assert any(cell.startswith("## Answer") for cell in prose)
    assert answer_code(path)
    question = prose[0].partition("\n")[0].removeprefix(f"# {path.name[:2]} · ")
    assert f"| `{path.stem}` | {question} |" in (ROOT / "README.md").read_text()


@each_notebook
def test_prose_states_no_results(path):
    code = "\n".join(cells_of(path, "code"))
    for cell in cells_of(path, "markdown"):
        assert "## Answer" not in cell or not re.search(r"\d", cell)
        for found in RESULTS.finditer(cell):
            # a setting of the experiment, such as a fault that a cell plants
            assert found[0] in code, f"{path.stem}: {found[0]!r} in {cell[:60]!r}"


def answer(number: str, names: dict) -> str:
    """What an answer concludes from these names."""
    concluded = []
    experiment = SimpleNamespace(
        gates=names["all_gates"],
        add_gates=lambda results: None,
        conclude=lambda words, *args, **tables: concluded.append(words),
    )
    names = {"pd": pd, "np": np, "gates": gates, "states": states} | names
    exec(answer_code(named(number)), names | {"experiment": experiment})
    return concluded[0]


FILES = {
    "30": {"shares": "probe"},
    "31": {"kl": "cost"},
    "32": {"scores": "orders"},
    "33": {"times": "first_token", "reported": "report"},
    "34": {"rates": "speed", "layers": "layer_ms", "both": "paths", "valid": "choice"},
}
"""The files of names in an answer, where they are called otherwise."""


def stored(number: str, folder: Path) -> dict:
    """The names of an answer from the files of a run: data of figures, tables and
    gates."""
    run = json.loads((folder / "run.json").read_text())
    # a table and a figure of one name: the answer reads the table
    paths = sorted(folder.glob("*/*.parquet"))
    files = {path.stem: pd.read_parquet(path) for path in paths}
    found = [SimpleNamespace(**gate) for gate in run["gates"]]
    names = run["parameters"] | files | {"all_gates": found, "decoder": None}
    names |= {name: files[file] for name, file in FILES.get(number, {}).items()}
    names |= {"result": SimpleNamespace(rows=None), "runtime": "portable"}
    names |= {"REAUTHORING": gates.REAUTHORING, "arithmetic": "exact", "decoders": [0]}
    if number == "05":
        kl = next(gate.value for gate in found if gate.name == "max_kl")
        cost = SimpleNamespace(kl=np.full(names["POSITIONS"], kl))
        names["result"] = SimpleNamespace(rows=files["fidelity"], cost=cost)
        for name, figure in (("late", "write_address"), ("turned", "rope")):
            rows = files[figure][files[figure]["bundle"] != "sound"]
            names[name] = SimpleNamespace(rows=rows)
            names[f"{name}_red"] = files[f"{figure}_gates"]
        names["Ts"] = [1, names["T_MAX"]]
    if number == "30":
        rows = files["cosine"].query("mode == 'isolated' and not routing_tie")
        names["own"] = 1 - rows.groupby("tensor")["cosine"].min()
        names["distances"] = names["own"] * 10 ** files["ingredients"]
        names["source"] = SimpleNamespace(name=Path(names["CHECKPOINT"]).name)
        names["golden"] = SimpleNamespace(ids=range(names["POSITIONS"]))
        sizes = "{COMPRESS}, max_seq_len {MAX_SEQ_LEN}".format(**names)
        names["about"] = f"{names['source'].name}, {sizes}, portable runtime"
    if number == "31":
        names["shares"] = files["shares"].set_index("part")
    if number == "32":
        names["orders"] = files["orders"]["order"].unique()
    if number == "34":
        first, model = files["speed"].iloc[0], Path(names["CHECKPOINT"]).name
        about = (
            f"{model}, {first['runtime']} runtime, {names['DEPTH']} tokens in the cache"
        )
        names["about"] = f"{names['COMPRESS'][0]}, {about}, {first['machine']}"
    return names


def shipped(number: str) -> dict:
    """The names of an answer from the shipped run."""
    return stored(number, ROOT / "experiments" / named(number).stem)


def test_the_answer_of_05_turns_with_its_rows():
    names = shipped("05")
    words = answer("05", names)
    assert "keeps its cache: 0 of " in words and "T = 1, the worst 1" in words
    assert "as in the sound bundle" in words and "this fault: write_address" in words
    ran = len(names["all_gates"]) - 1  # no device is here
    assert f"0 of {ran} gates that ran are RED" in words
    red = [gates.Gate("budget", "RED", 9.0, 6.0, "")]
    names |= {"result": names["late"], "late": names["result"], "all_gates": red}
    names["result"].cost = names["late"].cost
    names["late_red"] = names["late_red"][:0]
    words = answer("05", names)
    assert "keeps its cache: 1 of 1 gates that ran are RED (budget)" in words
    assert "0.000" in words and "this fault: none" in words
    red = [gates.Gate("stale_rows", "RED", 0.0, 1.0, "")]
    words = answer("05", names | {"all_gates": red})
    assert (
        "does not keep its cache: 1 of 1 gates that ran are RED (stale_rows)" in words
    )


def test_the_answer_of_30_turns_with_its_tables():
    names = shipped("30")
    words = answer("30", names)
    assert words.startswith("Yes. On tiny-zaya") and "would show all of them" in words
    assert "times fewer bytes" in words
    names["distances"] = names["distances"].clip(upper=0)
    names["all_gates"] = [gates.Gate("host", "RED", 1.0, 0.0, "")]
    names["routing"]["experts"] = names["routing"]["experts"].to_numpy()[::-1]
    words = answer("30", names)
    assert words.startswith("No: host is RED.") and "\n0 of " in words
    assert "would show all but" in words and "times more bytes" in words


def test_the_answer_of_31_turns_with_its_tables():
    names = shipped("31")
    words = answer("31", names)
    assert "part of the squared error is quantization" in words
    assert "within its limit" in words and " lowers its" in words
    names["shares"].loc["precision", "precision"] = 2.0
    names["parts"]["reauthoring"] = 1e-3
    names["remedies"]["fp16"] = names["kl"]["bundle"] = 0.5
    words = answer("31", names)
    assert "part of the squared error is precision: 200.0%" in words
    assert "beyond its limit" in words and "does not lower" in words
    assert "a mean KL of 0.5 nats" in words


def test_the_answer_of_32_says_which_order_overflows():
    names = shipped("32")
    words = answer("32", names)
    assert "alone does not overflow" in words and "bits more" in words
    assert "infinite in fp16 from a query norm" in words
    names["orders"] = names["orders"][::-1]
    names["leaks"]["right"] = True
    words = answer("32", names)
    assert "bits fewer" in words and "12 are right" in words
    fine = names["scores"].assign(**{"first inf": None, "first nan": None})
    words = answer("32", names | {"scores": fine})
    assert "No query norm that was tried" in words and "undoes this inf" not in words


def test_the_answer_of_33_says_whether_cells_hold_and_what_is_faster():
    cells = {"batch": [1, 2], "wrong": [0.0, 0.0], "apart": [0.0, 3e-7]}
    reported = {"cache": ["warm", "cold"], "context": [1024, 1024], "tokens": [0, 64]}
    offsets = {"modulo cache step (8)": [1, 1, None], "result": ["FAIL", "OK", "OK"]}
    times = {"cache": ["cold", "hot"], "context": [64, 64], "ms": [10.0, 2.0]}
    tables = {"found": cells, "edges": cells, "reported": reported}
    tables |= {"offsets": offsets, "times": times}
    names = {name: pd.DataFrame(table) for name, table in tables.items()}
    names |= {"all_gates": [], "decoders": [None], "arithmetic": "exact"}
    words = answer("33", names)
    assert words.startswith("Yes. 4 cells") and "5 times faster" in words
    assert "2 of its offsets are known and unaligned, with results FAIL, OK" in words
    assert "an unaligned offset alone is not the cause" in words
    assert "1 of 2 configurations gave no token" in words and "warm" in words
    names["edges"] = names["edges"].assign(wrong=1.0)
    names["offsets"].loc[1, "modulo cache step (8)"] = 0
    names["times"]["ms"] = [2.0, 10.0]
    words = answer("33", names)
    assert words.startswith("No: 2 of 4 cells differ") and "5 times slower" in words
    assert "an unaligned offset may be the cause" in words


def test_the_answer_of_34_turns_with_its_tables():
    names = shipped("34")
    words = answer("34", names)
    assert "T 4 has more than T 1" in words
    fastest = names["valid"].nlargest(2, "tokens_per_s")["name"]
    assert f"that passes: {fastest.iloc[0]}" in words
    assert f"% behind: {fastest.iloc[1]}" in words
    names["rates"]["value"] = 1e6 / names["rates"]["value"]
    names["valid"]["kl_mean"] = 1.0
    words = answer("34", names)
    assert "T 4 has fewer than T 1" in words and "\n0 of 8" in words
    for values, overlap in ((names["rates"]["T"], False), (1.0, True)):
        names["rates"]["value"] = values
        lines = answer("34", names).splitlines()
        (line,) = [line for line in lines if ", T 4 " in line]
        assert ("T 4 and T 1 overlap" in line) == overlap


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout whose notebooks have small parameters; one checkpoint is without a
    tokenizer."""
    folder = small.project(tmp_path_factory.mktemp("project"))
    (folder / "data" / "tiny-qwen2" / "tokenizer.json").unlink()
    commit(folder)
    return folder


OTHER = {"05": "qwen2", "31": "qwen2", "33": "llama", "34": "qwen2"}


@pytest.mark.slow("a kernel runs a whole notebook")
@each_notebook
def test_it_runs_with_another_checkpoint_and_its_answer_is_true_of_its_files(
    path, project, forked, monkeypatch
):
    monkeypatch.chdir(project)
    number = path.name[:2]
    other = {"CHECKPOINT": f"data/tiny-{OTHER[number]}"} if number in OTHER else {}
    result = run_notebook(number, other, progress=False)
    assert all(Path(figure["path"]).is_file() for figure in result["figures"])
    if number != "33":  # the data of its figure are texts
        names = stored(number, Path(result["report"]).parent)
        assert result["conclusion"] == answer(number, names)
    assert changes(project) == []


def test_34_draws_what_macs_measured(capsys):
    runs = log.load("runs", ROOT / "experiments" / "log" / log.SHIPPED)
    runs = runs[runs["tokens_per_s"].notna()]
    (cell,) = [c for c in cells_of(named("34"), "code") if "macs = runs[" in c]
    drawn = {}
    experiment = SimpleNamespace(
        figure=lambda name, draw, data, *, alt, about, **options: drawn.update(
            figure=data, drawn=draw(data, **options)
        ),
        table=lambda name, data, caption: drawn.update(table=data),
    )
    names = {"experiment": experiment, "plots": plots, "display": lambda shown: None}
    exec(cell, names | {"runs": runs})
    assert "no run on Core ML" in capsys.readouterr().out and not drawn
    exec(cell, names | {"runs": runs.assign(runtime="coreml", compute_units="ALL")})
    assert len(drawn["table"]) == len(runs) and (drawn["figure"]["ALL"] > 0).all()
