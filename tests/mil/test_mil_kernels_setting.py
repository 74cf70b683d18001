"""A setting of numba under which no kernel can be compiled is named."""

import os
import subprocess
import sys


def test_a_setting_that_compiles_nothing_is_named():
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", "import miltorch.kernels"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith("Next: unset NUMBA_DISABLE_JIT.")
