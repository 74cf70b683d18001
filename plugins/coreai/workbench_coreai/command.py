"""`workbench crosscheck`: the portable runtime and Core AI, both compared with Hugging
Face."""

from pathlib import Path
from typing import Annotated

from typer import Option

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.common import Json, Prompt, gate_lines, show

PANEL = "Check"


def crosscheck_command(
    bundle: Path,
    checkpoint: Annotated[Path, Option(help="What the bundle was exported from.")],
    prompt: Prompt,
    folder: Annotated[
        Path | None,
        Option(help="Folder of the Core AI twins; default: beside the bundle."),
    ] = None,
    json: Json = False,
) -> None:
    """Compares a bundle on the portable runtime and its Core AI twins with Hugging
    Face's model.

    The twins, fp32 and fp16, run on Apple's interpreter; missing ones are exported
    first.

    Example: workbench crosscheck build/llama --checkpoint data/tiny-llama
    """
    opened = workbench.Bundle.open(bundle)
    paths.checkpoint(checkpoint)
    prompt.given()
    from workbench.models.checkpoint import Checkpoint
    from workbench_coreai.crosscheck import crosscheck

    source, m = Checkpoint(checkpoint), opened.manifest
    ids = prompt.ids(m.dims.V, source.path, m.tokens.bos)
    result = crosscheck(opened, source, ids, folder=folder, progress=not json)
    lines = [gates.verdict(result.gates), *gate_lines(result.gates)]
    for row in result.runtimes:
        logits = row["logits"]
        lines.append(
            f"{row['name']:9}{row['precision']:9} update 1-cos {row['worst_update']:.2g} (median "
            f"{row['median_update']:.2g}), K/V {row['worst_kv']:.2g}, same top token "
            f"{logits['top1_agreement']:.1%}, worst KL {logits['kl_max']:.2g}"
        )
    show(result.json(), json, lines)
