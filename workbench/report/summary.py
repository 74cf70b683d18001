"""The log as one table in llama-bench's form: speed and fidelity per configuration and
test."""

import pandas as pd

from workbench import log
from workbench.errors import check_choice
from workbench.log.machine import with_machines
from workbench.log.store import Root
from workbench.sweep import runs
from workbench.sweep.results import VALIDATED, validated_costs

FORMATS = ("md", "csv", "tex", "json")
_SETTING = ["checkpoint", "checkpoint_hash", "machine", "software", "status"]
_SETTING += [*VALIDATED, *runs.OPTIONS, "fast", "threads"]
_OWN_COLUMNS = (  # bundle_hash has none: the options identify the bundle
    "checkpoint",
    "checkpoint_hash",
    "bundle_hash",
    "compress",
    "machine",
    "runtime",
    "status",
)
_FIGURES = [
    "test",
    "tokens_per_s",
    "sd",
    "n",
    "runs",
    "worst_update",
    "kl_mean",
    "verdict",
]


def summary_rows(root: Root = None, where: str | None = None) -> pd.DataFrame:
    """One row per configuration, machine and test of the log's runs that fit the query
    `where`.

    Returns:
        checkpoint, bundle_bytes, compress, the other settings in which rows differ,
        machine, runtime. test: pp64 (a prompt of 64 tokens) or tg24 @ d64 (24 tokens
        after 64; with T = 4: tg24 T4 @ d64); null for runs without times.
        tokens_per_s, sd: mean and standard deviation of `n` repetitions in `runs` runs,
            without warm-ups.
        worst_update (largest 1 − cosine of an isolated update), kl_mean (nats),
            verdict: of the newest validation of the same bundle and way to run it, on
            any machine. If the status of the run is not ok, the verdict is the status.
        run_id: the newest run.
    """
    rows = with_machines(log.load("runs", root, where))
    rates = _rates(rows, root)
    about = [*_SETTING, "test"]
    groups = rates.groupby(about, dropna=False, sort=False)
    timed = groups.agg(
        tokens_per_s=("rate", "mean"),
        sd=("rate", "std"),
        n=("rate", "size"),
        runs=("run_id", "nunique"),
        bundle_bytes=("bundle_bytes", "last"),
        run_id=("run_id", "max"),
    )
    untimed = rows[~rows["run_id"].isin(rates["run_id"]) & rows["checkpoint"].notna()]
    values = pd.Series(runs.values(untimed, VALIDATED), untimed.index)
    known = values.isin(runs.values(rates, VALIDATED))
    untimed = untimed[
        (untimed["verdict"].notna() & ~known) | untimed["status"].ne("ok")
    ]
    untimed = runs.newest(untimed, _SETTING)[[*_SETTING, "bundle_bytes", "run_id"]]
    table = pd.concat([timed.reset_index(), untimed], ignore_index=True)
    table = table.merge(validated_costs(root), "left", VALIDATED)
    table["verdict"] = table["verdict"].astype(object).where(table["status"] == "ok")
    table["verdict"] = table["verdict"].fillna(table["status"].replace("ok", "not_run"))
    others = [c for c in _SETTING if c not in _OWN_COLUMNS]
    return table[
        [
            "checkpoint",
            "bundle_bytes",
            "compress",
            *runs.varied(table, others),
            "machine",
            "runtime",
            *_FIGURES,
            "run_id",
        ]
    ]


def _rates(rows: pd.DataFrame, root: Root) -> pd.DataFrame:
    """Tokens per second of every timed repetition, named by `test`, with the columns of
    its run."""
    where = {"run_id": rows["run_id"].tolist(), "phase": ["tokens_per_s", "prefill"]}
    samples = log.load("samples", root, where)
    samples = samples[~samples["warmup"].fillna(False)].dropna(subset="value")
    samples = samples.merge(rows[["run_id", *_SETTING, "bundle_bytes"]], on="run_id")
    prompt = samples["phase"].eq("prefill")
    per_ms = samples["n_prompt"] * samples["batch"].fillna(1) * 1e3 / samples["value"]
    samples["rate"] = samples["value"].where(~prompt, per_ms).astype(float)
    counts = samples.fillna({"n_gen": 0, "T": 0, "depth": 0})
    samples["test"] = [_test(row) for row in counts.to_dict("records")]
    return samples


def _test(sample: dict) -> str:
    """pp64, or tg24 T4 @ d64; T is named if it exceeds 1, the depth if it is not 0."""
    if sample["phase"] == "prefill":
        return f"pp{sample['n_prompt']}"
    name = f"tg{sample['n_gen']}"
    if sample["T"] > 1:
        name += f" T{sample['T']}"
    if sample["depth"]:
        name += f" @ d{sample['depth']}"
    return name


def text_table(rows: pd.DataFrame, format: str = "md") -> str:
    """Rows of `summary_rows` as Markdown, LaTeX, CSV or JSON; Markdown and LaTeX are
    rounded.

    Raises:
        InputError: an unknown format.
    """
    check_choice("--format", format, FORMATS)
    if format == "json":
        return rows.to_json(orient="records")
    if format == "csv":
        return rows.to_csv(index=False)
    table = _rounded(rows)
    if format == "tex":
        return table.to_latex(index=False, escape=True)
    if table.empty:
        return table.to_markdown(index=False)
    right = dict.fromkeys(("size", "tok/s", "n", "worst update", "KL"), "right")
    align = [right.get(name, "left") for name in table]
    return table.to_markdown(index=False, colalign=align, disable_numparse=True)


def _rounded(rows: pd.DataFrame) -> pd.DataFrame:
    """The table with rounded values: sizes in MiB, speeds as mean ± standard deviation,
    nulls as –."""

    def words(values: pd.Series, form: str = "{}", null: str = "–") -> pd.Series:
        texts = values.map(form.format, na_action="ignore").astype(object)
        return texts.fillna(null)

    spread = words(rows["sd"], " ± {:.1f}", "")
    columns = {
        "model": words(rows["checkpoint"]),
        "size": words(rows["bundle_bytes"] / 2**20, "{:.1f} MiB"),
    }
    for name in rows.columns[2 : rows.columns.get_loc("test")]:
        columns[name] = words(rows[name])
    columns |= {
        "test": words(rows["test"]),
        "tok/s": words(rows["tokens_per_s"], "{:.1f}") + spread,
        "n": words(rows["n"], "{:.0f}"),
        "worst update": words(rows["worst_update"], "{:.2g}"),
        "KL": words(rows["kl_mean"], "{:.2g}"),
        "verdict": words(rows["verdict"]),
    }
    return pd.DataFrame(columns)
