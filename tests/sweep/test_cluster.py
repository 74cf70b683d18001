"""The same sweep on a Dask cluster: one job at a time per worker, one more attempt after a death,
no endless waiting."""

import json
import os
import subprocess
import sys

import cluster_jobs
import pytest

from workbench import log, sweep
from workbench.errors import InputError
from workbench.sweep import cluster


@pytest.fixture(scope="module")
def dask():
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2,
        threads_per_worker=4,
        processes=True,
        resources={"ANE": 1},
        dashboard_address=":0",
        memory_limit=0,
    ) as running:
        yield running


def jobs(count: int, **more) -> list[dict]:
    return [
        {"cell": f"cell-{i}", "sweep": os.urandom(4).hex(), "attempt": 1, "index": i}
        | more
        for i in range(count)
    ]


def note_failure(job: dict, reason: str) -> None:
    log.append("runs", {"status": "failed", "reason": reason}, job["root"])


def test_a_worker_never_runs_two_at_once(dask):
    with cluster.connect(dask.scheduler_address) as workers:
        spans = sorted(
            json.loads(files["answer"])
            for _, files, _ in workers.results(
                jobs(12), cluster_jobs.interval, note_failure
            )
        )
    assert len(spans) == 12 and len({pid for pid, *_ in spans}) == 2
    for (pid, _, end), (next_pid, start, _) in zip(spans, spans[1:], strict=False):
        assert pid != next_pid or start >= end


@pytest.mark.parametrize(("deaths", "ends_well"), [(1, True), (2, False)])
def test_a_death_costs_one_more_attempt_and_is_logged(dask, deaths, ends_well):
    with cluster.connect(dask.scheduler_address) as workers:
        answers = list(
            workers.results(jobs(4, deaths=deaths), cluster_jobs.dies, note_failure)
        )
    last = {
        job["index"]: (job["attempt"], "answer" in files)
        for job, files, final in answers
        if final
    }
    assert last == {0: (2, ends_well)} | {i: (1, True) for i in (1, 2, 3)}
    failed = [files for _, files, _ in answers if "answer" not in files]
    assert len(failed) == deaths and all(
        list(files)[0].startswith("runs/") for files in failed
    )


def test_a_cluster_without_the_resource_and_no_cluster_at_all_are_refused(monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    ) as bare:
        with (
            pytest.raises(InputError, match="none with ANE"),
            cluster.connect(bare.scheduler_address),
        ):
            pass
    with (
        pytest.raises(InputError, match="dask scheduler"),
        cluster.connect("tcp://127.0.0.1:1"),
    ):
        pass


def test_a_sweep_gives_the_same_rows_as_here(dask, forks, swept, grid, tmp_path):
    """`swept` ran the same grid in this process."""
    with cluster.connect(dask.scheduler_address) as workers:
        workers.client.run(cluster_jobs.start_children_with, forks)
    folder, _ = swept
    counts = sweep.sweep(
        sweep.make_grid(grid),
        root=tmp_path / "log",
        bundles=folder / "bundles",
        progress=False,
        scheduler=dask.scheduler_address,
    )
    assert (counts["cells"], counts["done"], counts["failed"]) == (2, 2, 0)
    here, there = (
        log.load("runs", root=root) for root in (folder / "log", tmp_path / "log")
    )
    same = [
        "checkpoint",
        "bundle_hash",
        "max_seq_len",
        "T",
        "setting",
        "round",
        "verdict",
        "runtime",
        "status",
    ]
    pick = lambda frame: sorted(map(str, frame[same].itertuples(index=False)))  # noqa: E731
    assert pick(here) == pick(there)
    samples = [
        log.load("samples", root=root).groupby(["phase", "T"]).size()
        for root in (folder / "log", tmp_path / "log")
    ]
    assert samples[0].equals(samples[1])
    again = sweep.sweep(
        sweep.make_grid(grid),
        root=tmp_path / "log",
        bundles=folder / "bundles",
        progress=False,
        scheduler=dask.scheduler_address,
    )
    assert again["resumed"] == 2


def test_what_is_no_address_is_one_message():
    """A client that could not begin tells of it when it is thrown away."""
    code = "from workbench.sweep import cluster\nwith cluster.connect('foo'):\n    pass"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "Next: start one: dask scheduler" in ended.stderr
        and "TimeoutError" not in ended.stderr
    )
