"""Settings of numba: one under which no kernel can be compiled is named; none of its folders needs to
be writable."""

import os
import subprocess
import sys


def test_a_setting_that_compiles_nothing_is_named():
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", "import miltorch.kernels"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith("Next: unset NUMBA_DISABLE_JIT.")


def test_kernels_compile_where_no_folder_can_hold_their_machine_code(tmp_path):
    (tmp_path / "file").write_text("")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache")}
    # the folder beside the kernels is found before; root may write into any
    code = (
        "from numba.core import caching\n"
        "locators = caching.CacheImpl._locator_classes\n"
        "caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]\n"
        "import numpy, miltorch.kernels as kernels\n"
        "assert locators and kernels.compiled()(lambda x: x + 1)(1) == 2\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
