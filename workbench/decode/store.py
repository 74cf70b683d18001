"""Snapshots in files: `save`, `load`, and `find` by the beginning of a prompt.

A file is one snapshot as safetensors. It is written under a temporary name and renamed,
so that it is whole or absent. The format `fp16` stores every array unchanged; `q4`
stores 4 bits per value of K and V:

    rows   [H, rows, D]           value ≈ low + code · scale, error ≤ scale / 2 and one rounding
    codes  [H, rows, D / 2]       uint8, two values per byte, the first in the low half
    scale  [H, rows, D / group]   fp16, like `low`; group: the largest common divisor of D and 64

Groups run along head_dim alone, so that a slice of tokens has the same codes. Other
states are stored unchanged. So is a cache whose q4 error exceeds a quarter of its
deviation from the mean token: a few large channels use up the range of its groups."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from workbench.bundle.names import MAX_FP16, is_cache
from workbench.decode.snapshot import Snapshot
from workbench.errors import InputError, check_choice
from workbench.files import save_arrays

FORMATS = ("fp16", "q4")
VERSION = "3"
GROUP = 64  # values along head_dim, at most, that share one scale
# the largest RMS of the errors of q4, over that of the values' deviations from the mean
MAX_Q4_ERROR_RATIO = 0.25
IDS_ARRAY = "ids"  # the name of the array of `Snapshot.ids`
# suffixes of the names of a cache's arrays in q4, in the order of the results of `quantize`
CODES, SCALE, LOW = Q4_SUFFIXES = (".codes", ".scale", ".low")
# The field of a file's header that has `Snapshot.min_length`. Files have the word that the
# field was called by once.
MIN_LENGTH = "floor"


def save(
    folder: str | Path, name: str, snapshot: Snapshot, format: str = "fp16"
) -> Path:
    """Writes a snapshot under a name, in place of an earlier one; returns its file.

    Raises:
        InputError: an unusable name, format or value, or no space on the disk; the
            earlier snapshot of the name stays.
    """
    check_choice("snapshot format", format, FORMATS, "choose one of these")
    path = _path(folder, name)
    tensors = {IDS_ARRAY: np.array(snapshot.ids, np.int32)}
    for state, value in snapshot.states.items():
        tensors |= tensors_of_state(state, value, format)
    header = {
        "version": VERSION,
        "identity": snapshot.identity,
        MIN_LENGTH: str(snapshot.min_length),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_arrays(path, tensors, header)
    except (OSError, SafetensorError) as problem:
        needed = "a folder that can be written, with enough space"
        step = "free some space, or choose another folder"
        raise InputError(f"snapshot {path}", str(problem), needed, step) from problem
    return path


def load(folder: str | Path, name: str) -> Snapshot:
    """Reads the snapshot of a name into new arrays; quantized caches in float16.

    Raises:
        InputError: no such name; a damaged file, or one of another version.
    """
    with _open(_path(folder, name)) as (header, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        ids = tuple(tensors.pop(IDS_ARRAY).tolist())
        states = states_from_tensors(tensors)
        return Snapshot(ids, header["identity"], states, int(header[MIN_LENGTH]))


def find(
    folder: str | Path, ids: Sequence[int], identity: str
) -> tuple[Snapshot, list[int]] | None:
    """The stored snapshot that shares the longest beginning with a prompt, trimmed to
    it, and the rest of the prompt; None if no snapshot shares any.

    Only snapshots of a decoder's `identity` count, and only those that can be trimmed
    so far. At least one token remains, because its logits are needed: the last token of
    a prompt that is stored whole runs again.

    Raises:
        InputError: a damaged file.
    """
    best, longest = None, 0
    prompt = np.array(ids[:-1], np.int32)
    for path in sorted(Path(folder).glob("[!.]*.safetensors")):
        with _open(path) as (header, file):
            stored = file.get_tensor(IDS_ARRAY)
            min_length = int(header[MIN_LENGTH])
            fits = header["identity"] == identity
        shorter = min(len(stored), len(prompt))
        equal = np.logical_and.accumulate(stored[:shorter] == prompt[:shorter])
        if fits and equal.sum() >= max(min_length, longest + 1):
            best, longest = path.stem, int(equal.sum())
    if best is None:
        return None
    snapshot = load(folder, best)
    return snapshot.trim(snapshot.offset - longest), list(ids[longest:])


def _path(folder: str | Path, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        needed = "up to 100 letters, digits, dots, dashes and underscores"
        raise InputError("snapshot name", repr(name), needed, "choose such a name")
    return Path(folder) / f"{name}.safetensors"


@contextmanager
def _open(path: Path) -> Iterator[tuple[dict, safe_open]]:
    """Context manager that gives the header of a file, and the open file.

    The block reads the file and does nothing else: an array or a field of the header that
    it does not find, or cannot parse, is reported as a damaged file, too.

    Raises:
        InputError: no such file, a damaged one, or one of another version.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata()
            if header["version"] != VERSION:
                raise ValueError(f"version {header['version']!r}")
            yield header, file
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
        needed = f"a whole snapshot of version {VERSION}, as `save` wrote it"
        step = "prefill again and save the snapshot in its place"
        raise InputError(f"snapshot {path}", str(problem), needed, step) from problem


def tensors_of_state(
    state: str, value: np.ndarray, format: str
) -> dict[str, np.ndarray]:
    """The tensors of a file that hold a state, by name."""
    if format == "q4" and is_cache(state) and value.size:
        arrays = quantize(value)
        if is_close_enough_for_q4(value, dequantize(*arrays)):
            names = [state + suffix for suffix in Q4_SUFFIXES]
            return dict(zip(names, arrays, strict=True))
    return {state: value}


def states_from_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """States from the tensors of a file; quantized caches in float16."""
    states = dict(tensors)
    for name in tensors:
        if name.endswith(CODES):
            state = name.removesuffix(CODES)
            arrays = [states.pop(state + suffix) for suffix in Q4_SUFFIXES]
            states[state] = dequantize(*arrays).astype(np.float16)
    return states


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [..., D] → codes [..., D / 2] uint8, scale and low [..., D / group] fp16, as
    the module's docstring defines them.

    Raises:
        InputError: values beyond fp16, an odd D.
    """
    D = rows.shape[-1]
    if D % 2 or not (np.abs(rows) <= MAX_FP16).all():
        needed = "finite values in fp16's range and an even head_dim"
        raise InputError("q4", f"other values, head_dim {D}", needed, "save as fp16")
    # as float16 storage would round them, whatever the dtype of the states
    rows = rows.astype(np.float16).astype(np.float32)
    grouped = rows.reshape(*rows.shape[:-1], -1, gcd(D, GROUP))
    low = grouped.min(-1)  # an fp16 number
    scale = ((grouped.max(-1) - low) / 15).astype(np.float16)
    # the next fp16 number, so that 15 steps reach the largest value
    scale = np.nextafter(scale, np.float16(np.inf))
    steps = scale.astype(np.float32)
    codes = np.rint((grouped - low[..., None]) / steps[..., None])
    codes = codes.astype(np.uint8).reshape(rows.shape)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale, low.astype(np.float16)


def dequantize(codes: np.ndarray, scale: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The inverse of `quantize`: rows [..., D] float32, low + code · scale."""
    values = np.stack([codes & 15, codes >> 4], -1).astype(np.float32)
    values = values.reshape(*scale.shape, -1)  # [..., D / group, group]
    rows = values * scale[..., None] + low[..., None]
    return rows.reshape(*codes.shape[:-1], -1)


def is_close_enough_for_q4(value: np.ndarray, approximation: np.ndarray) -> bool:
    """Whether the RMS of the errors of rows [H, rows, D] is at most `MAX_Q4_ERROR_RATIO`
    times that of their deviations from each channel's mean over tokens."""
    value = value.astype(np.float32)
    squared_errors = np.square(value - approximation).sum()
    squared_deviations = np.square(value - value.mean(1, keepdims=True)).sum()
    return bool(squared_errors <= MAX_Q4_ERROR_RATIO**2 * squared_deviations)
