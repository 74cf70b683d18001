"""Gates: a figure, a threshold, a verdict and the reason in words; thresholds that
several gates use; and BUNDLE/verdict.json, the results of the gates that need the
checkpoint, for machines that lack it.

Anybody can write that file. It counts where this checkout has noted the hashes of
bundle and file when it wrote it, or where the golden that the user names has noted
them."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from workbench.errors import InputError
from workbench.files import is_noted, note, read_bytes, write_whole

GREEN = "GREEN"
RED = "RED"
NOT_RUN = "not_run"
VERDICT = "verdict.json"
NOTES = "verdicts"  # the folder of this checkout's notes on such files
SOURCE = Path(__file__).parent  # of every gate


@dataclass(frozen=True)
class Gate:
    """The result of one gate. `value` is None if the gate could not run; `reason` says
    what was compared, or why nothing was compared."""

    name: str
    verdict: str
    value: float | None
    threshold: float | None
    reason: str

    def json(self) -> dict:
        return jsonable(asdict(self))


def jsonable(value):
    """`value` with each float that JSON lacks (nan, inf) replaced by its name, in dicts
    and lists too."""
    if isinstance(value, dict):
        return {name: jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def records(frame) -> list[dict]:
    """Rows of a DataFrame as JSON has them; what was not measured is null."""
    return jsonable(frame.to_dict("records"))


def at_least(name: str, value: float, threshold: float, reason: str) -> Gate:
    """GREEN where value >= threshold; nan is RED."""
    verdict = GREEN if value >= threshold else RED
    return Gate(name, verdict, value, threshold, reason)


def at_most(name: str, value: float, threshold: float, reason: str) -> Gate:
    """GREEN where value <= threshold; nan is RED."""
    verdict = GREEN if value <= threshold else RED
    return Gate(name, verdict, value, threshold, reason)


def holds(name: str, true: bool, reason: str) -> Gate:
    return at_least(name, float(true), 1.0, reason)


def none(
    name: str, faults: Sequence[str], fine: str, heading: str = "", sep: str = ", "
) -> Gate:
    """GREEN, for the reason `fine`, when there are no faults; else RED, with `heading`
    and all of them."""
    return holds(name, not faults, heading + sep.join(faults) if faults else fine)


def not_run(name: str, reason: str) -> Gate:
    return Gate(name, NOT_RUN, None, None, reason)


def verdict(gates: Iterable[Gate]) -> str:
    """RED if any gate is, not_run if none ran, else GREEN."""
    verdicts = {g.verdict for g in gates}
    return next((v for v in (RED, GREEN) if v in verdicts), NOT_RUN)


USER_LIMIT = "max_kl"  # a gate whose limit the user chooses: RED is no fault


def faults(gates: Iterable[Gate]) -> list[Gate]:
    """The RED gates that show a fault of the export, which leaves out the user's limit
    on the cost."""
    return [gate for gate in gates if gate.verdict == RED and gate.name != USER_LIMIT]


# relative RMS of an isolated update in exact arithmetic, on the same weights
REAUTHORING = 1e-5
MAX_KL = 0.05  # nats, mean of a prompt: the default of the limit that is the user's


@cache
def gates_version() -> str:
    """SHA-256 of the files of this package; a verdict that other gates gave is not
    read."""
    sources = [path.read_bytes() for path in sorted(SOURCE.glob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def save_verdict(bundle, results: Iterable[Gate]) -> str:
    """Writes gates of a bundle into its folder, bound to the bundle's identity and to
    the gates' source, and notes in this checkout that it did.

    Returns:
        The hash of the file, with which a golden names it (`Golden.verdict`).

    Raises:
        InputError: a folder that cannot be written.
    """
    path = bundle.root / VERDICT
    fields = {
        "version": gates_version(),
        "bundle": bundle.identity,
        "gates": [gate.json() for gate in results],
    }
    contents = (json.dumps(fields, indent=1) + "\n").encode()
    try:
        write_whole(path, contents)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        step = "copy the bundle to one, and validate it there"
        raise InputError(
            str(path), reason, "a folder that can be written", step
        ) from None
    digest = hashlib.sha256(contents).hexdigest()
    note(NOTES, {"bundle": bundle.identity, "verdict": digest})
    return digest


@dataclass(frozen=True)
class StoredVerdict:
    """The gates of a bundle's verdict.json, and whether they count: others are only
    stated by the bundle."""

    gates: list[Gate]
    counts: bool


def stored_verdict(bundle, named: str | None = None) -> StoredVerdict | None:
    """What the bundle's verdict.json says; None where there is none, or one of another
    bundle or by gates of other source.

    Args:
        named: the hash of a verdict.json that counts without a note of this checkout:
            that of the golden which the user names.
    """
    from pydantic import TypeAdapter

    try:
        contents = read_bytes(bundle.root / VERDICT)
        fields = json.loads(contents)
        if fields["version"] != gates_version():
            return None
        if fields["bundle"] != bundle.identity:
            return None
        # "nan" is nan again
        results = TypeAdapter(list[Gate]).validate_python(fields["gates"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not {gate.verdict for gate in results} <= {GREEN, RED, NOT_RUN}:
        return None
    digest = hashlib.sha256(contents).hexdigest()
    facts = {"bundle": bundle.identity, "verdict": digest}
    return StoredVerdict(results, digest == named or is_noted(NOTES, facts))
