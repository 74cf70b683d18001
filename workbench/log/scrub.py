"""What a row may say of where it was made: no host name and no absolute path, whoever reads the log
later.

Text in, text out; knows nothing of tables.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
_QUOTED = re.compile(
    r"""(?P<quote>['"`])(?:file://)?(?P<path>(?:~|/[^/'"`\n])[^'"`\n]*/[^'"`\n]*)(?P=quote)"""
)
_BARE = re.compile(
    r"(?<![\w.…/~-])(?:file://)?(?:~|/(?![/\s])[^\s/'\"`<>|,;:()\[\]{}]*)(?:/[^\s/'\"`<>|,;:()\[\]{}]*)+"
)


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
