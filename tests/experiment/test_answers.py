"""Answers are computed: on a table whose order is reversed their words turn, and no prose cell holds
a result."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from workbench.check import gates

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def cells(number: str) -> list[dict]:
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def answer(number: str, **names) -> str:
    """The words of the notebook's answer cell, run on these names alone."""
    code = ["".join(c["source"]) for c in cells(number) if c["cell_type"] == "code"]
    (source,) = [text for text in code if "words = " in text]
    said = []
    experiment = SimpleNamespace(
        gates=names.pop("results", []),
        conclude=lambda words, *_, **__: said.append(words),
    )
    scope = {"pd": pd, "np": np, "gates": gates, "experiment": experiment} | names
    exec(source, scope)
    return said[0] if said else scope["words"]


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
    shared["decoder"] = None
    said = answer("32", scores=scores(-1.0, 2.5), **shared)
    assert "infinite in fp16 from a query norm of 64" in said
    assert "3.5 bits more" in said and "every result is finite" in said
    turned = answer("32", scores=scores(2.5, -1.0), **shared)
    assert "No query norm that was tried" in turned
    assert "3.5 bits fewer" in turned and "overflows from a query norm of 64" in turned
    assert "Of 2 cases of masks 1 are right; 1 are NaN" in said


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
        index=["L2 norm", "GELU"],
    )
    red = gates.Gate("host", "RED", 1.0, 0.0, "")
    said = answer(
        "30",
        results=[] if fine else [red],
        routing=routing,
        shares=pd.DataFrame({"part": parts, "ms": [9.0, 5.0, 1.0]}),
        distances=distances,
        hidden=["GELU"],
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


RESULT = re.compile(
    r"\d[\d.,]* ?(times|%|ms|tok/s)|GREEN on|(fewer|faster|slower) than"
)


@pytest.mark.parametrize("number", ["30", "32", "33"])
def test_prose_holds_no_result_and_cells_can_be_read(number):
    found = cells(number)
    assert 15 <= len(found) <= 25
    for cell in found:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert text.count("\n") < 20, text
            continue
        assert not RESULT.search(text), text
        if "## Answer" in text:
            assert not re.search(r"\d", text), text
