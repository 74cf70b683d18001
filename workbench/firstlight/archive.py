"""The zip of a first light: packs a result and its log without identifying names, and
imports them into another log.

Members: `result.json`, `log/TABLE/RUN.parquet`, `stderr/STAGE.txt`.
"""

import io
import json
import re
import tempfile
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workbench import log
from workbench.errors import InputError
from workbench.files import write_whole
from workbench.firstlight import SCHEMA
from workbench.log import SCHEMAS
from workbench.log.schema import JSON_COLUMNS
from workbench.log.scrub import anonymous, identifiers

RESULT = "result.json"
_LOG_MEMBER = re.compile(rf"log/((?:{'|'.join(SCHEMAS)})/\w[\w-]*\.parquet)", re.ASCII)
_BROKEN = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,  # an encrypted member, or a compression that is not there
)
_EPOCH = (1980, 1, 1, 0, 0, 0)
STEP = "ask for the file again; nothing was imported"


def members(result: dict, folder: Path) -> dict[str, bytes]:
    """Name → contents of the zip's members, without user, host, home, serial number and
    UUID.

    Args:
        result: of `measure.first_light`, run in `folder`.
    """
    names = identifiers()
    text = json.dumps(anonymous(result, names), indent=1, default=str)
    contents = {RESULT: text.encode()}
    for path in sorted(folder.glob("*.stderr")):
        if text := path.read_text():
            contents[f"stderr/{path.stem}.txt"] = anonymous(text, names).encode()
    for name, data in log.files(folder / "log").items():
        contents[f"log/{name}"] = _anonymous_table(data, names)
    return contents


def _anonymous_table(data: bytes, names: set[str]) -> bytes:
    """A Parquet file with every text anonymous; JSON stays valid JSON."""
    table = pq.read_table(io.BytesIO(data))
    out = io.BytesIO()
    for index, field in enumerate(table.schema):
        if field.type == pa.string() and field.name != "run_id":
            texts = []
            for text in table[field.name].to_pylist():
                texts.append(_anonymous_text(field.name, text, names))
            table = table.set_column(index, field, pa.array(texts, field.type))
    pq.write_table(table, out)
    return out.getvalue()


def _anonymous_text(column: str, text: str | None, names: set[str]) -> str | None:
    if column not in JSON_COLUMNS or text is None:
        return anonymous(text, names)
    return json.dumps(anonymous(json.loads(text), names), sort_keys=True)


def write(contents: dict[str, bytes], path: Path) -> None:
    """Writes the zip atomically; equal contents give equal bytes."""

    def pack(file) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in contents.items():
                member = zipfile.ZipInfo(name, _EPOCH)
                archive.writestr(member, data, zipfile.ZIP_DEFLATED)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, pack)


def read(path: str | Path) -> tuple[dict, dict[str, bytes]]:
    """The result in a zip, and the files of its log: `table/run.parquet` → contents.

    Raises:
        InputError: no such file, or a file that is damaged, of another kind or of
            another schema.
    """
    path = Path(path)
    subject = f"first light {path.name}"
    needed = "a file that workbench first-light wrote"
    try:
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        result = json.loads(contents[RESULT])
        schema = result["schema"]
        missing = {"machine", "runtime", "simulated", "stages"} - result.keys()
        if missing and schema == SCHEMA:
            raise KeyError(", ".join(sorted(missing)))
    except FileNotFoundError:
        raise InputError(subject, "no such file", needed, "correct the path") from None
    except _BROKEN as problem:
        actual = f"{type(problem).__name__}: {problem}"
        raise InputError(subject, actual, needed, STEP) from None
    if schema != SCHEMA:
        needed, step = f"schema {SCHEMA}", "update the workbench"
        raise InputError(subject, f"schema {schema}", needed, step)
    files = {}
    for name, data in contents.items():
        if match := _LOG_MEMBER.fullmatch(name):
            files[match[1]] = data
        elif name != RESULT and not re.fullmatch(r"stderr/\w+\.txt", name):
            member = f"{subject}, member {name!r}"
            raise InputError(member, "a foreign file", needed, STEP)
    return result, files


def import_zip(path: str | Path, root: log.store.Root = None) -> dict:
    """Adds the rows of a zip to the log at `root`; rows that it has already are not
    changed.

    Returns:
        {machine, runtime, simulated, runs (ids), imported (number of new runs)}.

    Raises:
        InputError: see `read`; or a table that cannot be read. The log is not changed.
    """
    from workbench.log.machine import machine_name

    result, files = read(path)
    subject = f"first light {Path(path).name}"
    by_run = defaultdict(dict)
    with tempfile.TemporaryDirectory() as trial:
        for name, data in files.items():
            file = Path(trial) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
            by_run[file.stem][name] = data
        for table in SCHEMAS:
            try:
                rows = log.load(table, trial)
            except (InputError, pa.ArrowException) as problem:
                where = f"{subject}, table {table}"
                raise InputError(where, str(problem), "rows of the log", STEP) from None
            if table == "runs" and set(rows["run_id"]) != by_run.keys():
                actual = f"{len(rows)} rows in runs for {len(by_run)} runs"
                raise InputError(subject, actual, "a row for each", STEP)
    present = set(log.load("runs", root)["run_id"])
    run_ids = sorted(by_run)
    for run_id in run_ids:
        log.adopt(by_run[run_id], root)
    return {
        "machine": machine_name(result["machine"]),
        "runtime": result["runtime"],
        "simulated": result["simulated"],
        "runs": run_ids,
        "imported": len(set(run_ids) - present),
    }
