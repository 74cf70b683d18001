"""Removes from text what identifies a machine or its user."""

import getpass
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

# Both patterns match an absolute path; its group `rest` ends in the name that stays.
_NAME = r"[^\s/'\"`<>|,;:()\[\]{}]*"  # a file's name in an unquoted path
# within running text: /home/ann/model.bin (rest: /ann/model.bin), ~/model.bin or
# file:///home/ann/model.bin; not the end of a relative path, such as data/log/runs
_UNQUOTED = re.compile(
    rf"(?<![\w.…/~-])(?:file://)?(?:~|/(?![/\s]){_NAME})(?P<rest>(?:/{_NAME})+)"
)
# between equal quotes, where names may have spaces: '/home/ann/my model.bin'
_QUOTED = re.compile(
    r"""(?<=(?P<quote>['"`]))(?:file://)?(?:~|/[^/'"`\n])"""
    r"""(?P<rest>[^'"`\n]*/[^'"`\n]*)(?=(?P=quote))"""
)
# 00112233-4455-6677-8899-AABBCCDDEEFF
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")


def anonymize(value, names: Iterable[str] = ()):
    """Returns a value of a row in which no text identifies a machine or its user.
    Mappings, lists and tuples are returned with all their texts changed.

    An absolute path becomes ``…/name``. UUIDs, this host's name and the words in
    `names`, in any case, become ``…``. Values other than text stay as they are, and so
    does a text that was changed before."""
    host = socket.gethostname()
    hidden = {name for name in (host, host.partition(".")[0]) if len(name) > 3}
    hidden = sorted({*names, *hidden} - {"localhost"}, key=len, reverse=True)
    # (?!) matches nothing, for a machine with no name to hide
    words = rf"(?<!\w)(?:{'|'.join(map(re.escape, hidden)) or '(?!)'})(?!\w)"

    def change(value):
        if isinstance(value, Mapping):
            return {change(key): change(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(change, value))
        if not isinstance(value, str | Path):
            return value
        text = _UNQUOTED.sub(_short, _QUOTED.sub(_short, str(value)))
        return re.sub(words, "…", _UUID.sub("…", text), flags=re.I)

    return change(value)


def identifiers() -> set[str]:
    """Names of this machine's user and home folder; those of at most two letters would
    hide too much."""
    names = set()
    with suppress(KeyError, OSError):  # a user without a name
        names.add(getpass.getuser())
    with suppress(RuntimeError):  # a user without a home
        names.add(Path.home().name)
    return {name for name in names if len(name) > 2}


def _short(path: re.Match) -> str:
    """``…/name`` for a match of a path."""
    name = path["rest"].rstrip("/").rpartition("/")[2]
    return f"…/{name}" if name else "…"
