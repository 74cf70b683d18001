"""`workbench first-light`: every measurement that needs a Mac, in one command and one
zip."""

from pathlib import Path

from typer import echo

from workbench.cli.common import Json, show
from workbench.cli.export import check_writable

OUT = Path("build/first-light.zip")

PANEL = "Machine, memory, placement, cost"


def first_light_command(
    out: Path = OUT, runtime: str | None = None, json: Json = False
) -> None:
    """Runs six stages of measurements on Core ML in at most 15 minutes and writes one
    zip.

    Nothing is sent anywhere; neither root nor a network is needed. Off a Mac every
    stage runs over the stand-in.

    Example: workbench first-light --out build/first-light.zip

    Args:
        out: Zip of results, log rows, Core ML's messages; no user, host, home, serial
            number.
        runtime: Default: coreml on a Mac, else stand-in; stand-in:mac simulates a Mac.
    """
    import tempfile

    from workbench.firstlight import archive, measure
    from workbench.log import new_run_id
    from workbench.sweep import process

    runtime = measure.check_runtime(runtime)
    check_writable(out)
    lines = out.with_name(f"{out.stem}-{new_run_id()}.jsonl")
    echo(f"Rows are in {lines} until the zip is written.", err=True)
    with tempfile.TemporaryDirectory() as folder, process.awake():
        result = measure.first_light(
            Path(folder),
            runtime,
            lines=lines,
            progress=lambda stage: echo(stage_line(stage), err=True),
        )
        contents = archive.members(result, Path(folder))
    sizes = {name: len(data) for name, data in contents.items()}
    echo(f"{out} will hold, in bytes:", err=True)
    for name, size in sizes.items():
        echo(f"{size:10,}  {name}", err=True)
    archive.write(contents, out)
    lines.unlink(missing_ok=True)
    summary = f"{out}: {out.stat().st_size:,} bytes, {runtime}"
    if result["simulated"]:
        summary += ", simulated"
    result |= {"zip": str(out), "members": sizes}
    show(result, json, [summary])


def stage_line(stage: dict) -> str:
    """A stage in one line: status, name, rows, seconds, and the reason or its
    result."""
    amount = f"{len(stage['rows']):4} rows {stage['seconds']:7.1f} s"
    text = stage["reason"] or stage["says"]
    return f"{stage['status']:14}{stage['stage']:9}{amount}  {text}"
