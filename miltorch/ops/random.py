"""Random tensors: MIL's distributions, torch's values. A seed that is not negative
makes every call the same.

Every function without an underscore is a rule, see `registry`.
"""

import torch

from miltorch.ops.registry import bounded


def _generator(seed: int) -> torch.Generator | None:
    if seed >= 0:
        return torch.Generator().manual_seed(seed)
    return None


def random_uniform(*, shape, low=0.0, high=1.0, seed=-1):
    return low + (high - low) * torch.rand(bounded(shape), generator=_generator(seed))


def random_normal(*, shape, mean=0.0, stddev=1.0, seed=-1):
    return mean + stddev * torch.randn(bounded(shape), generator=_generator(seed))


def random_bernoulli(*, shape, prob=0.5, seed=-1):
    return (torch.rand(bounded(shape), generator=_generator(seed)) < prob).float()


def random_categorical(x, *, mode="logits", size=1, seed=-1):
    """`size` draws with replacement from each row of x [..., K]."""
    if mode == "logits":
        x = torch.softmax(x, -1)
    shape = bounded([*x.shape[:-1], size])
    rows = x.reshape(-1, x.shape[-1])
    generator = _generator(seed)
    draws = torch.multinomial(rows, size, replacement=True, generator=generator)
    return draws.reshape(shape).float()
