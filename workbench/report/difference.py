"""How two validated runs differ: where the error of one is larger than that of the
other, and which gates changed."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench import log, plots
from workbench.errors import InputError, check_choice
from workbench.log.schema import ALLOWED
from workbench.log.store import Root
from workbench.log.text import IDENTITIES, shortened
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
        Ts, (a, b) = ", ".join(map(str, self.Ts)), self.runs
        title = [f"{self.tensor} of {self.checkpoint}, A − B, worst over T = {Ts}"]
        differing = self.settings[~self.settings["setting"].isin(IDENTITIES)].to_dict(
            "records"
        )
        for name, run in zip("AB", self.runs):
            settings = "; ".join(
                f"{row['setting']} {row[name.lower()]}" for row in differing
            )
            title.append(f"{name}: {shortened(settings or run, 80)}")
        title = "\n".join(title)
        difference = f"of run {a} less that of run {b}, by layer and position"
        alt = f"{self.metric} of the {self.tensor} {difference}."
        options = {"metric": self.metric, "title": title}
        draw = lambda: plots.fidelity_difference(self.cells, **options)  # noqa: E731
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
        step = "name two runs of one checkpoint; workbench log --summary lists them"
        raise InputError(
            "diff", "runs of two checkpoints", "two of one checkpoint", step
        )
    sides = []
    for run_id in (run_a, run_b):
        sides.append(log.load("fidelity", root, {"run_id": run_id, "tensor": tensor}))
    isolated = all((side["mode"] == "isolated").any() for side in sides)
    sides = [
        side[side["mode"] == ("isolated" if isolated else "chained")] for side in sides
    ]
    if all(side["error"].notna().all() for side in sides):
        metric = "error"
    else:
        metric = "1-cosine"
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
    rows = log.load("runs", root, {"run_id": [run_a, run_b]}).set_index("run_id")
    gates = _changed(*(_gates(rows["config"][run_id]) for run_id in (run_a, run_b)))
    about = str(rows["checkpoint"].iloc[0]), tensor, metric, Ts
    return RunDifference((run_a, run_b), *about, cells, gates, settings)


def _errors(rows: pd.DataFrame, metric: str) -> pd.Series:
    """The error of each layer, position and T; infinite where the result was not
    finite."""
    error = rows["error"] if metric == "error" else 1 - rows["cosine"]
    error = error.astype(float).mask(
        ~rows["finite"].fillna(True).astype(bool), float("inf")
    )
    return error.groupby([rows["layer"], rows["position"], rows["T"]]).max()


def _gates(config: str | None) -> pd.DataFrame:
    gates = json.loads(config if isinstance(config, str) else "{}").get("gates", [])
    rows = pd.DataFrame(
        gates, columns=["name", "verdict", "value", "threshold", "reason"]
    )
    return rows.drop_duplicates("name", keep="last").set_index("name")[
        ["verdict", "value"]
    ]


def _changed(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Gates of two runs whose verdicts differ, in the order of A's, then B's."""
    names = [*a.index, *(name for name in b.index if name not in a.index)]
    gates = pd.DataFrame({"gate": names}, dtype=object)
    for side, rows in (("a", a), ("b", b)):
        gates[side] = gates["gate"].map(rows["verdict"]).astype(object)
        gates[f"value_{side}"] = gates["gate"].map(rows["value"]).astype(object)
    same = (gates["a"] == gates["b"]) | (gates["a"].isna() & gates["b"].isna())
    columns = ["gate", "a", "b", "value_a", "value_b"]
    return gates.loc[~same, columns].astype(object).where(gates.notna(), None)
