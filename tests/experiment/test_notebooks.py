"""Notebooks: 15 to 30 cells, prose without results; their
answers are computed from the tables of the run, and turn when the tables do."""

import ast
import json
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from experiment import small
from refusal import refused
from tiny import ROOT

from workbench import InputError, log, plots, recommend, roofline
from workbench.bundle.presets import PRESETS
from workbench.check import compare, gates, states, stream
from workbench.check.cost import describe_cost
from workbench.experiment import gate_table, overview, run_notebook
from workbench.explain import error
from workbench.plots.styled import TITLE_FONT, TITLE_SHARE
from workbench.plots.text import measure_line
from workbench.sweep import conclude

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
def test_the_title_of_a_figure_is_one_line_on_a_page(path):
    """With names of four characters in place of a tensor's or a chip's."""
    trees = [ast.parse(cell) for cell in cells_of(path, "code")]
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)]
    drawings = [call for call in calls if ast.unparse(call.func) == "experiment.figure"]
    assert drawings
    for call in drawings:
        (title,) = [word.value for word in call.keywords if word.arg == "title"]
        parts = title.values if isinstance(title, ast.JoinedStr) else [title]
        text = "".join(
            getattr(part, "value", "") if isinstance(part, ast.Constant) else "name"
            for part in parts
        )
        assert measure_line(text, **TITLE_FONT) < TITLE_SHARE * plots.PAGE, text


@each_notebook
def test_prose_states_no_results(path):
    code = "\n".join(cells_of(path, "code"))
    for cell in cells_of(path, "markdown"):
        assert "## Answer" not in cell or not re.search(r"\d", cell)
        for result in RESULTS.finditer(cell):
            # a setting of the experiment, such as a fault that a cell plants
            assert result[0] in code, f"{path.stem}: {result[0]!r} in {cell[:60]!r}"


def answer(number: str, names: dict) -> str:
    """What an answer concludes from these names."""
    concluded = []
    experiment = SimpleNamespace(
        gates=names["all_gates"],
        add_gates=lambda results: None,
        conclude=lambda words, *args, **tables: concluded.append(words),
    )
    modules = {"pd": pd, "np": np, "gates": gates, "states": states}
    modules |= {"compare": compare, "stream": stream, "error": error, "Path": Path}
    modules["describe_verdict"] = recommend.describe_verdict
    modules |= {"log": log, "describe_cost": describe_cost, "conclude": conclude}
    names = modules | names
    exec(answer_code(named(number)), names | {"experiment": experiment})
    return concluded[0]


FILES = {
    "30": {"free": "routers"},
    "05": {"kl": "cost"},
    "31": {"kl": "cost"},
    "32": {"scores": "orders"},
    "33": {"times": "first_token", "reported": "report"},
    "35": {"table": "choices"},
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
    all_gates = [SimpleNamespace(**gate) for gate in run["gates"]]
    names = run["parameters"] | files | {"all_gates": all_gates}
    names["decoder"] = SimpleNamespace(is_device=False)
    names |= {name: files.get(file) for name, file in FILES.get(number, {}).items()}
    names |= {"result": SimpleNamespace(rows=None), "runtime": "portable"}
    names["golden"] = None
    names["presets"] = files.get("presets", pd.DataFrame(columns=recommend.COLUMNS))
    names |= {"REAUTHORING": gates.REAUTHORING, "arithmetic": "exact", "trained": [0]}
    if number == "05":
        names["result"] = SimpleNamespace(rows=files["fidelity"])
        for name, figure in (("late", "write_address"), ("turned", "rope")):
            rows = files[figure][files[figure]["bundle"] != "sound"]
            if not rows["T"].eq(1).any():
                # the figure leaves out calls of one token, which are the sound host's
                rows = pd.concat([rows, files["fidelity"].query("T == 1")])
            names[name] = SimpleNamespace(rows=rows)
        verdicts = files.get("verdicts", verdicts_of_05())
        if "GREEN" not in verdicts:  # a run shipped before the table had the column
            verdicts = verdicts.assign(GREEN="interface")
        names |= {"largest": files.get("largest_token"), "verdicts": verdicts}
        names["Ts"] = [1, names["T_MAX"]]
    if number == "30":
        rows = files["cosine"].query("mode == 'isolated' and not routing_tie")
        names["result"] = SimpleNamespace(rows=files["cosine"])
        names["bundle_worst"] = 1 - rows.groupby("tensor")["cosine"].min()
        names["distances"] = names["bundle_worst"] * 10 ** files["ingredients"]
        names["source"] = SimpleNamespace(name=Path(names["CHECKPOINT"]).name)
        names["golden"] = SimpleNamespace(ids=range(names["POSITIONS"]))
        sizes = "{COMPRESS}, max_seq_len {MAX_SEQ_LEN}".format(**names)
        names["subtitle"] = f"{names['source'].name}, {sizes}, portable runtime"
        # a run shipped before these tables were written has none
        names = {"rounds": rounds_of_30(), "ROUNDS": 3} | names
        if names["free"] is None:
            names["free"] = routers_of_30()
        if "KiB of weights read by a token" not in names["routing"]:
            names["routing"]["KiB of weights read by a token"] = [2000.0, 1000.0]
    if number == "31":
        names["shares"] = files["shares"].set_index("part")
        names["ranked"] = files.get("ranked")
        # a run shipped before this table was written has none
        names["layer_shares"] = files.get("layer_shares", layer_shares_of_31())
        names["token_shares"] = files.get("token_shares", TOKEN_SHARES)
        without = files.get("layer_shares_without", layer_shares_of_31())
        names["shares_without"] = without
    if number == "35" and "bundle_mib" not in names["table"]:
        # a run shipped before the table had the bundle
        names["table"] = names["table"].assign(bundle_mib=names["table"]["mib"] + 58)
    if number == "35" and "calibrated" not in names["judged"]:
        # a run shipped before the table had these columns
        names["judged"] = names["judged"].assign(calibrated=["yes", "no"], text="a.txt")
    if number == "32":
        names["orders"] = files["orders"]["order"].unique()
    if number == "34":
        first, model = files["speed"].iloc[0], Path(names["CHECKPOINT"]).name
        setting = (
            f"{model}, {first['runtime']} runtime, {names['DEPTH']} tokens in the cache"
        )
        names["subtitle"] = f"{names['COMPRESS'][0]}, {setting}, {first['machine']}"
    return names


def shipped(number: str) -> dict:
    """The names of an answer from the shipped run."""
    return stored(number, ROOT / "experiments" / named(number).stem)


def rounds_of_30(of_routed: float = 0.5, disturbed: str | None = None) -> pd.DataFrame:
    """Profiles of three rounds, with experts of the dense form of about 10 ms."""
    rng, rows = np.random.default_rng(0), []
    for number in range(3):
        for place, form in enumerate(("bundle", "dense", "routed")):
            experts = 10.0 * (of_routed if form == "routed" else 1.0)
            times = [6.0, 2.0, experts, 1.0, 1.0] * (1 + 0.01 * rng.standard_normal(5))
            rows.append((form, f"{number:03}-{place}", *times, disturbed))
    parts = ["attention", "probe: q_proj, o_proj", "experts", "moe", "rest"]
    return pd.DataFrame(rows, columns=["form", "run_id", *parts, "disturbed"])


def routers_of_30() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "experts": ["Hugging Face's choice", "the bundle's own choice"],
            "worst 1 − cosine": [0.00024, 0.034],
            "choices that differ": [0, 8],
            "choices": 708,
        }
    )


TOKEN_SHARES = pd.DataFrame(
    {
        "position": [1, 0, 2],
        "token": ["·ferry", "The", "·to"],
        "share": [0.04, 0.948, 0.012],
    }
)
"""An attention sink at token 0 carries most of the error."""


def layer_shares_of_31(count: int = 30) -> pd.DataFrame:
    """SmolLM2's figures: three of 30 layers carry most of the error, and precision is the
    largest part in five others. With fewer layers the error is spread evenly."""
    rows = [(layer, 1.0, 0.9, 0.1) for layer in range(count)]
    if count == 30:
        shares = {28: 38.1, 11: 34.7, 29: 23.3}
        rows = [
            (layer, shares.get(layer, 3.9 / 27), *parts)
            for layer in range(count)
            for parts in [(0.2, 0.8) if 12 <= layer < 17 else (0.95, 0.05)]
        ]
    columns = ["layer", "share", "quantization", "precision"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(share=table["share"] / table["share"].sum(), storage=0.0)


def says(number: str, names: dict, *parts: str) -> None:
    """Asserts that an answer from these names has these words."""
    words = answer(number, names)
    assert [part for part in parts if part not in words] == [], words


def verdicts_of_05() -> pd.DataFrame:
    """Both verdicts on a sound bundle and two faulty ones, one of which changes no
    token."""
    return pd.DataFrame(
        {
            "bundle": ["sound", "one row late", "frequencies 2% too high"],
            "export": ["GREEN", "RED", "RED"],
            "quality": ["WITHIN", "not judged", "not judged"],
            "RED": ["none", "undo, text_budget", "host"],
            "GREEN": ["host, program, undo", "host, program", "program, undo"],
            "tokens agreed": [1.0, 0.6, 1.0],
            "logit error over rounding": [2.4, 238.0, 15.0],
        }
    )


def red(name: str) -> list:
    return [gates.Gate(name, "RED", 9.0, 6.0, "")]


STREAM = pd.DataFrame(
    {
        "layer": [0, 1, 2],
        stream.MULTIPLE: [2.0, 180.0, 3.0],
        stream.LARGEST: [9.0, 22500.0, 30.0],
        stream.STEP: [0.01, 16.0, 0.02],
        stream.VALUE: [5.0, 22500.0, 30.0],
        stream.ADDED: [5.0, 22495.0, -22470.0],
        stream.MOVED: [1e-4, 1e-4, 0.44],
        stream.OTHERS_MOVED: 2e-3,
        stream.ATTENTION: [0.1, 0.5, 0.6],
    }
)
STREAM.attrs = {"position": 0, "token": "<bos>", "channel": 7, "even": 0.07}
"""A stream with an attention sink, as `stream.largest_token` has it."""

KL = pd.DataFrame(
    {
        "KL (nats)": ["mean", "median", "p99", "max"],
        "bundle": [0.09, 0.05, 0.3, 0.5],
        "stored weights": [0.08, 0.05, 0.3, 0.5],
        "fp16 rounding alone": [4e-6, 2e-6, 5e-5, 8e-5],
    }
)

RANKED = pd.DataFrame({"layer": [3], "tensor": ["k"], "T": [4], "ratio": [1.25]})


def limit(value: float) -> gates.Gate:
    return gates.quality_at_most("max_kl", value, 0.05, "")


def test_the_answer_of_05_turns_with_its_rows():
    names = shipped("05") | {"largest": STREAM, "kl": KL}
    said = "keeps its cache.\n## The bundle\nExport GREEN"
    says("05", names, said, "”, T = 1: the error of an update", "as in the")
    late_red = "Planted fault “one row late” turned RED: write_address"
    says("05", names, late_red, "an attention sink", "planted on purpose")
    sound, late, turned = "sound", "one row late", "frequencies 2% too high"
    told = names | {"verdicts": verdicts_of_05()}
    says("05", told, "turned RED: undo, text_budget. GREEN stayed: host, program.\n")
    says("05", told, "turned RED: host. GREEN stayed: program, undo.\n")
    says("05", told, f"Bundle “{sound}”: export GREEN, quality WITHIN. Fed Hugging")
    says("05", told, f"Bundle “{late}”: export RED, quality not judged. Fed Hugging")
    says(
        "05",
        told,
        f"“{late}”",
        "at 60.0% of the positions; the error of its logits, in exact arithmetic, is 238",
    )
    says(
        "05",
        told,
        f"“{turned}”",
        "at 100.0% of the positions; the error of its logits, in exact arithmetic, is 15",
    )
    device = told | {"decoder": SimpleNamespace(is_device=True)}
    assert "exact arithmetic" not in answer("05", device)
    unasked = verdicts_of_05().assign(**{"tokens agreed": None})
    assert "Fed Hugging" not in answer("05", names | {"verdicts": unasked})
    texts = pd.DataFrame({"prompt": ["a ferry"], "text": ["leaves"]})
    words = answer("05", names | {"continuation": texts})
    assert "“… a ferry” the bundle writes: “leaves”" in words
    stale = names | {"all_gates": [*red("stale_rows"), limit(0.01)]}
    says(
        "05",
        stale,
        "does not keep its cache",
        "1 of 1 gates on it are RED (stale_rows)",
    )
    names |= {"result": names["late"], "late": names["result"]}
    names |= {"all_gates": [*red("budget"), limit(0.01)]}
    names |= {"verdicts": verdicts_of_05().assign(RED="budget")}
    names |= {"largest": STREAM.assign(**{stream.MULTIPLE: 2.0})}
    says(
        "05", names, "keeps its cache", "RED (budget)", "turned RED: none", "stands out"
    )


@pytest.mark.parametrize("number", ["05", "30", "31", "32", "34", "35"])
def test_the_row_of_an_answer_on_the_page_of_experiments_is_short(number):
    """From the files of the shipped run; those of 33 have texts in the place of numbers."""
    headline = overview.short_answer(answer(number, shipped(number)))
    assert 3 <= len(headline.split()) <= 25, headline


@pytest.mark.parametrize("number", ["05", "31"])
def test_an_answer_tells_a_fault_of_the_export_from_a_limit_of_the_user(number):
    """The gates of SmolLM2 in int8-tensor: the export is GREEN, the quality OVER."""
    green = [gates.holds(name, True, "") for name in ("program", "budget")]
    row = {"compress": "int8-channel", "outcome": recommend.KEPT, "kl": 0.0102}
    row |= {"kl_low": 0.009, "kl_high": 0.011, "MiB": 144.0, "bundle_MiB": 143.5}
    row |= {"command": "workbench export"}
    names = shipped(number) | {"largest": STREAM, "kl": KL, "ranked": RANKED}
    names |= {"all_gates": [*green, limit(0.0942)]}
    names["presets"] = pd.DataFrame([row])
    sentences = answer(number, names).splitlines()
    assert "Export GREEN: 2 gates on it are GREEN." in sentences
    (cost,) = (line for line in sentences if "0.0942" in line)
    assert cost.startswith("Quality OVER: ") and "more than your limit of 0.05" in cost
    (step,) = (line for line in sentences if line.startswith("Recommended"))
    assert "int8-channel: KL 0.0102 [0.009, 0.011] on one text, 144.0 MiB" in step
    assert "instead of 143.5" in step


def named_cells(number: str, *starts: str) -> str:
    """The definitions and statements of a notebook that begin with these words, from
    cells in which they stand alone."""
    cells = cells_of(named(number), "code")
    defining = [cell for cell in cells for start in starts if start in cell]
    return "\n".join(dict.fromkeys(defining))


def test_05_names_what_a_planted_fault_turned_red_and_nothing_else():
    """SmolLM2 in int8-tensor, whose quality is OVER without a fault, and of which one gate is
    RED without it. The stored tables have every gate, also those on texts, which are
    compared after the figures of the faults."""
    cell = named_cells("05", "def turned_red(results):")
    sound = [limit(0.0942), gates.holds("write_address", True, ""), *red("device")]
    stored = {}
    experiment = SimpleNamespace(
        gates=sound,
        table=lambda name, data, caption, section: stored.update({name: data}),
    )
    late = [limit(0.0940), *red("write_address"), *red("device"), *red("text_budget")]
    judged = {"one row late": late, "frequencies 2% too high": [*red("host")]}
    names = {"experiment": experiment, "gates": gates, "gate_table": gate_table}
    names["planted"] = "faults"
    exec(cell, names | {"judged": judged, "display": lambda shown: None})
    names_of = {name: table["gate"].tolist() for name, table in stored.items()}
    assert names_of == {
        "write_address_gates": ["write_address", "text_budget"],
        "rope_gates": ["host"],
    }


def test_05_draws_the_tensor_that_the_gate_names():
    """Planted: k lies beyond what rounding alone causes, updates do not."""
    rows = pd.read_parquet(
        ROOT / "experiments/05_stateful_kv_cache/figures/fidelity.parquet"
    )
    far = rows.assign(ratio=rows["ratio"].mask(rows["tensor"] == "k", 30.0))
    (cell,) = [c for c in cells_of(named("05"), "code") if '"rope", plots.heatmap' in c]
    drawn = {}
    experiment = SimpleNamespace(figure=lambda *_, **options: drawn.update(options))
    names = {
        "experiment": experiment,
        "compare": compare,
        "plots": plots,
        "subtitle": "",
    }
    names |= {
        "planted": "faults",
        "beside": lambda results: None,
        "golden": SimpleNamespace(tokens=[]),
    }
    names |= {"turned": SimpleNamespace(rows=far), "result": SimpleNamespace(rows=rows)}
    exec(cell, names)
    assert drawn["tensor"] == "k" and "layer's k " in drawn["title"]


def test_the_answer_of_30_turns_with_its_tables():
    names = shipped("30")
    says("30", names, "Yes. On tiny-zaya", "would also show all of them", "fewer bytes")
    names |= {"distances": names["distances"].clip(upper=0), "all_gates": red("host")}
    names["routing"]["experts"] = names["routing"]["experts"].to_numpy()[::-1]
    says(
        "30",
        names,
        "No: host is RED.",
        "\n0 of ",
        "would also show all but",
        "more bytes",
    )


def test_the_answer_of_30_tells_imposed_from_free_choices_of_experts():
    names = shipped("30") | {"free": routers_of_30()}
    says(
        "30",
        names,
        "lies 0.00024 (1",
        "and its choice of experts. With the bundle's own choice it lies 0.034: 8 of",
    )
    says("30", names, "8 of 708 choices differ")


def test_the_answer_of_30_concludes_from_undisturbed_rounds_alone():
    names = shipped("30") | {"rounds": rounds_of_30()}
    says(
        "30",
        names,
        "In 3 rounds",
        "25.0% to 25.2%",
        "attention's operations and 10.0% of those",
        "take 0.497 times",
    )
    names["rounds"] = rounds_of_30(of_routed=1.0)
    says("30", names, "less time is not decided; `workbench run 30 --set ROUNDS=5`")
    names["rounds"] = rounds_of_30(disturbed="load 8.9 on 2 cores before it")
    words = answer("30", names)
    assert "Nothing is concluded from times: load 8.9 on 2 cores before it" in words
    assert "Routed experts take" not in words and "projections take" not in words


def test_the_answer_of_31_turns_with_its_tables():
    names = shipped("31") | {"kl": KL.copy(), "ranked": RANKED}
    says("31", names, "Quantization makes up 92.9% of the squared", "within its limit")
    says("31", names, "rounding alone causes is 3: 1.25 times (k, T = 4)")
    layers = len(names["remedies"])
    says(
        "31", names, f"lowers the error of quantization in {layers} of {layers} layers"
    )
    names["shares"].loc["precision", "precision"] = 2.0
    names["parts"]["reauthoring"] = 1e-3
    names["remedies"]["fp16"] = names["kl"]["bundle"] = 0.5
    says("31", names, "Precision makes up 200.0% of the squared", "beyond its limit")
    costs = "mean KL of 0.5 nats, Hugging Face's model 0.08 with the stored weights and 4e-06"
    says("31", names, f"in 0 of {layers} layers", costs)


def test_the_answer_of_31_names_the_layers_that_carry_the_error():
    names = shipped("31") | {"kl": KL, "ranked": RANKED}
    names |= {"layer_shares": layer_shares_of_31(), "token_shares": TOKEN_SHARES}
    names["shares_without"] = layer_shares_of_31().sort_values("layer", ascending=False)
    says("31", names, "Without token 0, “The”, the layers 28 (38.1%), 11 (34.7%), 29")
    says(
        "31",
        names,
        "The layers that carry most are 28 (38.1%), 11 (34.7%), 29 (23.3%); even shares would "
        "be 10.0% together. By layer, quantization is the largest part in 25 of 30; its "
        "unweighted mean share over layers is 82.5%.",
    )
    # the line of the page of all experiments has the part and what limits it
    shown = overview.short_answer(answer("31", names))
    assert shown == (
        "Quantization makes up 92.9% of the squared error; 3 of 30 layers carry 96.1% of it, "
        "and token 0 alone 94.8%."
    )
    assert "94.8%. Each layer is fed Hugging Face's input" in answer("31", names)
    says("31", names, "One prompt was measured, of 3 tokens: “The ferry to”.")
    even = names | {"layer_shares": layer_shares_of_31(6)}
    says("31", even, "3 of 6 layers carry 50.0% of it")
    says("31", even, "even shares would be 50.0% together", "largest part in 6 of 6")
    two = names | {"layer_shares": layer_shares_of_31(2)}
    says("31", two, "2 of 2 layers carry 100.0% of it")
    # a bundle that equals Hugging Face's model
    none = layer_shares_of_31(6).assign(share=0.0, quantization=0.0, precision=0.0)
    says("31", names | {"layer_shares": none}, "largest part in 0 of 6")


def test_the_answer_of_31_names_the_layer_with_the_largest_error_of_its_weights():
    names = shipped("31") | {"kl": KL, "ranked": RANKED}
    error = np.linspace(0.01, 0.3, 30)
    remedies = {"layer": range(30), "tensors": "q_proj", "error": error}
    names["remedies"] = pd.DataFrame(remedies).assign(fp16=error / 2)
    words = answer("31", names)
    assert (
        "in 30 of 30 layers. The largest is that of layer 29: 30.00% as stored" in words
    )
    assert "15.00% with q_proj as fp16. Table `remedies` has" in words
    assert words.count("as stored") == 1


def test_31_has_the_layers_that_carry_the_error_in_the_first_rows_of_its_table():
    cells = cells_of(named("31"), "code")
    (cell,) = [cell for cell in cells if '"layer_shares"' in cell]
    tables = {}
    experiment = SimpleNamespace(
        table=lambda name, data, caption, section="": tables.update({name: data})
    )
    unordered = layer_shares_of_31()
    parts = SimpleNamespace(
        shares=lambda: pd.DataFrame({"storage": [1.0]}, index=["storage"]),
        layer_shares=lambda: unordered,
    )
    names = {"experiment": experiment, "isolated": parts, "display": lambda value: None}
    names["APPENDIX"] = "Appendix"
    exec(cell, names)
    # a report has the first rows of a table
    assert tables["layer_shares"]["layer"].head(3).tolist() == [28, 11, 29]


@pytest.mark.parametrize("count", [30, 7, 6])
def test_the_headline_of_31_can_be_read_off_its_figure(count):
    """That three of 30 layers carry 96% of the error: the sum in the third row."""
    (cell,) = [
        c for c in cells_of(named("31"), "code") if '"largest_layers", plots' in c
    ]
    drawn = {}
    experiment = SimpleNamespace(
        figure=lambda name, draw, data, *, alt, subtitle, **options: drawn.update(
            data=data, figure=draw(data, **options)
        )
    )
    shares = layer_shares_of_31(count).sort_values("share", ascending=False)
    names = {"experiment": experiment, "plots": plots, "pd": pd, "subtitle": ""}
    exec(cell, names | {"largest_first": shares.reset_index(drop=True)})
    sums = drawn["data"]["sum of the rows down to it"]
    assert sums.iloc[-1] == pytest.approx(100)
    assert len(sums) == min(count, 7)
    if count == 30:
        assert sums.index[:3].tolist() == ["layer 28", "layer 11", "layer 29"]
        assert sums.index[-1] == "24 other layers"
        assert sums.round(1).equals(sums)
        headline = error.describe_largest(EVEN, shares, TOKEN_SHARES)
        assert f"3 of 30 layers carry {sums.iloc[2]:.1f}% of it" in headline
        bars = drawn["figure"].axes[0].containers[1]
        assert bars.patches[2].get_width() == pytest.approx(sums.iloc[2])
        labels = [text.get_text() for text in drawn["figure"].axes[0].texts]
        assert labels[-1] == "100.0" and f"{sums.iloc[2]:.1f}" in labels
        assert all(label.partition(".")[2].isdigit() for label in labels)


EVEN = pd.DataFrame(np.eye(2) / 2, *[["quantization", "precision"]] * 2)
"""Shares of two parts without cross terms."""


def test_31_draws_the_presets_that_were_measured_with_their_intervals():
    (cell,) = [c for c in cells_of(named("31"), "code") if '"presets", plots' in c]
    drawn = {}
    experiment = SimpleNamespace(
        figure=lambda name, draw, data, *, alt, subtitle, **options: drawn.update(
            data=data, figure=draw(data, **options)
        )
    )
    names = {"experiment": experiment, "plots": plots, "MAX_KL": 0.05}
    names["PRESETS"] = PRESETS
    names |= {"golden": SimpleNamespace(source=SimpleNamespace(name="a"))}
    names |= {"advice": recommend.Recommendation(judged_on="512 tokens")}
    exec(cell, names | {"presets": recommend.as_table(None)})
    assert not drawn
    row = {"compress": "int8-channel", "kl_low": 0.003, "kl": 0.004, "kl_high": 0.005}
    unmeasured = {"compress": "lut4-g8", "MiB": 90.0}
    presets = pd.DataFrame([unmeasured, row | {"MiB": 187.0}])
    exec(cell, names | {"presets": presets})
    (figure,) = drawn["figure"].axes
    assert sorted(drawn["data"]["KL"]) == [0.003, 0.004, 0.005]
    (bar,) = figure.containers
    (segment,) = bar.lines[2][0].get_segments()
    assert segment[:, 1].tolist() == [0.003, 0.005]
    (legend,) = drawn["figure"].legends
    words = {text.get_text() for text in legend.get_texts()}
    assert {"int8-channel", "your limit"} <= words and "lut4-g8" not in words
    assert "bars: their 95% intervals" in legend.get_title().get_text()


def test_the_answer_of_32_says_which_order_overflows():
    names = shipped("32")
    says("32", names, "alone does not overflow", "bits more")
    says("32", names, "infinite in fp16 at a query norm of 256 (at 128 it is finite).")
    says(
        "32",
        names,
        "A possible cause: ",
        "with a key bias of norm 605 and a query bias",
    )
    fine = names["scores"].assign(**{"first inf": None, "first nan": None})
    words = answer("32", names | {"scores": fine})
    assert "No query norm that was tried" in words and "undoes this inf" not in words
    names["orders"] = names["orders"][::-1]
    names["leaks"]["right"] = True
    says("32", names, "bits fewer", "12 are right")


def test_32_draws_nan_unlike_every_weight_and_wrong_weights_unlike_right_ones():
    """All of the weight on blocked positions and NaN had one colour."""
    (cell,) = [c for c in cells_of(named("32"), "code") if '"masks", plots.grid' in c]
    drawn = {}
    experiment = SimpleNamespace(
        figure=lambda name, draw, data, *, alt, subtitle, **options: drawn.update(
            figure=draw(data, **options)
        )
    )
    rows = [("m", "a", 1.0, True), ("m", "b", np.nan, False), ("m", "c", 1.0, False)]
    rows = [*rows, ("n", "a", 0.0, True), ("n", "b", 0.5, False), ("n", "c", 0.0, True)]
    leaks = pd.DataFrame(rows, columns=["mask", "case", "leak", "right"])
    names = {"experiment": experiment, "plots": plots, "np": np, "leaks": leaks}
    exec(cell, names | {"masks": ["m", "n"], "cases": ["a", "b", "c"]})
    (ax,) = drawn["figure"].axes
    (mesh,) = ax.collections
    cells = np.ma.filled(mesh.get_array().reshape(2, 3).astype(float), np.nan)
    np.testing.assert_array_equal(cells, [[0, np.nan, 1], [0, 1, 0]])
    colour_of = {text.get_text(): text.get_color() for text in ax.texts}
    assert colour_of["✗ NaN"] == "black"  # upon light grey
    (legend,) = drawn["figure"].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["right", "wrong", "NaN"]


def test_the_answer_of_33_says_whether_cells_hold_and_what_is_faster():
    cells = {"batch": [1, 2], "wrong": [0.0, 0.0], "logits_error": [0.0, 3e-7]}
    cells["cache"] = ["warm", "cold"]
    reported = {"cache": ["warm", "cold"], "context": [1024, 1024], "tokens": [0, 64]}
    offsets = {"modulo cache step (8)": [1, 1, None], "result": ["FAIL", "OK", "OK"]}
    offsets["context"] = ["context 8", "context 9", "context 10"]
    times = {"cache": ["cold", "hot"], "context": [64, 64], "ms": [10.0, 2.0]}
    tables = {"random_cells": cells, "edges": cells, "reported": reported}
    tables |= {"offsets": offsets, "times": times}
    names = {name: pd.DataFrame(table) for name, table in tables.items()}
    names |= {"all_gates": [], "trained": [None], "arithmetic": "exact"}
    names |= {"CHECKPOINT": "data/tiny-zaya", "ROUNDS": 3, "report_step": 8}
    names["DIMS"] = {"num_hidden_layers": 2, "hidden_size": 128}
    says("33", names, "zaya. Of all, 2 restore a cache, 2 restore nothing")
    says(
        "33",
        names,
        "Yes. 4 of 4 cells",
        "5 times as fast as a cold",
        "alone is not the cause",
    )
    says("33", names, "worst relative difference of the logits is 3e-07. 2 are of")
    assert overview.short_answer(answer("33", names)) == (
        "Yes. 4 of 4 cells give the logits of the same sequence alone."
    )
    says("33", names, "a random Llama of 2 layers and 2 of tiny-zaya.")
    says("33", names, "2 contexts, with the results context 8 FAIL, context 9 OK. Such")
    says("33", names, "no multiple of the cache's step of 8 rows")
    says(
        "33",
        names,
        "cache bug report (`data/sources/batch2_cache_bug.csv`) 1 of 2 conf",
    )
    says("33", names, "1 of 2 configurations gave no token", "warm")
    says("33", names, "random Llama after 64 tokens 5 times", "(medians; rounds: 3)")
    says("33", names, "is small: 2 layers of width 128", "was not measured here")
    names["edges"] = names["edges"].assign(wrong=1.0)
    names["offsets"].loc[1, "modulo cache step (8)"] = 0
    names["times"]["ms"] = [2.0, 10.0]
    says(
        "33",
        names,
        "No. 2 of 4 cells give",
        "5 times as slow as a cold",
        "may be the cause",
    )


def test_the_factor_of_33_can_be_computed_from_its_table_of_milliseconds():
    (cell,) = [c for c in cells_of(named("33"), "code") if '"first_token_ms"' in c]
    rows = {
        "cold": [100.0, 90.0, 140.0],
        "warm": [4.0, 5.0, 6.0],
        "hot": [2.0, 2.0, 1.0],
    }
    times = pd.DataFrame(
        [(cache, 64, ms) for cache, values in rows.items() for ms in values],
        columns=["cache", "context", "ms"],
    )
    longer = times.assign(context=128, ms=10 * times["ms"])
    tables = {}
    experiment = SimpleNamespace(
        table=lambda name, data, caption: tables.update({name: data})
    )
    exec(cell, {"experiment": experiment, "times": pd.concat([longer, times])})
    table = tables["first_token_ms"]
    assert (
        table.columns[1] == "start"
        and table["context"].tolist() == [64] * 3 + [128] * 3
    )
    of_64 = table.set_index("start").iloc[:3].drop(columns="context")
    assert of_64.loc["prefill from scratch"].tolist() == [100, 90, 140, 3, 1]
    assert of_64.loc["restored from a file"].tolist() == [5, 4, 6, 3, 20]
    assert of_64.loc["restored from memory"].tolist() == [2, 1, 2, 3, 50]


def processes_of_34(**speeds: float) -> pd.DataFrame:
    """Three interleaved processes of each setting `compress_kv`, within 1% of its
    tokens per second."""
    rng, rows = np.random.default_rng(0), []
    for number in range(3):
        for place, (name, speed) in enumerate(speeds.items()):
            compress, kv_write = name.split("_")
            row = {"name": name, "run_id": f"{number:03}-{place}", "kv_write": kv_write}
            row |= {"compress": compress, "layers_per_shard": 1, "layout": "bct1"}
            row |= {"value": speed * (1 + 0.01 * rng.standard_normal())}
            rows.append(row | {"max_seq_len": 128, "T": 1, "disturbed": None})
    return pd.DataFrame(rows)


def names_of_34(of_T: float = 2.0) -> dict:
    """The names of the answer: speeds at T 4 are `of_T` times those at T 1; four
    configurations pass, int8_mask is the fastest."""
    rng, rows = np.random.default_rng(0), []
    for number in range(3):
        for place, (S, T) in enumerate([(128, 1), (128, 4), (1024, 1), (1024, 4)]):
            value = 300 * (of_T if T == 4 else 1) * (0.8 if S == 1024 else 1)
            value *= 1 + 0.01 * rng.standard_normal()
            rows.append((f"{number:03}-{place}", S, T, value, None))
    columns = ["run_id", "max_seq_len", "T", "value", "disturbed"]
    rates = pd.DataFrame(rows, columns=columns)
    calls = rates.assign(value=1e3 / rates["value"])
    speeds = {"int8_mask": 400, "int8_slice": 300, "fp16_mask": 350, "fp16_slice": 310}
    valid = pd.DataFrame({"name": list(speeds), "verdict": "GREEN"})
    valid["quality"] = "WITHIN"
    valid = valid.assign(kl_mean=2e-4, kl_p99=3e-3, disturbed=0, bundle_bytes=2**20)
    # both paths in every round, and reading all rows takes half as long again
    parts = [calls.assign(rows="some rows"), calls.assign(rows="all rows")]
    parts[1]["value"] *= 1.5
    parts[1]["run_id"] += "-all"
    names = {"rates": rates, "layers": calls, "both": pd.concat(parts)}
    names |= {"valid": valid, "configurations": valid, "subtitle": "int8, tiny-llama"}
    names |= {"processes": processes_of_34(**speeds), "MAX_KL": 0.05, "all_gates": []}
    return names | {"EXTRACT": False, "ROUNDS": 3, "decoder": None, "POSITIONS": 48}


def test_the_answer_of_34_turns_with_its_tables():
    names = names_of_34()
    says("34", names, " 4 has more than 1,", "1024 has fewer than 128", "\n4 of 4")
    says(
        "34", names, "int8_mask is the fastest: ", "of max_seq_len 128 and T 1.\n## The"
    )
    says("34", names, "It is the fastest in every round. The closest is fp16_mask")
    says("34", names, "kv_write slice is slower than mask in 2 of 2")
    says("34", names, "compress fp16 is faster than int8 in 1 of 2; ")
    says(
        "34",
        names,
        "T 4 is a call of the prompt (prefill) with 4 tokens; T 1 is decoding.",
    )
    says(
        "34",
        names,
        "Reading all rows takes longer than reading some rows at max_seq_len 128,",
    )
    says("34", names, "The first takes, over the second, 1.5 times (95%")
    says(
        "34",
        names,
        "no gate is RED on any of these 4 exports",
        "over 48 tokens. It says",
    )
    says(
        "34", names, "mean KL is 0.0002 nats, at most your limit of 0.05; their 99% KL"
    )
    says("34", names, "medians over 3 processes (the least to the most of them)")
    assert "workbench run" not in answer("34", names)
    dearer = names["valid"].assign(kl_mean=[2e-4, 3e-3, 2e-4, 3e-3])
    says("34", names | {"valid": dearer}, "mean KL is 0.0002 to 0.003 nats")
    slower = names_of_34(of_T=0.5)
    slower["processes"] = processes_of_34(int8_mask=300, int8_slice=400)
    says("34", slower, " 4 has fewer than 1,", "int8_slice is the fastest: ")
    says("34", slower, "kv_write slice is faster than mask in 1 of 1.")
    names["valid"] = names["valid"].assign(kl_mean=1.0, quality="OVER")
    words = answer("34", names)
    assert words.startswith("0 of 4 configurations pass.\n")
    assert "is the fastest" not in words


def test_the_answer_of_34_states_no_order_that_rounds_do_not_decide():
    names = names_of_34(of_T=1.0)
    again = "`workbench run 34 --set ROUNDS=5`"
    says("34", names, "## Not decided\nNot told apart", "): T 4 against 1.\nOn", again)
    names = names_of_34()
    reason = "load 8.9 on 2 cores before it"
    names["rates"] = names["rates"].assign(disturbed=reason)
    words = answer("34", names)
    assert "every process of one of the two was disturbed" in words
    assert " 4 has more than 1," not in words
    close = names_of_34()
    close["processes"] = processes_of_34(int8_mask=400, int8_slice=399, fp16_mask=350)
    words = answer("34", close)
    headline, _, second, *_ = lines = words.splitlines()
    assert "undecided against int8_" in headline and "is the fastest" not in headline
    assert "is faster: all 3 rounds agree, but the ratio, 0.993," in second
    # one list has all that is open, and one command decides it
    assert words.count("Not told apart") == words.count("workbench run 34") == 1
    assert again in lines[lines.index("## Not decided") + 2]
    one = names_of_34()
    one |= {"EXTRACT": True, "rates": one["rates"][lambda rows: rows.run_id < "001"]}
    says("34", one, "Preliminary", "1 interleaved round of 3", "--set EXTRACT=False")
    assert " 4 has more than 1," not in answer("34", one)


def test_the_first_line_of_34_names_no_fastest_where_processes_were_disturbed():
    names = names_of_34()
    names["configurations"] = names["configurations"].assign(disturbed=[1, 0, 2, 0])
    headline, second, *_ = answer("34", names).splitlines()
    assert headline == (
        "4 of 4 configurations pass. Other work disturbed 3 processes; a configuration counts "
        "without them where it has others."
    )
    assert second.startswith("int8_mask is the fastest: ")


def figures_of_34(start: str, **names) -> dict[str, SimpleNamespace]:
    """The figures that the cell of 34 with this text draws from these names."""
    (cell,) = [cell for cell in cells_of(named("34"), "code") if start in cell]
    figures = {}

    def figure(name, draw, data, *, alt, subtitle, section=None, **options):
        figures[name] = draw(data, **options)

    names |= {"experiment": SimpleNamespace(figure=figure), "plots": plots, "pd": pd}
    exec(cell, names | {"machine": "a machine"})
    return figures


def test_34_draws_all_times_on_linear_axes_that_say_where_they_start():
    rows = pd.DataFrame({"run_id": ["1", "2", "3"], "max_seq_len": [128, 512, 1024]})
    rows = rows.assign(T=1, value=[38.0, 44.0, 52.0])
    names = dict.fromkeys(("rates", "layers", "calls"), rows)
    names |= {
        "literal": None,
        "T": [1],
        "ROUNDS": 1,
        "growth": {},
        "conditions": "",
        "spread": "",
    }
    names |= {"figure_columns": [*rows], "speeds": lambda grid, phase: rows}
    names |= {"sweep_part": lambda *arguments, **options: None}
    for name in ("paths", "layer_ms"):
        (figure,) = figures_of_34(f'"{name}", plots.lines', **names).values()
        assert {ax.get_yscale() for ax in figure.axes} == {"linear"}
        assert "(axis starts above 0)" in figure.axes[0].get_ylabel()


def test_34_explains_filled_marks_beside_hollow_ones():
    figures = figures_of_34('"predictions", plots', roofline=roofline)
    (legend,) = figures["predictions"].legends
    notes = legend.get_title().get_text().splitlines()
    filled = notes.index("filled: predicted without the rows of their author")
    assert notes[filled - 1] == "hollow: in no fit"
    # the title and the axis have one word for the times of others
    (ax,) = figures["predictions"].axes
    assert ax.get_xlabel() == "measured ms of a call"
    assert "over measured milliseconds" in figures["predictions"].get_suptitle()


def test_34_and_35_print_predictions_with_three_digits():
    for number, start in (("34", '"predicted", '), ("35", '"choices", table')):
        (cell,) = [cell for cell in cells_of(named(number), "code") if start in cell]
        (columns,) = re.findall(r"conclude\.round_columns\(\w+, \[(.*?)\]\)", cell)
        assert {'"ms"', '"low_ms"', '"high_ms"'} <= set(columns.split(", "))


def test_a_heatmap_says_what_its_layers_are_fed():
    cells = [cell for path in NOTEBOOKS for cell in cells_of(path, "code")]
    drawn = [cell for cell in cells if "plots.heatmap" in cell]
    assert len(drawn) >= 5
    for cell in drawn:
        assert "each layer fed Hugging Face's input" in cell, cell


def test_35_names_the_conditions_of_its_heatmap():
    rows = pd.DataFrame({"layer": [0, 1], "position": 0, "tensor": "update", "T": 1})
    rows = rows.assign(mode="isolated", cosine=0.999, finite=True)
    rows = rows.assign(error=0.0, budget=0.0, max_abs=1.0, digest=["a", "b"])
    names = {"results": {"mixed": SimpleNamespace(rows=rows)}, "MAX_SEQ_LEN": 256}
    names |= {"golden": SimpleNamespace(tokens=["a"])}
    names |= {"source": SimpleNamespace(name="tiny-llama")}
    names |= {"decoder": SimpleNamespace(runtime="portable")}
    subtitle = figures_of_35('"cosine", plots', **names)["cosine"].subtitle
    facts = "tiny-llama · T = 1 · max_seq_len 256 · portable runtime · "
    assert subtitle == facts + "each layer fed Hugging Face's input"


def test_34_draws_configurations_of_one_kl_with_looks_of_their_own():
    cells = cells_of(named("34"), "code")
    (table,) = [cell for cell in cells if 'configurations["option"] = ' in cell]
    (figure,) = [cell for cell in cells if '"choice", plots' in cell]
    values = {"kv_write": ["mask", "slice"], "layers_per_shard": [1, 4]}
    rows = pd.DataFrame(product(*values.values()), columns=list(values))
    rows = rows.assign(
        tokens_per_s=[15.0, 18.0, 16.0, 17.0], kl_mean=1e-3, verdict="GREEN"
    )
    rows = rows.assign(quality="WITHIN", invalid=None, layout="bct1", name="a")
    figures = {}
    experiment = SimpleNamespace(
        figure=lambda name, draw, data, *, alt, subtitle, **options: figures.update(
            {name: draw(data, **options)}
        ),
        add_gates=lambda results: None,
    )
    names = {"axes": values | {"layout": ["bct1"]}, "configurations": rows}
    (statement,) = re.findall(r"^names = .*?^    *for row .*?$", table, re.M | re.S)
    names |= {"experiment": experiment, "plots": plots, "gates": gates, "MAX_KL": 0.05}
    exec(statement + "\n" + figure, names | {"facts": ["a"], "machine": "b"})
    (legend,) = figures["choice"].legends
    labels = [text.get_text() for text in legend.get_texts()]
    keys = dict(zip(labels, legend.legend_handles))
    of_options = [key for label, key in keys.items() if label.startswith("kv_write")]
    assert "kv_write mask, layers_per_shard 4" in labels
    shapes = {key.get_paths()[0].vertices.tobytes() for key in of_options}
    assert len(shapes) == len(of_options) == 4
    assert not any("layout" in label for label in labels)


def of_35() -> dict:
    """The names in the answer of 35: the figures of SmolLM2, rounded."""
    choices = pd.DataFrame(
        [
            ["one format", "lut4-g8", 65.0, 4.05, 0.227, 1.45, 0.9],
            ["one format", "lut6-g16", 98.0, 6.1, 0.012, 0.06, 1.1],
            ["one format", "int8-channel", 129.0, 8.02, 0.003, 0.02, 1.4],
            ["chosen", "mixed", 84.0, 5.2, 0.049, 0.37, 1.0],
        ],
        columns=["kind", "name", "mib", "bits", "kl", "kl_p99", "ms"],
    )
    choices = choices.assign(low_ms=choices["ms"] / 2, high_ms=choices["ms"] * 3)
    choices = choices.assign(bundle_mib=choices["mib"] + 58)
    kinds = pd.DataFrame(
        {"kind": ["head", "q_proj"], "weights": [0.2, 0.8], "loss": [0.4, 0.6]}
    ).assign(bits=[6.1, 5.0])
    judged = pd.DataFrame({"bundle": ["mixed"], "tokens": 700, "kl_mean": 0.048})
    judged = judged.assign(kl_p99=0.3, perplexity_ratio=1.03, same_top=0.87)
    judged = judged.assign(windows=9, ratio_low=1.011, ratio_high=1.049)
    judged = judged.assign(calibrated="yes", text="c.txt")
    names = {"table": choices, "kinds": kinds, "judged": judged, "all_gates": []}
    names |= {"MAX_KL": 0.05, "CHIP": "M4", "decoder": None}
    names |= {"CALIBRATE": "data/a.txt", "SELECT": "data/b.txt"}
    return names | {"golden": None, "result": SimpleNamespace(rows=None)}


def test_the_answer_of_35_turns_with_its_tables():
    names = of_35()
    words = answer("35", names)
    # the embedding table, which stays in fp16, is in the headline
    assert words.startswith("A bundle of 142.0 MiB, of which matrices take 84.0, keeps")
    assert "have 5.20 bits per weight. The other 58.0 MiB are the embedding" in words
    assert "lut6-g16 with 98.0 MiB of matrices, a bundle of 156.0 MiB." in words
    assert "needs 14% less for the matrices, 9% less for the bundle" in words
    assert (
        "1.00 in place of 1.10 ms a call, with a 90% interval of 0.5 to 3 ms" in words
    )
    assert "head: 20% of the weights cause 40% of the loss" in words
    assert "above the limit" not in words
    assert "of 0.05 nats: 0.049 on the text for selection. 99% of its tokens" in words
    assert (
        "fitted to the inputs on a.txt. The formats of the matrices are chosen on b"
        in words
    )
    assert (
        "On 700 tokens of a third text, held out (`c.txt`), mixed (calibrated) has"
        in words
    )
    plain = names["judged"].assign(bundle="int8-channel", calibrated="no")
    both = pd.concat([names["judged"], plain])
    words_of_both = answer("35", names | {"judged": both})
    assert "held out (`c.txt`), int8-channel (not calibrated) has" in words_of_both
    assert "is 1.030 times Hugging Face's (95%" in words
    assert "(95% interval 1.011 to 1.049, from 9 windows)" in words
    few = names["judged"].assign(windows=3, ratio_low=np.nan, ratio_high=np.nan)
    words = answer("35", names | {"judged": few})
    assert "1.030 times Hugging Face's (too few windows for an interval: 3)" in words
    names["judged"] = names["judged"].assign(kl_mean=0.06)
    assert "the mean KL is above the limit, by 20%" in answer("35", names)
    choices = names["table"]
    names["table"] = choices.assign(kl=choices["kl"].mask(choices["mib"] == 98.0, 0.06))
    assert "int8-channel with 129.0 MiB of" in answer("35", names)


def figures_of_35(start: str, **names) -> dict[str, SimpleNamespace]:
    """The figures that the cell with this text draws from these names: data, subtitle,
    title and the drawn figure."""
    (cell,) = [cell for cell in cells_of(named("35"), "code") if start in cell]
    figures = {}

    def figure(name, draw, data, *, alt, subtitle, **options):
        figure = draw(data, **options)
        title = options["title"]
        figures[name] = SimpleNamespace(
            data=data, subtitle=subtitle, title=title, figure=figure
        )

    names |= {"experiment": SimpleNamespace(figure=figure), "plots": plots, "pd": pd}
    exec(cell, names | {"PRESETS": PRESETS, "MAX_KL": 0.05, "CHIP": "M4"})
    return figures


def test_35_names_the_chip_where_times_are_and_says_whether_their_order_is_certain():
    shown = of_35()["table"].assign(predicted_kl=0.1)
    parts = {"mixed": shown[:0], "alone": shown[:-1], "chosen": shown[-1:]}
    facts = {"subtitle": "tiny-llama · 9 tokens of a.txt"}
    facts["other_bytes"] = 58 << 20
    of_bytes = figures_of_35('"bytes", plots', **facts, **parts)["bytes"]
    assert "M4" not in of_bytes.title + of_bytes.subtitle
    label = " ".join(of_bytes.figure.axes[0].get_xlabel().split())
    assert label == "MiB of matrices (bundle: 58.0 MiB more)"
    every = pd.concat(parts.values())
    # 0.9 to 1.4 ms, with an interval of half to three times as long
    times = figures_of_35('"times", plots', **facts, every=every)["times"]
    assert "M4" in times.title
    # the interval of the chosen formats, 1 ms, is a bar from 0.5 to 3 ms
    spans = [
        bar.lines[2][0].get_segments()[0][:, 0].tolist()
        for bar in times.figure.axes[0].containers
    ]
    assert [0.5, 3.0] in spans
    (legend,) = times.figure.legends
    words = " ".join(legend.get_title().get_text().split())
    assert "wider than the differences: the order of the choices" in words
    sure = every.assign(low_ms=0.99 * every["ms"], high_ms=1.01 * every["ms"])
    times = figures_of_35('"times", plots', **facts, every=sure)["times"]
    (legend,) = times.figure.legends
    assert "not certain" not in legend.get_title().get_text()


@pytest.mark.parametrize("count", [2, 60])
def test_35_names_the_head_below_a_grid_of_layers_alone(count):
    layers = [str(layer) for layer in range(count)]
    stored = pd.DataFrame({"kind": "q_proj", "layer": [*layers, None]})
    stored.loc[count, "kind"] = "head"
    stored = stored.assign(candidate=["lut4-g8"] * count + ["lut6-g16"])
    alone = of_35()["table"].query("kind == 'one format'")
    source = SimpleNamespace(name="tiny-llama")
    names = {"alone": alone, "stored": stored, "COMPARED": [], "source": source}
    bits = figures_of_35('"bits", plots', **names)["bits"]
    # no row and no column of the grid is almost empty
    assert bits.data.index.tolist() == ["q_proj"]
    assert bits.data.columns.tolist() == layers and bits.data.notna().all(axis=None)
    (legend,) = bits.figure.legends
    notes = legend.get_title().get_text().splitlines()
    assert notes[-1] == "head, in no layer: lut6-g16, 6.1 bits"
    bits.figure.draw_without_rendering()
    ax = bits.figure.axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "kind")
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:]))


OTHER = {"05": "qwen2", "30": "zaya", "31": "qwen2", "33": "llama", "34": "qwen2"}
"""The families of random checkpoints, which have no tokenizer."""


@pytest.mark.slow("a kernel runs a whole notebook")
@each_notebook
def test_it_runs_with_another_checkpoint_and_its_answer_is_true_of_its_files(
    path, small_project, forked, monkeypatch, tmp_path
):
    """Also where the checkout cannot be written: everything goes to another folder."""
    monkeypatch.chdir(small_project)
    monkeypatch.setenv("WORKBENCH_OUT", str(tmp_path))
    number = path.name[:2]
    other = {"CHECKPOINT": f"data/random-{OTHER[number]}"} if number in OTHER else {}
    if number in ("05", "31"):
        other["MAX_KL"] = 1e-9  # OVER: presets are tried, which no shipped run does
    result = run_notebook(number, other, progress=False)
    assert all(Path(figure["path"]).is_file() for figure in result["figures"])
    assert tmp_path in Path(result["report"]).parents
    if number != "33":  # the data of its figure are texts
        names = stored(number, Path(result["report"]).parent)
        assert result["conclusion"] == answer(number, names)
    assert small.changes(small_project) == ""
    assert not (small_project / "build" / "experiments" / path.stem).exists()


def test_34_says_why_no_run_is_valid():
    (cell,) = [c for c in cells_of(named("34"), "code") if "def speeds" in c]
    rows = pd.DataFrame({"invalid": ["it ran on the CPU"], "T": 1, "value": 1.0})
    sweep = SimpleNamespace(processes=lambda *_, **__: rows)
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
        figure=lambda name, draw, data, *, alt, subtitle, **options: drawn.update(
            figure=data, drawn=draw(data, **options)
        ),
        table=lambda name, data, caption: drawn.update(table=data),
    )
    names = {"experiment": experiment, "plots": plots, "display": lambda value: None}
    exec(cell, names | {"runs": runs})
    assert "no run on Core ML" in capsys.readouterr().out and not drawn
    exec(cell, names | {"runs": runs.assign(runtime="coreml", compute_units="ALL")})
    assert len(drawn["table"]) == len(runs) and (drawn["figure"]["ALL"] > 0).all()
