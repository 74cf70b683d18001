"""Child processes that start fast: forks of one server, which has imported what children of
tests import.

    python forks.py serve DESCRIPTOR COMMAND PID    # the server, which `start` starts
    python forks.py ask SOCKET -m MODULE ARGUMENTS  # python -m MODULE ARGUMENTS, in a fork
    python forks.py ask SOCKET -c CODE ARGUMENTS    # python -c CODE ARGUMENTS, in a fork

`start` yields the path of a shell script that calls `ask` with the words that Python would get. A
test of what children compute, not of how they start, sets `sys.executable` to that script (the
fixture `forked`).

`ask` sends its standard streams, folder, environment and words to the server. The server forks; the
fork takes these over (`take_over`) and runs the module or the code. Between the two is a process
that tells `ask` the fork's id and its exit code (`fork_and_report`). `ask` passes interrupts on to
the fork and ends as it ends; the fork ends when `ask` does."""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

MODULES = (
    *("torch", "coremltools", "transformers", "pandas", "matplotlib.pyplot"),
    *("ipykernel.kernelapp", "ipywidgets", "workbench.experiment", "workbench.plots"),
    *("workbench.widgets", "workbench.exporter", "workbench.sweep", "workbench.decode"),
    # what these import when they are first used
    *("transformers.models.llama.modeling_llama", "miltorch.fusion"),
    *("safetensors.torch", "huggingface_hub.serialization", "sympy.tensor"),
)
PARENT_S = 0.5  # between two checks whether the parent of a process lives
COMMAND = """#!/bin/sh
[ "$1" != -m ] && [ "$1" != -c ] && exec "{python}" "$@"
exec "{python}" -S -E "{file}" ask "{socket}" "$@"
"""


@contextmanager
def start() -> Iterator[str]:
    """Runs the server while the block runs; yields the path of the script that takes the arguments
    of `python`. The server imports `MODULES` when the script is first used."""
    # the path of a socket has at most 107 characters
    folder = tempfile.mkdtemp()
    path, command = f"{folder}/forks", f"{folder}/python"
    with open(command, "w") as file:
        file.write(COMMAND.format(python=sys.executable, file=__file__, socket=path))
    os.chmod(command, 0o755)
    write_kernel(kernels(command), command)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    with server:
        process = subprocess.Popen(
            [sys.executable, __file__, "serve"]
            + [str(server.fileno()), command, str(os.getpid())],
            pass_fds=[server.fileno()],
        )
    try:
        yield command
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def kernels(command: str) -> Path:
    """The folder for `JUPYTER_PATH` whose kernel `python3` is that command."""
    return Path(command).parent / "share"


def write_kernel(folder: Path, command: str) -> None:
    """Writes the kernel `python3` that is a command into a folder for `JUPYTER_PATH`."""
    words = [command, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    # its name is saved in notebooks: that of ipykernel's own kernel
    name = "Python 3 (ipykernel)"
    spec = {"argv": words, "display_name": name, "language": "python"}
    path = folder / "kernels" / "python3" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec))


def wait_readable(descriptor: int, parent: int) -> None:
    """Waits until there is something to read; ends this process once its parent has
    ended, however that happened."""
    while not select.select([descriptor], [], [], PARENT_S)[0]:
        if os.getppid() != parent:
            os._exit(1)


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, even while it imports. Forks of this
    process do not inherit that."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


@dataclass(frozen=True)
class Request:
    """What a fork takes over from the process that asks for it, besides its streams.

    Args:
        words: `-m` or `-c`, the module or the code, and its arguments.
        folder: the working folder.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]


def serve(listener: int, command: str, starter: int) -> list[str]:
    """Imports, then forks at every request until it or its starter ends; returns in a fork alone,
    with the words that Python would get.

    Args:
        listener: descriptor of the socket.
        command: the path of the script that stands for Python.
        starter: id of the process that started this one.
    """
    end_with_parent(starter)
    wait_readable(listener, starter)
    # matplotlib reads it when it is imported; a kernel sets it before
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    sys.path.pop(0)  # this file's folder
    sys.executable = command
    from numba import njit

    from miltorch.coremltools_import import protobuf_module

    for name in MODULES:
        importlib.import_module(name)
    protobuf_module("Model_pb2")
    njit("()")(lambda: None)  # reads what every compiled function needs
    gc.freeze()  # what forks share is neither traversed nor copied
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the forks
    with socket.socket(fileno=listener) as server:
        while True:
            wait_readable(server.fileno(), starter)
            peer, _ = server.accept()
            if os.fork() == 0:
                server.close()
                return become(peer)
            peer.close()


def become(peer: socket.socket) -> list[str]:
    """In the server's fork: reads the request of the process that asks, forks once more, and
    returns in that second fork alone, with the words of the request."""
    request = receive_request(peer)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fork_and_report(peer)
    take_over(request, peer)
    return request.words


def receive_request(peer: socket.socket) -> Request:
    """Reads a request, and replaces the standard streams by those that come with it."""
    _, streams, *_ = socket.recv_fds(peer, 1, 3)
    with peer.makefile() as lines:
        request = Request(**json.loads(lines.readline()))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return request


def fork_and_report(peer: socket.socket) -> None:
    """Forks, and returns in the fork. The parent stays here: it sends the fork's id and, when the
    fork has ended, its exit code, and ends."""
    fork = os.fork()
    if not fork:
        return
    os.closerange(0, 3)  # an end of file comes with the fork's end
    peer.sendall(f"{fork}\n".encode())
    _, status = os.waitpid(fork, 0)
    peer.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def take_over(request: Request, peer: socket.socket) -> None:
    """Takes over the folder and the environment of the process that asks, and ends this one when
    that one ends."""
    os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in folders if path and path not in sys.path]
    threading.Thread(target=lambda: (peer.recv(1), os._exit(1)), daemon=True).start()


def ask(path: str, words: list[str]) -> None:
    """Has a fork run a module or code; ends this process as the fork ends, and the fork
    when the process that asks for it ends.

    Args:
        path: of the server's socket.
        words: see `Request`.
    """
    parent = os.getppid()
    environment = dict(os.environ)
    environment.pop("JPY_PARENT_PID", None)  # of the one that asks, not of the fork
    request = Request(words, os.getcwd(), environment)
    with socket.socket(socket.AF_UNIX) as peer, peer.makefile() as lines:
        peer.connect(path)
        socket.send_fds(peer, [b"\0"], [0, 1, 2])
        peer.sendall(json.dumps(asdict(request)).encode() + b"\n")
        fork = int(lines.readline())
        signal.signal(signal.SIGINT, lambda *_: os.kill(fork, signal.SIGINT))
        wait_readable(peer.fileno(), parent)
        code = int(lines.readline())
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def run_python(words: list[str]) -> None:
    """Runs a module or code as `python` with these words does."""
    option, subject, *arguments = words
    if option == "-m":
        sys.argv = [subject, *arguments]
        runpy.run_module(subject, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *arguments]
        exec(compile(subject, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "ask":
        path, *words = arguments
        ask(path, words)
    else:
        listener, command, starter = arguments
        run_python(serve(int(listener), command, int(starter)))
