"""What lies at a path: a bundle, a checkpoint, or something that is easily taken for
one of them.

A leaf that looks at names alone and imports nothing heavy, so that a wrong path is
refused before torch is loaded."""

import os
import re
from pathlib import Path

from workbench.errors import InputError
from workbench.files import project_root

BUNDLE, CONFIG = "bundle.json", "config.json"
NAME = r"[A-Za-z0-9][\w.-]*"
HUB = re.compile(rf"(?:https?:/+(?:huggingface\.co|hf\.co)/)?({NAME}/{NAME})/?")
EXPORT = "run: workbench export CHECKPOINT BUNDLE"


def bundle(path: str | Path) -> Path:
    """The path of a bundle as it is; refuses what has no manifest, and says what it
    is."""
    path = _possible("bundle", path)
    if (path / BUNDLE).is_file() or (path / BUNDLE).is_symlink():
        return path
    if partial(path.resolve()).exists():
        actual, step = "an unfinished export", "run the same export again"
    elif path.name == BUNDLE and path.is_file():
        actual, step = "its manifest alone", f"give the folder {path.parent}"
    elif is_package(path) or path.suffix == ".mlmodelc":
        actual, step = "one .mlpackage", f"{EXPORT}; explain and plan take a package"
        if path.suffix == ".mlmodelc":
            actual = "one .mlmodelc"
        around = [folder for folder in path.parents if (folder / BUNDLE).is_file()]
        if around:
            step = f"give the folder {around[0]}"
    elif (path / CONFIG).is_file():
        actual = "a Hugging Face checkpoint"
        step = f"run: workbench export {path} BUNDLE, and give BUNDLE"
    elif _is_gguf(path):
        actual, step = "GGUF weights", EXPORT
    else:
        actual, step = f"no {BUNDLE}", EXPORT
        if not path.exists():
            actual = f"nothing there, hence {actual}"
    raise InputError(
        f"bundle {path}", actual, f"a finished bundle, a folder with {BUNDLE}", step
    )


def checkpoint(path: str | Path) -> Path:
    """The path of a checkpoint: as it is, or for the name of a model on the Hugging
    Face Hub its folder in the local cache. Refuses what has no config.json, and says
    what it is."""
    path = _possible("checkpoint", path)
    if (path / CONFIG).is_file():
        return path
    if not path.exists() and (snapshot := hub_snapshot(path)):
        return snapshot
    hub = hub_id(path)
    if (path / BUNDLE).is_file():
        actual, step = "a bundle", "give the checkpoint that it was exported from"
    elif is_package(path) or path.suffix == ".mlmodelc":
        actual, step = "a Core ML model", "give the checkpoint that it was made from"
    elif _is_gguf(path):
        actual, source = "GGUF weights", "hf download ORG/NAME --local-dir FOLDER"
        step = f"download the model's safetensors: {source}"
    elif path.is_file():
        actual, step = "a file", f"give the folder {path.parent}"
    elif path.is_dir():
        actual, step = f"no {CONFIG} in it", fetch(path)
    elif hub:
        actual = (
            "no folder, but what reads like the name of a model on the Hugging Face Hub; "
            "its weights are not in the local cache"
        )
        step = f"run: hf download {hub}"
    else:
        actual, step = "no folder", f"correct the path, or {fetch(path)}"
    needed = f"a Hugging Face folder with {CONFIG} and *.safetensors"
    raise InputError(f"checkpoint {path}", actual, needed, step)


def find(path: str | Path, project: Path | None = None) -> Path:
    """The place of a path that a notebook or a grid names: the path itself if it
    exists, else the path in the `project` (default: the checkout around the working
    directory), since notebooks run elsewhere. The name of a model on the Hub stands for
    its folder in the local cache."""
    project = project or project_root(Path.cwd()) or Path.cwd()
    if Path(path).exists():
        return Path(path)
    if not (project / path).exists() and hub_id(path, project):
        return hub_snapshot(path) or Path(path)
    return project / path


def hub_id(path: str | Path, folder: Path = Path()) -> str | None:
    """ORG/NAME where `path` reads like a model on the Hub: two names, no folder of the
    first one in `folder`."""
    hub = HUB.fullmatch(str(path))
    if hub and not (folder / hub[1].partition("/")[0]).exists():
        return hub[1]
    return None


def hub_snapshot(path: str | Path) -> Path | None:
    """The folder with the weights of a model on the Hub in the local cache, if it is
    there. Nothing is downloaded."""
    if not (hub := HUB.fullmatch(str(path))):
        return None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub[1], local_files_only=True))
    except (OSError, ValueError):
        return None
    if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")):
        return folder
    return None


def model_name(path: Path) -> str:
    """What a checkpoint is called: its folder's name, in the Hub's cache the
    model's."""
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.rpartition("--")[2]
    return path.name


def golden(path: str | Path) -> Path:
    """The path of a golden store as it is."""
    step = "run: workbench golden CHECKPOINT --out G"
    return file("golden", path, "a golden store", step)


def bundle_or_checkpoint(path: str | Path) -> Path:
    """The path of either as it is."""
    path = _possible("bundle", path)
    if (path / BUNDLE).exists():
        return path
    return checkpoint(path)


def bundle_or_package(path: str | Path) -> Path:
    """The path of a bundle or of one `.mlpackage` as it is."""
    path = _possible("bundle", path)
    if is_package(path):
        return path
    return bundle(path)


def new(path: str | Path) -> Path:
    """The path of a bundle to be made; refuses one where something is, even a broken
    link."""
    path = _possible("bundle", path)
    if os.path.lexists(path):
        actual, step = "something else there", "remove it or choose another"
        if (path / BUNDLE).exists():
            actual = "a finished bundle"
        raise InputError(f"bundle {path}", actual, "a new folder", step)
    return path


def file(subject: str, path: str | Path, needed: str, step: str) -> Path:
    """The path of a file as it is; refuses a folder, and what is not there."""
    path = _possible(subject, path)
    if not path.is_file():
        actual = "no such file"
        if path.is_dir():
            actual = "a folder"
        raise InputError(f"{subject} {path}", actual, needed, step)
    return path


def text(path: str | Path) -> str:
    """The contents of a file of text in UTF-8."""
    needed, step = "a file of text in UTF-8", "give a file of text"
    try:
        return file("text", path, needed, step).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        actual = getattr(problem, "strerror", None) or "not UTF-8"
        raise InputError(f"text {path}", actual, needed, step) from None


def fetch(path: str | Path = "FOLDER") -> str:
    """How a checkpoint comes to lie at `path`."""
    return f"download the checkpoint whole: hf download ORG/NAME --local-dir {path}"


def is_package(path: Path) -> bool:
    """Whether `path` is a folder that Core ML takes for a model package."""
    return path.is_dir() and (
        path.suffix == ".mlpackage" or (path / "Manifest.json").is_file()
    )


def partial(bundle: Path) -> Path:
    """The folder in which a bundle is made before it is renamed into place."""
    return bundle.parent / f".{bundle.name}.partial"


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")))


def _possible(subject: str, path: str | Path) -> Path:
    """`path`; refuses what the system cannot look at: too long a name, a loop of
    links."""
    path = Path(path)
    try:
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
