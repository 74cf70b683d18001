"""Hostile packages: `python -m tests.mil.fuzz N [SEED]` damages a small package N times and runs
what still opens.

Every attempt must end in an InputError or a finished run, within limits of time and memory.
Anything else ends the program: another exception (the attempt's number is in its notes), a hang, a
crash.
"""

import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import miltorch
from workbench.errors import InputError

FILES = {
    "Data/com.apple.CoreML/model.mlmodel": 0.7,
    "Data/com.apple.CoreML/weights/weight.bin": 0.2,
    "Manifest.json": 0.1,
}
# for one attempt; of address space beyond what is taken at the start
SECONDS, BYTES = (20, 4 << 30)


class Hang(BaseException):
    """An attempt took too long. No Exception, so that nothing on the way can take it for a bad
    operand."""


@contextmanager
def limits():
    """More than BYTES of new memory is a MemoryError inside, more than SECONDS since `signal.alarm`
    a Hang."""

    def late(*_):
        raise Hang

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, late)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempts(count: int, seed: int, attempt: Callable) -> list:
    """Results of `attempt(random)` with generators of one seed, each within the limits."""
    results = []
    with limits():
        for number in range(count):
            signal.alarm(SECONDS)
            try:
                results.append(attempt(np.random.default_rng([seed, number])))
            except BaseException as problem:
                problem.add_note(f"attempt {number} of seed {seed}")
                raise
    return results


def damage(data: bytes, random: np.random.Generator) -> bytes:
    """`data` cut short, with bytes replaced, a piece missing, or a piece twice."""
    kind, (first, last) = random.integers(5), sorted(random.integers(len(data), size=2))
    if kind == 0:
        return data[:first]
    if kind == 1:
        return data[:first] + data[last:]
    if kind == 2:
        return data[:last] + data[first:]
    array = np.frombuffer(data, np.uint8).copy()
    places = random.integers(len(array), size=random.integers(1, 9))
    array[places] = random.integers(256, size=len(places))
    return array.tobytes()


def opened_and_run(package: Path) -> str:
    """The outcome of a damaged package: `refused` or `ran`; anything but an InputError
    escapes."""
    try:
        executable = miltorch.Executable(miltorch.read(package))
        inputs = {
            name: torch.ones([2 if n is None else min(n, 64) for n in kind.shape])
            for name, kind in executable.program.inputs.items()
        }
        executable.run(inputs, executable.make_state())
        return "ran"
    except InputError:
        return "refused"


def fuzz(package: Path, count: int, seed: int = 0) -> Counter:
    """Damages a copy of `package` anew, `count` times; returns the number of those that were
    refused and of those that ran."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(package, Path(folder) / "hostile.mlpackage")

        def attempt(random) -> str:
            name = random.choice(list(FILES), p=list(FILES.values()))
            sound = (package / name).read_bytes()
            (copy / name).write_bytes(damage(sound, random))
            outcome = opened_and_run(copy)
            (copy / name).write_bytes(sound)
            return outcome

        return Counter(attempts(count, seed, attempt))


def main(count: int, seed: int = 0) -> None:
    from .memory import export

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "memory.mlpackage"
        export().save(str(package))
        print(f"{count} damaged packages: {dict(fuzz(package, count, seed))}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
