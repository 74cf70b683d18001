"""Notebooks: 15 to 30 cells, prose without results; their
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
from workbench.check import compare, gates, states, stream
from workbench.experiment import gate_table, run_notebook
from workbench.sweep import recommend

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
    assert 15 <= len(code) + len(prose) <= 30
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
    modules = {"pd": pd, "np": np, "gates": gates, "states": states}
    modules |= {"compare": compare, "recommend": recommend, "stream": stream}
    names = modules | names
    exec(answer_code(named(number)), names | {"experiment": experiment})
    return concluded[0]


FILES = {
    "30": {"shares": "probe"},
    "05": {"kl": "cost"},
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
    names |= {name: files.get(file) for name, file in FILES.get(number, {}).items()}
    names |= {"result": SimpleNamespace(rows=None), "runtime": "portable"}
    names["presets"] = files.get("presets", pd.DataFrame(columns=recommend.COLUMNS))
    names |= {"REAUTHORING": gates.REAUTHORING, "arithmetic": "exact", "decoders": [0]}
    if number == "05":
        # the shipped run has no such table
        texts = pd.DataFrame({"prompt": ["a ferry"], "text": ["leaves"]})
        names.setdefault("continuation", texts)
        names["result"] = SimpleNamespace(rows=files["fidelity"])
        for name, figure in (("late", "write_address"), ("turned", "rope")):
            rows = files[figure][files[figure]["bundle"] != "sound"]
            names[name] = SimpleNamespace(rows=rows)
        names |= {"late_red": files["write_address_gates"]}
        names |= {
            "rope_red": files["rope_gates"],
            "largest": files.get("largest_token"),
        }
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
        names["ranked"] = files.get("ranked")
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


STREAM = pd.DataFrame(
    {
        "layer": [0, 1, 2],
        "position": 0,
        "token": "<bos>",
        "times": [2.0, 180.0, 3.0],
        "largest": [9.0, 22500.0, 30.0],
        "step": [0.01, 16.0, 0.02],
        "channel": 7,
        "value": [5.0, 22500.0, 30.0],
        "added": [5.0, 22495.0, -22470.0],
        "update_moved": [1e-4, 1e-4, 0.44],
        "others_moved": 2e-3,
        "attention": [0.1, 0.5, 0.6],
        "even": 0.07,
    }
)
"""A stream with an attention sink, as `stream.largest_token` has it."""

KL = pd.DataFrame(
    {
        "KL (nats)": ["mean", "median", "p99", "max"],
        "bundle": [0.09, 0.05, 0.3, 0.5],
        "rounding alone": [0.08, 0.05, 0.3, 0.5],
    }
)

RANKED = pd.DataFrame({"layer": [3], "tensor": ["k"], "T": [4], "ratio": [1.25]})


def limit(value: float) -> gates.Gate:
    return gates.at_most("max_kl", value, 0.05, "")


def test_the_answer_of_05_turns_with_its_rows():
    names = shipped("05") | {"largest": STREAM, "kl": KL}
    says("05", names, "keeps its cache", "T = 1, the error of an update", "as in the")
    says("05", names, "This fault turned RED: write_address", "an attention sink")
    says("05", names, "“… a ferry” the bundle writes: “leaves”")
    stale = names | {"all_gates": [*red("stale_rows"), limit(0.01)]}
    says(
        "05",
        stale,
        "does not keep its cache",
        "1 of 1 gates on it are RED (stale_rows)",
    )
    names |= {"result": names["late"], "late": names["result"]}
    names |= {"all_gates": [*red("budget"), limit(0.01)]}
    names |= {"late_red": names["late_red"][:0], "largest": STREAM.assign(times=2.0)}
    says(
        "05", names, "keeps its cache", "RED (budget)", "turned RED: none", "stands out"
    )


@pytest.mark.parametrize("number", ["05", "31"])
def test_an_answer_tells_a_fault_of_the_export_from_a_limit_of_the_user(number):
    """The gates of SmolLM2 in int8-tensor: `max_kl` alone is RED."""
    green = [gates.holds(name, True, "") for name in ("program", "budget")]
    presets = [["int8-channel", 144.0, 0.0102, True]]
    names = shipped(number) | {"largest": STREAM, "kl": KL, "ranked": RANKED}
    names |= {"all_gates": [*green, limit(0.0942)]}
    names["presets"] = pd.DataFrame(presets, columns=recommend.COLUMNS)
    sentences = answer(number, names).splitlines()
    assert "No fault of the export is found: 2 gates on it are GREEN." in sentences
    (cost,) = (line for line in sentences if "0.0942" in line)
    assert "more than your limit of 0.05: RED stands for this limit alone" in cost
    (step,) = (line for line in sentences if line.startswith("Next step"))
    assert "int8-channel" in step and "0.0102" in step


def named_cells(number: str, *starts: str) -> str:
    """The definitions and statements of a notebook that begin with these words, from
    cells in which they stand alone."""
    cells = cells_of(named(number), "code")
    found = [cell for cell in cells for start in starts if start in cell]
    return "\n".join(dict.fromkeys(found))


def test_05_names_what_a_planted_fault_turned_red_and_nothing_else():
    """SmolLM2 in int8-tensor: `max_kl` was RED for the sound bundle already."""
    cell = named_cells("05", "def turned_red(results):").partition("\n\n\n")[0]
    sound = [limit(0.0942), gates.holds("write_address", True, "")]
    names = {"result": SimpleNamespace(gates=sound), "gate_table": gate_table}
    exec(cell, names)
    late = [limit(0.0940), *red("write_address"), *red("undo")]
    assert names["turned_red"](late)["gate"].tolist() == ["write_address", "undo"]


def test_05_draws_the_tensor_that_the_gate_names():
    """Planted: k lies beyond what rounding alone causes, updates do not."""
    rows = pd.read_parquet(
        ROOT / "experiments/05_stateful_kv_cache/figures/fidelity.parquet"
    )
    far = rows.assign(ratio=rows["ratio"].mask(rows["tensor"] == "k", 30.0))
    (cell,) = [c for c in cells_of(named("05"), "code") if '"rope", plots.heatmap' in c]
    drawn = {}
    experiment = SimpleNamespace(figure=lambda *_, **options: drawn.update(options))
    names = {"experiment": experiment, "compare": compare, "plots": plots, "about": ""}
    names |= {"beside": lambda results: None, "golden": SimpleNamespace(tokens=[])}
    names |= {"turned": SimpleNamespace(rows=far), "result": SimpleNamespace(rows=rows)}
    exec(cell, names)
    assert drawn["tensor"] == "k" and "layer's k " in drawn["title"]


def test_the_answer_of_30_turns_with_its_tables():
    names = shipped("30")
    says("30", names, "Yes. On tiny-zaya", "would show all of them", "fewer bytes")
    names |= {"distances": names["distances"].clip(upper=0), "all_gates": red("host")}
    names["routing"]["experts"] = names["routing"]["experts"].to_numpy()[::-1]
    says("30", names, "No: host is RED.", "\n0 of ", "would show all but", "more bytes")


def test_the_answer_of_31_turns_with_its_tables():
    names = shipped("31") | {"kl": KL.copy(), "ranked": RANKED}
    largest = "part of the squared error is"
    says("31", names, f"{largest} quantization", "within its limit")
    says("31", names, "rounding alone causes is 3: 1.25 times (k, T = 4)")
    layers = len(names["remedies"])
    says(
        "31", names, f"lowers the error of quantization in {layers} of {layers} layers"
    )
    names["shares"].loc["precision", "precision"] = 2.0
    names["parts"]["reauthoring"] = 1e-3
    names["remedies"]["fp16"] = names["kl"]["bundle"] = 0.5
    says("31", names, f"{largest} precision: 200.0%", "beyond its limit")
    says("31", names, f"in 0 of {layers} layers", "0.5 of the bundle")


def test_the_answer_of_31_names_three_of_many_layers_and_counts_the_others():
    names = shipped("31") | {"kl": KL, "ranked": RANKED}
    error = np.linspace(0.3, 0.01, 30)
    remedies = {"layer": range(30), "tensors": "q_proj", "error": error}
    names["remedies"] = pd.DataFrame(remedies).assign(fp16=error / 2)
    words = answer("31", names)
    layers = [line for line in words.splitlines() if line.startswith("Layer ")]
    assert [line.partition(",")[0] for line in layers] == [
        f"Layer {i}" for i in range(3)
    ]
    assert "in 30 of 30 layers" in words and "the other 27 layers are smaller" in words


def test_the_answer_of_32_says_which_order_overflows():
    names = shipped("32")
    says("32", names, "alone does not overflow", "bits more")
    says("32", names, "infinite in fp16 at a query norm", "(not of 128,")
    fine = names["scores"].assign(**{"first inf": None, "first nan": None})
    words = answer("32", names | {"scores": fine})
    assert "No query norm that was tried" in words and "undoes this inf" not in words
    names["orders"] = names["orders"][::-1]
    names["leaks"]["right"] = True
    says("32", names, "bits fewer", "12 are right")


def test_the_answer_of_33_says_whether_cells_hold_and_what_is_faster():
    cells = {"batch": [1, 2], "wrong": [0.0, 0.0], "apart": [0.0, 3e-7]}
    cells["cache"] = ["warm", "cold"]
    reported = {"cache": ["warm", "cold"], "context": [1024, 1024], "tokens": [0, 64]}
    offsets = {"modulo cache step (8)": [1, 1, None], "result": ["FAIL", "OK", "OK"]}
    times = {"cache": ["cold", "hot"], "context": [64, 64], "ms": [10.0, 2.0]}
    tables = {"found": cells, "edges": cells, "reported": reported}
    tables |= {"offsets": offsets, "times": times}
    names = {name: pd.DataFrame(table) for name, table in tables.items()}
    names |= {"all_gates": [], "decoders": [None], "arithmetic": "exact"}
    says("33", names, "alone: 2 restore a cache, 2 restore nothing")
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
