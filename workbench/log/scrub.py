"""Removes what identifies a machine or user from text.

`scrubbed` removes host name and absolute paths, from every row of the log; `anonymous`
also removes user, serial number and UUIDs, from files for others."""

import getpass
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
_QUOTED = re.compile(
    r"""(?P<quote>['"`])(?:file://)?(?P<path>(?:~|/[^/'"`\n])[^'"`\n]*/[^'"`\n]*)(?P=quote)"""
)
_NAME = r"[^\s/'\"`<>|,;:()\[\]{}]*"  # a file's name in an unquoted path
_BARE = re.compile(rf"(?<![\w.…/~-])(?:file://)?(?:~|/(?![/\s]){_NAME})(?:/{_NAME})+")
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
_IDENTITY = re.compile(r'"(?:IOPlatformSerialNumber|IOPlatformUUID)" = "([^"]+)"')


def identifiers() -> set[str]:
    """Names of this machine and its user: user, home folder, host, on a Mac serial
    number and hardware UUID."""
    host = socket.gethostname()
    names = {getpass.getuser(), Path.home().name, host, host.partition(".")[0]}
    try:
        command = ("ioreg", "-rd1", "-c", "IOPlatformExpertDevice")
        text = subprocess.check_output(command, text=True, timeout=10)
        names |= set(_IDENTITY.findall(text))
    except (OSError, subprocess.SubprocessError):  # not a Mac
        pass
    return {name for name in names if len(name) > 2 and name != "localhost"}


def anonymous(value, names: Iterable[str]):
    """A `scrubbed` value in which the words `names`, in any case, and UUIDs are
    replaced by ``…``."""
    longest_first = sorted(names, key=len, reverse=True)

    def without_names(text: str) -> str:
        text = _UUID.sub("…", scrubbed(text))
        for name in longest_first:
            word = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
            text = re.sub(word, "…", text, flags=re.I)
        return text

    return _with_texts(value, without_names)


def scrubbed(value, *projects: Path):
    """A row's value with every absolute path shortened: to the path within one of
    `projects`, else to ``…/name``.

    Mappings, lists and tuples are walked through; other values than text stay as they
    are. The name of this host becomes ``…``."""
    return _with_texts(value, partial(_scrubbed_text, projects=(*projects, SOURCE)))


def _with_texts(value, change: Callable[[str], str]):
    """A value with every text and path in it, as text, replaced by `change` of it."""
    if isinstance(value, Mapping):
        items = value.items()
        return {_with_texts(k, change): _with_texts(v, change) for k, v in items}
    if isinstance(value, list | tuple):
        return type(value)(_with_texts(item, change) for item in value)
    if isinstance(value, str | Path):
        return change(str(value))
    return value


def _scrubbed_text(text: str, projects: tuple[Path, ...]) -> str:
    if len(host := socket.gethostname()) > 3 and host != "localhost":
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "…", text)
    if "/" not in text:
        return text
    for project in projects:
        for folder in (project.absolute(), project.resolve()):
            if str(folder) != "/":
                path = rf"(?<![\w.…/~-])(?:file://)?{re.escape(str(folder))}"
                text = re.sub(f"{path}/", "", text)
                text = re.sub(rf"{path}(?![\w.-])", ".", text)
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"(?<![\w.…/~-]){re.escape(home)}(?![\w.-])", "~", text)

    def short_quoted(match: re.Match) -> str:
        return f"{match['quote']}{_short(match['path'])}{match['quote']}"

    return _BARE.sub(lambda match: _short(match[0]), _QUOTED.sub(short_quoted, text))


def _short(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2]
    if name in ("", "~"):
        return "…"
    return f"…/{name}"
