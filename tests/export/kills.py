"""Kills exports at random moments, with SIGKILL, and runs each again: `python -m tests.export.kills
30`.

Every export is a forked child of this process, so a moment costs no imports. Fails unless every
second run gives the bytes that an export in peace gives, and nothing is left beside them.
"""

import multiprocessing
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

from workbench.bundle import Bundle
from workbench.export import export
from workbench.models import checkpoint

OPTIONS = {"max_seq_len": 16, "compress": "int8-tensor"}
DIMS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
DIMS |= {"num_attention_heads": 2, "num_key_value_heads": 2}
DIMS |= {"num_hidden_layers": 12, "vocab_size": 40_000}


def started(source: Path, target: Path) -> multiprocessing.Process:
    """A process that exports."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=export, args=(source, target), kwargs=OPTIONS)
    process.start()
    return process


def main(moments: int) -> None:
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    source = checkpoint.random(folder / "c", "llama", **DIMS)
    export(source, folder / "first", **OPTIONS)  # warms this process up
    expected, start = Bundle.open(folder / "first").identity, time.perf_counter()
    started(source, folder / "whole").join()
    seconds = time.perf_counter() - start
    for i in range(moments):
        target, after = folder / f"b{i}", random.uniform(0, seconds)
        process = started(source, target)
        time.sleep(after)
        process.kill()
        process.join()
        # or its bundle was in place, only its end was not
        if not target.exists():
            started(source, target).join()
        assert Bundle.open(target).identity == expected, f"killed after {after} s"
        assert not list(folder.glob(".*.partial"))
        shutil.rmtree(target)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
