"""How two validated runs differ: where the error of one is larger than that of the
other, and which gates changed."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from workbench import log, plots
from workbench.errors import InputError, check_choice
from workbench.log.schema import ALLOWED
from workbench.log.store import Root
from workbench.log.text import IDENTITIES, shortened
from workbench.plots.fidelity import View
from workbench.report.writeup import folder


@dataclass(frozen=True)
class RunDifference:
    """Run A against run B.

    `cells`: layer, position, `a` and `b` (the error of each, worst over the T that both
    have), `difference` (a − b); `metric`: relative RMS error, or 1 − cosine where a run
    has no other; `gates`: gate, a, b (verdicts, null where a run lacks the gate),
    value_a, value_b, only those whose verdicts differ; `settings`: setting, a, b, those
    that differ."""

    runs: tuple[str, str]
    checkpoint: str
    tensor: str
    metric: str
    Ts: tuple[int, ...]
    cells: pd.DataFrame
    gates: pd.DataFrame
    settings: pd.DataFrame

    def save(self, root: Root = None, stem: Path | None = None) -> list[Path]:
        """Draws the cells as SVG, PDF and PNG with a sidecar; `stem`: path without an
        ending (default: in the folder `diffs` beside the log)."""
        stem = stem or folder("diffs", "-".join(self.runs), root) / self.tensor
        Ts = ", ".join(map(str, self.Ts))
        title = f"{self.tensor} of {self.checkpoint}, A − B, worst over T = {Ts}"
        differing = self.settings[~self.settings["setting"].isin(IDENTITIES)]
        for name, run in zip("ab", self.runs):
            pairs = zip(differing["setting"], differing[name])
            settings = "; ".join(f"{setting} {value}" for setting, value in pairs)
            title += f"\n{name.upper()}: {shortened(settings or run, 80)}"
        difference = "of run {} less that of run {}, by layer and position"
        alt = f"{self.metric} of the {self.tensor} {difference.format(*self.runs)}."
        draw = partial(
            plots.fidelity_difference, self.cells, metric=self.metric, title=title
        )
        return plots.save(draw, stem, run_ids=self.runs, alt=alt)


def run_difference(
    run_a: str, run_b: str, root: Root = None, tensor: str = "update"
) -> RunDifference:
    """Compares the fidelity of a tensor in two logged runs, at the layers, positions
    and T that both have.

    Isolated layers are compared if both runs have them, else chained ones, as of logits
    and of adopted packages.

    Raises:
        InputError: the log lacks a run, the runs are of two checkpoints, or they have
            no fidelity of the tensor in common.
    """
    check_choice("--tensor", tensor, sorted(ALLOWED["tensor"]))
    settings = log.compare(run_a, run_b, root).settings
    if (settings["setting"] == "checkpoint_hash").any():
        raise InputError(
            "diff",
            "runs of two checkpoints",
            "two of one checkpoint",
            "name two runs of one checkpoint; workbench log --summary lists them",
        )
    run_ids = {run_a, run_b}
    rows = log.load("fidelity", root, {"run_id": run_ids, "tensor": tensor})
    mode = "isolated"
    if set(rows.loc[rows["mode"] == mode, "run_id"]) != run_ids:
        mode = "chained"
    rows = rows[rows["mode"] == mode]
    metric = "error"
    if rows[metric].isna().any():
        metric = "1-cosine"
    sides = [rows[rows["run_id"] == run_id] for run_id in (run_a, run_b)]
    a, b = (_errors(side, metric) for side in sides)
    both = a.to_frame("a").join(b.rename("b"), how="inner")
    if both.empty:
        counts = " and ".join(str(len(side)) for side in sides)
        raise InputError(
            "diff",
            f"{counts} rows of the {tensor}, none of them of one layer, position and T",
            "two runs that were validated on as many tokens",
            "log validations: workbench validate BUNDLE --checkpoint C --log, or a notebook",
        )
    Ts = tuple(sorted(map(int, both.index.unique("T"))))
    cells = both.groupby(["layer", "position"]).max().reset_index()
    cells["difference"] = cells["a"] - cells["b"]
    runs = log.load("runs", root, {"run_id": run_ids}).set_index("run_id")
    configs = runs["config"].fillna("{}")
    gates = _changed(_gates(configs[run_a]), _gates(configs[run_b]))
    about = str(runs["checkpoint"].iloc[0]), tensor, metric, Ts
    return RunDifference((run_a, run_b), *about, cells, gates, settings)


def _errors(rows: pd.DataFrame, metric: str) -> pd.Series:
    """The error of each layer, position and T; infinite where the result was not
    finite."""
    finite = rows["finite"].fillna(True).astype(bool)
    errors = View(metric=metric).values(rows).where(finite, float("inf"))
    return errors.groupby([rows["layer"], rows["position"], rows["T"]]).max()


def _gates(config: str) -> pd.DataFrame:
    """Verdict and value of each gate in a run's `config`, by name."""
    gates = json.loads(config).get("gates", [])
    rows = pd.DataFrame(gates, columns=["name", "verdict", "value"])
    return rows.drop_duplicates("name", keep="last").set_index("name")


def _changed(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Gates of two runs whose verdicts differ, in the order of A's, then B's."""
    names = dict.fromkeys([*a.index, *b.index])
    gates = pd.DataFrame({"gate": list(names)}, dtype=object)
    for side, rows in (("a", a), ("b", b)):
        gates[side] = gates["gate"].map(rows["verdict"]).astype(object)
        gates[f"value_{side}"] = gates["gate"].map(rows["value"]).astype(object)
    same = (gates["a"] == gates["b"]) | (gates["a"].isna() & gates["b"].isna())
    columns = ["gate", "a", "b", "value_a", "value_b"]
    return log.plain(gates.loc[~same, columns])
