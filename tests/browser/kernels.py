"""Kernels that are forks of one process, which has imported what every notebook imports.

`python kernels.py SOCKET` is that process. `python kernels.py SOCKET FILE` is the command of a
kernel: it asks for a fork with this connection file, passes interrupts on, and ends with it.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

MODULES = (
    *("torch", "coremltools", "transformers", "pandas", "matplotlib.pyplot"),
    *("ipykernel.kernelapp", "ipywidgets", "workbench.report.study", "workbench.plots"),
    *("workbench.widgets", "workbench.export", "workbench.sweep", "workbench.decode"),
)


def spec(folder: Path, socket_path: str) -> None:
    """Writes the kernel `python3` of these forks into a folder for `JUPYTER_PATH`."""
    command = [sys.executable, "-S", "-E", __file__, socket_path, "{connection_file}"]
    # its name is saved in notebooks: that of ipykernel's own kernel
    name = "Python 3 (ipykernel)"
    about = {"argv": command, "display_name": name, "language": "python"}
    path = folder / "kernels" / "python3" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(about))


def serve(socket_path: str) -> None:
    """Imports, then forks at every request until it is killed."""
    # matplotlib reads it when it is imported; a kernel sets it before
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    sys.path.pop(0)  # this file's folder
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_path)
        server.listen()
        for name in MODULES:
            importlib.import_module(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the forks
        while True:
            peer, _ = server.accept()
            if os.fork() == 0:
                server.close()
                run(peer)
            peer.close()


def run(peer: socket.socket) -> None:
    """Becomes a kernel; ends the process with it, or when the one that asked ends."""
    from ipykernel import kernelapp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with peer.makefile() as lines:
        request = json.loads(lines.readline())
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    peer.sendall(f"{os.getpid()}\n".encode())
    threading.Thread(target=lambda: (peer.recv(1), os._exit(0)), daemon=True).start()
    kernelapp.launch_new_instance(argv=["-f", request["file"]])
    os._exit(0)


def ask(socket_path: str, file: str) -> None:
    environment = dict(os.environ)
    environment.pop("JPY_PARENT_PID", None)  # of the one that asks, not of the fork
    request = {"cwd": os.getcwd(), "environment": environment, "file": file}
    with socket.socket(socket.AF_UNIX) as peer, peer.makefile() as lines:
        peer.connect(socket_path)
        peer.sendall(json.dumps(request).encode() + b"\n")
        kernel = int(lines.readline())
        signal.signal(signal.SIGINT, lambda *_: os.kill(kernel, signal.SIGINT))
        lines.read()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    ask(*sys.argv[1:])
