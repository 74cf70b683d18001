"""The page of a bundle's validation, from the record that `validate` wrote and from
nothing else."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from os.path import commonprefix

import pandas as pd

from workbench import escape, plots
from workbench.bundle import Bundle
from workbench.bundle.manifest import COREML, Calibration, Selection
from workbench.check import gates
from workbench.check.compare import compared
from workbench.check.cost import COLUMNS, cost_table
from workbench.check.gates import Gate
from workbench.check.record import PromptFigures, Record, Setup, StopFigures
from workbench.check.transcript import LEAST_ENDS
from workbench.errors import InputError
from workbench.experiment.page import (
    Block,
    Commands,
    Continuations,
    Heading,
    Page,
    Paragraph,
    Picture,
    Table,
    Verdict,
    Verdicts,
)
from workbench.experiment.tables import gate_table, table_of, words_of
from workbench.files import read_bytes
from workbench.log.anonymous import anonymous

WORST_CELLS = 6  # rows of the table of the largest errors
COMMON_CHARACTERS = 160  # of a text before the first difference that a page shows
STATED = "not checked here"
TENSORS = {"update": "update", "k": "row of K", "v": "row of V"}
"""Tensors that a heatmap may show, the first that was measured, in words."""
# the checks of quality → the names of their figures
QUALITY_CHECKS = {
    "max_kl": "mean KL",
    "answers": "answers",
    "transcript": "tokens agreed",
    "stop": "ends agreed",
}


def validation_page(record: Record) -> Page:
    """The page of a bundle's validation. Where this checkout did not write the record,
    the page says that the bundle states it."""
    results, manifest = record.results, record.bundle.manifest
    title = f"{manifest.checkpoint.get('name', 'model')} · {manifest.options.compress}"
    blocks: list[Block] = [_verdicts(record)]
    if not record.is_noted:
        blocks.append(
            Paragraph(
                "Everything below is stated by the bundle and was not checked here: "
                "this checkout has no record that it made this validation. The command "
                "under Reproduce checks it."
            )
        )
    blocks += _recommendation(record)
    blocks += [Heading("What was run"), _setup_table(record)]
    blocks += _heatmap(record)
    checked = [_without_places(gate) for gate in results.gates]
    blocks += [Heading("Gates"), Table(_gates(checked, record.is_noted))]
    blocks += _cost(record)
    blocks += _transcript(record)
    blocks += [Heading("Reproduce"), *_reproduce(record.setup, record.bundle)]
    return Page(title, tuple(blocks))


def _without_places(gate: Gate) -> Gate:
    """A gate whose reason names no folder of the machine."""
    return replace(gate, reason=anonymous(gate.reason))


def _verdicts(record: Record) -> Verdicts:
    results = record.results
    checked = [_without_places(gate) for gate in results.gates]
    export = results.verdict.replace("_", " ")
    quality = gates.describe_quality(results.gates)
    if not record.is_noted:
        return Verdicts(
            Verdict("Export", STATED, f"The bundle states: {export}."),
            Verdict("Quality", STATED, f"The bundle states: {quality}."),
        )
    return Verdicts(
        Verdict("Export", export, _export_reason(checked)),
        Verdict("Quality", quality, _quality_reason(checked)),
    )


def _export_reason(checked: list[Gate]) -> str:
    """A sentence on the gates that decide the verdict on the export."""
    if faults := gates.faults(checked):
        first, *others = faults
        reason = f"{first.name}: {_sentence(first.reason)}"
        if others:
            reason += f" Also RED: {', '.join(gate.name for gate in others)}."
        return reason
    count = sum(gate.verdict == gates.GREEN for gate in checked)
    names = [
        gate.name
        for gate in checked
        if gate.verdict == gates.NOT_RUN and gate.name not in QUALITY_CHECKS
    ]
    rest = f" Not run: {', '.join(names)}." if names else ""
    if missing := gates.missing(checked):
        reasons = {gate.name: gate.reason for gate in checked}
        return f"{_sentence(reasons[missing[0]])}{rest}"
    return f"{count} gates ran and found no fault.{rest}"


def _quality_reason(checked: list[Gate]) -> str:
    """The figures of the checks of quality beside their limits."""
    parts = [
        f"{QUALITY_CHECKS[gate.name]} {words_of(gate.value)} "
        f"(limit {words_of(gate.threshold)})"
        for gate in checked
        if gate.name in QUALITY_CHECKS and gate.value is not None
    ]
    return _sentence("; ".join(parts)) if parts else ""


def _sentence(text: str) -> str:
    """A text that begins with a capital letter and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _pairs(rows: Mapping[str, object]) -> pd.DataFrame:
    """A table of names and values in words; those without a value are left out."""
    stated = [(name, str(value)) for name, value in rows.items() if value]
    return pd.DataFrame(stated, columns=["setting", "value"], dtype=object)


def _listed(values: Mapping) -> str:
    """Names and values on one line: `name value, …`."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)


def _describe_text(text: Calibration | Selection | None) -> str | None:
    """Name, size and hash of the text of a calibration or a selection."""
    if text is None:
        return None
    return f"{text.source}, {text.tokens} tokens, ids' SHA-256 {text.ids_sha256}"


def _setup_table(record: Record) -> Table:
    """The bundle, the command, its inputs and the machine of a validation."""
    setup, bundle, manifest = record.setup, record.bundle, record.bundle.manifest
    environment = setup.environment
    digests = {name: f"(SHA-256 {digest})" for name, digest in setup.inputs.items()}
    rows = {
        "checkpoint": manifest.checkpoint.get("name"),
        "checkpoint's SHA-256": manifest.checkpoint.get("sha256"),
        "family": manifest.family,
        "bundle's SHA-256": bundle.identity,
        "size of the bundle": f"{bundle.bytes / 2**20:,.1f} MiB",
        "export options": _listed(manifest.options.model_dump(mode="json")),
        "exported with": _listed(manifest.packages),
        "calibrated with": _describe_text(manifest.calibration),
        "formats chosen on": _describe_text(manifest.selection),
        "run on": _listed(setup.execution) or "no runtime opened the bundle",
        "parameters": escape.shell(setup.command),
        "files read": _listed(digests),
        "prompt": f"{len(record.tokens)} tokens" if record.tokens else None,
        "machine": environment.machine,
        "system": environment.platform,
        "versions": _listed(environment.versions),
        "commit": environment.commit,
        "date": environment.time,
        "time": f"{setup.seconds:.1f} s",
        "largest memory": f"{setup.peak_rss_bytes / 2**20:,.0f} MiB",
    }
    return Table(_pairs(rows))


def _heatmap(record: Record) -> list[Block]:
    """The error of every layer and position, and the largest ones as a table."""
    rows = record.rows
    if rows.empty:
        return []
    isolated = rows[rows["mode"] == "isolated"]
    present = set(isolated["tensor"])
    # where no layer shows its update, as in other exporters' packages, its rows of K
    tensor = next((name for name in TENSORS if name in present), None)
    if tensor is None:
        return []
    return [
        Heading("Where the error lies"),
        _error_picture(isolated, tensor, record.tokens),
        _worst_cells(rows, _has_budget(isolated), record.tokens),
    ]


def _has_budget(isolated: pd.DataFrame) -> bool:
    """Whether errors are compared with what rounding alone causes."""
    return bool(isolated["ratio"].notna().any())


def _error_picture(isolated: pd.DataFrame, tensor: str, tokens: list[str]) -> Picture:
    """A heatmap of a tensor's errors by layer and token, with a panel for calls of one
    token and one for longer calls.

    Args:
        isolated: rows of `record.COLUMNS`, of layers that were fed Hugging Face's
            inputs.
    """
    T = isolated["T"].astype(int)
    longer_calls = "T = 2"
    if T.max() > 2:
        longer_calls = f"T = 2 to {T.max()}, the worst"
    calls = T.map(lambda count: "T = 1" if count == 1 else longer_calls)
    has_budget = _has_budget(isolated)
    figure = plots.heatmap(
        isolated.assign(calls=calls),
        metric="error" if has_budget else "cosine",
        by="calls",
        tensor=tensor,
        tokens=tokens,
    )
    picture = io.BytesIO()
    # a date would change the bytes of equal pages
    figure.savefig(picture, format="svg", metadata={"Date": None})
    measure, divisor = "1 − cosine", ""
    if has_budget:
        measure, divisor = "Error", " over its tolerance"
    alt = (
        f"{measure} of each layer's {TENSORS[tensor]}{divisor}, by layer and token, each "
        "layer fed Hugging Face's input; T is the number of tokens of a call."
    )
    return Picture(picture.getvalue(), alt)


def _worst_cells(rows: pd.DataFrame, has_budget: bool, tokens: list[str]) -> Table:
    """The cells with the largest errors, each at its worst T."""
    order = "ratio" if has_budget else "over_rounding"
    ranked = compared(rows).sort_values(order, ascending=False, na_position="first")
    ranked = ranked.drop_duplicates(["tensor", "layer", "position"]).head(WORST_CELLS)
    labels = [tokens[position] for position in ranked["position"]]
    worst = pd.DataFrame(
        {
            "tensor": ranked["tensor"],
            "layer": ranked["layer"].astype(int),
            "position": ranked["position"].astype(int),
            "token": pd.Series(labels, ranked.index, dtype=object),
            "T": ranked["T"].astype(int),
            "error": ranked["error"],
            "rounding alone": ranked["budget"],
            "error over rounding": ranked[order],
            "cosine": ranked["cosine"],
        }
    )
    caption = (
        "The cells whose error is the largest multiple of what rounding alone causes, "
        "each at its worst T. Error and rounding alone are relative RMS."
    )
    return Table(worst.dropna(axis="columns", how="all"), caption)


def _gates(checked: list[Gate], is_noted: bool) -> pd.DataFrame:
    table = gate_table(checked)
    if is_noted:
        return table
    # a claim has no sign of a pass
    stated = table["verdict"].str.replace("^[✗✓–] ", "stated: ", regex=True)
    return table.assign(verdict=stated)


def _cost(record: Record) -> list[Block]:
    cost = record.results.cost
    if cost is None:
        return []
    caption = (
        f"KL from Hugging Face's logits over {len(record.tokens)} tokens, layers in a "
        f"row. The top token is Hugging Face's at {cost.same_top:.1%} of the positions. "
    )
    caption += COLUMNS
    if None not in (record.results.min_cosine, record.results.mean_cosine):
        caption += (
            f" The smallest cosine of a layer's update is "
            f"{record.results.min_cosine:.5f}, the mean {record.results.mean_cosine:.5f}."
        )
    return [Heading("Cost"), Table(cost_table(asdict(cost)), caption)]


def _transcript(record: Record) -> list[Block]:
    """The figures of every prompt, and both texts from shortly before the first
    difference on."""
    figures = record.results.transcript
    if figures is None:
        return []
    low, high = figures.interval
    caption = (
        f"The bundle, fed Hugging Face's own greedy text, takes its token at "
        f"{figures.agreed:.1%} of the positions (95% interval {low:.1%} to {high:.1%}, "
        f"prompts resampled), {figures.ties} ties included. σ is {figures.sigma:.3g} "
        "logits."
    )
    if figures.error is not None:
        caption += (
            f" Beside Hugging Face's model with the stored weights, the bundle's error "
            f"is {figures.error:.3g} times what rounding causes."
        )
    table = _prompt_table(figures.prompts)
    blocks: list[Block] = [Heading("Transcript"), Table(table, caption)]
    if stop := record.results.stop:
        blocks.append(Paragraph(_describe_ends(stop, len(figures.prompts))))
    blocks += [
        _continuations(row) for row in figures.prompts if row.bundle_text is not None
    ]
    blocks.append(
        Paragraph(
            "Greedy text cannot show an error that changes no best token, such as "
            "logits that are too large by one factor; the gates above ask for that."
        )
    )
    return blocks


def _prompt_table(prompts: Sequence[PromptFigures]) -> pd.DataFrame:
    """The figures of a transcript by prompt."""
    rows = [
        {
            "prompt": row.prompt,
            "agreed": f"{row.agreed:.1%}",
            "ties": row.ties,
            "first difference": words_of(row.first_difference),
            "cause": words_of(row.cause),
            "ends": _ends(row),
        }
        for row in prompts
    ]
    columns = dict.fromkeys(name for row in rows for name in row)
    return table_of(rows, [*columns])


def _describe_ends(stop: StopFigures, prompts: int) -> str:
    """A sentence on the ends of both texts.

    Args:
        prompts: the number of prompts.
    """
    words = f"Hugging Face's text ends after {stop.ends} of {prompts} prompts"
    if stop.ends:
        words += f", and the bundle ends at {stop.bundle_ends} of these places"
    if stop.ends < LEAST_ENDS:
        words += f"; {LEAST_ENDS} ends are needed to judge"
    if stop.contradiction:
        words += f"; {stop.contradiction}"
    return _sentence(words)


def _ends(row: PromptFigures) -> str:
    """The texts after a prompt that end, in words."""
    if not row.ended:
        return words_of(None)
    return "both" if row.bundle_ends else "Hugging Face's alone"


def _continuations(row: PromptFigures) -> Continuations:
    """Both texts of a prompt, from shortly before the first difference on."""
    common = commonprefix([row.text, row.bundle_text])
    reference, bundle = (t[len(common) :] for t in (row.text, row.bundle_text))
    if len(common) > COMMON_CHARACTERS:
        common = f"… {common[-COMMON_CHARACTERS:].split(' ', 1)[-1]}"
    note = f"first difference at token {row.first_difference}"
    if row.cause:
        note += f", cause: {row.cause}"
    return Continuations(row.prompt, common, reference, bundle, note)


def _recommendation(record: Record) -> list[Block]:
    """The preset that keeps the limits, and a table of the presets that were tried."""
    results = record.results
    blocks: list[Block] = []
    if chosen := results.recommendation:
        words = f"{chosen.compress}: KL {chosen.kl:.3g}"
        if chosen.interval:
            low, high = chosen.interval
            words += f" [{low:.3g}, {high:.3g}]"
        words += f", {chosen.bytes / 2**20:,.1f} MiB"
        if chosen.bundle_bytes:
            words += f" instead of {chosen.bundle_bytes / 2**20:,.1f}"
        blocks.append(Paragraph(f"{words}."))
        # a stranger may have written any command there
        if chosen.command and record.is_noted:
            blocks.append(Commands((anonymous(chosen.command),)))
    if (tried := results.tried) and tried.presets:
        columns = dict.fromkeys(name for row in tried.presets for name in row)
        table = table_of(tried.presets, [*columns]).dropna(axis="columns", how="all")
        caption = (
            f"Presets by Hugging Face's model with their weights, on {tried.text}, in "
            f"{tried.seconds:.0f} s; KL is the mean in nats, with its 95% interval."
        )
        table = table.drop(columns="command", errors="ignore")
        blocks.append(Table(table, caption))
    return [Heading("Recommendation"), *blocks] if blocks else []


def _text_option(option: str, source: str) -> list[str]:
    """The option that names a text, or a file of token ids."""
    ids = "-ids" if source.endswith((".npy", ".json")) else ""
    return [f"{option}{ids}", source]


def _selection_options(bundle: Bundle) -> list[str]:
    """The options of an export that chose a format for every matrix.

    Raises:
        InputError: an allocation that is damaged although its hash is the manifest's.
    """
    selection = bundle.manifest.selection
    if selection is None:
        return []
    path = bundle.root / selection.allocation.path
    try:
        fields = json.loads(read_bytes(path))
        limit, chip = fields["limit"], fields["chip"]
        options = _text_option("--select", selection.source)
        if fields["minimizes"] == "ms":
            options += ["--ms-on", str(chip)]
        if limit["kl"] is None:
            return [*options, "--bytes", str(limit["bytes"])]
        return [*options, "--max-kl", str(limit["kl"])]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        actual = f"no allocation ({type(problem).__name__})"
        step = "export the bundle again"
        needed = "limit, chip and what was minimized"
        raise InputError(str(path), actual, needed, step) from None


def _reproduce(setup: Setup, bundle: Bundle) -> list[Block]:
    """The commands that make and measure the bundle again, and a sentence on the files
    that they need."""
    manifest = bundle.manifest
    validate = ["workbench", "validate", "BUNDLE", *setup.command]
    report = ["workbench", "report", "BUNDLE", "--html", "page.html"]
    words = (
        "CHECKPOINT is the folder of the checkpoint whose SHA-256 is above, and BUNDLE "
        "a new folder."
    )
    if manifest.foreign:
        make = ["workbench", "adopt", "PACKAGES", "--checkpoint", "CHECKPOINT"]
        make += ["--out", "BUNDLE"]
        words += " PACKAGES are the other exporter's."
    else:
        make = ["workbench", "export", "CHECKPOINT", "BUNDLE"]
        for name, value in manifest.options.model_dump(mode="json").items():
            if (name, value) != ("target", COREML):
                make += [f"--{name.replace('_', '-')}", str(value)]
    make += _selection_options(bundle)
    if calibration := manifest.calibration:
        make += _text_option("--calibrate", calibration.source)
        make += ["--seed", str(calibration.seed)]
    if setup.inputs or manifest.calibration or manifest.selection:
        words += " Files are those whose SHA-256 is above."
    lines = tuple(escape.shell(line) for line in (make, validate, report))
    return [Commands(lines), Paragraph(words)]
