"""Runs the cells of a sweep on the workers of a Dask cluster: jobs in, (job, log files)
out.

Workers that measure have the resource `ANE=1`; a job takes one, so that no worker
measures two jobs at once. Dask's own retries and waiting are disabled: a job whose
worker dies is tried once more, both attempts are logged, and a cluster without workers
raises an error."""

import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench import log
from workbench.errors import InputError
from workbench.log.machine import machine_name
from workbench.paths import partial

RESOURCE = "ANE"
ATTEMPTS = 2
CONNECT_S = 10
PATIENCE_S = 600  # seconds that a job waits for a worker to come back
PIECE = 32 << 20  # bytes of a file that is sent


class Cluster:
    """The workers of a Dask scheduler."""

    def __init__(self, client):
        self.client = client
        self.indices = {}

    def environments(self) -> list[dict]:
        """`log.environment` of every worker."""
        return list(self.client.run(log.environment).values())

    def check(self, lacks: Callable[[str], str | None], path: str) -> None:
        """Refuses a cluster in which a worker cannot use the `path` of its project.

        Args:
            lacks: runs on a worker; the message that refuses a path, None for a usable
                one.
        """
        answers = self.client.run(lacks, path)
        if any(answers.values()):
            environments = self.client.run(log.environment)
            texts = []
            for address, text in answers.items():
                if text:
                    texts.append(f"{machine_name(environments[address])}: {text}")
            raise InputError(
                f"{len(texts)} of {len(environments)} workers",
                "; ".join(texts),
                f"{path} in the project of each, as here",
                "copy the checkpoint there, or name finished bundles in the grid (bundle: […]), "
                "which are sent",
            )

    def send(self, source: Path, place: str) -> None:
        """Copies a file or folder in pieces to `place` of every worker's project that
        lacks it."""
        projects = self.client.run(_lacking_project, place)
        addresses = {project: address for address, project in projects.items()}
        addresses.pop(None, None)
        lacking = list(addresses.values())
        if not lacking:
            return
        files = [p for p in sorted(source.rglob("*")) if p.is_file()] or [source]
        for path in files:
            name = path.relative_to(source).as_posix()
            with path.open("rb") as file:
                while (piece := file.read(PIECE)) or not file.tell():
                    self.client.run(_append, place, name, piece, workers=lacking)
                    if not piece:
                        break
        self.client.run(_finish, place, workers=lacking)

    def results(
        self,
        jobs: list[dict],
        run: Callable[[dict], dict],
        failed: Callable[[dict, str], None],
    ) -> Iterator[tuple]:
        """Runs every job; yields (job, its log files, whether that was its last
        attempt).

        Each worker has one job at a time, since Dask also fails the jobs that wait at a
        worker that dies."""
        from distributed import as_completed

        waiting = deque(jobs)
        pending = {}
        completed = as_completed([], loop=self.client.loop, raise_errors=False)
        while waiting or pending:
            while waiting and len(pending) < self._capacity():
                job = waiting.popleft()
                key = f"{job['cell']}-{job['sweep']}-{job['attempt']}"
                how = dict(key=key, pure=False, resources={RESOURCE: 1}, retries=0)
                work = _on_worker, run, job, dict(self.indices)
                future = self.client.submit(*work, **how)
                pending[future] = job
                completed.add(future)
            future = next(completed)
            job = pending.pop(future)
            problem = future.exception()
            if problem is None:
                yield job, future.result(), True
                continue
            retry = isinstance(problem, _errors()[0]) and job["attempt"] < ATTEMPTS
            if retry:
                waiting.appendleft(job | {"attempt": job["attempt"] + 1})
            yield job, _failed_files(job, problem, failed, self.indices), not retry

    def _capacity(self) -> int:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        for address in sorted(workers):
            self.indices.setdefault(address, len(self.indices))
        resources = [worker["resources"] for worker in workers.values()]
        return max(1, sum(each.get(RESOURCE, 0) >= 1 for each in resources))


def _lacking_project(place: str) -> tuple[str, str] | None:
    """On a worker: its host and project, or None if its project has something at
    `place`.

    The partial copy of an interrupted `send` is removed.
    """
    target = log.project() / place
    if target.exists():
        return None
    if partial(target).is_file():
        partial(target).unlink()
    shutil.rmtree(partial(target), ignore_errors=True)
    return socket.gethostname(), str(log.project())


def _append(place: str, name: str, piece: bytes) -> None:
    """On a worker: appends a piece to the file `name` of the folder sent to `place`.

    The name is "." if `place` itself is a file.
    """
    target = partial(log.project() / place) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as file:
        file.write(piece)


def _finish(place: str) -> None:
    """On a worker: renames the complete copy to `place`."""
    target = log.project() / place
    partial(target).rename(target)


def _on_worker(run: Callable[[dict], dict], job: dict, indices: dict[str, int]) -> dict:
    """On a worker: runs a job with its worker's index, since an address would name the
    host."""
    from distributed import get_worker

    return run(job | {"worker": indices.get(get_worker().address)})


def _failed_files(
    job: dict, problem: Exception, failed: Callable, indices: dict[str, int]
) -> dict[str, bytes]:
    """The log files of the failed run of a job that returned none."""
    reason = repr(problem)
    if isinstance(problem, _errors()):
        reason = "the worker died or left"
    worker = getattr(getattr(problem, "last_worker", None), "address", None)
    with tempfile.TemporaryDirectory() as root:
        row = job | {"root": root, "worker": indices.get(worker)}
        failed(row, f"attempt {job['attempt']}: {reason}")
        return log.files(root)


@contextmanager
def connect(address: str):
    """A `Cluster` on the scheduler at `address` (tcp://host:port).

    Raises:
        InputError: no scheduler there, or no worker with the resource.
    """
    from distributed import Client
    from distributed.comm.addressing import resolve_address

    try:  # a client of no address at all does not close by itself
        resolve_address(address)
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    # TypeError: tls without a certificate
    except (OSError, TypeError, ValueError) as problem:
        raise InputError(
            f"scheduler {address}",
            str(problem) or type(problem).__name__,
            "the address of a Dask scheduler",
            "start one: dask scheduler",
        ) from None
    with client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        if not any(RESOURCE in worker["resources"] for worker in workers.values()):
            raise InputError(
                f"scheduler {address}",
                f"{len(workers)} workers, none with {RESOURCE}",
                "at least one",
                f'start one on each Mac: dask worker {address} --resources "{RESOURCE}=1"',
            )
        client.run_on_scheduler(_disable_dask_retries)
        yield Cluster(client)


def _errors() -> tuple[type, type]:
    """Dask's errors for a worker that died and for no worker in time; sweeps on this
    machine do not import them."""
    from distributed.scheduler import KilledWorker, NoValidWorkerError

    return KilledWorker, NoValidWorkerError


def _disable_dask_retries(dask_scheduler) -> None:
    """On the scheduler: a job whose worker dies fails at once, and waiting for workers
    ends."""
    dask_scheduler.allowed_failures = 0
    dask_scheduler.no_workers_timeout = PATIENCE_S
