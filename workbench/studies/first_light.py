"""The tables, gates and conclusions of notebook 36, from the log's rows of a first
light.

Results over the stand-in are no evidence about Core ML, and every answer from them is
marked so."""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from workbench import log
from workbench.check import gates
from workbench.check.device import DEVICE_FACTOR
from workbench.check.gates import Gate
from workbench.firstlight import archive, rungs
from workbench.log.machine import machine_name

STAND_IN = Path("data/first-light/stand-in.zip")
SAME_TIME = 0.2  # largest relative difference of two medians that count as equal
UNKNOWN = "not measured"
NOT_CORE_ML = "open: not Core ML, which would say "


@dataclass(frozen=True)
class Light:
    """One first light of the log: `stages` (stage, status, reason, seconds, number of
    rows), the rows of each stage, and the machine and runtime."""

    stages: pd.DataFrame
    rows: dict[str, pd.DataFrame]
    machine: str
    runtime: str
    simulated: bool
    run_ids: list[str]

    @property
    def label(self) -> str:
        """The machine, and the runtime if it was not Core ML."""
        if self.runtime == "coreml":
            return self.machine
        if self.simulated:
            return f"simulated Mac ({self.machine})"
        return f"stand-in ({self.machine})"


def take(project: Path, path: str, root: log.store.Root = None) -> Light:
    """Imports the zip at `path` of the project into the log and reads it from there; if
    it is missing, the shipped zip of a run over the stand-in."""
    file = project / path
    if not file.exists():
        file = project / STAND_IN
    imported = archive.import_zip(file, root)
    return read(log.load("runs", root, {"run_id": imported["runs"]}))


def read(runs: pd.DataFrame) -> Light:
    """The first light whose rows of `runs` these are."""
    ended = runs[runs["command"].str.startswith("first-light ")].sort_values("run_id")
    stages = []
    rows = {}
    for text in ended["config"]:
        if stage := json.loads(text).get("first_light"):
            stages.append(stage)
            rows[stage["stage"]] = pd.DataFrame(stage["rows"])
    table = pd.DataFrame(
        stages, columns=["stage", "status", "reason", "seconds", "rows"]
    )
    return Light(
        table.assign(rows=table["rows"].map(len)),
        rows,
        machine_name(ended.iloc[0]),
        stages[0]["runtime"],
        stages[0]["simulated"],
        sorted(runs["run_id"]),
    )


class Ladder:
    """The rows of the stage `ladder`: each rung's run on a unit, and Core ML's plan for
    it."""

    def __init__(self, light: Light):
        rows = light.rows.get("ladder", pd.DataFrame(columns=["ask", "rung", "units"]))
        self.runs = {}
        self.plans = {}
        for row in log.plain(rows).to_dict("records"):
            if row["ask"] == "run":
                self.runs[row["rung"], row["units"]] = row
            else:
                self.plans[row["rung"]] = row
        timing = light.rows.get("timing", pd.DataFrame())
        columns = ["units", "status", "ane_joules", "energy_reason"]
        self.energy = timing.reindex(columns=columns)

    def ok(self, rung: str, units: str = "CPU_AND_NE") -> bool | None:
        """Whether a rung ran on these units with the portable runtime's values."""
        row = self.runs.get((rung, units))
        return row and row["status"] == "ok" and row["verdict"] == "GREEN"

    def rejected(self, rung: str) -> bool | None:
        """Whether Core ML refused to load a rung for the Neural Engine with error code
        -14."""
        row = self.runs.get((rung, "CPU_AND_NE"))
        return row and row["status"] == "refused" and _word(row) == "−14"

    def share(self, rung: str) -> float | None:
        """The share of a rung's operations planned on the Neural Engine."""
        row = self.plans.get(rung, {})
        if row.get("status") == "ok" and row["ops"]:
            return row["ane"] / row["ops"]
        return None

    def on_engine(self, rung: str) -> bool | None:
        """Whether a rung runs and is planned on the Neural Engine, in part at least."""
        share = self.share(rung)
        if share is None:
            return None
        return bool(self.ok(rung)) and share > 0

    def rows_on(self, units: str) -> dict[str, dict]:
        """The rungs that ran on some compute units, with their rows."""
        return {rung: row for (rung, other), row in self.runs.items() if other == units}

    def cells(self) -> pd.DataFrame:
        """The cells for `plots.placement_ladder`: rung, column, text, good."""
        rows = []
        for rung in rungs.ladder().values():
            for units in UNITS:
                row = self.runs.get((rung.name, units))
                ok = self.ok(rung.name, units)
                rows.append((rung.says, units, row and _word(row), row and float(ok)))
            share = self.share(rung.name)
            text = None
            if share is not None:
                text = f"{share:.0%}"
            rows.append((rung.says, "planned on the ANE", text, share))
        return pd.DataFrame(rows, columns=["rung", "column", "text", "good"])

    def table(self) -> pd.DataFrame:
        """Every run of a rung, the rung that it changes (`over`), its times and its
        distance from the portable results."""
        columns = [
            "rung",
            "over",
            "units",
            "status",
            "verdict",
            "ratio_t1",
            "ratio_t",
            "finite",
        ]
        columns += [
            "nan_comes_out",
            "as_shipped",
            "bytes",
            "compile_ms",
            "cold_load_ms",
        ]
        columns += ["warm_load_ms", "wall_ms", "native_ms", "reason"]
        over = {rung.name: rung.over for rung in rungs.ladder().values()}
        rows = [row | {"over": over.get(row["rung"])} for row in self.runs.values()]
        return pd.DataFrame(rows).reindex(columns=columns)


def _word(row: dict) -> str:
    """The word for the end of a rung's run in a figure's cell."""
    if row["status"] == "ok":
        return {"GREEN": "✓"}.get(row["verdict"], "✗")
    if "error code: -14" in (row["reason"] or ""):
        return "−14"
    return {"refused": "error", "invalid": "fell back"}.get(row["status"], "died")


def timings(light: Light) -> pd.DataFrame:
    """The rows of the stage `timing` with status ok: one for each unit, T and number of
    layers."""
    columns = [
        "units",
        "T",
        "layers",
        "wall_ms",
        "native_ms",
        "cpu_ms",
        "wall_p90_ms",
        "calls",
    ]
    columns += ["ane_ops_share", "invalid", "status"]
    rows = light.rows.get("timing", pd.DataFrame()).reindex(columns=columns)
    return rows[rows["status"] == "ok"].drop(columns="status")


def dispatch(light: Light) -> pd.DataFrame:
    """Milliseconds of a call against layers in a shard, with a linear fit: setting,
    layers, ms, fit_ms, and the fit's dispatch_ms (at 0 layers) and layer_ms. The times
    are Core ML's own durations where it reports them."""
    columns = ["setting", "layers", "ms", "fit_ms", "dispatch_ms", "layer_ms"]
    rows = timings(light)
    rows = rows.assign(ms=rows["native_ms"].fillna(rows["wall_ms"]).astype(float))
    parts = []
    for (units, T), line in rows.groupby(["units", "T"]):
        if line["layers"].nunique() > 1:
            layer, start = np.polyfit(line["layers"].astype(float), line["ms"], 1)
            fit = {
                "setting": f"{units}, T = {T}",
                "dispatch_ms": start,
                "layer_ms": layer,
                "fit_ms": start + layer * line["layers"],
            }
            parts.append(line.assign(**fit)[columns])
    if parts:
        return pd.concat(parts)
    return pd.DataFrame(columns=columns)


def host_and_device(light: Light) -> pd.DataFrame:
    """Median milliseconds of a call by setting: Core ML's own duration, and the rest of
    the wall time."""
    rows = timings(light).dropna(subset="native_ms")
    parts = []
    for row in rows.to_dict("records"):
        setting = f"{row['units']}, T = {row['T']}, layers: {row['layers']}"
        rest = max(0.0, row["wall_ms"] - row["native_ms"])
        parts += [(setting, "Core ML", row["native_ms"]), (setting, "host", rest)]
    return pd.DataFrame(parts, columns=["setting", "part", "ms"])


# --- which disputed rule is settled
# ---------------------------------------------------------------

UNITS = ("CPU_ONLY", "CPU_AND_NE")
WORDS = {True: "yes", False: "no", None: UNKNOWN}


def _all(answers: Collection[bool | None]) -> bool | None:
    """Whether all answers are True; None if one is unknown and none is False."""
    if False in answers:
        return False
    if None in answers:
        return None
    return True


def _any(answers: Iterable[bool | None]) -> bool | None:
    """Whether any known answer is True; None if none is known."""
    known = set(answers) - {None}
    if known:
        return any(known)
    return None


def _not(answer: bool | None) -> bool | None:
    """The reverse of a known answer."""
    if answer is None:
        return None
    return not answer


def _names(answers: dict[str, bool | None]) -> str:
    return ", ".join(f"{name} {WORDS[answer]}" for name, answer in answers.items())


def _on_engine(*names: str) -> Callable[[Ladder], tuple[bool | None, str]]:
    """Whether any of these rungs runs on the Neural Engine."""

    def decide(ladder: Ladder) -> tuple[bool | None, str]:
        answers = {name: ladder.on_engine(name) for name in names}
        return _any(answers.values()), f"on the Neural Engine: {_names(answers)}"

    return decide


def _mask_as_slice(ladder: Ladder) -> tuple[bool | None, str]:
    names = ("state", "slice", "state-t4", "slice-t4", "range", "slice-range")
    on = {name: ladder.on_engine(name) for name in names}
    masks = [on["state"], on["state-t4"], on["range"]]
    answer = None
    if any(masks):
        answer = True
    elif any(on.values()) and None not in masks:
        answer = False
    return answer, f"on the Neural Engine: {_names(on)}"


def _lut4_right(ladder: Ladder) -> tuple[bool | None, str]:
    answers = []
    shown = []
    for rung, units in product(("lut4", "large-lut4"), UNITS):
        answers.append(ladder.ok(rung, units))
        ratio = ladder.runs.get((rung, units), {}).get("ratio_t1")
        distance = UNKNOWN
        if ratio is not None:
            distance = f"{float(ratio):.2g}"
        shown.append(f"{rung} {units} {distance}")
    return _all(answers), f"distances: {', '.join(shown)}"


def _width_free(ladder: Ladder) -> tuple[bool | None, str]:
    answer = ladder.ok("width-30")
    return answer, f"width 30 {_names({'loads and agrees': answer})}"


DISPUTES: dict[str, tuple[str, Callable[[Ladder], tuple[bool | None, str]]]] = {
    "C1": (
        "A state runs on the Neural Engine.",
        _on_engine("state", "state-t4", "medium", "large"),
    ),
    "C2, K6": ("Writing by a mask is taken by the Neural Engine.", _mask_as_slice),
    "C3": (
        "A state with a flexible T runs on the Neural Engine.",
        _on_engine("range", "one-state-range", "medium-range"),
    ),
    "C4": ("4-bit tables are computed right.", _lut4_right),
    "K2": ("A state's width need not be a multiple of 32.", _width_free),
}


def disputes(light: Light) -> pd.DataFrame:
    """The answers of this first light to disputed rules: rule, says, answer,
    evidence."""
    rows = []
    ladder = Ladder(light)
    settled = NOT_CORE_ML
    if light.runtime == "coreml":
        settled = "settled: "
    for rule, (says, decide) in DISPUTES.items():
        answer, evidence = decide(ladder)
        word = "open"
        if answer is not None:
            word = settled + WORDS[answer]
        rows.append((rule, says, word, evidence))
    return pd.DataFrame(rows, columns=["rule", "says", "answer", "evidence"])


# --- the decision table: whether each result was seen, and on which rungs
# -------------------------

Seen = tuple[bool | None, list[str]]


def _seen(answers: dict[str, bool | None]) -> Seen:
    """Whether any rung's answer is True, and the names of these rungs."""
    return _any(answers.values()), [rung for rung, answer in answers.items() if answer]


def _seen_together(rungs: list[str], answers: list[bool | None]) -> Seen:
    """Whether all answers are True, and the names of these rungs if they are."""
    answer = _all(answers)
    if answer:
        return answer, rungs
    return answer, []


def _cpu_fails(ladder: Ladder) -> Seen:
    on_cpu = ladder.rows_on("CPU_ONLY")
    return _seen({rung: not ladder.ok(rung, "CPU_ONLY") for rung in on_cpu})


def _state_rejected(ladder: Ladder) -> Seen:
    pair = ["state", "range"]
    answers = []
    for rung in pair:
        answers += [ladder.ok(rung, "CPU_ONLY"), ladder.rejected(rung)]
    return _seen_together(pair, answers)


def _range_alone_off(ladder: Ladder) -> Seen:
    off = ladder.rejected("range") or _not(ladder.on_engine("range"))
    pair = ["state-t4", "range"]
    return _seen_together(pair, [ladder.on_engine("state-t4"), off])


def _write_decides(ladder: Ladder) -> Seen:
    answers = {}
    for mask, slice in (("state", "slice"), ("state-t4", "slice-t4")):
        pair = {ladder.rejected(mask), ladder.rejected(slice)}
        answers[mask] = None
        if None not in pair:
            answers[mask] = len(pair) == 2
    return _seen(answers)


def _falls_back(ladder: Ladder) -> Seen:
    answers = {}
    for rung in ladder.plans:
        share = ladder.share(rung)
        if share is not None:
            answers[rung] = share == 0 and ladder.ok(rung) and _same_time(ladder, rung)
    return _seen(answers)


def _same_time(ladder: Ladder, rung: str) -> bool:
    """Whether a rung's times on both units are equal within `SAME_TIME`."""
    times = []
    for units in UNITS:
        row = ladder.runs.get((rung, units), {})
        times.append(row.get("native_ms") or row.get("wall_ms"))
    return None not in times and abs(times[0] - times[1]) <= SAME_TIME * max(times)


def _hides_nan(ladder: Ladder) -> Seen:
    answers = {}
    for rung, row in ladder.rows_on("CPU_AND_NE").items():
        answers[rung] = _not(row.get("nan_comes_out"))
    return _seen(answers)


def _wrong_for_t(ladder: Ladder) -> Seen:
    answers = {}
    for rung, row in ladder.rows_on("CPU_AND_NE").items():
        answers[rung] = None
        ratios = row.get("ratio_t1"), row.get("ratio_t")
        if None not in ratios:
            answers[rung] = float(ratios[0]) <= DEVICE_FACTOR < float(ratios[1])
    return _seen(answers)


def _runs_there(ladder: Ladder) -> Seen:
    answer, there = _seen({rung: ladder.on_engine(rung) for rung in ladder.plans})
    if not there:
        return answer, []
    energy = ladder.energy.query("units == 'CPU_AND_NE' and status == 'ok'")
    if energy["ane_joules"].max() > 0:
        return True, there
    reasons = energy["energy_reason"].dropna().unique()
    if energy.empty:
        reasons = ["nothing was timed"]
    return None, [f"energy {UNKNOWN}: {reason}" for reason in reasons]


DECISIONS: tuple[tuple[str, str, str, Callable], ...] = (
    (
        "CPU_ONLY fails too",
        "binding or program fault",
        "mend the export or the runtime",
        _cpu_fails,
    ),
    (
        "CPU_ONLY GREEN, -14 on the Neural Engine for range and fixed T",
        "states are rejected on the Neural Engine",
        "caches as inputs and outputs; states on CPU and GPU",
        _state_rejected,
    ),
    (
        "fixed T on the Neural Engine, range not",
        "rule C3 holds",
        "--t fixed by default, one package for each T",
        _range_alone_off,
    ),
    (
        "mask -14 and slice works, or the reverse",
        "settles C2",
        "change the default of --kv-write",
        _write_decides,
    ),
    (
        "loads, 0 operations planned on the Neural Engine, as fast as CPU_ONLY",
        "silent fallback",
        "larger shards, else C3",
        _falls_back,
    ),
    (
        "finite on the Neural Engine where portable is NaN",
        "the Neural Engine hides NaN",
        "never a pass",
        _hides_nan,
    ),
    ("GREEN at T = 1, RED at T > 1", "chapter 5's hazard", "fixed T", _wrong_for_t),
    (
        "GREEN, planned on the Neural Engine, and energy used there",
        "the first real measurement",
        "publish cold, warm, sustained",
        _runs_there,
    ),
)


def decisions(light: Light) -> pd.DataFrame:
    """The decision table: result, seen (yes, no or not measured), where (at most six
    rungs, or the reason why it was not measured), means, next."""
    rows = []
    ladder = Ladder(light)
    for result, means, step, decide in DECISIONS:
        seen, where = decide(ladder)
        shown = ", ".join(where[:6])
        if len(where) > 6:
            shown += f" and {len(where) - 6} more"
        rows.append((result, WORDS[seen], shown, means, step))
    return pd.DataFrame(rows, columns=["result", "seen", "where", "means", "next"])


# --- verdict and words
# ----------------------------------------------------------------------------


def light_gates(light: Light) -> list[Gate]:
    """Gates for every machine: the packages are as shipped, the binding behaves as in
    its source, and on the CPU values are the portable runtime's."""
    results = []
    ladder = Ladder(light)
    rows = [row for row in ladder.runs.values() if row.get("as_shipped") is not None]
    if rows:
        other = sorted({row["rung"] for row in rows if not row["as_shipped"]})
        heading = "other bytes than shipped: "
        results.append(gates.none("packages", other, "all as shipped", heading))
    if on_cpu := ladder.rows_on("CPU_ONLY"):
        bad = _cpu_fails(ladder)[1]
        fine = f"{len(on_cpu)} rungs as portable"
        results.append(gates.none("ladder_on_cpu", bad, fine, "not as portable: "))
    if "binding" in light.rows:
        table = light.rows["binding"].reindex(
            columns=["case", "status", "accepted", "expected"]
        )
        known = table[table["expected"].notna()]
        odd = known[known["accepted"] != known["expected"]]["case"].tolist()
        fine = f"{len(known)} answers as its sources say"
        results.append(gates.none("binding", odd, fine, "otherwise: "))
    for row in light.rows.get("golden", pd.DataFrame()).to_dict("records"):
        reason = "data/tiny-llama"
        if isinstance(row["reason"], str):
            reason = row["reason"]
        green = row.get("verdict") == "GREEN"
        results.append(gates.holds(f"golden {row['units']}", green, reason))
    return results


def light_conclusion(light: Light) -> str:
    """The conclusion: the stages, the results of the decision table, the settled
    disputes."""
    ended = ", ".join(f"{row.stage} {row.status}" for row in light.stages.itertuples())
    lines = [f"First light on {light.label}: {ended}."]
    if light.runtime != "coreml":
        lines.append("No figure here is Core ML's, and nothing is settled by it.")
    table = decisions(light)
    for row in table.itertuples():
        if row.seen == "yes":
            lines.append(f"Seen: {row.result} ({row.where}).")
    unknown = f"{(table['seen'] == UNKNOWN).sum()} of {len(table)} results"
    lines.append(f"{unknown} of the decision table were not measured.")
    for row in dispatch(light).drop_duplicates("setting").itertuples():
        ms = f"{row.dispatch_ms:.2f} ms a call and {row.layer_ms:.2f} ms a layer"
        lines.append(f"{row.setting}: {ms}.")
    for row in disputes(light).query("answer.str.startswith('settled')").itertuples():
        lines.append(f"{row.rule}, {row.says} {row.answer}.")
    return "\n".join(lines)
