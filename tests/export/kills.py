"""Kills exports at random moments, with SIGKILL, and runs each again: `python -m tests.export.kills
30`.

Every export is a forked child of this process, so a moment costs no imports. Exits 1 unless every
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


def main(moments: int) -> int:
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    source = checkpoint.random(folder / "c", "llama", **DIMS)
    export(source, folder / "first", **OPTIONS)  # warms this process up
    start = time.perf_counter()
    assert wait(child(source, folder / "whole"))
    seconds = time.perf_counter() - start
    expected, wrong = Bundle.open(folder / "whole").identity, 0
    print(f"an export in peace takes {seconds:.2f} s")
    for i in range(moments):
        target, after = folder / f"b{i}", random.uniform(0, seconds)
        left = target.with_name(f".b{i}.partial")
        pid = child(source, target)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        # its bundle was in place, only its end was not
        finished = wait(pid) or target.exists()
        files = len(list(left.rglob("*")))
        if finished or wait(child(source, target)):
            same = Bundle.open(target).identity == expected and not left.exists()
        else:
            same = False
        wrong += not same
        state = "done" if finished else f"{files} files left"
        print(
            f"killed after {after:.2f} s: {state}, {'same bytes' if same else 'WRONG'}"
        )
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(folder)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
