"""The bytes that a decoding process will need, against the memory of a machine: of a
bundle from its files, of a checkpoint from the shards that an export would write."""

import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.ane.work import VALUE_BYTES, source_plan, state_bytes
from workbench.bundle import Bundle, Options, Shard
from workbench.bundle.names import is_cache
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.exporter.shards import Spec
    from workbench.models.checkpoint import Checkpoint

MAC_SHARE = 0.7
"""The share of a Mac's memory, which the system and the GPU share, beyond which macOS
swaps."""


def process_bytes(
    source: "Bundle | Checkpoint", options: Options | None = None
) -> dict[str, int]:
    """The bytes that a process needs to decode with a bundle, or with a checkpoint's export
    with `options`, by the keys of `workbench plan --json`:

    weights, embedding: as the bundle stores them.
    kv: the caches of keys and values.
    side_states: recurrent and router states.
    buffers: an estimate of the host's arrays of one call, which all shards share.
    total: all of these."""
    if isinstance(source, Bundle):
        dims, options = source.manifest.dims, source.manifest.options
        sizes = _bundle_sizes(source)
    else:
        dims = source_plan(source).dims
        sizes = _export_sizes(source, options)
    T, S = options.t_max, options.max_seq_len
    # hidden in and out, two masks, logits
    values = options.batch * (2 * dims.C * T + 2 * T * S + T * dims.V)
    sizes["buffers"] = VALUE_BYTES[options.program_dtype] * values
    return sizes | {"total": sum(sizes.values())}


def _bundle_sizes(bundle: Bundle) -> dict[str, int]:
    """The bytes of a bundle's weights, kv, side_states and embedding."""
    manifest = bundle.manifest
    weights = sum(shard.bytes for shard in manifest.shards)
    states = _state_sizes(manifest.shards, manifest.options)
    return {"weights": weights, **states, "embedding": manifest.embedding.file.bytes}


def _export_sizes(source: "Checkpoint", options: Options) -> dict[str, int]:
    """The bytes of the weights, kv, side_states and embedding that an export would have."""
    from workbench.exporter.shards import specs
    from workbench.exporter.weights import all_weights

    plan = source_plan(source)
    dims = plan.dims
    weights = sum(weight.bytes for weight in all_weights(source, plan, options))
    states = _state_sizes(specs(plan, options), options)
    # fp16; the second table has a row of P numbers for every layer
    embedding = 2 * dims.V * (dims.C + dims.L * dims.P)
    return {"weights": weights, **states, "embedding": embedding}


def _state_sizes(shards: "Iterable[Shard | Spec]", options: Options) -> dict[str, int]:
    """The bytes of caches, `kv`, and of all other states, `side_states`."""
    sizes = {"kv": 0, "side_states": 0}
    for shard in shards:
        for name, state in shard.states.items():
            kind = "kv" if is_cache(name) else "side_states"
            sizes[kind] += state_bytes(state, options)
    return sizes


def fits(total: int, machine_bytes: int) -> dict[str, bool]:
    """Whether a process of `total` bytes fits a machine with `machine_bytes` of memory:
    `fits` for a machine of this system, `fits_mac` for a Mac, whose share `MAC_SHARE` it
    may use."""
    fits_mac = total <= MAC_SHARE * machine_bytes
    fits_here = fits_mac if sys.platform == "darwin" else total <= machine_bytes
    return {"fits": fits_here, "fits_mac": fits_mac}


def parse_bytes(text: str, subject: str = "memory") -> int:
    """`16G`, `512M`, `8GiB` or plain bytes → bytes (binary units).

    Raises:
        InputError: another text, which the message calls `subject`.
    """
    size = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)(IB|B)?", text.strip().upper())
    total = 0
    if size:
        number, unit = float(size[1]), size[2]
        power = "KMGT".index(unit) + 1 if unit else 0
        total = int(number * 1024**power)
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
    return int(peak[1]) * 1024 if peak else None
