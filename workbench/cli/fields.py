"""The refusals of fields that pydantic checks, such as those of bundle.json and of an export's
options, in the words of the workbench."""

import re

from workbench.errors import InputError, field_error, needed_value, propose_choice

OF_A_BUNDLE = "Manifest", "Options"
RESTORE = "restore the file, or make the bundle again with workbench export or adopt"


def in_own_words(problem: InputError) -> InputError:
    """The refusal without pydantic's words, where a field caused it; otherwise itself."""
    cause = problem.__context__
    if cause is None:
        return problem
    from pydantic import ValidationError

    # the classes whose readers keep pydantic's words
    if not isinstance(cause, ValidationError) or cause.title not in OF_A_BUNDLE:
        return problem
    fault = cause.errors(include_url=False)[0]
    if cause.title == "Manifest":
        return _manifest_error(problem.subject, fault)
    if fault["loc"]:  # of one option; a combination has words of its own
        needed = needed_value(fault)
        step = propose_choice(fault["input"], needed, problem.next_step)
        return InputError(problem.subject, problem.actual, needed, step)
    return problem


def _manifest_error(subject: str, fault: dict) -> InputError:
    """The error for the first fault in a bundle.json."""
    from workbench.bundle.manifest import MANIFEST_VERSION, Manifest

    if fault["type"] == "json_invalid":
        needed = "JSON, as workbench export writes it"
        return InputError(subject, _json_fault(fault["ctx"]["error"]), needed, RESTORE)
    if fault["loc"] == ("version",):
        actual = f"version {fault['input']}"
        needed = f"version {MANIFEST_VERSION}"
        return InputError(subject, actual, needed, "export again with this workbench")
    return field_error(fault, Manifest, subject, RESTORE)


def _json_fault(text: str) -> str:
    """Where and why a text is no JSON, from the words of pydantic's parser: `expected value
    at line 1 column 1`."""
    place = re.fullmatch(r"(.*) at line (\d+) column (\d+)", text, re.DOTALL)
    if not place:
        return f"no JSON: {text}"
    reason, line, column = place.groups()
    if reason.startswith("EOF"):
        reason = "the file ends too early"
    return f"no JSON in line {line}, column {column}: {reason}"
