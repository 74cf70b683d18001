"""Commands, and calls that the workbench makes in processes of their own, made here: for tests
whose subject is the result. A process takes seconds until torch and coremltools are imported;
tests/sweep/test_process.py is about processes themselves."""

import contextlib
import io
import json
import os
import pickle
import traceback
from dataclasses import dataclass
from unittest import mock

from cyclopts import CycloptsError

from workbench import process
from workbench.cli.app import run_command
from workbench.errors import CellError, InputError, is_full_disk, last_message


def call(function, *args, **options) -> process.Outcome:
    """`process.call` without a process: values are pickled, an `InputError` is a failure
    in words, and so is the end of another error's traceback. That of a full disk is raised."""
    try:
        value = function(*pickle.loads(pickle.dumps(args)))
    except Exception as problem:
        if is_full_disk(problem):
            raise
        if isinstance(problem, InputError):
            return process.Outcome(failure=str(problem))
        lines = traceback.format_exc().splitlines()
        return process.Outcome(failure=f"exit code 1: {last_message(lines)}")
    return process.Outcome(pickle.loads(pickle.dumps(value)))


@dataclass
class Ended:
    """A command that ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """What a user sees on both streams."""
        return self.stdout + self.stderr


def cli(*arguments, columns: int = 80, raises: bool = False) -> Ended:
    """A command of `workbench` in this process; `raises` its InputError instead of keeping it."""
    printed, told, code = io.StringIO(), io.StringIO(), 0
    size = mock.patch.dict(os.environ, COLUMNS=str(columns))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told), size:
        try:
            run_command(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code or 0
        except (InputError, CycloptsError, CellError) as problem:
            if raises:
                raise
            code = 3 if isinstance(problem, CellError) else 2
            print("workbench:", problem, file=told)
    return Ended(code, printed.getvalue(), told.getvalue())


def invoke(*arguments) -> dict:
    """The JSON of a command that ends GREEN, RED or OVER; raises what the command raises."""
    ended = cli(*arguments, "--json", raises=True)
    assert ended.exit_code in (0, 1, 4), ended.output
    return json.loads(ended.stdout)
