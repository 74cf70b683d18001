"""The result of a gate: a figure, a threshold, a verdict and the reason in words; the
two verdicts that follow from gates; thresholds that several gates use; and
BUNDLE/verdict.json, the results of the gates that need the checkpoint, for machines
without it.

The *export* verdict (GREEN, RED, not_run) says whether the exported program computes
what Hugging Face's model computes with the stored weights. The *quality* verdict
(WITHIN, OVER, not_run) says whether the cost of compression stays within the limits
that the user sets. A RED export withholds the quality: the cost of a faulty program
says nothing about its compression.

Anybody can write a verdict.json. It counts only if this checkout noted the hashes of the
bundle and of the file when it wrote the file, or if the golden that the user gives
names the hash of the file."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from workbench.errors import InputError
from workbench.files import note_verified, read_bytes, was_verified, write_whole

GREEN = "GREEN"
RED = "RED"
NOT_RUN = "not_run"
NOT_JUDGED = "not judged"  # in words: the quality of a RED export
WITHIN = "WITHIN"
OVER = "OVER"
EXPORT_WORDS = {GREEN, RED, NOT_RUN}
QUALITY_WORDS = {WITHIN, OVER, NOT_RUN}
MAX_KL_GATE = "max_kl"  # the check of quality in every validation
# The names of the checks of quality. A check that did not run has no word of its own that tells
# it from a gate on the export.
QUALITY_CHECKS = (MAX_KL_GATE, "transcript", "stop", "answers")
VERDICT = "verdict.json"
NOTES = "verdicts"  # the folder of this checkout's notes on verdict.json files
SOURCE = Path(__file__).parent  # the folder of the gates' source
# The gates without which an export is not GREEN.
REQUIRED = (
    "interface",
    "weights",
    "host",
    "program",
    "state_life",
    "write_address",
    "stale_rows",
    "undo",
)
# The gates whose reason names what is to be corrected, such as a tensor: `explain` splits the
# error of a program and could add nothing.
NAME_THE_CAUSE = {"interface", "weights"}
# relative RMS of an isolated update in exact arithmetic, on the same weights
REAUTHORING = 1e-5
# defaults of the limits that are the user's
MAX_KL = 0.05  # nats, mean of a prompt
MIN_AGREED = 0.95  # share of the tokens of Hugging Face's text
MIN_STOPS = 0.75  # share of the ends of Hugging Face's text


@dataclass(frozen=True)
class Gate:
    """The result of one gate.

    Attributes:
        verdict: GREEN, RED or not_run; WITHIN, OVER or not_run for a check of quality,
            whose limit the user sets.
        value: None if the gate could not run.
        reason: what was compared, or why nothing was compared.
        applies: False for a gate that the bundle's target cannot have: it is named, and
            the export is GREEN without it.
        tensors: the checkpoint's tensors that a RED gate `weights` found to be stored
            wrongly, worst first. `explain` looks for their faults; JSON leaves them out,
            since the reason names them.
    """

    name: str
    verdict: str
    value: float | None
    threshold: float | None
    reason: str
    applies: bool = True
    tensors: tuple[str, ...] = ()

    def json(self) -> dict:
        """The fields but `tensors`; `applies` only where it is False."""
        fields = jsonable(asdict(self))
        del fields["tensors"]
        if self.applies:
            del fields["applies"]
        return fields


def jsonable(value):
    """`value` with every nan and inf replaced by its name, which JSON can hold; dicts
    and lists included."""
    if isinstance(value, dict):
        return {name: jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def records(frame) -> list[dict]:
    """The rows of a DataFrame for JSON; a value that was not measured is null."""
    return jsonable(frame.to_dict("records"))


def at_least(name: str, value: float, threshold: float, reason: str) -> Gate:
    """A gate on the export: GREEN if value >= threshold, otherwise, and for nan, RED."""
    verdict = GREEN if value >= threshold else RED
    return Gate(name, verdict, value, threshold, reason)


def at_most(name: str, value: float, threshold: float, reason: str) -> Gate:
    """A gate on the export: GREEN if value <= threshold, otherwise, and for nan, RED."""
    verdict = GREEN if value <= threshold else RED
    return Gate(name, verdict, value, threshold, reason)


def holds(name: str, condition: bool, reason: str) -> Gate:
    """A gate on the export: GREEN with the value 1 if the condition holds, otherwise RED
    with 0."""
    return at_least(name, float(condition), 1.0, reason)


def no_faults(
    name: str,
    faults: Sequence[str],
    pass_reason: str,
    heading: str = "",
    sep: str = ", ",
) -> Gate:
    """GREEN with `pass_reason` if there are no faults; otherwise RED, with `heading` and
    the faults, joined by `sep`, as the reason.

    Args:
        faults: a clause for each fault that a gate has found.
    """
    return holds(
        name, not faults, heading + sep.join(faults) if faults else pass_reason
    )


def quality_at_most(name: str, value: float, limit: float, reason: str) -> Gate:
    """A check of quality, not of the export: WITHIN if value <= limit, otherwise, and for
    nan, OVER."""
    return Gate(name, WITHIN if value <= limit else OVER, value, limit, reason)


def quality_at_least(name: str, value: float, limit: float, reason: str) -> Gate:
    """A check of quality, not of the export: WITHIN if value >= limit, otherwise, and for
    nan, OVER."""
    return Gate(name, WITHIN if value >= limit else OVER, value, limit, reason)


def not_run(name: str, reason: str, applies: bool = True) -> Gate:
    """A gate that compared nothing, for a reason; see `Gate` for `applies`."""
    return Gate(name, NOT_RUN, None, None, reason, applies)


def missing_gates(gates: Iterable[Gate]) -> list[str]:
    """The required gates that did not run although the bundle can have them."""
    return [
        gate.name
        for gate in gates
        if gate.name in REQUIRED and gate.verdict == NOT_RUN and gate.applies
    ]


def verdict(gates: Iterable[Gate]) -> str:
    """The verdict on the export: RED if any gate is RED; not_run if a required gate
    among them did not run, or none did; otherwise GREEN. Checks of quality do not
    count."""
    gates = list(gates)
    verdicts = {gate.verdict for gate in gates}
    if RED in verdicts:
        return RED
    if missing_gates(gates) or GREEN not in verdicts:
        return NOT_RUN
    return GREEN


def quality(gates: Iterable[Gate]) -> str:
    """The verdict on the cost: OVER if any check of quality is OVER, WITHIN if one is
    WITHIN and none OVER. not_run if none ran, or if a gate on the export is RED."""
    verdicts = {gate.verdict for gate in gates}
    if RED in verdicts:
        return NOT_RUN
    return next((word for word in (OVER, WITHIN) if word in verdicts), NOT_RUN)


def describe_quality(gates: Sequence[Gate]) -> str:
    """The quality in words: WITHIN, OVER, `not run`, or `not judged` where a RED export
    withholds it."""
    word = quality(gates)
    if word != NOT_RUN:
        return word
    return NOT_JUDGED if verdict(gates) == RED else "not run"


def describe_verdict(word: str, export: str) -> str:
    """The verdict of one gate as it is printed: a check of quality is `not judged` where a
    RED export withholds the quality.

    Args:
        word: the verdict of the gate.
        export: the verdict on the export.
    """
    return NOT_JUDGED if export == RED and word in (WITHIN, OVER) else word


def red_gates(gates: Iterable[Gate]) -> list[Gate]:
    """The gates that are RED: each shows a fault of the export."""
    return [gate for gate in gates if gate.verdict == RED]


def names_cause(names: Iterable[str]) -> bool:
    """Whether RED gates of these names, at least one, say in their reasons what is to be
    corrected."""
    names = {*names}
    return bool(names) and names <= NAME_THE_CAUSE


@cache
def gates_version() -> str:
    """SHA-256 of the source files of this package. A verdict of gates with another
    source is ignored."""
    sources = [path.read_bytes() for path in sorted(SOURCE.glob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def save_verdict(bundle, results: Iterable[Gate]) -> str:
    """Writes gates of a bundle into its folder, bound to the bundle's identity and to
    the gates' source, and notes in this checkout that it did.

    Returns:
        The hash of the file, with which a golden names it (`Golden.verdict_sha256`).

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
    note_verified(NOTES, {"bundle": bundle.identity, "verdict": digest})
    return digest


@dataclass(frozen=True)
class StoredVerdict:
    """The gates of a bundle's verdict.json, and whether they count. Gates that do not
    count are a claim of whoever made the bundle."""

    gates: list[Gate]
    counts: bool


def stored_verdict(bundle, trusted_hash: str | None = None) -> StoredVerdict | None:
    """The verdict in the bundle's verdict.json; None if there is no such file, if it is
    of another bundle, or if it was written by gates with another source.

    Args:
        trusted_hash: of a verdict.json that counts without a note of this checkout,
            from the golden that the user gives.
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
    if not {gate.verdict for gate in results} <= EXPORT_WORDS:
        return None
    digest = hashlib.sha256(contents).hexdigest()
    facts = {"bundle": bundle.identity, "verdict": digest}
    return StoredVerdict(results, digest == trusted_hash or was_verified(NOTES, facts))
