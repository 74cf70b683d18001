"""Export against its peers: the plain loop over coremltools, and the disk. Takes the
export as a function to call.

Every export runs in a process of its own, warmed up by a tiny export before the clock
starts, so imports count for neither side. Peak memory is the process's resident maximum
(`memory.peak_rss`): everything is counted in it, imports too; nothing is mapped from
the checkpoint, which is read into buffers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from workbench.benchmarks.stopwatch import apart, bench_row, seconds
from workbench.errors import check_choice

# transformers' configuration keywords of Qwen/Qwen2.5-0.5B and Zyphra/ZAYA1-8B, and
# their number of decoder layers
MODELS = {
    "qwen2": (
        dict(
            hidden_size=896,
            intermediate_size=4864,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
        24,
    ),
    "zaya": ({}, 40),  # ZAYA1-8B is transformers' default
}
LAYERS = 7  # decoder layers timed one by one
BUFFER = bytearray(1 << 20)


def model(family: str) -> tuple[dict, int]:
    """Dimensions of a layer and its surroundings, and how many decoder layers the model
    has."""
    check_choice("--family", family, MODELS, "choose one of them")
    return MODELS[family]


def compare_exports(
    once: Callable,
    layers: Callable | None,
    source: Path,
    folder: Path,
    rounds: int,
    options: dict,
) -> dict:
    """Rows of stamped export against the disk and, given `layers`, against plain
    export.

    Args:
        once: (checkpoint, target, plain, options) → `seconds`, `identity`, `bytes`,
            `split`, `peak_rss_bytes`, ….
        layers: (checkpoint, folder, count, options) → seconds of single layers, `plain`
            and `stamped`.
        folder: emptied, and removed in the end.
    """
    runs = {"stamped": []}
    if layers:
        runs["plain"] = []
    checkpoint, target = str(source), str(folder / "bundle")
    over_templates, floors, disk = [], [], []
    for _ in range(rounds):
        for mode, alike in runs.items():
            _empty(folder)
            forget(source)
            alike.append(apart(once, checkpoint, target, mode == "plain", options))
        stamped = runs["stamped"][-1]
        over_templates.append(stamped["seconds"] - stamped["split"]["template"])
        floors.append(floor(source, folder / "floor.bin", stamped["bytes"]))
        disk.append(sum(floors[-1].values()))
    name, times = "_".join(["export", *options.values()]), _samples(runs, "seconds")
    over = f"{name}_seconds_over_templates"
    result = {
        "rows": [bench_row(over, over_templates, "s", "disk", disk)],
        "same_bytes": None,
        "split": _samples(runs, "split")["stamped"],
        "floor": floors,
        "peak_rss_bytes": _samples(runs, "peak_rss_bytes"),
        "shards": stamped["shards"],
        "stamped": stamped["stamped"],
        "bytes": stamped["bytes"],
        "seconds": times,
    }
    if layers:
        _empty(folder)
        single = apart(layers, checkpoint, target, LAYERS, options)
        slowest = {how: max(samples) for how, samples in single.items()}
        result["layer_seconds_max"] = slowest
        for what, values in (("seconds", times), ("layer_seconds", single)):
            pair = values["stamped"], "s", "plain", values["plain"]
            result["rows"].append(bench_row(f"{name}_{what}", *pair))
        identities = _samples(runs, "identity").values()
        result["same_bytes"] = len(set().union(*identities)) == 1
    shutil.rmtree(folder)
    return result


def _samples(runs: dict[str, list[dict]], key: str) -> dict[str, list]:
    """One value of every run, by mode."""
    return {mode: [run[key] for run in alike] for mode, alike in runs.items()}


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def forget(source: Path) -> None:
    """Lets the system drop what it keeps of the checkpoint in memory, so that reading
    it is reading the disk."""
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def floor(source: Path, target: Path, count: int) -> dict[str, float]:
    """Seconds to read the checkpoint once, and to write `count` bytes as the export
    writes them: without waiting for the device."""

    def read():
        for path in source.glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(BUFFER):
                    pass

    def write():
        with target.open("wb", buffering=0) as file:
            for at in range(0, count, len(BUFFER)):
                file.write(BUFFER[: count - at])
        target.unlink()

    forget(source)
    return {"read": seconds(read), "write": seconds(write)}
