"""Runs commands, and what the workbench calls in child processes, in the process of the tests: a
process of its own takes seconds until torch and coremltools are imported. Tests of processes
themselves are in tests/sweep/test_process.py."""

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
    """`process.call` without a process. Arguments and result are pickled, as between processes. The
    failure of an outcome is the message of an `InputError`, or the end of another error's
    traceback; the error of a full disk is raised."""
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
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """What a user sees on both streams."""
        return self.stdout + self.stderr


def cli(*arguments, columns: int = 80, raises: bool = False) -> Ended:
    """Runs `workbench` with these arguments, in a terminal of `columns`. An error that it reports
    to the user is printed to `stderr` with its exit code, or raised where `raises`."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    size = mock.patch.dict(os.environ, COLUMNS=str(columns))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), size:
        try:
            run_command(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code or 0
        except (InputError, CycloptsError, CellError) as problem:
            if raises:
                raise
            code = 3 if isinstance(problem, CellError) else 2
            print("workbench:", problem, file=stderr)
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def invoke(*arguments) -> dict:
    """The JSON that a command prints; raises the errors that `cli` prints. Fails where the exit code
    is none of those for GREEN, RED and OVER."""
    ended = cli(*arguments, "--json", raises=True)
    assert ended.exit_code in (0, 1, 4), ended.output
    return json.loads(ended.stdout)
