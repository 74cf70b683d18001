"""The same cells on the workers of a Dask cluster.

Workers that measure have the resource `ANE=1`; a job takes one, so that no worker
measures two at once. Dask gives the job of a worker that died to another; a job is not
measured again if the log has its row by then, of a machine of the same name with the
same software."""

from collections.abc import Callable, Iterator

from workbench.errors import InputError

RESOURCE = "ANE"
CONNECT_S = 10


def connect(address: str):
    """A client of the scheduler at `address` (tcp://host:port).

    Raises:
        InputError: no Dask, no scheduler there, or no worker with the resource.
    """
    needed, step = "the address of a Dask scheduler", "start one: dask scheduler"
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address

        resolve_address(address)  # a client of no address does not close by itself
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
        workers = client.scheduler_info(n_workers=-1)["workers"]
        if any(RESOURCE in worker["resources"] for worker in workers.values()):
            return client
        client.close()
        actual, needed = f"{len(workers)} workers, none with {RESOURCE}", "at least one"
        step = f'start one: dask worker {address} --resources "{RESOURCE}=1"'
    except ImportError:
        actual, needed = "no Dask here", "Dask"
        step = "run: pip install 'workbench[cluster]'; or split the grid with --part"
    # TypeError: tls without a certificate
    except (OSError, TypeError, ValueError) as problem:
        actual = str(problem) or type(problem).__name__
    raise InputError(f"scheduler {address}", actual, needed, step)


def run(client, measure: Callable, jobs: list) -> Iterator[tuple]:
    """What `measure` returns of each job on a worker, as they end; closes the client."""
    from distributed import as_completed

    with client:
        how = {"resources": {RESOURCE: 1}, "pure": False}
        futures = client.map(measure, jobs, **how)
        for future in as_completed(futures, loop=client.loop):
            problem = future.exception()
            if problem:
                yield "failed", f"the worker died or left: {problem}"
            else:
                yield future.result()
