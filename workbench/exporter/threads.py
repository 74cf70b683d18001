"""Runs a compiled kernel on parts of its rows at the same time, or a function for several
matrices."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
MATRICES_AT_A_TIME = 2
"""Threads gain: most of the time none of them holds Python's lock. Each needs memory for the
values of a matrix in float32."""


def call_for_each(call: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Calls `call` for every item, for `MATRICES_AT_A_TIME` of them at the same time, without
    gradients. The calls share the threads that torch may use: with all of them for each call,
    OpenMP's threads would spin while they wait for a core, a third of the processor time on
    two cores."""
    threads = torch.get_num_threads()

    def call_without_gradients(item: Item) -> None:
        with torch.inference_mode():  # a mode of the thread
            call(item)

    pool = ThreadPoolExecutor(
        MATRICES_AT_A_TIME,
        initializer=torch.set_num_threads,
        initargs=(max(1, threads // MATRICES_AT_A_TIME),),
    )
    try:
        with pool:
            # the list raises what a call has raised
            list(pool.map(call_without_gradients, items))
    finally:
        torch.set_num_threads(threads)  # also for threads that start later


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
