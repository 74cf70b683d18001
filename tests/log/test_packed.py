"""Packed logs: they name nobody, and what a stranger packed changes no run that is there."""

import getpass
import io
import json
import os
import resource
import socket
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusal import refused

from workbench import log
from workbench.log import cache, packed, parquet
from workbench.log.schema import VERSION


@pytest.fixture
def filled(tmp_path):
    user, host = getpass.getuser(), socket.gethostname()
    secret = f"/home/{user}x/models of jane-doe on {host}, jane-doe"
    for run_id in ("1-a", "2-b"):
        log.append("layers", {"layer": 1, "shard": secret}, tmp_path / "a", run_id)
        row = {"status": "ok", "reason": secret, "config": {"stderr": [secret]}}
        log.append("runs", row, tmp_path / "a", run_id)
    log.append("runs", {"status": "ok"}, tmp_path / "a" / "shipped", "0-s")
    return tmp_path / "a"


def test_a_packed_log_names_nobody_and_is_taken_in_once(filled, tmp_path, monkeypatch):
    names = {"jane-doe", socket.gethostname()}
    monkeypatch.setattr(packed, "identifiers", lambda: names)
    path = tmp_path / "log.zip"
    assert log.pack(path, filled) == 2
    assert log.unpack(path, tmp_path / "b") == ["1-a", "2-b"]
    assert log.unpack(path, tmp_path / "b") == []
    for table in ("runs", "layers"):
        text = log.load(table, tmp_path / "b").astype(str).to_json(force_ascii=False)
        for name in ("jane-doe", "/home"):
            assert name not in text.replace("\\/", "/")
        assert len(log.load(table, tmp_path / "b")) == 2
    (stderr,) = json.loads(log.load("runs", tmp_path / "b")["config"][0])["stderr"]
    assert stderr.startswith("…/models of … on ")


def test_runs_that_were_unpacked_are_not_read_from_their_files(
    filled, tmp_path, monkeypatch
):
    """And a run that the log has already is what its file says, whatever was unpacked."""
    monkeypatch.setattr(cache, "MIN_UNSAVED", 2)
    path = tmp_path / "log.zip"
    log.pack(path, filled)
    root = tmp_path / "b"
    log.append("runs", {"status": "failed"}, root, "1-a")
    log.append("runs", {"status": "ok"}, filled, "3-c")
    log.pack(path, filled)
    assert log.unpack(path, root) == ["2-b", "3-c"]
    files, read_file = [], parquet.read_file

    def reads(table, file):
        files.append(Path(file.path).stem)
        return read_file(table, file)

    monkeypatch.setattr(parquet, "read_file", reads)
    cache._caches.clear()
    unpacked = log.load("runs", root)
    assert unpacked["status"].tolist() == ["failed", "ok", "ok"]
    assert files == []
    (root / "runs" / cache.FILE_NAME).unlink()
    cache._caches.clear()
    pd.testing.assert_frame_equal(log.load("runs", root), unpacked)


@pytest.mark.parametrize(
    "damage", ["torn", "note.txt", "runs/../x", "samples/log.parquet", "no zip"]
)
def test_a_packed_log_that_cannot_be_read_changes_nothing(filled, tmp_path, damage):
    path = tmp_path / "log.zip"
    log.pack(path, filled)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "no zip":
        path.write_text("text")
    else:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(damage, "PAR1")
    with refused("no run was added here"):
        log.unpack(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def packed_table(table: str, rows: list[dict] | pa.Table, **options) -> bytes:
    """The file of a table in a packed log, whatever its rows are."""
    if not isinstance(rows, pa.Table):
        fields = [
            f.with_nullable(True) for f in log.SCHEMAS[table] if f.name in rows[0]
        ]
        rows = pa.Table.from_pylist(rows, pa.schema(fields))
    file = io.BytesIO()
    metadata = {parquet.VERSION_KEY: str(VERSION)}
    pq.write_table(rows.replace_schema_metadata(metadata), file, **options)
    return file.getvalue()


def write_zip(path: Path, **tables: list[dict] | pa.Table | bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for table, rows in tables.items():
            contents = rows if isinstance(rows, bytes) else packed_table(table, rows)
            archive.writestr(f"{table}/log.parquet", contents)
    return path


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.parquet")}


RUN = {"run_id": "1-a", "status": "ok"}
NEW = {"run_id": "9-z", "status": "ok"}
UPDATE = {"run_id": "1-a", "tensor": "update", "mode": "isolated", "cosine": 1.0}
LAYER = {"run_id": "1-a", "layer": 7, "layer_ms": 1.0}
SAMPLE = {"run_id": "9-z", "phase": "call", "unit": "ms", "value": 1.0}


def test_rows_of_a_run_that_is_there_are_left_out_whatever_table_they_are_of(
    filled, tmp_path
):
    """Also of a shipped run, and of tables that the run has no rows of."""
    before = files_below(filled)
    shipped = {"run_id": "0-s", "status": "ok"}
    path = write_zip(
        tmp_path / "log.zip",
        fidelity=[UPDATE, UPDATE | {"run_id": "0-s"}],
        layers=[LAYER],
        samples=[SAMPLE, SAMPLE | {"run_id": "1-a"}],
        runs=[RUN | {"status": "failed"}, shipped, NEW],
    )
    assert log.unpack(path, filled) == ["9-z"]
    after = files_below(filled)
    assert {file: after[file] for file in before} == before
    added = {str(Path(file).relative_to(filled)) for file in after.keys() - before}
    assert added == {"runs/9-z.parquet", "samples/9-z.parquet"}


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        (
            {"runs": [NEW], "samples": [SAMPLE | {"run_id": "8-y"}]},
            "8-y.*does not contain",
        ),
        ({"runs": [NEW], "fidelity": [UPDATE]}, "1-a.*does not contain"),
        ({"runs": [NEW, NEW]}, "a run id occurs twice"),
        ({"runs": [NEW, NEW | {"run_id": None}]}, "run_id"),
        ({"runs": [NEW | {"run_id": "../x"}]}, "run id"),
        ({"runs": [NEW | {"run_id": ""}]}, "run id"),
        ({"runs": [NEW | {"status": "fine"}]}, "fine"),
        ({"runs": [NEW | {"config": "[1]"}]}, "not a JSON object"),
        ({"runs": [NEW | {"config": "[" * 10**5}]}, ""),
        (
            {"runs": [NEW], "layers": [LAYER | {"run_id": "9-z", "layer": None}]},
            "layer",
        ),
        ({"runs": [NEW], "samples": []}, "no rows"),
        (
            {"runs": pa.table({"run_id": ["9-z"], "status": [1]})},
            "'status' of type int",
        ),
        ({"runs": pa.table({"run_id": ["9-z"], "x": [1]})}, "a column 'x'"),
        ({"samples": [SAMPLE]}, "no run in it"),
    ],
)
def test_one_wrong_row_and_nothing_is_taken_in(filled, tmp_path, tables, named):
    before = files_below(filled)
    if tables.get("samples") == []:
        tables = tables | {"samples": log.SCHEMAS["samples"].empty_table()}
    path = write_zip(tmp_path / "log.zip", **tables)
    with refused(f"{named}.*no run was added here"):
        log.unpack(path, filled)
    assert files_below(filled) == before
    assert sorted(p.name for p in filled.iterdir()) == ["layers", "runs", "shipped"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_table_that_is_there_twice_is_refused(filled, tmp_path):
    path = write_zip(tmp_path / "log.zip", runs=[NEW])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(
            "runs/log.parquet", packed_table("runs", [NEW | {"run_id": "8-y"}])
        )
    with refused("occurs twice.*no run was added here"):
        log.unpack(path, filled)


def repeated(value: str, count: int) -> pa.Array:
    places = pa.array([0] * count, pa.int32())
    return pa.DictionaryArray.from_arrays(places, pa.array([value]))


def bomb(kind: str) -> bytes:
    """A small file whose rows would take a gigabyte or more."""
    if kind == "rows":
        ids = repeated("9-z", 2_000_000)
    else:
        ids = repeated("9-z", 100_000)
    columns = {"run_id": ids, "status": repeated("ok", len(ids))}
    if kind == "texts":
        columns["reason"] = repeated("x" * 100_000, len(ids))
    options = {"compression": "zstd"} if kind == "codec" else {}
    return packed_table("runs", pa.table(columns), **options)


@pytest.mark.parametrize("kind", ["rows", "texts", "codec", "zeros"])
def test_a_small_file_that_would_take_a_gigabyte_is_refused_before_it_does(
    tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(packed, "MOST_BYTES", 1 << 26)
    monkeypatch.setattr(packed, "MOST_FILE_BYTES", 1 << 24)
    contents = (
        b"PAR1" + bytes(packed.MOST_FILE_BYTES) if kind == "zeros" else bomb(kind)
    )
    path = write_zip(tmp_path / "log.zip", runs=contents)
    assert path.stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused("no run was added here"):
        log.unpack(path, tmp_path / "b")
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kib < 256 * 1024
    assert not (tmp_path / "b").exists()


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log.zip")
    with refused("a pipe.*no run was added here"):
        log.unpack(tmp_path / "log.zip", tmp_path / "b")


def test_a_disk_that_is_full_in_the_middle_leaves_the_log_as_it_was(
    filled, tmp_path, monkeypatch
):
    path = tmp_path / "log.zip"
    log.pack(path, filled)
    log.append("runs", {"status": "ok"}, tmp_path / "b", "0-x")
    before = files_below(tmp_path / "b")
    for function, count in (("fsync", 3), ("replace", 1), ("replace", 7)):
        calls, call = iter(range(100)), getattr(os, function)

        def fails(*arguments, calls=calls, call=call, count=count):
            if next(calls) == count:
                raise OSError(28, "No space left on device")
            return call(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, fails)
            with refused("log .*No space left.*no run of log.zip was added"):
                log.unpack(path, tmp_path / "b")
        assert files_below(tmp_path / "b") == before
    assert log.unpack(path, tmp_path / "b") == ["1-a", "2-b"]


def test_a_log_that_is_too_large_to_be_taken_in_again_is_not_packed(
    filled, tmp_path, monkeypatch
):
    monkeypatch.setattr(packed, "MOST_BYTES", 1000)
    with refused("bytes of rows.*pack it with --log"):
        log.pack(tmp_path / "log.zip", filled)
    assert not (tmp_path / "log.zip").exists()
