"""Checks of the paths that a user gives: whether a bundle, a checkpoint or a file is
there, and what is there instead. `checkpoint_checks.py` checks what a checkpoint is.

Reads names and small files and imports nothing heavy, so that a wrong path is refused
before torch is loaded."""

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from workbench.checkpoint_checks import CONFIG, DOWNLOAD_HINT, check_weights_format
from workbench.errors import InputError, nearest_names, propose
from workbench.files import project_root, read_bytes

# size of a file of text; its token ids take several times as much
MAX_PROMPT_BYTES = 1 << 28
BUNDLE = "bundle.json"
# ORG/NAME, or the page of that model
HUB_PART = r"[A-Za-z0-9][\w.-]*"
HUB_NAME = re.compile(
    rf"(?:https?:/+(?:huggingface\.co|hf\.co)/)?({HUB_PART}/{HUB_PART})/?"
)


def check_bundle(path: str | Path) -> Path:
    """Returns the path of a bundle.

    Raises:
        InputError: there is no manifest; says what is there instead.
    """
    path = _check_resolvable("bundle", path)
    if (path / BUNDLE).is_file() or (path / BUNDLE).is_symlink():
        return path
    step = "run: workbench export CHECKPOINT BUNDLE"
    raise _refusal("bundle", path, BUNDLE, "the folder of a finished bundle", step)


def locate_checkpoint(path: str | Path) -> Path:
    """Returns the folder of a checkpoint: `path` itself, or the folder in the local cache
    where `path` is the name of a model on the Hugging Face Hub.

    Raises:
        InputError: there is no config.json, or no weights that can be read; says what is
            there instead.
    """
    path = _check_resolvable("checkpoint", path)
    if (path / CONFIG).is_file():
        check_weights_format(path)
        return path
    # a folder of this name is meant before a model of the Hub
    if not path.exists() and (snapshot := hub_snapshot(path)):
        return snapshot
    check_weights_format(path)
    step = DOWNLOAD_HINT
    if hub := hub_id(path):
        step = f"run: hf download {hub}"
    needed = "a Hugging Face folder of *.safetensors"
    raise _refusal("checkpoint", path, CONFIG, needed, step)


def _refusal(subject: str, path: Path, file: str, needed: str, step: str) -> InputError:
    """The error for a path that is no folder with `file`. It says what is there; for a
    path inside such a folder, the next step is to give that folder."""
    # the first kind that applies is named
    kinds = {
        "an unfinished export": unfinished_folder(path.resolve()).exists(),
        "a bundle": (path / BUNDLE).is_file(),
        "a Hugging Face checkpoint": (path / CONFIG).is_file(),
        "one Core ML model": is_package(path) or path.suffix == ".mlmodelc",
        "GGUF weights": path.suffix == ".gguf" or any(path.glob("*.gguf")),
        "a file": path.is_file(),
        f"no {file}": path.is_dir(),
        "nothing there": True,
    }
    actual = next(kind for kind, applies in kinds.items() if applies)
    if actual == "a bundle":
        step = "give the checkpoint that it was exported from"
    for folder in path.parents:
        if (folder / file).is_file():
            step = f"give the folder {folder}"
            break
    else:
        step = propose(_similar_folders(path, file), step)
    return InputError(f"{subject} {path}", actual, f"{needed} with {file}", step)


def _similar_folders(path: Path, file: str) -> list[Path]:
    """At most three folders with `file`: those in a folder without it; or those beside a
    path where nothing is, the one with the most similar name first."""
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(p.parent.name for p in folder.glob(f"*/{file}"))
    except OSError:  # a folder that may not be read
        return []
    if path.is_dir():
        return [path / name for name in names[:3]]
    if os.path.lexists(path):
        return []
    return [folder / name for name in nearest_names(path.name, names)]


def find(path: str | Path, project: Path | None = None) -> Path:
    """Finds a path that a notebook or a grid names; notebooks run in other folders than
    the checkout's. Returns the first of these:

    1. the path itself, if it exists;
    2. the path within `project` (default: the checkout around the working directory), if
       it exists there or cannot be the name of a model on the Hub. It may not exist;
    3. the folder in the local cache of the model on the Hub of this name, or the path
       itself if the cache lacks it.

    Commands use `locate_checkpoint` and `check_bundle`, which refuse what they cannot
    use."""
    project = project or project_root(Path.cwd()) or Path.cwd()
    if Path(path).exists():
        return Path(path)
    if (project / path).exists() or not hub_id(path, project):
        return project / path
    return hub_snapshot(path) or Path(path)


def hub_id(path: str | Path, folder: Path = Path()) -> str | None:
    """ORG/NAME if `path` may be a model on the Hub: two names, and `folder` has no entry
    of the first name."""
    hub = HUB_NAME.fullmatch(str(path))
    if hub and not (folder / hub[1].partition("/")[0]).exists():
        return hub[1]
    return None


def hub_snapshot(path: str | Path) -> Path | None:
    """The folder in the local cache with the weights of a model on the Hub, or None.
    Downloads nothing."""
    if not (hub := HUB_NAME.fullmatch(str(path))):
        return None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub[1], local_files_only=True))
    except (OSError, ValueError):
        return None
    # a snapshot may hold a few files alone, such as a tokenizer
    if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")):
        return folder
    return None


def model_name(path: Path) -> str:
    """The name of a checkpoint: that of its folder, or in the Hub's cache that of the
    model."""
    # the Hub's cache has models--ORG--NAME/snapshots/COMMIT
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.rpartition("--")[2]
    return path.name


def check_golden(path: str | Path) -> Path:
    """Returns the path of a golden store; refuses a path that is no file."""
    step = "run: workbench golden CHECKPOINT --out G"
    return check_file("golden", path, "a golden store", step)


def check_new_bundle(path: str | Path) -> Path:
    """Returns the path of a bundle to be made; refuses a path where anything exists, even
    a broken link."""
    path = _check_resolvable("bundle", path)
    if os.path.lexists(path):
        # only a bundle may be removed: anything else there is the user's
        actual, step = "a file", "choose another path"
        if (path / BUNDLE).exists():
            actual, step = "a finished bundle", "remove it or choose another path"
        elif path.is_dir():
            actual = "a folder that is no bundle"
        elif path.is_symlink():
            actual = "a link"
        raise InputError(f"bundle {path}", actual, "a new folder", step)
    # the folder in which the missing ones will be made
    existing = next(p for p in path.absolute().parents if p.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as problem:
        actual = f"{existing}: {problem.strerror}"
        needed, step = "a folder that can be written", "choose another path"
        raise InputError(f"bundle {path}", actual, needed, step) from None
    return path


def check_packages(packages: Sequence[Path]) -> None:
    """Refuses paths that are neither a package of Core ML nor a folder with packages.

    Raises:
        InputError: names the first such path, or says that there is none.
    """
    needed = "a Core ML package (.mlpackage), or a folder with some"
    if not packages:
        step = "name the packages before the options"
        raise InputError("packages", "none", needed, step)
    for path in packages:
        path = _check_resolvable("package", path)
        if is_package(path) or any(path.glob("[!.]*.mlpackage")):
            continue
        kinds = {
            "a Hugging Face checkpoint": (path / CONFIG).is_file(),
            "a file": path.is_file(),
            "no package in it": path.is_dir(),
            "nothing there": True,
        }
        actual = next(kind for kind, applies in kinds.items() if applies)
        raise InputError(f"package {path}", actual, needed, "check the path")


def check_file(subject: str, path: str | Path, needed: str, step: str) -> Path:
    """Returns the path of a file; refuses a folder, a device or a pipe, and a path where
    nothing is."""
    path = _check_resolvable(subject, path)
    if not path.is_file():
        actual = "no such file"
        if path.is_dir():
            actual = "a folder"
        elif path.exists():
            actual = "no regular file but a device or a pipe"
        raise InputError(f"{subject} {path}", actual, needed, step)
    return path


def read_text(path: str | Path, subject: str = "text") -> str:
    """Reads a file of text in UTF-8 of at most `MAX_PROMPT_BYTES` bytes.

    Raises:
        InputError: there is no such file, it is too large, or it is not UTF-8.
    """
    needed, step = "a file of text in UTF-8", "give a file of text"
    try:
        file = check_file(subject, path, needed, step)
        return read_bytes(file, MAX_PROMPT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        actual = getattr(problem, "strerror", None) or "not UTF-8"
        raise InputError(f"{subject} {path}", actual, needed, step) from None


def check_output(option: str, path: Path) -> None:
    """Refuses a file to be written where a folder is, and makes nothing yet."""
    if path.is_dir():
        needed = "a file in a folder that can be written"
        raise InputError(f"{option} {path}", "a folder", needed, "name another file")


def prepare_output(option: str, path: Path) -> None:
    """Makes the folder of a file to be written, and checks that a file can be written
    there before hours of work are spent on its contents.

    Raises:
        InputError: `path` is a folder, or its folder cannot be written.
    """
    check_output(option, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as problem:
        needed, step = "a file in a folder that can be written", "name another file"
        raise InputError(f"{option} {path}", problem.strerror, needed, step) from None


def is_package(path: Path) -> bool:
    """Whether Core ML takes the folder `path` for a model package."""
    return path.is_dir() and (
        path.suffix == ".mlpackage" or (path / "Manifest.json").is_file()
    )


def unfinished_folder(bundle: Path) -> Path:
    """The folder in which a bundle is made before it is renamed into place."""
    return bundle.parent / f".{bundle.name}.partial"


def _check_resolvable(subject: str, path: str | Path) -> Path:
    """Returns `path`, where nothing needs to exist; refuses one that the system cannot
    resolve, such as a name that is too long or a loop of links."""
    path = Path(path)
    try:
        # any name in the folder serves: only an error of the path itself matters
        (path / BUNDLE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as problem:
        text = str(path)
        if len(text) >= 200:
            text = f"{text[:80]}…{text[-20:]}"
        actual = getattr(problem, "strerror", None) or str(problem)
        needed, step = "a path that can be read", "correct the path"
        raise InputError(f"{subject} {text!r}", actual, needed, step) from None
    return path
