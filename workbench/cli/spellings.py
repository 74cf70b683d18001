"""Words on the command line that no command takes: spellings of earlier versions, and
words that are no subcommand. Each is refused with the spelling that is right."""

from collections.abc import Collection

from workbench.errors import InputError, did_you_mean

OLD_OPTIONS = {
    "validate": {
        "--each-unit": "run: workbench validate units BUNDLE",
        "--alone": "write --single-copy",
    },
    "explain": {
        "--only": "run: workbench explain parts|variant|ranges BUNDLE",
        "--op": "run: workbench explain op BUNDLE",
    },
    "log": {
        "--pack": "run: workbench log pack ZIP",
        "--unpack": "run: workbench log unpack ZIP",
    },
}
"""Command → option of an earlier version → next step."""

COMPARE_STEP = "run: workbench log compare RUN_A RUN_B"


def check_spelling(arguments: list[str]) -> None:
    """Refuses an option of an earlier version.

    Args:
        arguments: those of the command line, without the program.

    Raises:
        InputError: names the present spelling.
    """
    if not arguments:
        return
    command, *rest = arguments
    steps = OLD_OPTIONS.get(command, {})
    for argument in rest:
        option = argument.partition("=")[0]
        if option in steps:
            raise _old_spelling_error(f"{command} {option}", steps[option])


def unknown_words_error(
    command: str, words: list[str], subcommands: Collection[str], first: str
) -> InputError:
    """The error for words that a command with subcommands does not take.

    Args:
        words: those behind the arguments that it takes.
        subcommands: their names.
        first: the word right behind the command, which may be one of them misspelled.
    """
    if command == "log" and len(words) == 2:
        return _old_spelling_error(f"log {' '.join(words)}", COMPARE_STEP)
    if words[0] in subcommands:  # behind its argument
        needed = f"the subcommand {words[0]} before its arguments"
        step = f"write: workbench {command} {words[0]} {first}"
        return InputError(command, f"{words[0]} behind {first}", needed, step)
    names = ", ".join(subcommands)
    needed = f"at most a subcommand ({names}), and then its arguments"
    step = did_you_mean(first, subcommands, f"see workbench {command} --help")
    return InputError(command, f"the extra argument {' '.join(words)}", needed, step)


def _old_spelling_error(spelling: str, step: str) -> InputError:
    actual, needed = "a spelling of an earlier version", "the present one"
    return InputError(spelling, actual, needed, step)
