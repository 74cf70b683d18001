"""The errors of the workbench: `InputError`, `check_choice` and the functions that propose a
name, all of which `miltorch.errors` defines; `CellError`; and functions that read the errors of
libraries and of the system: whether a disk is full, their message in one line, and what a
field needs that pydantic refuses."""

import errno
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from miltorch.errors import (
    InputError,
    check_choice,
    did_you_mean,
    nearest_names,
    propose,
    visible,
)

__all__ = [
    "CellError",
    "InputError",
    "check_choice",
    "did_you_mean",
    "field_error",
    "is_full_disk",
    "last_message",
    "needed_value",
    "nearest_names",
    "one_line",
    "propose",
    "propose_choice",
    "visible",
]


# libraries in Rust (safetensors, tokenizers) report an error of the system as text
RUST_ERROR = re.compile(r"\(os error (\d+)\)")
FULL = errno.ENOSPC, errno.EDQUOT
# the end of an error of Core ML's binding, after its lines were joined:
# `{ NSLocalizedDescription = "no such model"; }`
CORE_ML_DICTIONARY = re.compile(r"(^|: )\{ (.*?);? \}$")
# a character as such a dictionary writes it, `\U2019`; not half of a surrogate pair
# (d800 to dfff), which is no character alone
ESCAPED_CHARACTER = re.compile(r"\\U(?!d[89a-f])([0-9a-f]{4})")


# pydantic's type of an error → what the field needs; {names} are of the error's `ctx`
NEEDED_VALUES = {
    "greater_than_equal": "a number from {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number up to {le}",
    "less_than": "a number below {lt}",
    "finite_number": "a finite number",
    "too_short": "at least {min_length} in the list",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "missing": "this key, which the file lacks",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "string_type": "a text",
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"), "keys with values"
    ),
}


class CellError(RuntimeError):
    """A notebook did not run to its end: a cell raised an error other than InputError, or
    the kernel failed."""


def field_error(
    fault: Mapping[str, Any], model: type, subject: str, step: str
) -> InputError:
    """The error for a field of a file that pydantic refuses.

    Args:
        fault: one of the `errors()` of a pydantic `ValidationError`.
        model: the pydantic class of the whole file.
        subject: the file, in words.
        step: what to do where no similar name is known.
    """
    value = fault.get("input")
    *parents, last = fault["loc"] or ["its contents"]
    if last == "[key]":  # pydantic's word for a wrong key, which is the part before it
        actual = f"{'.'.join(map(str, parents[:-1]))}: the key {reprlib.repr(value)}"
    else:
        place = ".".join(map(str, [*parents, last]))
        actual = f"{place}: {reprlib.repr(value)}"
    if fault["type"] == "extra_forbidden":
        names = _keys_at(model, fault["loc"][:-1])
        needed = f"one of the keys {', '.join(names)}"
        step = did_you_mean(str(fault["loc"][-1]), names, step)
    else:
        if fault["type"] == "missing":
            actual = f"no {place}"
        needed = needed_value(fault)
        step = propose_choice(value, needed, step)
    return InputError(subject, actual, needed, step)


def propose_choice(value: object, needed: str, step: str) -> str:
    """The next step for a value that is none of those in `needed`, such as `one of fp16,
    mixed`; `step` alone where `needed` names no values."""
    words, is_choice, names = needed.partition("one of ")
    if words or not is_choice:
        return step
    return did_you_mean(str(value), names.split(", "), step)


def needed_value(fault: Mapping[str, Any]) -> str:
    """What a field needs that pydantic refuses, in words; `fault` as for `field_error`."""
    context = fault.get("ctx", {})
    if words := NEEDED_VALUES.get(fault["type"]):
        return words.format_map(context)
    if fault["type"] == "literal_error":
        expected = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"one of {expected}" if ", " in expected else expected
    if isinstance(context.get("error"), InputError):  # of a validator of the field
        return context["error"].needed
    if fault["type"] == "list_type":
        value = fault.get("input")
        is_plain = isinstance(value, str | int | float)
        return f"a list, such as [{value}]" if is_plain else "a list"
    return re.sub("^(Value error, |Input should be )", "", fault["msg"])


def _keys_at(model: type, place: Iterable[str | int]) -> list[str]:
    """The keys of the object at a place in a file whose pydantic class is `model`."""
    for part in place:
        field = model.model_fields.get(part)
        if field is not None:  # not the number of an entry of a list
            model = _model_in(field.annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type | None:
    """The first pydantic class in the type of a field, such as `Layer` in `list[Layer]`."""
    if hasattr(annotation, "model_fields"):
        return annotation
    models = map(_model_in, get_args(annotation))
    return next((model for model in models if model), None)


def is_full_disk(problem: BaseException | None) -> bool:
    """Whether an error, or an error that it was raised from, says that a disk is full or a
    quota is used up."""
    while problem is not None:
        number = getattr(problem, "errno", None)
        if rust := RUST_ERROR.search(str(problem)):
            number = int(rust[1])
        if number in FULL:
            return True
        problem = problem.__cause__
    return False


def one_line(problem: object) -> str:
    """The text of a library's error in one line.

    Core ML's binding words an error as a dictionary over several lines, with escapes for
    characters that are not ASCII. The line has no braces and has the characters:
    `{`, `Reason = "model\\U2019s";`, `}` → `Reason = "model’s"`."""
    line = " ".join(str(problem).split())
    line = CORE_ML_DICTIONARY.sub(r"\1\2", line)
    return ESCAPED_CHARACTER.sub(lambda escape: chr(int(escape[1], 16)), line)


def last_message(written: list[str]) -> str:
    """The last message of a failed process on stderr, in one line: that of its last
    exception, however many lines it has; without one the last line, or the dictionary
    that ends there."""
    lines = [line for line in written if line.strip()]
    if not lines:
        return "no message"
    start = len(lines) - 1
    traces = [
        index
        for index, line in enumerate(lines)
        if line.startswith("Traceback (most recent call")
    ]
    openings = [index for index, line in enumerate(lines) if line.endswith("{")]
    if traces:
        # the frames of a traceback are indented; the message begins at the line after them
        start = traces[-1] + 1
        while start < len(lines) and lines[start].startswith(" "):
            start += 1
        if start == len(lines):  # a traceback that was cut off has no message
            start = traces[-1]
    elif lines[-1] == "}" and openings:
        start = openings[-1]
    return one_line("\n".join(lines[start:]))
