"""The same cells on the workers of a Dask cluster.

Workers that measure have the resource `ANE=1`; a job takes one, so that no worker
measures two at once. Dask gives the job of a worker that died to another; a job is not
measured again if the log has its row by then, of a machine of the same name with the
same software. Workers on one machine measure one after the other (see `lock`)."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import InputError

RESOURCE = "ANE"
CONNECT_S = 10
WAIT_S = 10
"""Between two looks at the cluster while no cell ends."""


def code_identity() -> str:
    """A hash of the code of the workbench here. A worker whose code differs may read a
    cell otherwise, and would log times of another program under the same setting."""
    digest = hashlib.sha256()
    for package in ("miltorch", "workbench"):
        folder = Path(find_spec(package).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def connect(address: str):
    """A client of the scheduler at `address` (tcp://host:port).

    Raises:
        InputError: no Dask, no scheduler there, no worker with the resource, or one
            with another version of the workbench.
    """
    needed, step = "the address of a Dask scheduler", "start one: dask scheduler"
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address

        resolve_address(address)  # a client of no address does not close by itself
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
        count, measuring = _workers(client)
        others = _of_other_code(client, measuring)
        if measuring and not others:
            return client
        client.close()
        actual, needed = f"{count} workers, none with {RESOURCE}", "at least one"
        step = f'start one: dask worker {address} --resources "{RESOURCE}=1"'
        if others:
            actual = f"another version of the workbench on {', '.join(others)}"
            needed = "the code of this checkout on every worker"
            step = "update the workbench there and start the worker again"
    except ImportError:
        actual, needed = "no Dask here", "Dask"
        step = "run: pip install 'workbench[cluster]'; or split the grid with --part"
    # TypeError: tls without a certificate
    except (OSError, TypeError, ValueError) as problem:
        actual = str(problem) or type(problem).__name__
    raise InputError(f"scheduler {address}", actual, needed, step)


def run(client, measure: Callable, jobs: list) -> Iterator[tuple]:
    """What `measure` returns of each job on a worker, as they end; closes the client.
    While no worker is there that could measure, one line on stderr says so.

    Raises:
        InputError, OSError: that a worker raised, such as of a full disk; the jobs that
            are left are cancelled.
    """
    from distributed import wait

    with client, client.as_current():
        how = {"resources": {RESOURCE: 1}, "pure": False}
        left, announced = set(client.map(measure, jobs, **how)), False
        while left:
            try:
                ended = wait(left, WAIT_S, "FIRST_COMPLETED").done
            except TimeoutError:
                if not _workers(client)[1] and not announced:
                    print(_no_worker(len(left)), file=sys.stderr, flush=True)
                    announced = True
                continue
            announced = False
            for future in ended:
                left.discard(future)
                problem = future.exception()
                # Dask's own errors of connections are an OSError without a number
                is_system = isinstance(problem, OSError) and problem.errno is not None
                if is_system or isinstance(problem, InputError):
                    client.cancel([*left])
                    raise problem
                if problem:
                    yield "failed", f"the worker died or left: {problem}"
                else:
                    yield future.result()


def _workers(client) -> tuple[int, list[str]]:
    """The number of all workers, and the addresses of those that measure."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    measuring = [
        address
        for address, worker in workers.items()
        if RESOURCE in worker["resources"]
    ]
    return len(workers), measuring


def _of_other_code(client, addresses: list[str]) -> list[str]:
    """The workers whose code of the workbench differs from this, or is missing."""
    if not addresses:
        return []
    found = client.run(code_identity, workers=addresses, on_error="return")
    return sorted(name for name, code in found.items() if code != code_identity())


def _no_worker(count: int) -> str:
    return (
        f"workbench: no worker with {RESOURCE} is left at the scheduler; {count} cells "
        "wait for one. Start one, or end this sweep: the same command resumes"
    )
