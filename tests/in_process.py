"""Calls that the workbench makes in processes of their own, made here: for tests whose subject is
the result. A process takes seconds until torch and coremltools are imported;
tests/sweep/test_process.py is about processes themselves."""

import contextlib
import importlib
import io
import json
import subprocess
import traceback
from functools import partial

from typer.testing import CliRunner

from workbench.check import units
from workbench.cli.app import app
from workbench.errors import InputError
from workbench.sweep import process


def call(function: str, argument: dict, **options) -> process.Outcome:
    """`process.call` without a process: JSON in, JSON out, an `InputError` is a failure in
    words."""
    module, name = function.split(":")
    try:
        value = getattr(importlib.import_module(module), name)(
            json.loads(json.dumps(argument))
        )
    except InputError as problem:
        return process.Outcome(failure=str(problem))
    return process.Outcome(json.loads(json.dumps(value)))


def invoke(*arguments) -> dict:
    """The JSON of a command that ends GREEN or RED; raises what the command raises."""
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, "--json")])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def launch(command: list[str]) -> subprocess.CompletedProcess:
    """`units.launch` without a process: `python -m workbench.check.units …`."""
    out, code, err = io.StringIO(), 0, ""
    with contextlib.redirect_stdout(out):
        try:
            units.units_main(*command[3:])
        except Exception:
            code, err = 1, traceback.format_exc()
    return subprocess.CompletedProcess(command, code, out.getvalue(), err)


validate_units = partial(units.validate_units, start=launch)
