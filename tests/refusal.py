"""Bad input ends in an InputError, whose message is what a user reads."""

import pytest

from workbench.errors import InputError


def refused(words: str):
    """Within, bad input is refused with a message that has these words (a pattern)."""
    return pytest.raises(InputError, match=words)
