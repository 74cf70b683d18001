"""Removes from text what identifies a machine or its user."""

import getpass
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from workbench.log.machine import command_output

SOURCE = Path(__file__).resolve().parents[2]
_START = r"(?<![\w.…/~-])(?:file://)?"
_NAME = r"[^\s/'\"`<>|,;:()\[\]{}]*"  # a file's name in an unquoted path
_BARE = re.compile(rf"{_START}(?:~|/(?![/\s]){_NAME})((?:/{_NAME})+)")
_QUOTED = re.compile(
    r"""(?<=(['"`]))(?:file://)?(?:~|/[^/'"`\n])([^'"`\n]*/[^'"`\n]*)(?=\1)"""
)
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
_IDENTITY = r'"(?:IOPlatformSerialNumber|IOPlatformUUID)" = "([^"]+)"'


def anonymous(value, *projects: Path, names: Iterable[str] = ()):
    """A row's value, in mappings, lists and tuples too, with every text changed.

    An absolute path becomes the path within one of `projects` or within this checkout,
    else ``…/name``; UUIDs, this host and the words `names`, in any case, become ``…``.
    Other values than text stay as they are, and so does a text that was changed
    before."""

    def change(value):
        if isinstance(value, Mapping):
            return {change(key): change(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(change, value))
        if not isinstance(value, str | Path):
            return value
        text = _UUID.sub("…", _without_paths(str(value), projects))
        return re.sub(words, "…", text, flags=re.I)

    hidden = sorted({*names, *_hosts()}, key=len, reverse=True)
    words = rf"(?<!\w)(?:{'|'.join(map(re.escape, hidden)) or '(?!)'})(?!\w)"
    return change(value)


def identifiers() -> set[str]:
    """Names of this machine and its user: user, home folder, host, on a Mac serial
    number and hardware UUID."""
    device = command_output("ioreg", "-rd1", "-c", "IOPlatformExpertDevice")
    names = {getpass.getuser(), Path.home().name, *re.findall(_IDENTITY, device or "")}
    return {name for name in names if len(name) > 2} | _hosts()


def _hosts() -> set[str]:
    host = socket.gethostname()
    names = {host, host.partition(".")[0]} - {"localhost"}
    return {name for name in names if len(name) > 3}


def _without_paths(text: str, projects: tuple[Path, ...]) -> str:
    if "/" not in text:
        return text
    for project in (*projects, SOURCE):
        for folder in {str(project.absolute()), str(project.resolve())} - {"/"}:
            path = _START + re.escape(folder)
            text = re.sub(f"{path}/", "", text)
            text = re.sub(rf"{path}(?![\w.-])", ".", text)
    return _BARE.sub(_short, _QUOTED.sub(_short, text))


def _short(path: re.Match) -> str:
    name = path[path.lastindex].rstrip("/").rpartition("/")[2]
    return f"…/{name}" if name else "…"
