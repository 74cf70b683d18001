"""Fuzz test of the reader: `python -m tests.mil.fuzz N [SEED]` damages a small package N times and
runs what still opens, as if each copy were hostile.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

import miltorch
from workbench.errors import InputError

Result = TypeVar("Result")
# file of the package → the share of attempts that damage it
SHARES = {
    "Data/com.apple.CoreML/model.mlmodel": 0.7,
    "Data/com.apple.CoreML/weights/weight.bin": 0.2,
    "Manifest.json": 0.1,
}
SECONDS = 20  # for one attempt
BYTES = 4 << 30  # of address space beyond what the process uses at the start
FLEXIBLE_SIZE = 2  # of an axis whose size the package leaves open
LARGEST_SIZE = 64  # of any axis, because damage can declare huge ones


class Hang(BaseException):
    """An attempt took too long. Not an Exception, because the executor turns every Exception of an
    operation into an InputError."""


@contextmanager
def limits() -> Iterator[None]:
    """A context in which more than BYTES of new memory raise a MemoryError, and more than SECONDS
    since the last `signal.alarm(SECONDS)` a Hang."""

    def raise_hang(*_):
        raise Hang

    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (allowed, old_limits[1]))
    old_handler = signal.signal(signal.SIGALRM, raise_hang)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old_handler)
        resource.setrlimit(resource.RLIMIT_AS, old_limits)


def run_attempts(
    count: int, seed: int, attempt: Callable[[np.random.Generator], Result]
) -> list[Result]:
    """The results of `count` attempts, each within the limits. Attempt n gets a generator seeded
    with [seed, n], so that it can be repeated alone."""
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
    """`data` cut short, without a piece, with a piece twice, or (twice as often) with up to eight
    bytes replaced."""
    kind = random.integers(5)
    start, end = sorted(random.integers(len(data), size=2))
    match kind:
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:end] + data[start:]
    array = np.frombuffer(data, np.uint8).copy()
    places = random.integers(len(array), size=random.integers(1, 9))
    array[places] = random.integers(256, size=len(places))
    return array.tobytes()


def open_and_run(package: Path) -> str:
    """Runs a package on ones if it opens. Returns `refused` for an InputError and `ran` otherwise;
    any other exception passes through."""
    try:
        executable = miltorch.Executable(miltorch.read(package))
        inputs = {}
        for name, declared in executable.program.inputs.items():
            shape = [
                FLEXIBLE_SIZE if size is None else min(size, LARGEST_SIZE)
                for size in declared.shape
            ]
            inputs[name] = torch.ones(shape)
        executable.run(inputs, executable.make_state())
        return "ran"
    except InputError:
        return "refused"


def fuzz(package: Path, count: int, seed: int = 0) -> Counter:
    """Damages one file of a copy of `package`, opens and runs the copy, and repairs it, `count`
    times. Returns how many were refused and how many ran."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(package, Path(folder) / "hostile.mlpackage")

        def attempt(random: np.random.Generator) -> str:
            file = random.choice(list(SHARES), p=list(SHARES.values()))
            sound = (package / file).read_bytes()
            (copy / file).write_bytes(damage(sound, random))
            outcome = open_and_run(copy)
            (copy / file).write_bytes(sound)
            return outcome

        return Counter(run_attempts(count, seed, attempt))


def main(count: int, seed: int = 0) -> None:
    from .memory import export

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "memory.mlpackage"
        export().save(str(package))
        print(f"{count} damaged packages: {dict(fuzz(package, count, seed))}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
