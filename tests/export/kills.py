"""Kills exports at random moments, with SIGKILL, and runs each again: `python -m tests.export.kills
30`.

Every export is a forked child of this process, so a moment costs no imports. Fails unless every
second run gives the bytes that an export in peace gives, and nothing is left beside them.
"""

import os
import random
import shutil
import signal
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


def child(source: Path, target: Path) -> int:
    """A process that exports and ends; 0 in its exit status when the export did."""
    pid = os.fork()
    if pid:
        return pid
    try:
        export(source, target, **OPTIONS)
        os._exit(0)
    finally:
        os._exit(1)


def wait(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main(moments: int) -> None:
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    source = checkpoint.random(folder / "c", "llama", **DIMS)
    export(source, folder / "first", **OPTIONS)  # warms this process up
    start = time.perf_counter()
    assert wait(child(source, folder / "whole"))
    seconds = time.perf_counter() - start
    expected = Bundle.open(folder / "whole").identity
    for i in range(moments):
        target, after = folder / f"b{i}", random.uniform(0, seconds)
        pid = child(source, target)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        # its bundle was in place, only its end was not
        assert wait(pid) or target.exists() or wait(child(source, target))
        assert Bundle.open(target).identity == expected, f"killed after {after} s"
        assert not list(folder.glob(".*.partial"))
        shutil.rmtree(target)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
