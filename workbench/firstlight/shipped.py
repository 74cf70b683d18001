"""Rewrites the files shipped with first light after a change of the export or of the
rungs: `python -m workbench.firstlight.shipped`, on Linux, in a checkout."""

import json
import tempfile
from pathlib import Path

import numpy as np

from workbench import log
from workbench.check import golden, tasks
from workbench.files import write_whole
from workbench.firstlight import rungs, stages
from workbench.models.checkpoint import Checkpoint

GOLDEN_TOKENS = 12


def write_shipped(folder: Path) -> None:
    """Writes digests and portable results of every rung, and the golden of
    data/tiny-llama; bundles go to `folder`."""
    digests, arrays = {}, {}
    for rung in rungs.ladder().values():
        bundle, shard = rungs.opened(rung, folder)
        digests[rung.name] = rungs.digest(bundle.package(shard))
        results = rungs.portable_results(bundle, shard)
        arrays[f"{rung.name} distance"] = np.array([r.distance for r in results])
        # `declared` arithmetic rounds an output to fp16, so fp16 holds it
        for i, result in enumerate(results):
            arrays[f"{rung.name} {i}"] = np.float16(result.output)
    rungs.DATA.mkdir(exist_ok=True)
    write_whole(rungs.DIGESTS, (json.dumps(digests, indent=1) + "\n").encode())
    write_whole(rungs.OUTPUTS, lambda file: np.savez_compressed(file, **arrays))
    data = log.project() / "data"
    source = Checkpoint(data / "tiny-llama")
    text = tasks.load_tasks(data / "tasks" / "heldout.jsonl")[0]["prompt"]
    ids = tasks.load_tokenizer(source.path).encode(text)[:GOLDEN_TOKENS]
    golden.make_golden(source, ids).save(stages.GOLDEN)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_shipped(Path(folder))
