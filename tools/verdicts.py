"""Both verdicts on a model in every preset, beside Hugging Face's own text.

    python tools/verdicts.py measure CHECKPOINT
    python tools/verdicts.py table

`measure` exports the checkpoint in every preset, with `data/calibration.txt` where a preset needs a
text, and runs `workbench validate --transcript` on the bundle, with the prompts of
`data/prompts.jsonl` and the default limits. Each row is a file in `experiments/verdicts`. A row of
the same checkpoint, prompts and text of calibration is not measured again, so that a run that was
ended goes on. `table` writes the rows to docs/verdict.md."""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bits import ROOT, rounded
from cpu_time import cpu_seconds_of_children
from page_blocks import replace_block

from workbench import Bundle
from workbench.bundle.presets import PRESETS, find_preset
from workbench.check.gates import REQUIRED
from workbench.check.transcript import PROMPTS
from workbench.files import sha256
from workbench.log import machine
from workbench.models.checkpoint import Checkpoint
from workbench.recommend.candidates import CALIBRATION_TEXT

ROWS = ROOT / "experiments" / "verdicts"
# build/verdicts has this checkout's notes on verdict.json files
WORK = ROOT / "build" / "preset_verdicts"
PAGE = ROOT / "docs" / "verdict.md"
MAX_SEQ_LEN = 256  # of every bundle; a prompt and its text take about a hundred tokens
SEED = 0
ENDED = {0: "held", 1: "RED", 4: "OVER"}  # exit codes of a validation that ended
COLUMNS = ["preset", "MiB", "export", "quality", "mean KL", "tokens agreed", "ties"]
COLUMNS += ["ends agreed", "error over rounding", "recommended", "recommendation"]
COLUMNS += ["validation"]


@dataclass(frozen=True)
class Inputs:
    """The files that a row is measured from, by the SHA-256 of each.

    Attributes:
        calibration: of the text that the weights were fitted to; None without one.
    """

    checkpoint: str
    prompts: str
    calibration: str | None

    @classmethod
    def of(cls, source: Checkpoint, preset: str) -> "Inputs":
        """The files from which a preset of a checkpoint is measured."""
        text = None
        if find_preset(preset).needs_calibration:
            text = sha256(ROOT / CALIBRATION_TEXT)
        return cls(source.sha256, sha256(ROOT / PROMPTS), text)


def row_path(source: Checkpoint, preset: str) -> Path:
    """The file of a row."""
    return ROWS / source.name / f"{preset}.json"


def is_current(path: Path, inputs: Inputs) -> bool:
    """Whether a row was measured from these files."""
    return path.is_file() and json.loads(path.read_text())["inputs"] == vars(inputs)


@dataclass(frozen=True)
class CommandRun:
    """A command of the workbench that has ended.

    Attributes:
        result: the JSON that it printed.
        cpu_seconds: of all its processors.
        seconds: by the clock.
    """

    result: dict
    cpu_seconds: float
    seconds: float


def run_command(*words: object) -> CommandRun:
    """Runs a command of the workbench with --json.

    Raises:
        subprocess.CalledProcessError: a command that did not end with a result.
    """
    command = [sys.executable, "-m", "workbench.cli", *map(str, words), "--json"]
    start, cpu_start = time.perf_counter(), cpu_seconds_of_children()
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
    if ended.returncode not in ENDED:
        raise subprocess.CalledProcessError(ended.returncode, command)
    seconds = time.perf_counter() - start
    cpu_seconds = cpu_seconds_of_children() - cpu_start
    return CommandRun(json.loads(ended.stdout), cpu_seconds, seconds)


def export(source: Checkpoint, preset: str, inputs: Inputs) -> Bundle:
    """The bundle in a preset; exported again only where no whole one of these inputs is
    left of an interrupted run. Bundles have a folder each: finished bundles beside one
    another would recommend each other."""
    facts = json.dumps(vars(inputs) | {"max_seq_len": MAX_SEQ_LEN}, sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    folder = WORK / source.name / f"{preset}-{digest}" / "bundle"
    if not folder.exists():
        words = ["export", source.path, folder, "--compress", preset]
        words += ["--max-seq-len", MAX_SEQ_LEN]
        if find_preset(preset).needs_calibration:
            words += ["--calibrate", ROOT / CALIBRATION_TEXT, "--seed", SEED]
        run_command(*words)
    return Bundle.open(folder)


def measure(source: Checkpoint, preset: str) -> None:
    """Exports and validates one preset, writes its row, and deletes its bundle."""
    inputs = Inputs.of(source, preset)
    bundle = export(source, preset, inputs)
    words = ["validate", bundle.root, "--checkpoint", source.path, "--transcript"]
    validation = run_command(*words)
    environment = machine.environment()
    row = {
        "checkpoint": source.name,
        "preset": preset,
        "inputs": vars(inputs),
        "bytes": bundle.bytes,
        "cpu_seconds": validation.cpu_seconds,
        "seconds": validation.seconds,
        "machine": environment["machine"],
        "commit": environment["commit"],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **select_figures(validation.result),
    }
    path = row_path(source, preset)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(rounded(row), indent=1) + "\n")
    unfinished.rename(path)
    shutil.rmtree(bundle.root.parent)


def select_figures(result: dict) -> dict:
    """The part of the JSON of `workbench validate --transcript` that a row has: verdicts,
    gates and figures, without the texts and without commands, which name folders."""
    gates = []
    for gate in result["gates"]:
        names = ("name", "verdict", "value", "threshold")
        gates.append({name: gate[name] for name in names})
    prompts = result["transcript"]["prompts"]
    # cause of the first different token → number of prompts; None where all tokens agree
    causes = Counter(prompt["cause"] for prompt in prompts if prompt["cause"])
    tried, recommendation = result["tried"], result["recommendation"]
    if tried:
        presets = [without_field(trial, "command") for trial in tried["presets"]]
        tried = tried | {"presets": presets}
    if recommendation:
        recommendation = without_field(recommendation, "command")
    return {
        "verdict": result["verdict"],
        "quality": result["quality"],
        "gates": gates,
        "cost": result["cost"],
        "transcript": without_field(result["transcript"], "prompts"),
        "prompts": len(prompts),
        "first_differences": dict(sorted(causes.items())),
        "stop": result["stop"],
        "recommendation": recommendation,
        "tried": tried,
    }


def without_field(fields: dict, removed: str) -> dict:
    """The fields but one."""
    return {name: value for name, value in fields.items() if name != removed}


def table(folder: Path = ROWS) -> list[str]:
    """The lines of the page's tables, one table for each checkpoint."""
    lines = []
    for checkpoint in sorted(path for path in folder.glob("*") if path.is_dir()):
        rows = [json.loads(path.read_text()) for path in checkpoint.glob("*.json")]
        sizes = {row["preset"]: row["bytes"] for row in rows}
        lines += [f"### {checkpoint.name}", "", f"| {' | '.join(COLUMNS)} |"]
        lines.append("|---" * len(COLUMNS) + "|")
        order = [*PRESETS]
        for row in sorted(rows, key=lambda row: order.index(row["preset"])):
            lines.append(f"| {' | '.join(cells(row, sizes))} |")
        lines.append("")
    return lines


def cells(row: dict, sizes: Mapping[str, int]) -> list[str]:
    """A row of a table, by `COLUMNS`.

    Args:
        sizes: the bytes of the bundle of each preset that has a row.
    """
    transcript = row["transcript"]
    low, high = transcript["interval"]
    return [
        f"`{row['preset']}`",
        f"{row['bytes'] / 2**20:,.1f}",
        describe_export(row),
        "not judged" if row["verdict"] == "RED" else row["quality"].replace("_", " "),
        f"{row['cost']['kl']['mean']:.3g}",
        f"{transcript['agreed']:.3f} [{low:.3f}, {high:.3f}]",
        str(transcript["ties"]),
        describe_ends(row),
        f"{transcript['error']:.3g}",
        describe_recommendation(row, sizes),
        f"{row['tried']['cpu_seconds']:.0f} CPU s" if row["tried"] else "–",
        f"{row['cpu_seconds']:.0f} CPU s",
    ]


def describe_ends(row: dict) -> str:
    """How many of the texts that Hugging Face's model ends the bundle ends, too."""
    stop = row["stop"]
    ends = f"{stop['bundle_ends']} of {stop['ends']}" if stop["ends"] else "no end"
    verdicts = {gate["name"]: gate["verdict"] for gate in row["gates"]}
    return f"{ends}, not run" if verdicts["stop"] == "not_run" else ends


def describe_export(row: dict) -> str:
    """The verdict on the export, and the gates that decide it where it is not GREEN."""
    if row["verdict"] == "GREEN":
        return "GREEN"
    names = [gate["name"] for gate in row["gates"] if gate["verdict"] == row["verdict"]]
    if row["verdict"] == "not_run":
        names = [name for name in names if name in REQUIRED]
    return f"{row['verdict'].replace('_', ' ')}: {', '.join(names)}"


def describe_recommendation(row: dict, sizes: Mapping[str, int]) -> str:
    """The preset that keeps the limits, with its KL, its interval and its size.

    The size is that of the preset's bundle where it has a row. A trial computes it beside
    the programs of another preset, and differs by a few hundredths of a percent.
    """
    if not row["tried"]:
        return "–"
    chosen = row["recommendation"]
    if not chosen:
        return "none keeps the limits"
    low, high = chosen["interval"]
    size = f"{sizes.get(chosen['compress'], chosen['bytes']) / 2**20:,.1f} MiB"
    return f"`{chosen['compress']}`: {chosen['kl']:.3g} [{low:.3g}, {high:.3g}], {size}"


def write_page(page: Path = PAGE, folder: Path = ROWS) -> None:
    """Writes the tables into the page's block `verdicts`."""
    replace_block(page, "verdicts", table(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--preset", nargs="+", choices=[*PRESETS], default=[*PRESETS])
    arguments = parser.parse_args()
    if arguments.what == "table":
        return write_page()
    if arguments.checkpoint is None:
        parser.error("measure needs a CHECKPOINT")
    source = Checkpoint(arguments.checkpoint)
    for preset in arguments.preset:
        path = row_path(source, preset)
        if not is_current(path, Inputs.of(source, preset)):
            measure(source, preset)
        print(path.relative_to(ROOT), flush=True)
    return None


if __name__ == "__main__":
    main()
