"""The bytes that a decoding process will need, against the memory of a machine, and the
work of one of its calls: of a bundle from its files, of a checkpoint from the shards
that an export would write."""

import re
import resource
import sys
from math import prod
from pathlib import Path

import pandas as pd

from workbench.bundle import PRESETS, Bundle, Options
from workbench.bundle.names import is_cache
from workbench.errors import InputError

# of a Mac's memory, which the system and the GPU share; beyond it macOS swaps
MAC_SHARE = 0.7
VALUE_BYTES = {"fp16": 2, "fp32": 4}  # of a program's inputs, states and results


def parts(source, options: Options) -> pd.DataFrame:
    """Every shard of a bundle, or of a checkpoint's export with `options`.

    Returns:
        name: of the shard, one name for all slices of the head and for all experts of a
        layer. Bytes: files, weight_bytes (among them), kv, side_states.
    """
    if isinstance(source, Bundle):
        shards = source.manifest.shards
        files = [shard.bytes for shard in shards]
        weights = [
            sum(f.bytes for f in shard.files if f.path.endswith(".bin"))
            for shard in shards
        ]
    else:
        from workbench.exporter.shards import specs
        from workbench.exporter.weights import weight_sources

        plan = _plan(source)
        shards = list(specs(plan, options))
        files = weights = [
            sum(weight.bytes for weight in weight_sources(spec, source, plan, options))
            for spec in shards
        ]
    rows = []
    for shard in shards:
        joined = {"head": "head", "expert": f"expert of layer {shard.layers[0]}"}
        row = {"name": joined.get(shard.kind, shard.name), "kv": 0, "side_states": 0}
        for name, state in shard.states.items():
            kind = "kv" if is_cache(name) else "side_states"
            row[kind] += VALUE_BYTES[options.program_dtype] * prod(state.shape)
        rows.append(row)
    return pd.DataFrame(rows).assign(files=files, weight_bytes=weights)


def _plan(checkpoint):
    from workbench.models import family_of

    return family_of(checkpoint.config).plan(checkpoint.config)


def budget(source, options: Options | None = None) -> dict[str, int]:
    """The bytes of a bundle, or of a checkpoint's export with `options`: weights, kv,
    side_states, embedding, buffers (of a call on the host, which all shards share,
    estimated), total."""
    if isinstance(source, Bundle):
        d, options = source.manifest.dims, source.manifest.options
        embedding = source.manifest.embedding.file.bytes
    else:
        d = _plan(source).dims
        embedding = 2 * prod(source.shape(f"{source.prefix}embed_tokens.weight"))
    sums = parts(source, options)[["files", "kv", "side_states"]].sum().tolist()
    sizes = dict(zip(("weights", "kv", "side_states"), sums))
    T, S = options.t_max, options.max_seq_len
    # hidden in and out, two masks, logits
    values = options.batch * (2 * d.C * T + 2 * T * S + T * d.V)
    sizes["embedding"] = embedding
    sizes["buffers"] = VALUE_BYTES[options.program_dtype] * values
    return sizes | {"total": sum(sizes.values())}


def fits(total: int, machine: int) -> dict[str, bool]:
    """Whether a process of `total` bytes `fits` a machine of this system and `fits_mac`,
    a Mac, with `machine` bytes of memory. On a Mac it may use the share `MAC_SHARE`."""
    fits_mac = total <= MAC_SHARE * machine
    here = fits_mac if sys.platform == "darwin" else total <= machine
    return {"fits": here, "fits_mac": fits_mac}


def work(source, options: Options | None = None, T: int = 1) -> pd.DataFrame:
    """The work of one call of T tokens (see `roofline`), by shard: one expert of each
    layer, the largest, and all slices of the head as one."""
    options = options or source.manifest.options
    shards = parts(source, options).groupby("name", sort=False)
    works = shards.max()
    works.loc[works.index == "head"] = shards.sum()
    works["state_bytes"] = works["kv"] + works["side_states"]
    # a multiply-add for each weight and token
    elements = 8 * works["weight_bytes"] / PRESETS[options.compress].stored_bits
    works["flops"] = 2 * T * options.batch * elements
    works = works.assign(dispatches=1, compress=options.compress).reset_index()
    # other exporters may have the head in the last layer's package
    return works[works["weight_bytes"] > 0]


def parse_bytes(text: str) -> int:
    """`16G`, `512M`, `8GiB` or plain bytes → bytes (binary units)."""
    size = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)(IB|B)?", text.strip().upper())
    total = size and int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))
    if not total:
        needed = "a size above zero, such as 16G"
        step = "write a number and K, M, G or T"
        raise InputError("memory", repr(text), needed, step)
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
