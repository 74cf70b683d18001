"""Arguments that several commands take.

Paths are looked at before a command imports anything, so that a wrong one is refused at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from workbench import paths


def optional(check):
    """A callback that looks at the path of an option only where one is given."""
    return lambda path: None if path is None else check(path)


def golden_file(path: Path) -> Path:
    """The path of a golden store; refuses what is no file."""
    return paths.file("golden", path, "a golden store", "run: workbench golden CHECKPOINT --out G")


def tasks_file(path: Path) -> Path:
    """The path of a file of known-answer prompts; refuses what is no file."""
    return paths.file("--tasks", path, "prompts with answers (JSON lines)", "correct the path")


def print_version(asked: bool) -> None:
    """Prints the installed version and ends the command."""
    if asked:
        from importlib.metadata import version

        typer.echo(f"workbench {version('workbench')}")
        raise typer.Exit()


Version = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True,
                                       help="Print the version.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Ids = Annotated[str | None, typer.Option("--prompt-ids",
                                         help="Token ids, comma-separated: 2,42,100.")]
RuntimeName = Annotated[str, typer.Option("--runtime", help="auto, portable or coreml.")]
Precision = Annotated[str, typer.Option("--precision",
                                        help="Portable arithmetic: declared, exact or narrow.")]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", callback=paths.bundle)]
NewBundle = Annotated[Path, typer.Argument(metavar="BUNDLE", callback=paths.new)]
CheckpointPath = Annotated[Path, typer.Argument(metavar="CHECKPOINT", callback=paths.checkpoint)]
GoldenPath = Annotated[Path | None, typer.Option(help="Golden store.",
                                                 callback=optional(golden_file))]
GoldenOf = Annotated[Path | None, typer.Option(help="Make the golden now from this checkpoint.",
                                               callback=optional(paths.checkpoint))]
Log = Annotated[bool, typer.Option(help="Write the run into the experiment log.")]
LogFolder = Annotated[Path | None, typer.Option("--log", help="Folder of the experiment log.")]
Publish = Annotated[bool, typer.Option("--publish", help="Make this the shipped write-up.")]
Memory = Annotated[str | None, typer.Option("--memory",
                                            help="Memory of the target machine, such as 16G.")]
