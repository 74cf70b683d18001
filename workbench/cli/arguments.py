"""The errors of cyclopts, which parses the command line, as an `InputError`: subject, what
was found, what is needed, next step."""

import re
import shlex

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from workbench.errors import InputError, did_you_mean

KINDS = {"int": "a whole number", "float": "a number"}
"""Python's type of an option → the value that it needs, in words."""

OWN_OPTIONS = ("--help", "--version")
"""The options that `workbench` takes without a command."""

LIMITS = {">=": "from", ">": "above", "<=": "up to", "<": "below"}
"""A comparison as cyclopts writes it → in words."""


def as_input_error(problem: CycloptsError, commands: list[str]) -> InputError:
    """The refusal of arguments that cyclopts refuses.

    Args:
        commands: the names of all commands.
    """
    words = problem.command_chain or ()
    # the message begins with the program's name already
    command = " ".join(words) or "command"
    look = f"see {' '.join(['workbench', *words])} --help"
    cause = problem.__cause__
    if isinstance(cause, InputError):  # of a validator of an option
        return InputError(_name(problem), cause.actual, cause.needed, cause.next_step)
    match problem:
        case UnknownOptionError():
            options = _options(problem)
            option = problem.token.keyword or problem.token.value
            step = did_you_mean(option, options, look)
            return InputError(command, option, "an option of this command", step)
        case UnknownCommandError():
            word = str((problem.unused_tokens or [""])[0])
            if word.startswith("-"):
                step = did_you_mean(word, OWN_OPTIONS, look)
                needed = f"a command, or an option: {', '.join(OWN_OPTIONS)}"
                return InputError(command, word, needed, step)
            step = did_you_mean(word, commands, look)
            needed = f"one of {', '.join(commands)}"
            return InputError(command, repr(word), needed, step)
        case MissingArgumentError():
            name = _name(problem)
            step = f"give it; {look}"
            if problem.argument and problem.argument.tokens or problem.keyword:
                needed = f"a value behind {name}"
                return InputError(command, f"{name} without a value", needed, step)
            kind = "option" if name.startswith("-") else "argument"
            return InputError(command, f"no {name}", f"this {kind}", step)
        case UnusedCliTokensError():
            words = " ".join(problem.unused_tokens or [])
            step = f"leave it out; {look}"
            if command == "generate":  # a prompt without its option
                step = f"write --prompt {shlex.quote(words)}"
            return InputError(
                command, f"the extra argument {words}", "no further argument", step
            )
        case RepeatArgumentError():
            name = problem.token.keyword or problem.token.value
            return InputError(
                f"{command} {name}", "several values", "one", "give it once"
            )
        case CoercionError():
            kind = getattr(problem.target_type, "__name__", str(problem.target_type))
            actual = problem.token.value if problem.token else "another value"
            needed = KINDS.get(kind, f"a value of type {kind}")
            return InputError(_name(problem), actual, needed, look)
        case ValidationError() if problem.argument is not None:
            reason = problem.exception_message.rstrip(".")
            needed = f"another value ({reason})"
            if limit := re.fullmatch("Must be ([<>]=?) (.+)", reason):
                needed = f"a number {LIMITS[limit[1]]} {limit[2]}"
            # the error has the value in its text alone
            value = re.match('Invalid value "(.*?)" for', str(problem), re.DOTALL)
            actual = value[1] if value else "a value out of range"
            if reason.endswith("does not exist"):
                step = "check the path"
                return InputError(
                    _name(problem), f"no file {actual}", "a file that exists", step
                )
            return InputError(_name(problem), actual, needed, look)
    return InputError(command, str(problem).rstrip("."), "other arguments", look)


def _name(problem: CycloptsError) -> str:
    """The option or the argument that an error is about."""
    if problem.argument is not None:
        return problem.argument.names[0]
    return "the argument"


def _options(problem: UnknownOptionError) -> list[str]:
    """The options of the command that refuses one."""
    names = [
        name for argument in problem.argument_collection for name in argument.names
    ]
    return [name for name in names if name.startswith("--")]
