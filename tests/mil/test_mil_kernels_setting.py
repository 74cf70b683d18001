"""Settings of numba, which compiles the kernels: `miltorch.kernels` refuses the one under which
nothing is compiled, and needs no folder that it can write to."""

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a new interpreter, because numba reads its settings when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_the_import_under_numba_disable_jit_says_to_unset_it():
    ended = run_python("import miltorch.kernels", NUMBA_DISABLE_JIT="1")
    assert ended.stderr.splitlines()[-1].endswith("Next: unset NUMBA_DISABLE_JIT.")


def test_kernels_compile_where_no_folder_can_hold_their_machine_code(tmp_path):
    (tmp_path / "file").write_text("")
    # numba would take the folder beside the kernels first, and root may write to any folder:
    # so only the locator that reads NUMBA_CACHE_DIR is left, and that is a path below a file
    code = (
        "from numba.core import caching\n"
        "locators = caching.CacheImpl._locator_classes\n"
        "caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]\n"
        "import numpy, miltorch.kernels as kernels\n"
        "assert locators and kernels.compiled()(lambda x: x + 1)(1) == 2\n"
    )
    ended = run_python(code, NUMBA_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert ended.returncode == 0, ended.stderr
