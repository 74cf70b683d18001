"""Picks a token from logits and a position. The same seed gives the same token at a
position, whatever ran before."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.errors import InputError


def suppress(logits: np.ndarray, suppressed: Sequence[int]) -> np.ndarray:
    """Logits [.., V] with −inf for the `suppressed` token ids, as transformers'
    SuppressTokensLogitsProcessor sets them. Without such ids the array itself."""
    if not len(suppressed):
        return logits
    logits = logits.copy()
    logits[..., list(suppressed)] = -np.inf
    return logits


@dataclass(frozen=True)
class Sampling:
    """How one sequence picks its tokens.

    Args:
        temperature: divides the logits; 0 takes the most likely token (the lowest id
            among equals).
        top_k: only the k most likely tokens; 0 takes all.
        top_p: only the fewest of them whose probabilities, most likely first, reach
            this sum.
        seed: random numbers depend on it and the position alone, so that a restored
            sequence continues as it would have.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        ranges = {
            "temperature": (self.temperature >= 0, "a number from 0 on"),
            "top_k": (self.top_k >= 0, "a whole number from 0 on"),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and up to 1"),
            "seed": (self.seed >= 0, "a whole number from 0 on"),
        }
        for name, (is_inside, needed) in ranges.items():
            if not is_inside:
                option = f"sampling, --{name.replace('_', '-')}"
                value = str(getattr(self, name))
                raise InputError(option, value, needed, "correct the value")

    def pick(
        self, logits: np.ndarray, position: int, suppressed: Sequence[int] = ()
    ) -> int:
        """Picks a token from logits [V] for `position`.

        Args:
            suppressed: token ids that are never picked.

        Raises:
            InputError: logits that are not finite; a suppressed token that is the best
                one of packages with an argmax inside.
        """
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):  # a NaN is the largest of all here
            step = (
                "run: workbench explain ranges BUNDLE, which names the first operation "
                "with inf or NaN"
            )
            subject = f"logits for position {position}"
            raise InputError(subject, str(logits[best]), "finite values", step)
        if best in suppressed and np.isneginf(logits).any():
            # each slice of the vocabulary has one logit: the second best token of this
            # one may be better than those of the others
            raise InputError(
                f"token {position} of a text",
                f"suppressed token {best}, the best one",
                "logits of every token, which packages with the argmax inside do not "
                "output",
                "export packages that output logits",
            )
        # greedy decoding copies no row where the best token may be picked
        if best in suppressed or (self.temperature and len(suppressed)):
            logits = suppress(logits, suppressed)
            best = int(np.argmax(logits))
        if self.temperature == 0:
            return best
        return self._draw(logits, position)

    def _draw(self, logits: np.ndarray, position: int) -> int:
        """A token from finite or −inf logits [V], by the probabilities of `temperature`,
        `top_k` and `top_p`."""
        # stable: among equal logits the lowest id comes first, as in greedy decoding
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        differences = logits[order].astype(np.float64) - logits[order[0]]
        # differences from the largest logit, so that exp cannot overflow
        weights = np.exp(differences / self.temperature)
        chances = weights / weights.sum()
        # as transformers' TopPLogitsWarper: the token that reaches top_p is still in
        nucleus = np.cumsum(chances) - chances < self.top_p
        chances = chances[nucleus] / chances[nucleus].sum()
        rng = np.random.default_rng([self.seed, position])
        return int(rng.choice(order[nucleus], p=chances))
