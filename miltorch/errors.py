"""The one exception a user of the workbench should ever have to read.

A leaf: every part may raise it, none catches it but the command line (exit code 2) and the widgets.
"""

import re


class InputError(ValueError):
    """Input that cannot be used: what it is, what was found, what is needed, and what to do next.

    ```
    raise InputError("prompt", "300 tokens", "at most max_seq_len = 256", "export with --max-seq-len 512")
    ```
    prints as ``prompt: found 300 tokens; needs at most max_seq_len = 256. Next: export with --max-seq-len 512.``
    """

    def __init__(self, subject: str, found: str, needed: str, next_step: str):
        self.subject, self.found, self.needed, self.next_step = subject, found, needed, next_step
        super().__init__(f"{subject}: found {found}; needs {needed}. Next: {next_step.rstrip('.')}.")

    @classmethod
    def from_message(cls, message: str) -> "InputError | None":
        """An error with this message, or None where an InputError would say it differently."""
        parts = re.fullmatch(r"(.*?): found (.*); needs (.*)\. Next: (.*)\.", message, re.DOTALL)
        return cls(*parts.groups()) if parts else None

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback; IPython looks for a method of this name."""
        next_step = self.next_step.rstrip(".")
        return [
            f"InputError: {self.subject}\n"
            f"  found      {self.found}\n"
            f"  needs      {self.needed}\n"
            f"  next step  {next_step}"
        ]


def one_line(problem: object) -> str:
    """The text of a library's error in one line.

    Core ML's binding words an error as a dictionary over several lines, `{`,
    `NSLocalizedDescription = "…";`, `}`, with escapes for what is not ASCII: here without the
    braces, and with the characters themselves.
    """
    line = re.sub(r"(^|: )\{ (.*?);? \}$", r"\1\2", " ".join(str(problem).split()))
    return re.sub(r"\\U(?!d[89a-f])([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), line)


def last_message(written: list[str]) -> str:
    """What a failed process wrote last on stderr, in one line: the message of its last exception,
    however many lines it has; without one the last line, or the dictionary that ends there."""
    lines = [line for line in written if line.strip()] or ["no message"]
    backwards = range(len(lines) - 1, -1, -1)
    trace = next(
        (i for i in backwards if lines[i].startswith("Traceback (most recent call last)")), None
    )
    if trace is not None:  # the frames behind it are indented, the message begins where they end
        start = next(
            (i for i in range(trace + 1, len(lines)) if not lines[i].startswith(" ")), trace
        )
    elif lines[-1] == "}":
        start = next((i for i in backwards if lines[i].endswith("{")), len(lines) - 1)
    else:
        start = len(lines) - 1
    return one_line("\n".join(lines[start:]))
