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
