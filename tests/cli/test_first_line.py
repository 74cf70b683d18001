"""Every command says what it does before it imports a library that takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.cli.app import COMMANDS, SUBCOMMANDS

# Runs the commands that it reads from stdin, a list of words each in JSON, in forks of one process,
# and writes their streams to files in a folder. On an idle machine each of the slow libraries takes
# 0.3 to 4 s to import. The process itself has imported the commands' modules and what opening a
# bundle needs, numpy and pydantic, which take a tenth of a second; a slow import of theirs ends it.
END_AT_A_SLOW_IMPORT = """
import json, os, sys

SLOW = {"torch", "transformers", "coremltools", "pandas", "pyarrow", "matplotlib", "IPython",
        "scipy", "numba", "nbformat", "jupyter_client"}

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in SLOW:
            sys.stderr.flush()
            os._exit(0)

sys.meta_path.insert(0, Stop())
import workbench.bundle
import workbench.cli.app
from workbench.cli import main

folder = sys.argv[1]
for number, words in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    for stream, name in enumerate(("out", "err"), 1):
        mode = os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(f"{folder}/{number}.{name}", mode), stream)
    sys.argv = ["workbench", *words]
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
print("all ended")
"""
ARGUMENTS = {
    "export": "CHECKPOINT OUT/b",
    "golden": "CHECKPOINT --out OUT/g",
    "adopt": "BUNDLE --checkpoint CHECKPOINT --out OUT/a",
    "validate": "BUNDLE",
    "validate units": "BUNDLE --checkpoint CHECKPOINT",
    "explain": "BUNDLE --checkpoint CHECKPOINT",
    "explain parts": "BUNDLE --checkpoint CHECKPOINT",
    "explain variant": "BUNDLE --checkpoint CHECKPOINT",
    "explain ranges": "BUNDLE",
    "explain op": "BUNDLE",
    "generate": "BUNDLE --prompt Hello",
    "evaluate": "BUNDLE --prompt Hello",
    "run": "32",
    "report": "BUNDLE",
    "sweep": "BUNDLE",
    "log": "",
    "log compare": "A B",
    "log pack": "OUT/z",
    "log unpack": "BUNDLE/bundle.json",
    "plan": "BUNDLE",
    "doctor": "",
    "crosscheck": "BUNDLE --checkpoint CHECKPOINT",
}
OTHER_INPUTS = {
    "validate": "BUNDLE --checkpoint CHECKPOINT",
    "explain ranges": "PACKAGE",
    "report": "05",
    "sweep": "first-light",
    "plan": "CHECKPOINT",
}
"""Inputs of another kind, which a command reads with other code."""


def test_the_table_has_every_command():
    names = {function.__name__ for group in COMMANDS.values() for function in group}
    for command, words in SUBCOMMANDS.items():
        names |= {f"{command} {word}" for word in words}
    # an environment without the plug-in lacks its command
    assert names | {"crosscheck"} == {*ARGUMENTS}


CASES = [
    (command, arguments, form)
    for form in ("text", "json")
    for command, arguments in [*ARGUMENTS.items(), *OTHER_INPUTS.items()]
]


@pytest.fixture(scope="module")
def outputs(llama_bundle, tiny_llama, tmp_path_factory) -> Path:
    """A folder with the files `NUMBER.out` and `NUMBER.err` of each of `CASES`."""
    folder = tmp_path_factory.mktemp("outputs")
    package = next(llama_bundle.root.rglob("*.mlpackage"))
    inputs = {"BUNDLE": llama_bundle.root, "CHECKPOINT": tiny_llama.path}
    inputs["PACKAGE"] = package
    commands = []
    for number, (command, arguments, form) in enumerate(CASES):
        (folder / f"new-{number}").mkdir()
        for name, path in (inputs | {"OUT": folder / f"new-{number}"}).items():
            arguments = arguments.replace(name, str(path))
        words = [*command.split(), *arguments.split()]
        commands.append([*words, "--json"] if form == "json" else words)
    # stdout of a file is one block at the end of the process, which `os._exit` drops:
    # unbuffered, a result that is printed before the import would be there
    ended = subprocess.run(
        [sys.executable, "-u", "-c", END_AT_A_SLOW_IMPORT, folder],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    # no module of a command imports one of the libraries by itself
    assert ended.stdout == "all ended\n", ended.stderr
    return folder


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[" ".join(case).strip() for case in CASES]
)
def test_a_command_says_first_what_it_does(number, outputs):
    command, *_ = CASES[number]
    if command == "crosscheck":
        pytest.importorskip("workbench_coreai")
    printed = (outputs / f"{number}.out").read_text()
    # only `doctor` ends without such an import; it prints its result
    assert printed == "" or command == "doctor"
    line = (outputs / f"{number}.err").read_text()
    assert line.startswith(f"{command.split()[0]}: "), line
