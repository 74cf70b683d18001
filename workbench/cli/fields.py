"""The refusals of fields that pydantic checks, such as those of bundle.json and of an export's
options, in the words of the workbench; and the nearest name of a value that is none of those
that a refusal lists."""

import re

from workbench.errors import InputError, field_error, needed_value, propose_choice

OF_A_BUNDLE = "Manifest", "Options"
RESTORE = "restore the file, or make the bundle again with workbench export or adopt"


def in_own_words(problem: InputError) -> InputError:
    """The refusal without pydantic's words, where a field caused it; with the nearest name,
    where a value is none of those that are listed; otherwise itself."""
    worded = _of_field(problem) or _with_nearest(problem)
    if worded is None:
        return problem
    for note in getattr(problem, "__notes__", ()):
        worded.add_note(note)
    return worded


def _with_nearest(problem: InputError) -> InputError | None:
    """A refusal such as `found 'exakt'; needs one of declared, exact` with the nearest name
    in its next step; None where there is none, or it has one already."""
    value = re.fullmatch("'(.*)'", problem.actual)
    if not value or problem.next_step.startswith("did you mean"):
        return None
    step = propose_choice(value[1], problem.needed, problem.next_step)
    if step == problem.next_step:
        return None
    return InputError(problem.subject, problem.actual, problem.needed, step)


def _of_field(problem: InputError) -> InputError | None:
    """The refusal of a field that pydantic checked for a manifest or for export options;
    None for another one."""
    cause = problem.__context__
    if cause is None:
        return None
    from pydantic import ValidationError

    # the classes whose readers keep pydantic's words
    if not isinstance(cause, ValidationError) or cause.title not in OF_A_BUNDLE:
        return None
    fault = cause.errors(include_url=False)[0]
    if cause.title == "Manifest":
        return _manifest_error(problem.subject, fault)
    if not fault["loc"]:  # a combination of options has words of its own
        return None
    needed = needed_value(fault)
    step = problem.next_step
    if not step.startswith("did you mean"):
        step = propose_choice(fault["input"], needed, step)
    return InputError(problem.subject, problem.actual, needed, step)


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
