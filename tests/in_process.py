"""Calls that the workbench makes in processes of their own, made here: for tests whose subject is
the result. A process takes seconds until torch and coremltools are imported;
tests/sweep/test_process.py is about processes themselves."""

import json
import pickle
import traceback

from typer.testing import CliRunner

from workbench import process
from workbench.cli.app import app
from workbench.errors import InputError, last_message


def call(function, *args, **options) -> process.Outcome:
    """`process.call` without a process: values are pickled, an `InputError` is a failure
    in words, and so is the end of another error's traceback."""
    try:
        value = function(*pickle.loads(pickle.dumps(args)))
    except InputError as problem:
        return process.Outcome(failure=str(problem))
    except Exception:
        lines = traceback.format_exc().splitlines()
        return process.Outcome(failure=f"exit code 1: {last_message(lines)}")
    return process.Outcome(pickle.loads(pickle.dumps(value)))


def invoke(*arguments) -> dict:
    """The JSON of a command that ends GREEN or RED; raises what the command raises."""
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, "--json")])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)
