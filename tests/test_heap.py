"""The heap keeps freed arrays: the system gives no new pages for the next ones."""

import os
import subprocess
import sys

import pytest

from workbench import heap

# prints whether the heap was set, and the page faults of five arrays of 64 MB, one after another
COUNT = """
import resource, numpy as np
from workbench import heap
print(heap.keep_freed_memory())
np.ones(16 << 20, np.float32)  # the heap grows
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(16 << 20, np.float32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NEEDS_GLIBC = pytest.mark.skipif(
    not heap.keep_freed_memory(), reason="not glibc, or the caller has set its limits"
)
PAGES = 5 * (64 << 20) // 4096


def count_page_faults(**variables: str) -> tuple[bool, int]:
    environment = {k: v for k, v in os.environ.items() if k not in heap.VARIABLES}
    command = [sys.executable, "-c", COUNT]
    output = subprocess.check_output(command, env=environment | variables, text=True)
    is_set, faults = output.split()
    return is_set == "True", int(faults)


@NEEDS_GLIBC
def test_an_array_takes_the_pages_of_a_freed_one():
    is_set, faults = count_page_faults()
    assert is_set and faults < PAGES / 100


@NEEDS_GLIBC
def test_a_caller_s_limits_stay():
    is_set, faults = count_page_faults(MALLOC_MMAP_THRESHOLD_="1000000")
    # pages may be larger than 4 KiB
    assert not is_set and faults > PAGES / 600
