"""What children of test_process.py are called to do."""

import ctypes
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
