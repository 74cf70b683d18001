"""The cells of a sweep on the workers of a Dask cluster.

Workers that measure have the resource `ANE=1`. A job takes one, so that no worker
measures two cells at once. When a worker dies, Dask gives its job to another worker,
which does not measure it again if the log has the run by then, from a machine of the
same name with the same software. Workers on one machine take turns (see `lock`)."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import InputError
from workbench.runtime import resolve
from workbench.sweep.grid import CellResult

RESOURCE = "ANE"
CONNECT_S = 10
WAIT_S = 10
"""Seconds after which the workers are counted again while no cell ends."""


def code_identity() -> str:
    """A hash of the workbench's code here. A worker with other code could read a cell
    differently, and would log times of another program under the same setting."""
    digest = hashlib.sha256()
    for package in ("miltorch", "workbench"):
        folder = Path(find_spec(package).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def connect(address: str):
    """A client of the scheduler at `address` (tcp://host:port).

    Raises:
        InputError: no Dask, no scheduler there, no worker with the resource, or a
            worker with another version of the workbench.
    """
    subject = f"scheduler {address}"
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address
    except ImportError:
        step = "run: pip install 'workbench[cluster]'; or split the grid with --part"
        raise InputError(subject, "no Dask here", "Dask", step) from None
    try:
        # a client of an invalid address would not close by itself
        resolve_address(address)
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
        workers = _list_workers(client)
        outdated = _workers_with_other_code(client, workers.measuring)
    # TypeError: tls without a certificate
    except (OSError, TypeError, ValueError) as problem:
        actual = str(problem) or type(problem).__name__
        needed, step = "the address of a Dask scheduler", "start one: dask scheduler"
        raise InputError(subject, actual, needed, step) from None
    if outdated:
        client.close()
        actual = f"another version of the workbench on {', '.join(outdated)}"
        needed = "the code of this checkout on every worker"
        step = "update the workbench there and start the worker again"
        raise InputError(subject, actual, needed, step)
    if not workers.measuring:
        client.close()
        actual = f"{workers.count} workers, none with {RESOURCE}"
        step = f'start one: dask worker {address} --resources "{RESOURCE}=1"'
        raise InputError(subject, actual, "at least one", step)
    return client


def resolve_auto(client, named: Sequence[str]) -> list[str]:
    """The runtime that `auto` stands for on the workers, in a list; an empty list unless
    the grid names `auto`.

    Args:
        named: the runtimes of the grid.

    Raises:
        InputError: `auto` stands for different runtimes on two workers. The client is
            closed.
    """
    if "auto" not in named:
        return []
    measuring = _list_workers(client).measuring
    names = sorted(set(client.run(resolve, workers=measuring).values()))
    if len(names) > 1:
        client.close()
        actual, needed = f"auto is {' and '.join(names)} there", "one runtime"
        step = "name the runtime in the grid, or start only workers of one kind"
        raise InputError("workers of the scheduler", actual, needed, step)
    return names


def run_jobs(
    client, measure: Callable[..., CellResult], jobs: list
) -> Iterator[tuple[Any, CellResult]]:
    """Yields each job with the result of `measure` for it on a worker, in the order in which
    the jobs end; closes the client at the end. While there is no worker that could measure,
    one line on stderr says so.

    Raises:
        InputError, OSError: a worker raised it, such as for a full disk; the remaining
            jobs are cancelled.
    """
    from distributed import wait

    with client, client.as_current():
        # impure: Dask would take equal jobs, such as rounds of a cell, for one
        options = {"resources": {RESOURCE: 1}, "pure": False}
        futures = client.map(measure, jobs, **options)
        job_of = dict(zip(futures, jobs, strict=True))
        pending, announced = set(futures), False
        while pending:
            try:
                ended = wait(pending, WAIT_S, "FIRST_COMPLETED").done
            except TimeoutError:
                if not _list_workers(client).measuring and not announced:
                    print(_describe_waiting(len(pending)), file=sys.stderr, flush=True)
                    announced = True
                continue
            announced = False
            for future in ended:
                pending.discard(future)
                problem = future.exception()
                # Dask's own connection errors are OSErrors without a number
                is_system = isinstance(problem, OSError) and problem.errno is not None
                if is_system or isinstance(problem, InputError):
                    client.cancel([*pending])
                    raise problem
                if problem:
                    reason = f"the worker died or left: {problem}"
                    yield job_of[future], CellResult("failed", reason)
                else:
                    yield job_of[future], future.result()


class _Workers(NamedTuple):
    """The workers of a scheduler."""

    count: int
    """The number of all workers."""
    measuring: list[str]
    """The addresses of the workers that measure."""


def _list_workers(client) -> _Workers:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    measuring = [
        address
        for address, worker in workers.items()
        if RESOURCE in worker["resources"]
    ]
    return _Workers(len(workers), measuring)


def _workers_with_other_code(client, addresses: list[str]) -> list[str]:
    """The workers whose code of the workbench differs from this machine's, or that lack
    the workbench."""
    if not addresses:
        return []
    codes = client.run(code_identity, workers=addresses, on_error="return")
    return sorted(name for name, code in codes.items() if code != code_identity())


def _describe_waiting(count: int) -> str:
    return (
        f"workbench: no worker with {RESOURCE} is left at the scheduler; {count} cells "
        "wait for one. Start one, or end this sweep: the same command resumes"
    )
