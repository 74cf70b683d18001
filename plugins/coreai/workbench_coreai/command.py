"""`workbench crosscheck`: the portable runtime and Core AI, both compared with Hugging
Face."""

from pathlib import Path

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.options import Json, Prompt
from workbench.cli.output import gates_json, print_and_exit
from workbench.progress import stage


def crosscheck(
    bundle: Path,
    /,
    *,
    checkpoint: Path,
    prompt: Prompt = Prompt(),
    folder: Path | None = None,
    json: Json = False,
) -> None:
    """Compares a bundle on the portable runtime and its Core AI twins with Hugging
    Face's model.

    The twins, fp32 and fp16, run on Apple's interpreter; missing ones are exported
    first.

    Example: workbench crosscheck build/llama --checkpoint data/tiny-llama

    Args:
        checkpoint: What the bundle was exported from.
        folder: Folder of the Core AI twins; default: beside the bundle.
    """
    opened = workbench.Bundle.open(bundle)
    paths.locate_checkpoint(checkpoint)
    prompt.check()
    stage("crosscheck: opening the bundle")
    from workbench.models.checkpoint import Checkpoint
    from workbench_coreai.crosscheck import crosscheck as compare_runtimes

    source = Checkpoint(checkpoint)
    ids = prompt.token_ids(opened)
    result = compare_runtimes(opened, source, ids, folder=folder)
    print_and_exit(
        gates_json(result.gates) | {"runtimes": gates.records(result.runtimes)}, json
    )
