"""A checkout of the project in which each notebook has parameters that run within seconds,
and which has checkpoints of two random layers beside the trained ones."""

import json
import shutil
import subprocess
from pathlib import Path

import nbformat
from tiny import ROOT, random_checkpoint

SMALL = {
    "05": {
        "MAX_SEQ_LEN": 64,
        "T_MAX": 2,
        "POSITIONS": 6,
        "NEW_TOKENS": 3,
        "PROMPTS": 2,
    },
    # dense experts in fp16 are exported once
    "30": {
        "MAX_SEQ_LEN": 48,
        "T_MAX": 2,
        "COMPRESS": "fp16",
        "PROMPTS": [[42, 100, 20], [2, 42]],
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
    "33": {"MAX_SEQ_LEN": 32, "CONTEXTS": [12, 17], "ROUNDS": 1},
    "34": {
        "MAX_SEQ_LEN": [16, 32],
        "T": [2],
        "COMPRESS": ["int8-tensor"],
        "KV_WRITE": ["mask"],
        "DEPTH": 4,
        "N_GEN": 2,
        "REPETITIONS": 1,
        "ROUNDS": 1,
        "POSITIONS": 4,
    },
    "35": {
        "CHECKPOINT": "data/tiny-llama",
        "MAX_KL": 0.005,
        "CALIBRATE": "data/tasks/calibration.txt",
        "SELECT": "data/tasks/selection.txt",
        "WINDOWS": 2,
        "COMPARED": ["int8-tensor"],
        "OTHER_KL": [0.01],
        "MAX_SEQ_LEN": 64,
        "POSITIONS": 6,
        "TOKENS": 100,
    },
}


def project(folder: Path) -> Path:
    """A checkout of what notebooks read, with the write-ups; the small parameters stand
    behind the notebooks' own."""
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    unused = "bundles", "golden", "evaluations", "smollm2-135m-instruct", "gemma3-270m"
    ignored = shutil.ignore_patterns(*unused)
    shutil.copytree(ROOT / "data", folder / "data", ignore=ignored)
    for family in ("llama", "qwen2", "zaya"):
        random_checkpoint(
            folder / "data" / f"random-{family}", family, num_hidden_layers=2
        )
    write_texts(folder / "data" / "tasks")
    (folder / "notebooks").mkdir()
    for source in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(source, as_version=4)
        (cell,) = (
            c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])
        )
        parameters = {line.partition(" =")[0] for line in cell.source.splitlines()}
        for name, value in SMALL[source.stem[:2]].items():
            assert name in parameters, f"{source.stem} has no {name}"
            cell.source += f"\n{name} = {value!r}"
        nbformat.write(notebook, folder / "notebooks" / source.name)
    for path in (ROOT / "experiments").glob("[0-9]*"):
        shutil.copytree(path, folder / "experiments" / path.name)
    git(folder, "init")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=x", "-c", "user.email=x", "commit", "-m", "x")
    return folder


def write_texts(folder: Path) -> None:
    """Writes two parts of the held-out tasks, behind the one that judges models, in the
    place of the English texts of notebook 35."""
    lines = (folder / "heldout.jsonl").read_text().splitlines()
    words = " ; ".join(json.loads(line)["prompt"] for line in lines).split()
    (folder / "calibration.txt").write_text(" ".join(words[600:2000]))
    (folder / "selection.txt").write_text(" ".join(words[2100:2800]))


def git(project: Path, *arguments: str) -> str:
    command = ["git", "-C", project, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def changes(project: Path) -> str:
    """What git says has changed, or is new, in that copy."""
    return git(project, "status", "--porcelain")
