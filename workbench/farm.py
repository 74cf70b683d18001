"""The cells of a sweep on the workers of a Dask cluster: jobs in, (job, log files) out, in the order they end.

A machine that may measure is a worker with the resource `ANE=1`; every job takes one, so that no worker ever measures
two at once. Dask's own ideas of retrying and waiting are set aside: a worker that dies costs one more attempt, logged,
and a cluster without workers ends in a message. Knows nothing of what a job is.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workbench import log
from workbench.errors import InputError

RESOURCE = "ANE"
ATTEMPTS = 2
PATIENCE_S = 600  # how long a job waits for a worker to come back


class Farm:
    """A connection to a scheduler."""

    def __init__(self, client):
        self.client = client

    def machines(self) -> set[tuple]:
        """(chip, platform) of every worker."""
        return {(found["chip"], found["platform"]) for found in self.client.run(log.environment).values()}

    def results(self, jobs: list[dict], run: Callable[[dict], dict], failed: Callable[[dict, str], None]) -> Iterator[tuple]:
        """Runs every job; yields (job, its log files, whether that is the last of it)."""
        from distributed import as_completed
        from distributed.scheduler import KilledWorker, NoValidWorkerError

        pending = {self._submit(job, run): job for job in jobs}
        done = as_completed(list(pending), raise_errors=False)
        for future in done:
            job = pending.pop(future)
            problem = future.exception()
            if problem is None:
                yield job, future.result(), True
                continue
            again = isinstance(problem, KilledWorker) and job["attempt"] < ATTEMPTS
            lost = isinstance(problem, (KilledWorker, NoValidWorkerError))
            reason = f"attempt {job['attempt']}: {'the worker died or left' if lost else repr(problem)}"
            with tempfile.TemporaryDirectory() as root:
                failed(job | {"root": root, "worker": getattr(getattr(problem, "last_worker", None), "address", None)}, reason)
                yield job, log.files(root), not again
            if again:
                job = job | {"attempt": job["attempt"] + 1}
                pending[retry := self._submit(job, run)] = job
                done.add(retry)

    def _submit(self, job: dict, run: Callable):
        key = f"{job['cell']}-{job['sweep']}-{job['attempt']}"
        return self.client.submit(run, job, key=key, pure=False, resources={RESOURCE: 1}, retries=0)


@contextmanager
def connect(address: str):
    """A `Farm` on the scheduler at `address` (tcp://host:port).

    Raises:
        InputError: no scheduler there, or no worker with the resource.
    """
    from distributed import Client

    try:
        client = Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as problem:
        raise InputError(f"scheduler {address}", str(problem) or type(problem).__name__, "the address of a Dask scheduler",
                         "start one: dask scheduler") from None  # fmt: skip
    with client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        if not any(RESOURCE in worker["resources"] for worker in workers.values()):
            raise InputError(f"scheduler {address}", f"{len(workers)} workers, none with {RESOURCE}", "at least one",
                             f'start one on each Mac: dask worker {address} --resources "{RESOURCE}=1"')  # fmt: skip
        client.run_on_scheduler(_no_second_thoughts, patience_s=PATIENCE_S)
        yield Farm(client)


def _no_second_thoughts(patience_s: float, dask_scheduler=None) -> None:
    """On the scheduler: a death is reported at once instead of tried elsewhere; waiting for workers ends."""
    dask_scheduler.allowed_failures = 0
    dask_scheduler.no_workers_timeout = patience_s
