"""Whether speculative decoding pays: k drafts a round, which one call of k + 1 tokens
verifies.

    gain = (1 − α^(k+1)) ÷ ((1 − α) · (V + k·d))

α is the chance that a draft is accepted, V the time of the verification and d that of
one draft, both in calls of one token. At α = 1 the gain is (k + 1) ÷ (V + k·d). The
numerator is the mean number of tokens of a round (Leviathan et al., arXiv 2211.17192).
"""

from dataclasses import dataclass

import numpy as np

from workbench.ane.roofline import by_chip
from workbench.ane.work import Work

RANGED = (
    "experts in one program that takes a range of T: published verifications cost 4.3 to "
    "4.5 plain tokens, as rule D3 says; a fixed --tokens 1,T has a figure"
)


@dataclass(frozen=True)
class Speculation:
    """The gain of speculation on one chip. `gain` is None where there is no figure, and
    `reason` says why.

    Args:
        acceptance: α.
        tokens: of a verification, k + 1.
        draft_cost: d.
        verify_cost: V, from the formula.
        gain: tokens per second over those of plain decoding.
        pays_from: the least acceptance at which the gain is 1; None: it never is.
    """

    chip: str
    acceptance: float
    tokens: int
    draft_cost: float
    verify_cost: float | None = None
    gain: float | None = None
    pays_from: float | None = None
    reason: str = ""

    def sentence(self) -> str:
        """The prediction in words."""
        if self.gain is None:
            return f"speculation: no figure: {self.reason}"
        least = "never"
        if self.pays_from is not None:
            least = f"from an acceptance of {self.pays_from:.2f}"
        return (
            f"speculation on {self.chip}: {self.gain:.2f} times plain decoding at an "
            f"acceptance of {self.acceptance:g}; a verification of {self.tokens} tokens "
            f"costs {self.verify_cost:.2f} plain ones; it pays {least}"
        )


def gain(
    acceptance: float | np.ndarray,
    drafts: int,
    verify_cost: float,
    draft_cost: float = 0.0,
) -> float | np.ndarray:
    """Tokens per second over those of plain decoding, for each acceptance.

    Args:
        acceptance: α; drafts: k; verify_cost: V; draft_cost: d (see the module).
    """
    # the sum of α^i for i = 0 … k, which α = 1 does not divide by zero
    tokens = sum(np.asarray(acceptance, float) ** i for i in range(drafts + 1))
    return tokens / (verify_cost + drafts * draft_cost)


def implied_acceptance(
    gained: float, drafts: int, verify_cost: float, draft_cost: float = 0.0
) -> float | None:
    """The acceptance at which the gain is `gained`: 0 if the gain is larger even where no
    draft is accepted, None if it is smaller even where all are."""
    costs = drafts, verify_cost, draft_cost
    if gain(0.0, *costs) >= gained:
        return 0.0
    if gain(1.0, *costs) < gained:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-9:  # the gain grows with the acceptance
        middle = (low + high) / 2
        if gain(middle, *costs) < gained:
            low = middle
        else:
            high = middle
    return high


def pays_from(drafts: int, verify_cost: float, draft_cost: float = 0.0) -> float | None:
    """The least acceptance at which speculation is no slower than plain decoding."""
    return implied_acceptance(1.0, drafts, verify_cost, draft_cost)


def speculate(
    plain: Work,
    verification: Work,
    chip: str,
    acceptance: float,
    draft_cost: float = 0.0,
) -> Speculation:
    """The gain of speculation on a chip, from the work of a call of one token and of a
    verification."""
    T = verification.T
    if verification.ranged_experts:
        return Speculation(chip, acceptance, T, draft_cost, reason=RANGED)
    plain_ms = by_chip(plain, [chip])["ms"].item()
    verification_ms = by_chip(verification, [chip])["ms"].item()
    verify_cost = verification_ms / plain_ms
    drafts = T - 1
    return Speculation(
        chip=chip,
        acceptance=acceptance,
        tokens=T,
        draft_cost=draft_cost,
        verify_cost=verify_cost,
        gain=float(gain(acceptance, drafts, verify_cost, draft_cost)),
        pays_from=pays_from(drafts, verify_cost, draft_cost),
    )
