"""Files of a checkpoint folder: JSON and safetensors, with the errors that every reader
raises."""

import json
from pathlib import Path

from workbench import checkpoint_checks
from workbench.errors import InputError
from workbench.files import check_regular, is_lfs_pointer, read_bytes

GENERATION = "generation_config.json"
# Arguments of every reader of transformers: nothing is downloaded, and no Python file of the
# folder is run. Without the second, transformers would ask on a terminal whether to run them.
LOCAL = {"local_files_only": True, "trust_remote_code": False}
# the next step where a file is missing or wrong
FETCH = f"{checkpoint_checks.DOWNLOAD_HINT}, or git lfs pull"


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises an InputError for anything else."""
    try:
        fields = json.loads(read_bytes(path))
    except InputError:
        raise
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InputError(str(path), "no JSON object", "the file of a checkpoint", FETCH)
    return fields


def open_tensors(path: Path):
    """Context manager that gives safetensors' own reader of a file.

    Raises:
        InputError: no such file, no whole safetensors file, a Git LFS pointer.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as problem:
        reason = f"no whole safetensors file ({problem})"
        if not path.is_file():
            reason = "no such file (half a download?)"
        elif is_lfs_pointer(path):
            reason = "a Git LFS pointer"
        needed = "every weight file of the checkpoint, whole"
        raise InputError(str(path), reason, needed, FETCH) from problem
