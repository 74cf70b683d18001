"""A check that bad input ends in an InputError, whose message a user reads."""

import pytest

from workbench.errors import InputError


def refused(words: str):
    """A context that fails unless bad input is refused in it, with a message that matches `words`, a
    regular expression."""
    return pytest.raises(InputError, match=words)
