"""Notebooks: 15 to 25 cells, prose without results; their
answers are computed from the tables of the run, and turn when the tables do."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from experiment import small
from refusal import refused
from tiny import ROOT

from workbench import InputError, log, plots
from workbench.check import gates, states
from workbench.experiment import run_notebook

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
RESULTS = re.compile(
    r"\d[\d.,]*\s*(times|×|%|tok/s|ms|nats|MiB|GiB)|"
    r"\b(faster|slower|fewer|cheaper|better|worse|closer|further) than\b"
)


def cells_of(path: Path, *kinds: str) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] in kinds]


def named(number: str) -> Path:
    return next(path for path in NOTEBOOKS if path.name.startswith(number))


def answer_code(path: Path) -> str:
    """The code that computes the answer and concludes: the cells below `## Answer`, up
    to the one that concludes, and in 32 that of its own gates."""
    sources = cells_of(path, "code", "markdown")
    (first,) = (i for i, text in enumerate(sources) if text.startswith("## Answer"))
    (last,) = (i for i, text in enumerate(sources) if "experiment.conclude(" in text)
    gates = [text for text in sources if text.startswith("naive, scaled = ")]
    return "\n".join(gates + sources[first + 1 : last + 1])


@each_notebook
def test_a_notebook_has_few_short_cells(path):
    """That it has no outputs, test_lab.py shows; a cell of parameters, small.py."""
    code, prose = cells_of(path, "code"), cells_of(path, "markdown")
    assert 15 <= len(code) + len(prose) <= 25
    assert all(len(cell.splitlines()) <= 20 for cell in code)
    # as many characters as a page of 1400 pixels shows
    assert max(len(line) for cell in code for line in cell.splitlines()) <= 105


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
        # the shipped run has no such table
        texts = pd.DataFrame({"prompt": ["a ferry"], "text": ["leaves"]})
        names.setdefault("continuation", texts)
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


def says(number: str, names: dict, *parts: str) -> None:
    """Asserts that an answer from these names has these words."""
    words = answer(number, names)
    assert [part for part in parts if part not in words] == [], words


def red(name: str) -> list:
    return [gates.Gate(name, "RED", 9.0, 6.0, "")]


def test_the_answer_of_05_turns_with_its_rows():
    names = shipped("05")
    ran = len(names["all_gates"]) - 1  # no device is here
    sound = f"keeps its cache: 0 of {ran} gates that ran are RED"
    says("05", names, sound, "T = 1, the worst 1", "as in the sound bundle")
    says(
        "05",
        names,
        "this fault: write_address",
        "“… a ferry” the bundle writes: “leaves”",
    )
    stale = "does not keep its cache: 1 of 1 gates that ran are RED (stale_rows)"
    says("05", names | {"all_gates": red("stale_rows")}, stale)
    names |= {"result": names["late"], "late": names["result"]}
    names |= {"all_gates": red("budget"), "late_red": names["late_red"][:0]}
    names["result"].cost = names["late"].cost
    turned = "keeps its cache: 1 of 1 gates that ran are RED (budget)"
    says("05", names, turned, "0.000", "this fault: none")


def test_the_answer_of_30_turns_with_its_tables():
    names = shipped("30")
    says("30", names, "Yes. On tiny-zaya", "would show all of them", "fewer bytes")
    names |= {"distances": names["distances"].clip(upper=0), "all_gates": red("host")}
    names["routing"]["experts"] = names["routing"]["experts"].to_numpy()[::-1]
    says("30", names, "No: host is RED.", "\n0 of ", "would show all but", "more bytes")


def test_the_answer_of_31_turns_with_its_tables():
    names = shipped("31")
    largest = "part of the squared error is"
    says("31", names, f"{largest} quantization", "within its limit", " lowers its")
    names["shares"].loc["precision", "precision"] = 2.0
    names["parts"]["reauthoring"] = 1e-3
    names["remedies"]["fp16"] = names["kl"]["bundle"] = 0.5
    says("31", names, f"{largest} precision: 200.0%", "beyond its limit")
    says("31", names, "does not lower", "a mean KL of 0.5 nats")


def test_the_answer_of_32_says_which_order_overflows():
    names = shipped("32")
    says("32", names, "alone does not overflow", "bits more")
    says("32", names, "infinite in fp16 from a query norm")
    fine = names["scores"].assign(**{"first inf": None, "first nan": None})
    words = answer("32", names | {"scores": fine})
    assert "No query norm that was tried" in words and "undoes this inf" not in words
    names["orders"] = names["orders"][::-1]
    names["leaks"]["right"] = True
    says("32", names, "bits fewer", "12 are right")


def test_the_answer_of_33_says_whether_cells_hold_and_what_is_faster():
    cells = {"batch": [1, 2], "wrong": [0.0, 0.0], "apart": [0.0, 3e-7]}
    reported = {"cache": ["warm", "cold"], "context": [1024, 1024], "tokens": [0, 64]}
    offsets = {"modulo cache step (8)": [1, 1, None], "result": ["FAIL", "OK", "OK"]}
    times = {"cache": ["cold", "hot"], "context": [64, 64], "ms": [10.0, 2.0]}
    tables = {"found": cells, "edges": cells, "reported": reported}
    tables |= {"offsets": offsets, "times": times}
    names = {name: pd.DataFrame(table) for name, table in tables.items()}
    names |= {"all_gates": [], "decoders": [None], "arithmetic": "exact"}
    says("33", names, "Yes. 4 cells", "5 times faster", "alone is not the cause")
    says("33", names, "2 of its offsets are known and unaligned, with results FAIL, OK")
    says("33", names, "1 of 2 configurations gave no token", "warm")
    names["edges"] = names["edges"].assign(wrong=1.0)
    names["offsets"].loc[1, "modulo cache step (8)"] = 0
    names["times"]["ms"] = [2.0, 10.0]
    says("33", names, "No: 2 of 4 cells differ", "5 times slower", "may be the cause")


def test_the_answer_of_34_turns_with_its_tables():
    names = shipped("34")
    first, second = names["valid"].nlargest(2, "tokens_per_s")["name"]
    says("34", names, f"that passes: {first}", f"% behind: {second}")
    says("34", names, "T 4 has more than T 1")
    names["rates"]["value"] = 1e6 / names["rates"]["value"]
    names["valid"]["kl_mean"] = 1.0
    says("34", names, "T 4 has fewer than T 1", "\n0 of 8")
    for values, overlap in ((names["rates"]["T"], False), (1.0, True)):
        names["rates"]["value"] = values
        lines = answer("34", names).splitlines()
        (line,) = [line for line in lines if ", T 4 " in line]
        assert ("T 4 and T 1 overlap" in line) == overlap


OTHER = {"05": "qwen2", "30": "zaya", "31": "qwen2", "33": "llama", "34": "qwen2"}
"""The families of random checkpoints, which have no tokenizer."""


@pytest.mark.slow("a kernel runs a whole notebook")
@each_notebook
def test_it_runs_with_another_checkpoint_and_its_answer_is_true_of_its_files(
    path, small_project, forked, monkeypatch
):
    monkeypatch.chdir(small_project)
    number = path.name[:2]
    other = {"CHECKPOINT": f"data/random-{OTHER[number]}"} if number in OTHER else {}
    result = run_notebook(number, other, progress=False)
    assert all(Path(figure["path"]).is_file() for figure in result["figures"])
    if number != "33":  # the data of its figure are texts
        names = stored(number, Path(result["report"]).parent)
        assert result["conclusion"] == answer(number, names)
    assert small.changes(small_project) == ""


def test_34_says_why_no_run_is_valid():
    (cell,) = [c for c in cells_of(named("34"), "code") if "def speeds" in c]
    samples = pd.DataFrame({"invalid": ["it ran on the CPU"]})
    sweep = SimpleNamespace(stored_tables=lambda *_, **__: {"samples": samples})
    names = {"sweep": sweep, "InputError": InputError, "MACHINE": None}
    exec(cell.partition("\n\n\n")[0], names)
    with refused("it ran on the CPU"):
        names["speeds"](None, "call")


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
