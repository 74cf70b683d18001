"""Core ML's compute plans, made in a child process, which Core ML may abort
(CT#2757)."""

from collections.abc import Iterable

from workbench.ane.placement import Placement
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError
from workbench.sweep import process


def plan_job(
    bundle: Bundle,
    shards: Iterable[Shard],
    runtime: str,
    compute_units: str,
    fault: str,
) -> dict:
    """The argument of `placement.plan_main` for every function of some shards of a
    bundle."""
    programs = []
    for shard in shards:
        for name in shard.functions or [None]:
            programs.append((shard.name, name))
    job = {"bundle": str(bundle.root), "programs": programs, "runtime": runtime}
    return job | {"compute_units": compute_units, "fault": fault}


def planned_placement(
    bundle: Bundle,
    shards: Iterable[Shard],
    runtime: str,
    compute_units: str,
    fault: str = "",
    timeout_s: float | None = None,
) -> list[Placement]:
    """The plan of Core ML, or of its stand-in with a fault, for every function of some
    shards.

    Raises:
        InputError: there is no plan; the reason may be the death of the child process.
    """
    job = plan_job(bundle, shards, runtime, compute_units, fault)
    outcome = process.call(
        "workbench.ane.placement:plan_main", job, timeout_s=timeout_s
    )
    if outcome.failure is not None:
        raise InputError.from_message(outcome.failure) or InputError(
            f"compute plan of bundle {bundle.root.name}",
            outcome.failure,
            "a plan from Core ML",
            "see the message; timings alone say where it ran",
        )
    return [
        Placement(**row | {"convolutions": tuple(row["convolutions"])})
        for row in outcome.value
    ]
