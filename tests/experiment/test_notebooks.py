"""Notebooks: committed without outputs, 15 to 25 cells, prose without results; their
answers are computed from the tables of the run, and turn when the tables do."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from browser.lab import changes, commit
from experiment import small

from workbench import plots
from workbench.check import gates
from workbench.experiment import gate_table, notebook_parameters, run_notebook

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
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


def answer_code(path: Path, *more: str) -> str:
    """The code that computes the answer and concludes, one cell or two; with the cells
    that hold `more`."""
    code = cells_of(path, "code")
    assert sum("experiment.conclude(" in cell for cell in code) == 1
    parts = "words = ", "experiment.conclude(", *more
    return "\n".join(cell for cell in code if any(part in cell for part in parts))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_asks_a_question_and_computes_the_answer(path):
    prose = cells_of(path, "markdown")
    assert re.match(rf"# {path.name[:2]} · .*\?\n", prose[0] + "\n")
    assert any(cell.startswith("## Answer") for cell in prose)
    assert answer_code(path)
    question = prose[0].partition("\n")[0].removeprefix(f"# {path.name[:2]} · ")
    assert f"| `{path.stem}` | {question} |" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prose_states_no_results(path):
    code = "\n".join(cells_of(path, "code"))
    for cell in cells_of(path, "markdown"):
        assert "## Answer" not in cell or not re.search(r"\d", cell)
        for found in RESULTS.finditer(cell):
            # a setting of the experiment, such as a fault that a cell plants
            assert found[0] in code, f"{path.stem}: {found[0]!r} in {cell[:60]!r}"


def answer(number: str, *more: str, **names) -> str:
    """What an answer concludes from these names."""
    concluded = []
    names = {"pd": pd, "np": np, "gates": gates} | names
    experiment = SimpleNamespace(
        gates=names.pop("all_gates", []),
        add_gates=lambda results: None,
        conclude=lambda words, *args, **tables: concluded.append(words),
    )
    exec(answer_code(named(number), *more), names | {"experiment": experiment})
    return concluded[0]


def updates(far: dict[int, float]) -> SimpleNamespace:
    rows = [
        {"mode": "isolated", "tensor": "update", "T": T, "cosine": 1 - value / share}
        for T, value in far.items()
        for share in (1, 10)
    ]
    cost = SimpleNamespace(kl=np.array([0.01, 0.03]))
    gate = gates.at_most("budget", far[4], 1e-3, "error")
    return SimpleNamespace(rows=pd.DataFrame(rows), gates=[gate], cost=cost)


def answer_05(sound: float, late: float, turned: float) -> str:
    results = {"result": {1: 1e-4, 4: sound}, "late": {1: 1e-4, 4: late}}
    results = {name: updates(far) for name, far in results.items()}
    results |= {"turned": updates({1: turned, 4: turned})}
    red = {name: gate_table(results[name].gates) for name in ("late", "turned")}
    red = {f"{name}_red": t[t["verdict"] == "✗ RED"] for name, t in red.items()}
    names = red | {"Ts": [1, 4], "T_MAX": 4}
    names |= {"all_gates": results["result"].gates, "MAX_KL": 0.05, "decoder": None}
    return answer("05", **results, **names)


def test_the_answer_of_05_turns_with_its_rows():
    words = answer_05(sound=1e-4, late=0.5, turned=2e-3)
    assert "keeps its cache: 0 of 1 gates are RED (none)" in words
    late = "At T = {} and with writes one row late, 1 − cosine reaches"
    assert f"{late.format(1)} 1.0e-04, as in the sound" in words
    assert f"{late.format(4)} 5.0e-01, 5e+03 times the 1.0e-04" in words
    assert words.count("Gates that name it: budget.") == 2
    assert "mean KL 0.02 nats" in words
    words = answer_05(sound=0.5, late=1e-4, turned=1e-4)
    assert "does not keep its cache: 1 of 1 gates are RED (budget)" in words
    assert f"{late.format(4)} 1.0e-04, 0.0002 times" in words
    assert "Gates that name it: none." in words


def answer_31(shares: dict[str, float], again: float, fp16: float) -> str:
    table = pd.DataFrame(np.diag(list(shares.values())), [*shares], [*shares])
    parts = {"layer": [0, 1], "reauthoring": [0.0, again], "total": [0.2, 0.1]}
    remedies = {"layer": [0], "tensors": ["w"], "error": [0.2], "fp16": [fp16]}
    names = {"parts": pd.DataFrame(parts), "remedies": pd.DataFrame(remedies)}
    names |= {"REAUTHORING": 1e-5, "decoder": None, "result": updates({4: 0.1})}
    return answer("31", shares=table, **names)


def test_the_answer_of_31_turns_with_its_tables():
    words = answer_31({"quantization": 0.9, "precision": 0.05}, 1e-7, 0.1)
    assert "Most of the squared error is quantization: 90.0%" in words
    assert "1.0e-07 at most, within its limit of 1e-05" in words
    assert "The layer with the largest error is 0: 20.00%" in words
    assert "storing w as fp16 lowers its error, 20.00% to 10.00%" in words
    words = answer_31({"quantization": 0.05, "precision": 0.9}, 1e-3, 0.3)
    assert "Most of the squared error is precision: 90.0%" in words
    assert "beyond its limit" in words and "does not lower" in words


def answer_34(rate: float, ms: float, kl: float) -> str:
    """Answer of a run whose last T and max_seq_len have `rate` and `ms` times the
    first's."""
    grid = [(S, T) for S in (128, 512) for T in (1, 4)]
    rates = pd.DataFrame(grid, columns=["max_seq_len", "T"])
    last = rates["T"].eq(4) * 1 + rates["max_seq_len"].eq(512) * 1
    layers = rates.assign(layer_ms=0.5 * ms**last)
    rates = rates.assign(value=1000 * rate**last)
    both = pd.concat([rates.assign(rows=rows) for rows in ("all rows", "used rows")])
    table = {"name": ["a", "b"], "kv_write": ["mask", "slice"], "kl_mean": [kl, 0.01]}
    table |= {"verdict": ["GREEN", "GREEN"], "tokens_per_s": [2000.0, 200.0]}
    names = {"machine": "a machine", "EXTRACT": False, "MAX_KL": 0.05, "both": both}
    names |= {"MAX_SEQ_LEN": [128, 512], "T": [1, 4], "layers": layers}
    return answer("34", rates=rates, valid=pd.DataFrame(table), **names)


def test_the_answer_of_34_turns_with_its_tables():
    words = answer_34(rate=2, ms=3, kl=0.02)
    assert (
        "T 4 has more tokens per second than T 1: 4000 against 2000 (2.00 times)"
        in words
    )
    assert "max_seq_len 512 has more tokens per second than max_seq_len 128" in words
    assert "max_seq_len 512 has more ms per layer" in words
    assert "The fastest that passes: a, 2000 tok/s, mean KL 0.02 nats." in words
    assert "slice: 200 tok/s" in words
    words = answer_34(rate=0.5, ms=0.5, kl=0.2)
    assert (
        "T 4 has fewer tokens per second than T 1: 250 against 500 (0.50 times)"
        in words
    )
    assert "max_seq_len 512 has fewer ms per layer" in words
    assert (
        "1 of 2 configurations pass" in words and "The fastest that passes: b" in words
    )
    assert "as many" in answer_34(rate=1, ms=1, kl=0.02)


def scores(naive_bits: float, scaled_bits: float) -> pd.DataFrame:
    """Both orders of the score at two query norms; the one without headroom overflows."""
    rows = []
    for order, bits in (("naive", naive_bits), ("scaled", scaled_bits)):
        for norm in (0, 64):
            fault = "matmul" if norm and bits < 0 else None
            row = {"order": order, "query_norm": norm, "headroom_bits": bits}
            row |= {"largest": 100.0, "first inf": fault, "first nan": fault}
            rows.append(row | {"with narrow sums": fault})
    return pd.DataFrame(rows)


def test_32_says_which_order_overflows():
    leaks = pd.DataFrame({"right": [True, False], "leak": [0.0, np.nan]})
    shared = {"orders": ["naive", "scaled"], "leaks": leaks, "QUERY_NORMS": [0, 64]}
    shared["operations"] = pd.DataFrame({"operation": ["matmul", "none"]})
    gates_cell = "naive, scaled = ("
    said = answer("32", gates_cell, scores=scores(-1.0, 2.5), **shared)
    assert "infinite in fp16 from a query norm of 64" in said
    assert "3.5 bits more" in said and "every result is finite" in said
    turned = answer("32", gates_cell, scores=scores(2.5, -1.0), **shared)
    assert "No query norm that was tried" in turned
    assert "3.5 bits fewer" in turned and "overflows from a query norm of 64" in turned
    assert "Of 2 cases of masks 1 are right; 1 are NaN" in said
    assert "names matmul; in exported layers none" in said


@pytest.mark.parametrize("fine", [True, False])
def test_33_says_whether_cells_hold_and_what_is_faster(fine):
    verdict = "GREEN" if fine else "RED"
    found = pd.DataFrame(
        {"batch": [1, 2], "verdict": ["GREEN", verdict], "apart": [0.0, 3e-7]}
    )
    reported = pd.DataFrame(
        {"cache": ["warm", "cold"], "context": [1024, 1024], "tokens": [0, 64]}
    )
    rows = [("cold", 64, 10.0), ("warm", 64, 5.0), ("hot", 64, 2.0)]
    if not fine:
        rows = [("cold", 64, 2.0), ("warm", 64, 5.0), ("hot", 64, 10.0)]
    said = answer(
        "33",
        found=found,
        edges=found,
        reported=reported,
        offsets=pd.DataFrame(
            {"offset modulo step": [1, 1 if fine else 2], "result": ["FAIL", "OK"]}
        ),
        times=pd.DataFrame(rows, columns=["cache", "context", "ms"]),
        decoders=[None],
    )
    if fine:
        assert said.startswith("Yes. 4 cells") and "5 times faster" in said
        assert "do not tell" in said and "does not follow" in said
    else:
        assert said.startswith("No: 2 of 4 cells differ") and "5 times slower" in said
        assert "offsets tell" in said and "may follow" in said
    assert "1 of 2 configurations gave no token" in said and "warm" in said


@pytest.mark.parametrize("fine", [True, False])
def test_30_counts_ingredients_and_says_who_reads_more(fine):
    order = ("dense", "routed") if fine else ("routed", "dense")
    routing = pd.DataFrame(
        [(order[0], 5, 400.0, 2.0, 9.0), (order[1], 9, 100.0, 4.0, 9.0)],
        columns=["experts", "programs", "bytes", "ms of experts", "ms"],
    )
    parts = ["attention", "moe", "probe: q_proj, o_proj"]
    distances = pd.DataFrame(
        {"update": [0.5, 1e-3 if fine else 1e-6], "hidden": [0.1, 1e-7]},
        index=["L2 norm", "GELU"],  # its loss is hidden in the stream
    )
    red = gates.Gate("host", "RED", 1.0, 0.0, "")
    said = answer(
        "30",
        all_gates=[] if fine else [red],
        routing=routing,
        shares=pd.DataFrame({"part": parts, "ms": [9.0, 5.0, 1.0]}),
        distances=distances,
        own=1e-4,
        prompts=pd.DataFrame({"worst 1 − cosine": [2e-4, 3e-5]}),
        source=SimpleNamespace(name="tiny-zaya"),
        PROMPTS=[[1]],
        T_MAX=4,
        decoder=None,
        result=SimpleNamespace(rows=None),
    )
    assert "10% of the attention's" in said and "7% of the layers'" in said
    if fine:
        assert said.startswith("Yes.") and "2 of 2 ingredients" in said
        assert "lies 0.0002 (1 − cosine)" in said and "all but GELU" in said
        assert "4 times fewer bytes" in said and "2 times more milliseconds" in said
    else:
        assert said.startswith("No: host is RED.") and "1 of 2 ingredients" in said
        assert "4 times more bytes" in said and "2 times fewer milliseconds" in said


def stored(folder: Path) -> dict:
    """The names of an answer from the files of a run: data of figures, tables and
    gates."""
    run = json.loads((folder / "run.json").read_text())
    # a table and a figure of one name: the answer reads the table
    paths = sorted(folder.glob("*/*.parquet"))
    files = {path.stem: pd.read_parquet(path) for path in paths}
    found = [SimpleNamespace(**gate) for gate in run["gates"]]
    names = run["parameters"] | files | {"all_gates": found, "decoder": None}
    number = folder.parent.name[:2]
    if number == "05":
        values = {gate.name: gate.value for gate in found}
        cost = SimpleNamespace(kl=np.array([values["max_kl"]]))
        names["result"] = SimpleNamespace(rows=files["fidelity"], cost=cost)
        for name, figure in (("late", "write_address"), ("turned", "rope")):
            rows = files[figure][files[figure]["bundle"] != "sound"]
            names[name] = SimpleNamespace(rows=rows)
            names[f"{name}_red"] = files[f"{figure}_gates"]
        names["Ts"] = [1, names["T_MAX"]]
    if number == "30":
        rows = files["cosine"].query("mode == 'isolated' and tensor == 'update'")
        names["own"] = 1 - rows["cosine"].min()
        names["distances"] = names["own"] * 10 ** files["ingredients"]
        names |= {"shares": files["probe"], "result": SimpleNamespace(rows=None)}
        names["source"] = SimpleNamespace(name=Path(names["CHECKPOINT"]).name)
    if number == "31":
        names["shares"] = files["shares"].set_index("part")
        names |= {"REAUTHORING": gates.REAUTHORING, "result": updates({4: 0.1})}
    if number == "32":
        names |= {
            "scores": files["orders"],
            "orders": files["orders"]["order"].unique(),
        }
    if number == "34":
        names |= {"rates": files["speed"], "layers": files["layer_ms"]}
        names |= {"both": files["paths"], "valid": files["choice"]}
        names["machine"] = files["speed"]["machine"].iloc[0]
    return names


def check_answer(folder: Path) -> None:
    """The run's answer is what its notebook computes from the run's files."""
    number = folder.parent.name[:2]
    if number == "33":
        return  # its figure holds texts; `test_33_…` reverses its tables
    more = ["naive, scaled = ("] if number == "32" else []
    said = json.loads((folder / "run.json").read_text())["conclusion"]
    assert said == answer(number, *more, **stored(folder))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout whose notebooks have small parameters."""
    folder = small.project(tmp_path_factory.mktemp("project"))
    commit(folder)
    return folder


OTHER = {"05": "qwen2", "31": "qwen2", "33": "llama", "34": "qwen2"}


@pytest.mark.slow("a kernel runs a whole notebook")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_with_another_checkpoint_and_its_answer_is_true_of_its_files(
    path, project, forked, monkeypatch
):
    monkeypatch.chdir(project)
    number = path.name[:2]
    other = {"CHECKPOINT": f"data/tiny-{OTHER[number]}"} if number in OTHER else {}
    if number == "05":
        shutil.copytree(Path(other["CHECKPOINT"]), "build/tiny-plain")
        Path("build/tiny-plain/tokenizer.json").unlink()
        other = {"CHECKPOINT": "build/tiny-plain"}
    result = run_notebook(number, other, progress=False)
    assert all(Path(figure["path"]).is_file() for figure in result["figures"])
    check_answer(Path(result["report"]).parent)
    assert changes(project) == []


def test_34_draws_what_macs_measured(capsys):
    rows = [
        ("coreml", units, T) for units in ("CPU_ONLY", "CPU_AND_NE") for T in (1, 4)
    ]
    runs = pd.DataFrame(rows, columns=["runtime", "compute_units", "T"])
    same = {
        "machine": "Apple M9",
        "checkpoint": "a",
        "compress": "fp16",
        "kv_write": "mask",
    }
    same |= {"max_seq_len": 64, "layers_per_shard": 1, "status": "ok", "run_id": "one"}
    runs = runs.assign(**same, ane_ops_share=0.5, worst_cosine=1.0)
    runs["tokens_per_s"] = [10.0, 20.0, 30.0, 40.0]
    (cell,) = [c for c in cells_of(named("34"), "code") if "macs = runs[" in c]
    drawn = {}

    def figure(name, draw, data, *, alt, about, **options):
        drawn[name] = data
        draw(data, **options)

    def table(name, data, caption):
        drawn[f"{name} table"] = data

    names = {"experiment": SimpleNamespace(figure=figure, table=table), "plots": plots}
    names["display"] = lambda shown: None
    exec(cell, names | {"runs": runs})
    assert drawn["macs"].loc["T 4", "CPU_AND_NE"] == 40
    assert len(drawn["macs table"]) == 4
    exec(cell, names | {"runs": runs.assign(runtime="portable")})
    assert "no run on Core ML" in capsys.readouterr().out
