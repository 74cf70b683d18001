"""What children of test_process.py are called to do."""

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


def refuses_after_core_ml_complained():
    print(CORE_ML, file=sys.stderr)
    raise InputError("x", "1", "2", "write 2")


def crash(name):
    print(CORE_ML, file=sys.stderr)
    print("a line", file=sys.stderr, flush=True)
    os.kill(os.getpid(), getattr(signal, name))


def raises():
    raise RuntimeError("Error compiling model: no")


def sleeps(pid):
    pid.write_text(str(os.getpid()))
    time.sleep(600)


def hangs(pid):  # as a native call may: no other thread of Python runs meanwhile
    pid.write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)


def loses_its_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def search_path() -> list[str]:
    return sys.path


def fills_the_disk(kind: str):
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    if kind == "OSError":
        raise full
    if kind == "InputError":
        raise InputError("bundle", "9 bytes free", "10", "choose another") from full
    raise RuntimeError("I/O error: No space left on device (os error 28)")


def misses_a_file():
    open("/nowhere/file")
