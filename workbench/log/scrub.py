"""What a row may say of where it was made: no host name and no absolute path, whoever reads the log
later; and what a file may say that is handed to others: no user, serial number or UUID either.

Text in, text out; knows nothing of tables.
"""

import getpass
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
_QUOTED = re.compile(
    r"""(?P<quote>['"`])(?:file://)?(?P<path>(?:~|/[^/'"`\n])[^'"`\n]*/[^'"`\n]*)(?P=quote)"""
)
_BARE = re.compile(
    r"(?<![\w.…/~-])(?:file://)?(?:~|/(?![/\s])[^\s/'\"`<>|,;:()\[\]{}]*)(?:/[^\s/'\"`<>|,;:()\[\]{}]*)+"
)


_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
_IDENTITY = re.compile(r'"(?:IOPlatformSerialNumber|IOPlatformUUID)" = "([^"]+)"')


def identifiers() -> set[str]:
    """What names this machine or its user: user, folder of the user, host, and on a Mac serial
    number and hardware UUID."""
    host = socket.gethostname()
    names = {getpass.getuser(), Path.home().name, host, host.partition(".")[0]}
    try:
        command = ("ioreg", "-rd1", "-c", "IOPlatformExpertDevice")
        names |= set(_IDENTITY.findall(subprocess.check_output(command, text=True, timeout=10)))
    except (OSError, subprocess.SubprocessError):  # not a Mac
        pass
    return {name for name in names if len(name) > 2 and name != "localhost"}


def anonymous(value, names: Iterable[str]):
    """A `scrubbed` value without the words `names`, in upper or lower case, and without UUIDs: each
    becomes ``…``."""
    if isinstance(value, Mapping):
        return {anonymous(key, names): anonymous(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(anonymous(item, names) for item in value)
    if not isinstance(value, str):
        return value
    text = _UUID.sub("…", scrubbed(value))
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "…", text, flags=re.I)
    return text


def scrubbed(value, *projects: Path):
    """A row's value with every absolute path in it shortened: inside a project to the path
    within it, else to ``…/name``.

    Mappings, lists and tuples are walked through; what is no text is left as it is. The name of
    this host becomes ``…``.
    """
    if isinstance(value, Mapping):
        return {scrubbed(key, *projects): scrubbed(item, *projects) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(scrubbed(item, *projects) for item in value)
    if isinstance(value, Path):
        value = str(value)
    return _scrubbed_text(value, (*projects, SOURCE)) if isinstance(value, str) else value


def _scrubbed_text(text: str, projects: tuple[Path, ...]) -> str:
    if len(host := socket.gethostname()) > 3 and host != "localhost":
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "…", text)
    if "/" not in text:
        return text
    for folder in dict.fromkeys(
        str(p) for project in projects for p in (project.absolute(), project.resolve())
    ):
        if folder != "/":
            text = re.sub(
                rf"(?<![\w.…/~-])(?:file://)?{re.escape(folder)}(?:/(?=[^\s/])|(?![\w.-])/?)",
                lambda match: "" if match[0].endswith("/") else ".",
                text,
            )
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"(?<![\w.…/~-]){re.escape(home)}(?![\w.-])", "~", text)
    text = _QUOTED.sub(
        lambda match: f"{match['quote']}{_short(match['path'])}{match['quote']}", text
    )
    return _BARE.sub(lambda match: _short(match[0]), text)


def _short(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2]
    return f"…/{name}" if name not in ("", "~") else "…"
