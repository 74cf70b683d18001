"""Lets the C library keep the memory of freed arrays for the next ones.

glibc takes a large block from the system and gives it back when it is freed; at the latest
from 32 MB on. The system fills each new page of 4 KiB with zeros when the process first
writes to it: a fifth of the processor time of a validation went there, and more with larger
layers. Blocks below `MAPPED_FROM` bytes come from the heap instead, which keeps what is
freed."""

import ctypes
import os
import sys

MAPPED_FROM = (
    256 << 20
)  # bytes of a block that is returned to the system when it is freed
KEPT = 512 << 20  # bytes at the heap's end that are kept when they are free
GROWTH = 64 << 20  # bytes by which the heap grows at least
# numbers of mallopt's parameters in glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# a caller's settings of the same parameters
VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> bool:
    """Sets the heap's limits in this process; returns whether it did.

    Nothing is set where the C library is not glibc, or where one of `VARIABLES` is set."""
    if sys.platform != "linux" or any(name in os.environ for name in VARIABLES):
        return False
    library = ctypes.CDLL(None)
    # musl has neither
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    settings = {
        M_MMAP_THRESHOLD: MAPPED_FROM,
        M_TRIM_THRESHOLD: KEPT,
        M_TOP_PAD: GROWTH,
    }
    return all([library.mallopt(name, size) for name, size in settings.items()])
