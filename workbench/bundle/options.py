"""The export options from keywords. Imports nothing heavy, so that a command refuses a
wrong option before it loads torch."""

from pydantic import ValidationError

from workbench.bundle.manifest import Options, first_fault
from workbench.bundle.presets import PRESETS, REPLACED
from workbench.errors import InputError, did_you_mean, needed_value, propose_choice


def make_options(**fields) -> Options:
    """Export options from keywords.

    Raises:
        InputError: an unknown option, a value out of range, a preset that is no longer
            exported, options that exclude each other, an option that the target's plug-in
            refuses.
    """
    try:
        options = Options(**fields)
    except ValidationError as problem:
        name, error = first_fault(problem, "export options")
        actual, needed = repr(error.get("input")), needed_value(error)
        if not error["loc"]:
            # a combination: its message names the option that excludes another value
            before, is_combination, behind = error["msg"].partition(" needs ")
            if is_combination:
                actual, needed = before, behind
        step = propose_choice(
            error.get("input"), needed, "see: workbench export --help"
        )
        if name == "compress":
            step = did_you_mean(str(error.get("input")), PRESETS, step)
        raise InputError(name, actual, needed, step) from None
    if options.compress in REPLACED:
        needed = (
            "tables for groups of rows: one table for a whole tensor costs too much"
        )
        step = f"export with --compress {REPLACED[options.compress]}"
        raise InputError("compress", repr(options.compress), needed, step)
    if options.plugin:
        options.plugin.check(options)
    return options
