"""Core ML's compute plans, asked for in a process of their own: Core ML may abort the one that asks
(CT#2757)."""

from collections.abc import Sequence

from workbench.ane.placement import Placement
from workbench.bundle import Bundle
from workbench.errors import InputError
from workbench.sweep import process


def planned_placement(
    bundle: Bundle,
    programs: Sequence[tuple[str, str | None]],
    runtime: str,
    compute_units: str = "CPU_AND_NE",
    *,
    fault: str = "",
    timeout_s: float | None = None,
) -> list[Placement]:
    """What Core ML, or its stand-in with a fault, plans for some shards of a bundle.

    Args:
        programs: a shard's name and the function's (None: its only one) for each.

    Raises:
        InputError: there is no plan, with the reason, the death of the process that asked included.
    """
    job = {"bundle": str(bundle.root), "programs": list(programs), "runtime": runtime}
    job |= {"compute_units": compute_units, "fault": fault}
    outcome = process.call("workbench.ane.placement:plan_main", job, timeout_s=timeout_s)
    if outcome.failure is not None:
        raise InputError.from_message(outcome.failure) or InputError(
            f"compute plan of bundle {bundle.root.name}",
            outcome.failure,
            "a plan from Core ML",
            "see the message; timings alone say where it ran",
        )
    return [
        Placement(**row | {"convolutions": tuple(row["convolutions"])}) for row in outcome.value
    ]
