"""The page of a bundle's validation, from the record that `validate` wrote and from
nothing else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from os.path import commonprefix

import pandas as pd

from workbench import escape, plots
from workbench.bundle import Bundle
from workbench.bundle.manifest import COREML, Calibration, Selection
from workbench.bundle.presets import FP16
from workbench.check import gates
from workbench.check.compare import judged_rows
from workbench.check.cost import COLUMNS, STORAGE_ALONE, cost_table
from workbench.check.gates import Gate
from workbench.check.record import PromptFigures, Record, Results, Setup, StopFigures
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
from workbench.experiment.stored_weights import COLUMNS_OF_WRONG, IN_A_CELL
from workbench.experiment.tables import gate_table, table_of, words_of
from workbench.files import read_bytes
from workbench.log.anonymous import anonymize

WORST_CELLS = 6  # rows of the table of the largest errors
FIRST_TOKENS = 12  # of a prompt that a page shows
COMMON_CHARACTERS = 160  # of a text before the first difference that a page shows
NOT_CHECKED = "not checked here"
TENSORS = {"update": "update", "k": "row of K", "v": "row of V"}
"""Tensors that a heatmap may show, the first that was measured, in words."""
# `gates.QUALITY_CHECKS` → the names of their figures
QUALITY_FIGURES = {
    "max_kl": "mean KL",
    "answers": "answers",
    "transcript": "tokens agreed",
    "stop": "ends agreed",
}


def validation_page(record: Record) -> Page:
    """The page of a bundle's validation. Where this checkout did not write the record,
    the page says that the bundle states it."""
    blocks: list[Block] = [_verdicts(record)]
    if not record.is_noted:
        blocks.append(
            Paragraph(
                "Everything below is stated by the bundle and was not checked here: "
                "this checkout has no record that it made this validation. The command "
                "under Reproduce checks it."
            )
        )
    blocks.append(Paragraph(_answer(record)))
    blocks += _recommendation(record)
    blocks += _heatmap(record)
    blocks += _cost(record)
    blocks += [Heading("What was run"), _setup_table(record)]
    blocks += [Heading("Gates"), Table(_gates_table(record))]
    blocks += _transcript(record)
    blocks += [Heading("Reproduce"), *_reproduce(record.setup, record.bundle)]
    return Page(page_title(record), tuple(blocks))


def page_title(record: Record) -> str:
    """The names of the checkpoint and of the preset."""
    manifest = record.bundle.manifest
    return f"{manifest.checkpoint.get('name', 'model')} · {manifest.options.compress}"


def _portable_gates(results: Results) -> list[Gate]:
    """The gates, with reasons that name no folder of this machine."""
    return [replace(gate, reason=anonymize(gate.reason)) for gate in results.gates]


def _wrong_weights(record: Record) -> Gate | None:
    """Gate `weights` where it is RED, with its reason as a page has it."""
    faults = gates.red_gates(_portable_gates(record.results))
    return next((gate for gate in faults if gate.name == "weights"), None)


def _verdicts(record: Record) -> Verdicts:
    results = record.results
    all_gates = _portable_gates(results)
    export = results.verdict.replace("_", " ")
    quality = gates.describe_quality(results.gates)
    if not record.is_noted:
        return Verdicts(
            Verdict("Export", NOT_CHECKED, f"The bundle states: {export}."),
            Verdict("Quality", NOT_CHECKED, f"The bundle states: {quality}."),
        )
    return Verdicts(
        Verdict("Export", export, _export_reason(all_gates)),
        Verdict("Quality", quality, _quality_reason(all_gates)),
    )


def _export_reason(all_gates: list[Gate]) -> str:
    """A sentence on the gates that decide the verdict on the export."""
    if faults := gates.red_gates(all_gates):
        first, *others = faults
        reason = f"{first.name}: {_end_sentence(first.reason)}"
        if others:
            reason += f" Also RED: {', '.join(gate.name for gate in others)}."
        return reason
    count = sum(gate.verdict == gates.GREEN for gate in all_gates)
    names = [
        gate.name
        for gate in all_gates
        if gate.verdict == gates.NOT_RUN and gate.name not in gates.QUALITY_CHECKS
    ]
    rest = f" Not run: {', '.join(names)}." if names else ""
    if missing := gates.missing_gates(all_gates):
        reasons = {gate.name: gate.reason for gate in all_gates}
        return f"{missing[0]}: {_end_sentence(reasons[missing[0]])}{rest}"
    return f"{count} gates ran and found no fault.{rest}"


def _quality_figures(all_gates: list[Gate]) -> str:
    """The figures of the checks of quality beside their limits."""
    return "; ".join(
        f"{QUALITY_FIGURES[gate.name]} {words_of(gate.value)} "
        f"(limit {words_of(gate.threshold)})"
        for gate in all_gates
        if gate.name in QUALITY_FIGURES and gate.value is not None
    )


def _quality_reason(all_gates: list[Gate]) -> str:
    figures = _quality_figures(all_gates)
    return _sentence(figures) if figures else ""


def _answer(record: Record) -> str:
    """A sentence with both verdicts in words and their figures."""
    results = record.results
    words = f"{_export_answer(results)}, and {_quality_answer(results)}."
    return words if record.is_noted else f"The bundle states: {words}"


def _export_answer(results: Results) -> str:
    if faults := gates.red_gates(results.gates):
        names = ", ".join(f"`{gate.name}`" for gate in faults)
        return f"The export is faulty (RED: {names})"
    if results.verdict != gates.GREEN:
        return "The export was not tested for every fault (not run)"
    words = "No gate found a fault in the export (GREEN)"
    by_name = {gate.name: gate for gate in results.gates}
    budget = by_name.get("budget")
    if budget is not None and budget.value is not None:
        words += (
            f", whose worst layer errs by {budget.value:.3g} times what rounding causes "
            f"(RMS over positions; limit {words_of(budget.threshold)})"
        )
    return words


def _quality_answer(results: Results) -> str:
    if results.verdict == gates.RED:
        return "its cost is not judged while it is"
    answers = {
        gates.WITHIN: "its cost is within your limits (WITHIN)",
        gates.OVER: "its cost is above your limits (OVER)",
    }
    words = answers.get(results.quality, "its cost was not measured (not run)")
    figures = _quality_figures(results.gates)
    return f"{words}: {figures}" if figures and results.quality in answers else words


def _sentence(text: str) -> str:
    """A text that begins with a capital letter and ends with a full stop."""
    return _end_sentence(f"{text[:1].upper()}{text[1:]}")


def _end_sentence(text: str) -> str:
    """A text that ends with a full stop. A gate's reason keeps its first letter, which may be
    that of an identifier, such as a shard's name."""
    return text.rstrip(".") + "."


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
        "prompt": _describe_prompt(record) or None,
        "machine": environment.machine,
        "system": environment.platform,
        "versions": _listed(environment.versions),
        "commit": environment.commit,
        "date": environment.time,
        "time": f"{setup.seconds:.1f} s",
        "largest memory": f"{setup.peak_rss_bytes / 2**20:,.0f} MiB",
    }
    return Table(_pairs(rows))


def _describe_prompt(record: Record) -> str:
    """The tokens on which the bundle was compared: their number, their text, where it is
    from, and its first tokens; empty where nothing was measured."""
    if not record.tokens:
        return ""
    count, has_text = len(record.tokens), bool(record.bundle.manifest.tokens.files)
    tokens = f"{count} token" if count == 1 else f"{count} tokens"
    labels = record.tokens[:FIRST_TOKENS]
    # labels are ids without a tokenizer, and many tokenizers decode a token without the
    # space before it
    has_spaces = any("·" in label for label in labels)
    first = ("" if has_spaces else " ").join(labels).replace("·", " ").strip()
    more = " …" if count > FIRST_TOKENS else ""
    source = _prompt_source(record.setup.command, has_text)
    return f"{tokens} of {source}, “{first}{more}”"


def _prompt_source(command: list[str], has_text: bool) -> str:
    """What gave the prompt of a validation.

    Args:
        command: with the options of the prompt, see `Setup`.
        has_text: whether the bundle has a tokenizer.
    """
    values = dict(pairwise(command))
    if "--golden" in values:
        return f"the text of the golden {values['--golden']}"
    if "--text" in values:
        return f"the file {values['--text']}"
    if "--prompt-ids" in values:
        return "the ids of --prompt-ids"
    if "--prompt" in values:
        return "the text of --prompt"
    if not has_text:
        return "random ids, since the bundle has no tokenizer"
    return "the workbench's own text for this tokenizer"


def _heatmap(record: Record) -> list[Block]:
    """The error of every layer and position, and the largest ones as a table."""
    figure = draw_errors(record)
    if figure is None:
        return []
    warning: list[Block] = []
    if fault := _wrong_weights(record):
        reason = _end_sentence(fault.reason)
        words = (
            f"The stored weights are wrong (gate weights is RED): {reason} {IN_A_CELL}"
        )
        warning.append(Paragraph(words))
    return [
        Heading("Where the error lies"),
        *warning,
        Picture(plots.encode(figure, "svg"), _caption(record)),
        _worst_cells(record.rows, _has_budget(record), record.tokens),
    ]


def _isolated(record: Record) -> pd.DataFrame:
    """The rows of layers that were fed Hugging Face's inputs."""
    rows = record.rows
    return rows if rows.empty else rows[rows["mode"] == "isolated"]


def _drawn_tensor(record: Record) -> str | None:
    """The tensor of the figure: where no layer shows its update, as in other exporters'
    packages, its rows of K; None where nothing was measured."""
    rows = _isolated(record)
    present = set() if rows.empty else set(rows["tensor"])
    return next((name for name in TENSORS if name in present), None)


def _has_budget(record: Record) -> bool:
    """Whether errors are compared with the rounding budget."""
    return bool(_isolated(record)["ratio"].notna().any())


def draw_errors(record: Record, title: str = "") -> plots.StyledFigure | None:
    """The figure of a validation: a tensor's error over what rounding causes, and below
    it 1 − cosine, by layer and token, each cell the worst T. Without a budget it has
    1 − cosine alone; None where no layer was measured."""
    tensor = _drawn_tensor(record)
    if tensor is None:
        return None
    return plots.heatmap(
        _isolated(record),
        metric=["error", "cosine"] if _has_budget(record) else "cosine",
        by=None,
        tensor=tensor,
        tokens=record.tokens,
        title=title,
    )


def _caption(record: Record) -> str:
    """What the panels of the figure show, which of them judges, and the cell with the
    smallest cosine."""
    rows, tensor = _isolated(record), _drawn_tensor(record)
    words = (
        f"Each layer's {TENSORS[tensor]} by layer and token, each layer fed Hugging "
        f"Face's input; a cell is the worst of {_describe_calls(rows['T'])}. "
    )
    panel = "The colour is 1 − cosine. It"
    if _has_budget(record):
        words += (
            "Upper panel: the error over what rounding causes. This panel judges: gate "
            f"budget lets a layer's RMS over tokens reach {plots.TOLERANCE_FACTOR:g}. "
        )
        panel = "Lower panel: 1 − cosine, which"
    words += (
        f"{panel} judges nothing: where a token's stream is large, as at an attention "
        "sink, rounding alone turns a small update far."
    )
    if smallest := _smallest_cosine(record):
        words += f" The smallest cosine is {smallest}."
    return words


def _describe_calls(counts: pd.Series) -> str:
    """The numbers of tokens in a call in words: T = 1 to 4 tokens in a call."""
    values = sorted({int(count) for count in counts})
    is_range = len(values) > 2 and values == [*range(values[0], values[-1] + 1)]
    if is_range:
        named = f"{values[0]} to {values[-1]}"
    else:
        named = " and ".join(map(str, values))
    return f"T = {named} tokens in a call"


def _smallest_cosine(record: Record) -> str:
    """The smallest cosine among the cells that gates read, its distance from 1, and its
    layer and token, in words; empty without such cells."""
    rows = _isolated(record)
    if rows.empty:
        return ""
    rows = judged_rows(rows[rows["tensor"] == _drawn_tensor(record)])
    rows = rows[rows["cosine"].notna()]
    if rows.empty:
        return ""
    row = rows.loc[rows["cosine"].idxmin()]
    position = int(row["position"])
    return (
        f"{row['cosine']:.5f} (1 − cosine {1 - row['cosine']:.2g}): layer "
        f"{row['layer']}, token {position} “{record.tokens[position]}”, T = {row['T']}"
    )


def _worst_cells(rows: pd.DataFrame, has_budget: bool, tokens: list[str]) -> Table:
    """The cells with the largest errors, each at its worst T."""
    excess = "ratio" if has_budget else "over_rounding"
    # a null is an error that is not finite, the worst (see `compare.furthest`)
    ranked = judged_rows(rows).sort_values(excess, ascending=False, na_position="first")
    ranked = ranked.drop_duplicates(["tensor", "layer", "position"]).head(WORST_CELLS)
    labels = [tokens[position] for position in ranked["position"]]
    # a cosine near 1 has its digits in the distance from 1; two of them say enough
    distances = (1 - ranked["cosine"]).clip(lower=0)
    worst = pd.DataFrame(
        {
            "tensor": ranked["tensor"],
            "layer": ranked["layer"].astype(int),
            "position": ranked["position"].astype(int),
            "token": pd.Series(labels, ranked.index, dtype=object),
            "T": ranked["T"].astype(int),
            "error": ranked["error"],
            "rounding budget": ranked["budget"],
            "error over rounding": ranked[excess],
            "1 − cosine": distances.map(lambda value: float(f"{value:.2g}")),
        }
    )
    caption = (
        "The cells whose error is the largest multiple of what rounding causes, each at "
        "its worst T. A cell is a single position, which is not judged: the gate `budget` "
        "judges the RMS over a layer's positions. Error and rounding budget are relative "
        "RMS; the budget is the error of Hugging Face's model with the stored weights and "
        "its stream in fp16."
    )
    return Table(worst.dropna(axis="columns", how="all"), caption)


def _gates_table(record: Record) -> pd.DataFrame:
    """The table of gates. Where the export is RED, checks of quality are `not judged`,
    like the quality in the verdict above the table."""
    export = record.results.verdict
    described = []
    for gate in _portable_gates(record.results):
        verdict = gates.describe_verdict(gate.verdict, export)
        described.append(replace(gate, verdict=verdict))
    table = gate_table(described)
    if record.is_noted:
        return table
    # a verdict that was not checked here has no sign of a pass
    stated = table["verdict"].str.replace("^[✗✓–] ", "stated: ", regex=True)
    return table.assign(verdict=stated)


def _cost(record: Record) -> list[Block]:
    cost = record.results.cost
    if cost is None:
        return []
    caption = (
        f"KL from Hugging Face's logits over {_describe_prompt(record)}, layers in a row. "
        f"The top token is Hugging Face's at {cost.same_top:.1%} of the positions. "
    )
    caption += COLUMNS_OF_WRONG if _wrong_weights(record) else COLUMNS
    smallest = _smallest_cosine(record)
    if smallest and record.results.mean_cosine is not None:
        caption += (
            f" The mean cosine of a layer's update is {record.results.mean_cosine:.5f}, "
            f"the smallest {smallest}."
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
            f"is {figures.error:.3g} times what rounding to fp16 causes; that of a right "
            "program in exact arithmetic is far below 1."
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
        if chosen.compress == FP16.name:
            words += f" ({STORAGE_ALONE})"
        words += f", {chosen.bytes / 2**20:,.1f} MiB"
        if chosen.bundle_bytes:
            words += f" instead of {chosen.bundle_bytes / 2**20:,.1f}"
        blocks.append(Paragraph(f"{words}."))
        # a stranger may have written any command there
        if chosen.command and record.is_noted:
            blocks.append(Commands((anonymize(chosen.command),)))
    if (tried := results.tried) and tried.presets:
        columns = dict.fromkeys(name for row in tried.presets for name in row)
        table = table_of(tried.presets, [*columns]).dropna(axis="columns", how="all")
        caption = (
            f"Presets by Hugging Face's model with their weights, on {tried.text}, in "
            f"{tried.seconds:.0f} s; KL is the mean in nats, with its 95% interval, "
            f"{STORAGE_ALONE}."
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
