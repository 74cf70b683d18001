"""The Markdown an author starts from: an experiment's runs, verdicts, figures, and what was not measured.

Every number comes from the log and every figure from a sidecar that names its runs; nothing is typed in here.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench import log
from workbench.errors import InputError


@dataclass(frozen=True)
class Experiment:
    """Number, slug and question of a numbered experiment; its notebook and its folder are named `number_slug`."""

    number: str
    slug: str
    question: str

    @property
    def name(self) -> str:
        return f"{self.number}_{self.slug}"


EXPERIMENTS = {
    e.number: e
    for e in (
        Experiment("05", "stateful_kv_cache", "Does one exported layer keep its cache as chapter 5 says it must, at T = 1 and at T > 1?"),
        Experiment("29", "zaya_probe", "What does a Q→O probe of ZAYA's attention leave unmeasured?"),
        Experiment("30", "zaya_stateful_attention", "Does ZAYA's stateful attention survive the export, judged by Hugging Face?"),
        Experiment("31", "error_parts", "How much of the error is storage, re-authoring, quantization, precision, device?"),
        Experiment("32", "fp16_overflow", "Why does Qwen 2.5 give NaN on one compute unit and not on another?"),
        Experiment("33", "cache_reuse", "Does a restored cache go on as the sequence did, and which hypothesis explains the empty output?"),
        Experiment("34", "decode_sweep", "How do tok/s and ms per layer depend on max_seq_len and T?"),
        Experiment("35", "routed_experts", "What does routing experts on the host save?"),
    )
}  # fmt: skip


def experiment(number: str) -> Experiment:
    if number not in EXPERIMENTS:
        raise InputError("experiment", repr(number), f"one of {', '.join(EXPERIMENTS)}", "name one of these")
    return EXPERIMENTS[number]


def folder(number: str, root: Path | str | None = None) -> Path:
    """`experiments/NN_slug` beside the log at `root`, made if missing."""
    path = (Path(root) if root else log.default_root()).parent / experiment(number).name
    (path / "figures").mkdir(parents=True, exist_ok=True)
    return path


def write(number: str, root: Path | str | None = None) -> Path:
    """Writes `report.md` of an experiment from the log at `root` and the figures saved for it."""
    chosen, place = experiment(number), folder(number, root)
    runs = log.load("runs", root=root, where={"experiment": number})
    if runs.empty:
        raise InputError(f"experiment {number}", "no run in the log", "at least one run",
                         f"run the notebook: workbench run {number}")  # fmt: skip
    runs = runs.sort_values("run_id")
    parts = [f"# Experiment {number}: {chosen.question}", _setup(runs), _verdicts(runs), _speed(runs, root),
             _figures(place), _unmeasured(runs), f"Reproduce: `workbench run {number}`\n"]  # fmt: skip
    path = place / "report.md"
    path.write_text("\n\n".join(p for p in parts if p))
    return path


def _setup(runs: pd.DataFrame) -> str:
    columns = ["checkpoint", "family", "compress", "t_max", "runtime", "precision", "platform", "chip", "power_source"]
    rows = [(c, ", ".join(sorted(runs[c].dropna().astype(str).unique()))) for c in columns]
    table = pd.DataFrame([(c, v or "not measured") for c, v in rows], columns=["setting", "value"])
    return "## Setup\n\n" + table.to_markdown(index=False)


def _latest(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each setting that says anything."""
    by = ["checkpoint", "compress", "max_seq_len", "t_max", "T", "command"]
    return runs.groupby(by, dropna=False).tail(1)


def _verdicts(runs: pd.DataFrame) -> str:
    judged = _latest(runs[runs["verdict"].notna()])
    lines = []
    for _, run in judged.iterrows():
        found = pd.DataFrame(json.loads(run["config"]).get("gates", []))
        title = f"**{run['verdict']}** {run['checkpoint']}, {run['compress']}, max_seq_len {run['max_seq_len']} (run {run['run_id']})"
        lines.append(title + "\n\n" + found.to_markdown(index=False) if len(found) else title)
    return "## Verdicts\n\n" + "\n\n".join(lines) if lines else ""


def _speed(runs: pd.DataFrame, root) -> str:
    ids = _latest(runs[runs["command"] == "sweep"])["run_id"].tolist()
    if not ids:
        return ""
    samples = log.load("samples", root=root, where={"run_id": ids, "phase": ["tokens_per_s", "call"]})
    found = log.summary(samples).merge(runs[["run_id", "max_seq_len", "compress"]], on="run_id")
    shown = found[["max_seq_len", "compress", "T", "depth", "phase", "unit", "median", "mad", "n", "run_id"]]
    shown = shown.sort_values(["phase", "compress", "max_seq_len", "T"])
    return "## Speed\n\n" + shown.to_markdown(index=False, floatfmt=".4g")


def _figures(place: Path) -> str:
    parts = []
    for sidecar in sorted((place / "figures").glob("*.json")):
        about = json.loads(sidecar.read_text())
        parts.append(f"![{about['alt']}](figures/{sidecar.stem}.svg)\n\n{about['alt']} Runs: {', '.join(about['run_ids'])}.")
    return "## Figures\n\n" + "\n\n".join(parts) if parts else ""


def _unmeasured(runs: pd.DataFrame) -> str:
    missing = []
    if not (runs["runtime"] == "coreml").any():
        missing.append("No run on Core ML: device values, Neural Engine placement and its tok/s are *not measured*. "
                       "Times above are the portable runtime's on the machine named above.")  # fmt: skip
    if not runs["placement"].notna().any():
        missing.append("Placement (ANE, GPU, CPU): *not measured*.")
    return "## Not measured\n\n" + "\n".join(f"- {m}" for m in missing) if missing else ""
