"""Every command says what it does before it imports a library that takes seconds."""

import subprocess
import sys

import pytest

from workbench.cli.app import COMMANDS, SUBCOMMANDS

# On an idle machine each takes 0.3 to 4 s to import; numpy and pydantic, which opening a
# bundle needs, take a tenth of a second.
ENDS_AT_A_SLOW_IMPORT = """
import os, sys

SLOW = {"torch", "transformers", "coremltools", "pandas", "pyarrow", "matplotlib", "IPython",
        "scipy", "numba", "nbformat", "jupyter_client"}

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in SLOW:
            sys.stderr.flush()
            os._exit(0)

sys.meta_path.insert(0, Stop())
from workbench.cli import main

sys.argv = ["workbench", *sys.argv[1:]]
main()
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
    "log unpack": "OUT/z",
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


@pytest.mark.parametrize("json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    "command, arguments", [*ARGUMENTS.items(), *OTHER_INPUTS.items()]
)
def test_a_command_says_first_what_it_does(
    command, arguments, json, llama_bundle, tiny_llama, tmp_path
):
    if command == "crosscheck":
        pytest.importorskip("workbench_coreai")
    package = next(llama_bundle.root.rglob("*.mlpackage"))
    inputs = {"BUNDLE": llama_bundle.root, "CHECKPOINT": tiny_llama.path}
    inputs |= {"PACKAGE": package, "OUT": tmp_path}
    for name, path in inputs.items():
        arguments = arguments.replace(name, str(path))
    words = [*command.split(), *arguments.split(), *(["--json"] if json else [])]
    # stdout of a pipe is one block at the end of the process, which `os._exit` drops:
    # unbuffered, a result that is printed before the import would be there
    ended = subprocess.run(
        [sys.executable, "-u", "-c", ENDS_AT_A_SLOW_IMPORT, *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # only `doctor` ends without such an import; it prints its result
    assert ended.stdout == "" or command == "doctor"
    assert ended.stderr.startswith(f"{command.split()[0]}: "), ended.stderr
