"""The same sweep on a Dask cluster: a worker that dies loses and doubles no cell."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from refusal import refused

from workbench import log, sweep
from workbench.errors import InputError
from workbench.sweep import cluster

pytestmark = pytest.mark.wide  # workers of Dask are processes


@pytest.fixture(scope="module")
def dask():
    from distributed import LocalCluster

    options = {"threads_per_worker": 1, "resources": {"ANE": 1}, "memory_limit": 0}
    with LocalCluster(n_workers=2, dashboard_address=":0", **options) as running:
        yield running


@pytest.mark.slow("workers of Dask import torch")
def test_every_cell_is_there_once_though_a_worker_is_killed(
    dask, swept, grid, tmp_path
):
    root = tmp_path / "log"
    run = grid["run"] | {"rounds": 4, "n_gen": 2, "repetitions": 1}
    parsed = sweep.make_grid(grid | {"run": run, "validate_ids": []})

    def kill_one():
        while not list(root.glob("runs/*.parquet")):
            time.sleep(0.05)
        os.kill(next(iter(dask.workers.values())).pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    options = {"root": root, "bundles": swept.bundles, "progress": False}
    counts = sweep.sweep(parsed, scheduler=dask.scheduler_address, **options)
    killer.join()
    assert (counts["cells"], counts["done"], counts["failed"]) == (8, 8, 0)
    rows = log.load("runs", root)
    assert len(rows) == 8 and not rows.duplicated(["setting", "round"]).any()
    assert sweep.sweep(parsed, **options)["resumed"] == 8


def test_a_cluster_without_the_resource_and_no_cluster_at_all_are_refused(monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    from distributed import LocalCluster

    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(processes=False, **options) as bare:
        with refused("none with ANE"):
            cluster.connect(bare.scheduler_address)
    with refused("dask scheduler"):
        cluster.connect("tcp://127.0.0.1:1")


@pytest.fixture
def cluster_here():
    """A cluster in this process; its worker has the resource."""
    from distributed import LocalCluster

    options = {"n_workers": 1, "threads_per_worker": 1, "resources": {"ANE": 1}}
    options |= {"processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as running:
        yield running


def test_a_worker_with_other_code_is_refused(cluster_here, monkeypatch):
    cluster.connect(cluster_here.scheduler_address).close()
    # differs between this thread and the worker's
    code_here = lambda: threading.current_thread().name  # noqa: E731
    monkeypatch.setattr(cluster, "code_identity", code_here)
    with refused("another version of the workbench on .*update the workbench there"):
        cluster.connect(cluster_here.scheduler_address)


def test_auto_is_what_it_stands_for_on_the_workers(cluster_here, monkeypatch):
    client = cluster.connect(cluster_here.scheduler_address)
    assert cluster.resolve_auto(client, ["portable"]) == []
    assert cluster.resolve_auto(client, ["auto"]) == ["portable"]
    monkeypatch.setattr(
        client, "run", lambda *_, **__: {"a": "coreml", "b": "portable"}
    )
    with refused("auto is coreml and portable there.*name the runtime in the grid"):
        cluster.resolve_auto(client, ["auto"])
    assert client.status == "closed"


def raise_disk_full(job):
    raise OSError(28, "No space left on device")


def refuse(job):
    raise InputError("log", "a torn file", "a whole one", "move it")


@pytest.mark.parametrize("measure", [raise_disk_full, refuse])
def test_what_the_system_refuses_a_worker_ends_the_sweep(cluster_here, measure):
    """A cell that fails is a result; a log that cannot be written is none."""
    client = cluster.connect(cluster_here.scheduler_address)
    with pytest.raises((OSError, InputError), match="No space left|torn"):
        list(cluster.run_jobs(client, measure, [1, 2, 3]))
    assert client.status == "closed"


def test_a_cluster_without_workers_says_so_and_goes_on_with_a_new_one(
    cluster_here, monkeypatch, capsys
):
    monkeypatch.setattr(cluster, "WAIT_S", 0.2)
    client = cluster.connect(cluster_here.scheduler_address)
    cluster_here.scale(0)
    while cluster_here.scheduler.workers:
        time.sleep(0.02)
    results = []
    running = threading.Thread(
        target=lambda: results.extend(cluster.run_jobs(client, str, [1, 2]))
    )
    running.start()
    stderr = ""
    while "no worker with ANE is left at the scheduler; 2 cells wait" not in stderr:
        time.sleep(0.05)
        stderr += capsys.readouterr().err
    cluster_here.scale(1)
    running.join(60)
    assert sorted(results) == [(1, "1"), (2, "2")]


def test_what_is_no_address_is_one_message():
    """A client that could not begin tells of it when it is thrown away."""
    code = "from workbench.sweep import cluster\ncluster.connect('foo')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Next: start one: dask scheduler" in ended.stderr
    assert "TimeoutError" not in ended.stderr
