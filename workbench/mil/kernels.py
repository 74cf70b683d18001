"""Matrix products with int8 weights that stay int8 in memory: the weight streams once, rounded as declared on the way.

Every dequantized weight is rounded to fp16 before it meets its activation, as `constexpr_blockwise_shift_scale` says;
products and sums are float32. Compiled by numba once per machine, then read from its cache.
"""

import platform

import numpy as np
import torch
from llvmlite import binding, ir
from numba import config, get_num_threads, njit, prange, set_num_threads, types
from numba.extending import intrinsic

config.NUMBA_NUM_THREADS = torch.get_num_threads()  # idle threads of a larger pool would spin against the others

FLAGS = {"reassoc", "contract"}  # sums may be reordered; NaN and infinity keep their meaning


def available() -> bool:
    """Whether this processor converts fp16 in hardware; without it LLVM's conversion aborts the process."""
    return platform.machine() in ("arm64", "aarch64") or bool(binding.get_host_cpu_features().get("f16c"))


@intrinsic
def _round16(typing, x):
    """float32 rounded to fp16, to nearest even."""

    def build(context, builder, signature, arguments):
        return builder.fpext(builder.fptrunc(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.float32), build


@njit(parallel=True, fastmath=FLAGS, cache=True)
def _one(weight, scale, x, out):
    """out [R] = round16(weight · scale) @ x [K], for one activation vector."""
    for r in prange(weight.shape[0]):
        s, total = scale[r], np.float32(0)
        for k in range(weight.shape[1]):
            total += _round16(np.float32(weight[r, k]) * s) * x[k]
        out[r] = total


@njit(parallel=True, fastmath=FLAGS, cache=True)
def _many(weight, scale, x, out):
    """out [N, R] for x [N, K]: each weight row is made dense once and used for every vector."""
    K = weight.shape[1]
    for r in prange(weight.shape[0]):
        s, row = scale[r], np.empty(K, np.float32)
        for k in range(K):
            row[k] = _round16(np.float32(weight[r, k]) * s)
        for n in range(x.shape[0]):
            total = np.float32(0)
            for k in range(K):
                total += row[k] * x[n, k]
            out[n, r] = total


def int8_product(weight: np.ndarray, scale: np.ndarray, x: torch.Tensor) -> torch.Tensor:
    """x [N, K] by int8 weight [R, K] with a scale per row [R] float32 → float32 [N, R], on torch's threads."""
    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    if get_num_threads() != threads:
        set_num_threads(threads)
    x = np.ascontiguousarray(x.float().numpy())
    out = np.empty((len(x), len(weight)), np.float32)
    if len(x) == 1:
        _one(weight, scale, x[0], out[0])
    else:
        _many(weight, scale, x, out)
    return torch.from_numpy(out)

