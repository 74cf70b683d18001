"""`InputError`, the exception for every input that cannot be used, and the last message
of a failed process.

This module imports nothing of the package, so every other module may import it.
"""

import re


class InputError(ValueError):
    """Input that cannot be used: the subject, its actual value, the value it needs, and
    the next step for the user.

    ```
    step = "export with --max-seq-len 512"
    raise InputError("prompt", "300 tokens", "at most max_seq_len = 256", step)
    ```
    prints as ``prompt: found 300 tokens; needs at most max_seq_len = 256. Next: export with
    --max-seq-len 512.``
    """

    def __init__(self, subject: str, actual: str, needed: str, next_step: str):
        self.subject, self.actual, self.needed, self.next_step = (
            subject,
            actual,
            needed,
            next_step,
        )
        super().__init__(
            f"{subject}: found {actual}; needs {needed}. Next: {next_step.rstrip('.')}."
        )

    @classmethod
    def from_message(cls, message: str) -> "InputError | None":
        """An error with this message, or None where an InputError would say it
        differently."""
        parts = re.fullmatch(
            r"(.*?): found (.*); needs (.*)\. Next: (.*)\.", message, re.DOTALL
        )
        return cls(*parts.groups()) if parts else None

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback; IPython looks for a method of
        this name."""
        next_step = self.next_step.rstrip(".")
        return [
            f"InputError: {self.subject}\n"
            f"  found      {self.actual}\n"
            f"  needs      {self.needed}\n"
            f"  next step  {next_step}"
        ]


def check_choice(
    subject: str, value, choices, next_step: str = "name one of these"
) -> None:
    """Raises an InputError unless `value` is one of `choices`."""
    if value not in choices:
        raise InputError(
            subject, repr(value), f"one of {', '.join(choices)}", next_step
        )


def one_line(problem: object) -> str:
    """The text of a library's error in one line.

    Core ML's binding words an error as a dictionary over several lines, `{`,
    `NSLocalizedDescription = "…";`, `}`, with escapes for what is not ASCII: here
    without the braces, and with the characters themselves."""
    line = re.sub(r"(^|: )\{ (.*?);? \}$", r"\1\2", " ".join(str(problem).split()))
    return re.sub(
        r"\\U(?!d[89a-f])([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), line
    )


def last_message(written: list[str]) -> str:
    """What a failed process wrote last on stderr, in one line: the message of its last
    exception, however many lines it has; without one the last line, or the dictionary
    that ends there."""
    lines = [line for line in written if line.strip()] or ["no message"]
    start = len(lines) - 1
    traces = [
        i
        for i, line in enumerate(lines)
        if line.startswith("Traceback (most recent call last)")
    ]
    if (
        traces
    ):  # the frames behind the last one are indented, the message begins where they end
        behind = range(traces[-1] + 1, len(lines))
        start = next((i for i in behind if not lines[i].startswith(" ")), traces[-1])
    elif lines[-1] == "}":
        start = max(
            (i for i, line in enumerate(lines) if line.endswith("{")), default=start
        )
    return one_line("\n".join(lines[start:]))
