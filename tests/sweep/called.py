"""What tests of test_process.py and test_killed.py call in a child process."""

import ctypes
import errno
import os
import signal
import sys
import time

from workbench.errors import InputError

CORE_ML = "E5RT: ANECCompile() FAILED (-14)"


def answer(argument):
    print("chatter on stdout")
    print("chatter on stderr", CORE_ML, sep="\n", file=sys.stderr)
    threads = os.environ["OMP_NUM_THREADS"]
    return {"got": argument, "pid": os.getpid(), "threads": threads}


def refuse_after_core_ml_complained():
    print(CORE_ML, file=sys.stderr)
    raise InputError("x", "1", "2", "write 2")


def crash(name):
    print(CORE_ML, file=sys.stderr)
    print("a line", file=sys.stderr, flush=True)
    os.kill(os.getpid(), getattr(signal, name))


def raise_error():
    raise RuntimeError("Error compiling model: no")


def sleep(pid_file):
    pid_file.write_text(str(os.getpid()))
    time.sleep(600)


def hang(pid_file):
    """Sleeps as a native call may: no other thread of Python runs meanwhile."""
    pid_file.write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)


def kill_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def get_search_path() -> list[str]:
    return sys.path


def fill_disk(kind: str):
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    if kind == "OSError":
        raise full
    if kind == "InputError":
        raise InputError("bundle", "9 bytes free", "10", "choose another") from full
    raise RuntimeError("I/O error: No space left on device (os error 28)")


def open_missing_file():
    open("/nowhere/file")
