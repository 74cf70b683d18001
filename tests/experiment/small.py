"""A copy of the project in which each notebook has parameters that run within seconds."""

import shutil
from pathlib import Path

import nbformat
from tiny import ROOT

SMALL = {
    "05": {"MAX_SEQ_LEN": 64, "T_MAX": 2, "POSITIONS": 12},
    "30": {
        "MAX_SEQ_LEN": 96,
        "T_MAX": 2,
        "PROMPTS": [[42, 100, 200], [2, 42]],
        "POSITIONS": 8,
        "DEPTH": 4,
    },
    "31": {"POSITIONS": 17, "WORST": 1},
    "32": {
        "NORMS": [605.0],
        "QUERY_NORMS": [0, 64, 2048],
        "TOKENS": 4,
        "MAX_SEQ_LEN": 16,
    },
    "33": {"MAX_SEQ_LEN": 64, "CONTEXTS": [24, 33, 48], "ROUNDS": 1},
    "34": {
        "MAX_SEQ_LEN": [16, 32],
        "T": [1, 2],
        "COMPRESS": ["int8-tensor"],
        "KV_WRITE": ["mask"],
        "DEPTH": 4,
        "N_GEN": 2,
        "REPETITIONS": 1,
        "ROUNDS": 1,
        "POSITIONS": 4,
    },
}


def project(folder: Path) -> Path:
    """Copies what notebooks read, with the small parameters behind the notebooks' own."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    ignored = shutil.ignore_patterns("bundles", "golden", "evaluations")
    shutil.copytree(ROOT / "data", folder / "data", ignore=ignored)
    (folder / "notebooks").mkdir()
    for source in (ROOT / "notebooks").glob("*.ipynb"):
        found = nbformat.read(source, as_version=4)
        (cell,) = (c for c in found.cells if "parameters" in c.metadata.get("tags", []))
        own = {line.partition(" =")[0] for line in cell.source.splitlines()}
        for name, value in SMALL[source.stem[:2]].items():
            assert name in own, f"{source.stem} has no {name}"
            cell.source += f"\n{name} = {value!r}"
        nbformat.write(found, folder / "notebooks" / source.name)
    return folder
