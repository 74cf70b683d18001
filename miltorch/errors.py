"""`InputError`, the exception for every input that cannot be used; and `nearest_names`,
`propose` and `did_you_mean`, for the next step after a wrong name.

This module imports nothing of the package, so every other module may import it.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

# control characters other than tab and newline, marks that change the direction of text
# or end a line, and surrogates (undecodable bytes of file names)
CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: object) -> str:
    """The text as it is printed: control characters as their escapes, since names and
    texts come from files of strangers."""
    return CONTROL.sub(lambda one: ascii(one[0])[1:-1], str(text))


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
        self.subject, self.actual = visible(subject), visible(actual)
        self.needed, self.next_step = visible(needed), visible(next_step).rstrip(".")
        super().__init__(
            f"{self.subject}: found {self.actual}; needs {self.needed}. "
            f"Next: {self.next_step}."
        )

    def __reduce__(self) -> tuple:
        """Pickled by its four parts: workers and child processes send it."""
        return type(self), (self.subject, self.actual, self.needed, self.next_step)

    @classmethod
    def from_message(cls, message: str) -> "InputError | None":
        """The InputError whose message this is; None for a message of another form."""
        pattern = r"(.*?): found (.*); needs (.*)\. Next: (.*)\."
        if parts := re.fullmatch(pattern, message, re.DOTALL):
            return cls(*parts.groups())
        return None

    def _render_traceback_(self) -> list[str]:
        """The lines that a notebook shows in place of a traceback; IPython looks for a
        method of this name."""
        return [
            f"InputError: {self.subject}\n"
            f"  found      {self.actual}\n"
            f"  needs      {self.needed}\n"
            f"  next step  {self.next_step}"
        ]


def check_choice(
    subject: str,
    value: object,
    choices: Collection[str],
    next_step: str = "name one of these",
) -> None:
    """Raises an InputError unless `value` is one of `choices`; its next step proposes the
    nearest of them."""
    if value not in choices:
        needed = f"one of {', '.join(choices)}"
        next_step = did_you_mean(str(value), choices, next_step)
        raise InputError(subject, repr(value), needed, next_step)


def did_you_mean(name: str, names: Iterable[str], step: str) -> str:
    """The next step for a name that is none of `names`: the nearest of them, if there is
    one, and `step`."""
    return propose(nearest_names(name, names, count=1), step)


def propose(nearest: Sequence[object], step: str) -> str:
    """The next step that names what a user may have meant before `step`; `step` alone where
    `nearest` is empty."""
    if not nearest:
        return step
    *others, last = map(str, nearest)
    words = f"{', '.join(others)} or {last}" if others else last
    return f"did you mean {words}? If not, {step}"


def nearest_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """At most `count` of the names: those that begin with `name`, then similar ones, the
    most similar first. Upper and lower case are alike."""
    by_lower_case = {other.lower(): other for other in names}
    word = name.lower()
    longer = [other for other in by_lower_case if word and other.startswith(word)]
    similar = difflib.get_close_matches(word, by_lower_case, n=count)
    nearest = dict.fromkeys([*longer, *similar])
    return [by_lower_case[other] for other in nearest][:count]
