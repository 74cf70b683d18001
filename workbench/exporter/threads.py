"""Runs a compiled kernel on parts of its rows at the same time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def call_in_parts(call: Callable[[slice], None], count: int) -> None:
    """Calls `call` with slices that together cover `count` items, one slice for each thread
    that torch may use. The parts run at the same time where `call` spends its time in
    kernels that release Python's lock.

    Args:
        call: its result for an item must not depend on the slice that the item is in.
    """
    parts = max(1, min(torch.get_num_threads(), count))
    bounds = [count * part // parts for part in range(parts + 1)]
    slices = [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]
    if len(slices) == 1:
        call(slices[0])
        return
    # A new pool for each call takes a quarter of a millisecond. A pool that stays would
    # have no threads in a process that is forked later.
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(call, slices))  # raises what a part has raised
