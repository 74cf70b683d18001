"""Lists what the manifest of adopted packages says that their interfaces do not state."""

from dataclasses import dataclass

from workbench.adopt.packages import ANEMLL_FILE
from workbench.adopt.roles import INPUTS, find_role
from workbench.bundle import Manifest
from workbench.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Assumption:
    """Something in the manifest that had to be guessed: that `subject` is `value`, because
    of `reason`."""

    subject: str
    value: str
    reason: str

    def json(self) -> dict:
        """The row as `workbench adopt` prints it."""
        return {"subject": self.subject, "assumed": self.value, "why": self.reason}


def list_assumptions(
    manifest: Manifest, checkpoint: Checkpoint, error: float
) -> list[Assumption]:
    """What the manifest says that no interface states.

    Args:
        error: of the rows by which caches were recognised, see `match_caches`.
    """
    (shard,) = manifest.shards
    foreign = shard.foreign
    rows = []
    for name, role in foreign.roles.items():
        reason = "its name and shape"
        if role == "mask_inf" and find_role(INPUTS, name) != role:
            reason = f"{ANEMLL_FILE} beside the packages, whose exporter has such masks"
        rows.append(Assumption(name, role, reason))
    for function in foreign.functions:
        limits = function.model_dump_json(exclude_defaults=True)
        reason = "its inputs and name" if function.name else "its inputs"
        rows.append(Assumption(function.label, limits, reason))
    for count, move in foreign.moves.items():
        reason = "names of functions and inputs"
        rows.append(Assumption(f"caches of {count} rows", move, reason))
    reason = (
        f"a token's keys and values, relative RMS {error:.2g} from the checkpoint's"
    )
    for name, entry in shard.states.items():
        rows.append(Assumption(name, entry.tensor, reason))
    compress = manifest.options.compress
    rows.append(Assumption("options.compress", compress, "the stored bits"))
    for name in checkpoint.matrices:
        if name not in shard.weights:
            reason = "not among the constants"
            rows.append(Assumption(name, "the checkpoint's values", reason))
    return rows
