"""The bytes that a decoding process will need, against the memory of a machine: of a
bundle from its files, of a checkpoint from the shards that an export would write."""

import re
import resource
import sys
from math import prod
from pathlib import Path

from workbench.ane.work import VALUE_BYTES, source_plan
from workbench.bundle import Bundle, Options
from workbench.bundle.names import is_cache
from workbench.errors import InputError

# of a Mac's memory, which the system and the GPU share; beyond it macOS swaps
MAC_SHARE = 0.7


def budget(source, options: Options | None = None) -> dict[str, int]:
    """The bytes of a bundle, or of a checkpoint's export with `options`: weights, kv,
    side_states, embedding, buffers (of a call on the host, which all shards share,
    estimated), total."""
    if isinstance(source, Bundle):
        manifest = source.manifest
        d, options, shards = manifest.dims, manifest.options, manifest.shards
        embedding = manifest.embedding.file.bytes
        weights = sum(shard.bytes for shard in shards)
    else:
        from workbench.exporter.shards import specs
        from workbench.exporter.weights import weight_sources

        plan = source_plan(source)
        d, shards = plan.dims, list(specs(plan, options))
        # the second table has a row of P numbers for every layer
        embedding = 2 * d.V * (d.C + d.L * d.P)
        weights = sum(
            weight.bytes
            for spec in shards
            for weight in weight_sources(spec, source, plan, options)
        )
    sizes = {"weights": weights, "kv": 0, "side_states": 0, "embedding": embedding}
    size = VALUE_BYTES[options.program_dtype]
    for shard in shards:
        for name, state in shard.states.items():
            kind = "kv" if is_cache(name) else "side_states"
            sizes[kind] += size * prod(state.shape)
    T, S = options.t_max, options.max_seq_len
    # hidden in and out, two masks, logits
    values = options.batch * (2 * d.C * T + 2 * T * S + T * d.V)
    sizes["buffers"] = size * values
    return sizes | {"total": sum(sizes.values())}


def fits(total: int, machine: int) -> dict[str, bool]:
    """Whether a process of `total` bytes `fits` a machine of this system and `fits_mac`,
    a Mac, with `machine` bytes of memory. On a Mac it may use the share `MAC_SHARE`."""
    fits_mac = total <= MAC_SHARE * machine
    fits_here = fits_mac if sys.platform == "darwin" else total <= machine
    return {"fits": fits_here, "fits_mac": fits_mac}


def parse_bytes(text: str, subject: str = "memory") -> int:
    """`16G`, `512M`, `8GiB` or plain bytes → bytes (binary units).

    Raises:
        InputError: another text, which the message calls `subject`.
    """
    size = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)(IB|B)?", text.strip().upper())
    total = size and int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))
    if not total:
        needed = "a size above zero, such as 16G"
        step = "write a number and K, M, G or T"
        raise InputError(subject, repr(text), needed, step)
    return total


def peak_rss() -> int | None:
    """Peak resident bytes of this process (Linux's VmHWM, macOS' ru_maxrss), imports
    included.

    Linux's ru_maxrss is not used, since it survives exec and may be the parent's.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return peak and int(peak[1]) * 1024
