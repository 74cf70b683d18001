"""`workbench adopt`, and the other commands on an adopted folder."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from workbench import paths
from workbench.check import gates
from workbench.cli.common import Json, gate_lines, parse_ids, record, red_first, show
from workbench.errors import InputError

PANEL = "Check"


def adopt_command(
    packages: Annotated[list[Path] | None, Argument(metavar="PACKAGES…")] = None,
    checkpoint: Annotated[
        Path | None, Option(help="The checkpoint that was exported.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for foreign.yaml.")] = None,
    schema: Annotated[
        bool, Option("--schema", help="Print the JSON schema and stop.")
    ] = False,
    json: Json = False,
) -> None:
    """Describes another exporter's packages in a foreign.yaml; validate, check, decode,
    reuse and explain then take its folder where they take a bundle.

    Example: workbench adopt anemll/ --checkpoint data/tiny-llama --out build/adopted
    """
    from workbench.adopt import schema as schemas

    if schema:
        from json import dumps

        return echo(dumps(schemas.Foreign.model_json_schema(), indent=2))
    if not (packages and checkpoint and out):
        raise InputError(
            "adopt",
            "not all of PACKAGES, --checkpoint and --out",
            "all three, or --schema",
            "run: workbench adopt PACKAGES --checkpoint HF --out FOLDER",
        )
    paths.checkpoint(checkpoint)
    from workbench.adopt.propose import propose, target, write
    from workbench.models.checkpoint import Checkpoint

    path = target(out)
    foreign, notes = propose(packages, Checkpoint(checkpoint), out)
    write(foreign, notes, path)
    result = {"foreign": str(path), "parts": len(foreign.parts), "assumed": notes}
    show(result, json, [str(path), *(f"- {note}" for note in notes)])


def _adapter(folder: Path, *how):
    """The adapter of an adopted folder; `how`: runtime, precision, compute units."""
    from workbench.adopt.adapter import Adapter
    from workbench.adopt.folder import Adopted

    return Adapter(Adopted.open(folder), *how)


def check_adopted(folder: Path, golden, runtime, compute_units, json: bool) -> None:
    """`workbench check` on adopted packages: the gates without a golden; with one,
    `validate`."""
    from workbench.adopt import gates as adopted_gates

    if golden:
        return validate_adopted(
            folder, None, golden, None, runtime, compute_units, "exact", json
        )
    checks = adopted_gates.own_gates(_adapter(folder, runtime, "exact", compute_units))
    result = {
        "verdict": gates.verdict(checks),
        "gates": [gate.json() for gate in checks],
    }
    show(result, json, [result["verdict"], *gate_lines(checks)])


def validate_adopted(
    folder: Path,
    checkpoint,
    golden,
    prompt_ids,
    runtime,
    compute_units,
    precision,
    json: bool,
    log: bool = False,
) -> None:
    """`workbench validate` on adopted packages."""
    from workbench.adopt.folder import Adopted
    from workbench.adopt.validate import validate
    from workbench.check.golden import Golden, check_ids
    from workbench.runtime import resolve

    adopted, ids = Adopted.open(folder, checkpoint), None
    stored = golden and Golden.load(golden)
    if prompt_ids:
        if stored:
            V = len(stored.logits[0])
        else:
            V = adopted.needed_checkpoint().config.vocab_size
        ids = check_ids(parse_ids(prompt_ids), V).tolist()
    how = dict(runtime=runtime, precision=precision, compute_units=compute_units)
    validation = validate(adopted, stored, ids, **how)
    result = validation.json()
    if log:
        from workbench.sweep import runs

        row = {"verdict": validation.verdict, "config": {"gates": result["gates"]}}
        row |= runs.executed(resolve(runtime), precision, False, compute_units, {})
        record("validate", result, adopted, row, fidelity=validation.rows)
    show(result, json, [result["verdict"], *gate_lines(validation.gates)])


def reuse_adopted(
    folder: Path, max_new: int, runtime, compute_units, precision, json: bool
) -> None:
    """`workbench reuse` on adopted packages: restored and overwritten caches, batch
    1."""
    from workbench.adopt import gates as adopted_gates

    adapter = _adapter(folder, runtime, precision, compute_units)
    cells = adopted_gates.reuse_cells(adapter, max_new)
    verdict = gates.verdict(cells)
    rows, lines = [cell.json() for cell in cells], [verdict]
    for cell in red_first(cells):
        settings = f"batch 1  {cell.cache:5} context {cell.context:<6}"
        lines.append(f"{cell.verdict:8}{settings}{cell.reason}")
    show({"verdict": verdict, "cells": rows}, json, lines)


def explain_adopted(folder: Path, checkpoint: Path, json: bool) -> None:
    """`workbench explain` on adopted packages."""
    from workbench.adopt import validate
    from workbench.adopt.folder import Adopted

    cause = validate.explain(Adopted.open(folder, checkpoint), progress=not json)
    rows = gates.records(cause.variants)
    lines = [f"{row['relative_rms']:<12.3g}{row['name']}" for row in rows]
    result = {"fits": cause.fits, "variants": rows, "faults": cause.faults}
    show(result, json, [validate.conclusion(cause), *lines])


def traced(folder: Path, prompt_ids: str | None):
    """The trace of adopted packages over one prompt."""
    from workbench.adopt.folder import Adopted
    from workbench.adopt.probe import trace_adopted

    ids = None if prompt_ids is None else parse_ids(prompt_ids)
    return trace_adopted(Adopted.open(folder), ids)
