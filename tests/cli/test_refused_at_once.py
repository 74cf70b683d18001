"""What can be known at once is refused at once: before torch is imported and before anything is
exported."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from in_process import cli
from refusal import refused
from tiny import DATA

from workbench import kernel
from workbench.ane import chips
from workbench.experiment import parameters

TINY = DATA / "tiny-llama"
# torch and pandas take most of the time until a late refusal
LATE_IMPORTS = "torch", "pandas"
# Runs each command in a fork of one process, which has imported what most commands import; the server
# of `forks` has imported torch, too. A line of its stdin is the working folder, two files for the streams, and the command's words.
FORKS = """
import atexit, json, os, sys
import workbench.bundle, workbench.cli.app
from workbench.cli import main

for line in sys.stdin:
    folder, *streams, words = json.loads(line)
    if not os.fork():
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(folder)
        atexit.register(lambda: print(*filter(sys.modules.get, {late!r})))
        sys.argv = ["workbench", *words]
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Refusal(NamedTuple):
    """How a command ended."""

    exit_code: int
    late_imports: list[str]
    """The modules of `LATE_IMPORTS` that it imported."""
    stderr: str


@pytest.fixture(scope="module")
def refuse(tmp_path_factory) -> Iterator[Callable[[list[str], Path], Refusal]]:
    """A function that runs a command in a folder."""
    code = FORKS.format(late=LATE_IMPORTS)
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as forks:

        def run(words: list[str], folder: Path) -> Refusal:
            streams = tmp_path_factory.mktemp("streams")
            out, err = streams / "out", streams / "err"
            request = [*map(str, (folder, out, err)), words]
            print(json.dumps(request), file=forks.stdin, flush=True)
            exit_code = int(forks.stdout.readline())
            return Refusal(exit_code, out.read_text().split(), err.read_text())

        yield run


MIXED = "export {tiny} out --compress mixed --calibrate {data}/tasks/heldout.txt"
COMMANDS = {
    "evaluate {bundle} --prompt-ids 1,2 --window 5000": "at most max_seq_len = 32",
    "evaluate {bundle} --prompt-ids 1,2 --window 8 --stride 8": "1 … 7",
    "export {tiny} out --max-seq-len 100000": "max_position_embeddings",
    "export {tiny} out --compress lut6-g1x": "lut6-g1x",
    "export {tiny} out --compress lut4": "export with --compress lut4-g8",
    "export {tiny} out --tokens 0": "1-4, 4 or 1,64",
    "export {tiny} out --moe sparse": "needs one of dense, routed",
    "export {tiny} /proc/x/b": "found /proc",
    MIXED + " --bytes lots": "a size above zero",
    MIXED + " --ms-on M99": "M99",
    "explain op {bundle} --layer 99": "--layer: found 99; needs a number from 0 to",
    "explain op {bundle} --position -1": "--position: found -1; needs a number from 0",
    "export {tiny} out --tokens 4,1": "found tokens = 4,1; needs numbers that ascend",
    "export {bundle} out": "Next: give the checkpoint that it was exported from",
    "generate {bundle} --prompt-ids 1 --max-new -1": "--max-new: found -1",
    "generate {bundle} --prompt-ids 1 --temperature 1 --top-p 2": "--top-p: found 2",
    "validate {bundle} --tasks nowhere": "--tasks: found no file nowhere; needs a file that exists",
    "golden {tiny} --out {data}": "found a folder",
    "golden {tiny} --out g --prompt-ids 1,,2": "a whole number",
    "adopt nowhere --checkpoint {tiny} --out a": "package nowhere: found nothing",
    "adopt {tiny} --checkpoint {tiny} --out a": "found a Hugging Face checkpoint",
    "adopt --checkpoint {tiny} --out a": "packages: found none",
    "adopt {bundle} --checkpoint {tiny} --out {bundle}": "found a finished bundle",
    "generate {bundle} --prompt-ids 1,b": "--prompt-ids: found 'b'",
    "validate {bundle} --checkpoint {tiny} --precision fp16": "declared, exact, narrow",
    "explain {bundle} --checkpoint {data}/tiny-qwen2": "found a qwen2 checkpoint",
    "evaluate {bundle} --prompt-ids 1 --checkpoint {data}/tiny-zaya": "found a zaya",
    "plan {tiny} --max-seq-len 100000": "max_position_embeddings",
    "plan {tiny} --compress lut6-g1x": "lut6-g1x",
    "plan {tiny} --memory lots": "lots",
    "plan {bundle} --chip M9": "M9",
    "sweep nowhere.yaml": "found no such file",
    "sweep {tiny}": "found a Hugging Face checkpoint",
    "sweep {grid}": "lut6-g1x",
    "run 99": "experiment 99: found no such notebook",
    "report 77": "experiment 77: found no such notebook",
    "generate {bundle} --prompt-ids 1 --runtime coreml": "macOS 15",
    "evaluate {bundle} --prompt-ids 1,2 --runtime coreml": "macOS 15",
    "validate {bundle} --checkpoint {tiny} --runtime coreml": "macOS 15",
    "validate units {bundle} --checkpoint {tiny} --runtime coreml": "macOS 15",
    "explain {bundle} --checkpoint {tiny} --runtime coreml": "macOS 15",
    "explain op {bundle} --runtime coreml": "macOS 15",
    "plan {bundle} --runtime coreml": "macOS 15",
}


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Core ML")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_refused_before_torch_is_imported(
    command, refuse, llama_bundle, tmp_path, tmp_path_factory
):
    grid = tmp_path_factory.mktemp("grids") / "grid.yaml"
    grid.write_text(f"checkpoint: {TINY}\nexport: {{compress: [fp16, lut6-g1x]}}\n")
    places = {"bundle": llama_bundle.root, "tiny": TINY, "grid": grid, "data": DATA}
    refusal = refuse(
        [word.format_map(places) for word in shlex.split(command)], tmp_path
    )
    assert refusal.exit_code == 2, refusal.stderr
    assert COMMANDS[command] in refusal.stderr
    assert "torch" not in refusal.late_imports
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [MIXED + " --ms-on M99", "plan {tiny} --chip M99"])
def test_a_chip_is_refused_before_pandas_is_imported(command, refuse, tmp_path):
    """pandas takes most of the time of a refusal without torch."""
    words = shlex.split(command.format(tiny=TINY, data=DATA))
    refusal = refuse(words, tmp_path)
    assert (refusal.exit_code, refusal.late_imports) == (2, [])
    assert "chip: found 'M99'; needs one of A17 Pro" in refusal.stderr


def test_the_chips_of_a_refusal_are_those_with_rates():
    rated = [*chips.chips()["chip"]]
    for chip in rated:
        chips.check_chip(chip)
    with refused("chip: .* needs one of " + ", ".join(sorted(rated)) + "\\."):
        chips.check_chip("M99")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json: found no JSON object with fields; needs the file of the"),
        ("[]", "config.json: found no JSON object with fields; needs the file of the"),
        ('{"hidden_size": 8}', "found no model_type in config.json; needs one of"),
    ],
)
def test_a_damaged_config_is_called_damaged(config, words, tmp_path):
    copy = shutil.copytree(TINY, tmp_path / "copy")
    (copy / "config.json").write_text(config)
    result = cli("export", copy, tmp_path / "bundle")
    assert result.exit_code == 2 and words in result.stderr


@pytest.mark.parametrize("command", ["validate", "validate units"])
def test_a_changed_file_is_refused_before_the_checkpoint_is_read(
    command, llama_bundle, tmp_path, monkeypatch
):
    def read_checkpoint(*_):
        pytest.fail("read the checkpoint")

    monkeypatch.setattr(
        "workbench.cli.checks.load_exported_checkpoint", read_checkpoint
    )
    copy = shutil.copytree(llama_bundle.root, tmp_path / "copy")
    path = next(copy.rglob("weight.bin"))
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    result = cli(*command.split(), copy, "--checkpoint", TINY)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "weight.bin: found bytes that differ" in result.stderr


LENGTHS = [
    ("05", "MAX_SEQ_LEN=20", "POSITIONS: found 48 tokens; needs at most 20"),
    ("05", "T_MAX=300", "T_MAX: found 300 tokens; needs at most 256"),
    ("30", "MAX_SEQ_LEN=20", "POSITIONS: found 40"),
    ("30", "DEPTH=250", "DEPTH: found 250 tokens; needs at most 247"),
    ("31", "POSITIONS=80", "POSITIONS: found 80 tokens; needs at most 64"),
    ("32", "TOKENS=40", "TOKENS: found 40 tokens; needs at most 32"),
    ("34", "MAX_SEQ_LEN=[32, 512]", "POSITIONS: found 48 tokens; needs at most 32"),
    ("35", "MAX_SEQ_LEN=40", "POSITIONS: found 48 tokens; needs at most 40"),
]


@pytest.mark.parametrize(("number", "setting", "words"), LENGTHS)
def test_tokens_that_do_not_fit_the_cache_are_refused_before_a_kernel_starts(
    number, setting, words, monkeypatch
):
    monkeypatch.setattr(kernel, "execute", lambda *_, **__: pytest.fail("ran"))
    result = cli("run", number, "--set", setting)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr and "Next: lower" in result.stderr


def test_a_prompt_of_its_own_may_be_shorter_than_positions():
    values = {"MAX_SEQ_LEN": 20, "POSITIONS": 48, "PROMPT": "A ferry is"}
    parameters.check_lengths("05", values)
    with refused("POSITIONS"):
        parameters.check_lengths("05", values | {"PROMPT": ""})


def test_every_notebook_with_such_parameters_is_checked():
    for number in ("05", "30", "31", "32", "33", "34", "35"):
        values = parameters.notebook_parameters(number).values
        counts = [name for name in ("POSITIONS", "T_MAX") if name in values]
        assert {*counts} <= {*parameters.LENGTHS.get(number, ())}, number
        parameters.check_lengths(number, values)
