"""The bytes that a decoding process will need, against the memory of a machine, and the
work of one of its calls, from a bundle's files or predicted from a checkpoint."""

import re
import resource
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from workbench.ane.roofline import Work
from workbench.bundle import PRESETS, Bundle, Dims, Options, Shard
from workbench.bundle.names import is_cache
from workbench.errors import InputError

# of a Mac's memory, which the system and the GPU share; beyond it macOS swaps
MAC_SHARE = 0.7
VALUE_BYTES = {"fp16": 2, "fp32": 4}  # of a program's inputs, states and results


@dataclass(frozen=True)
class Budget:
    """Bytes by part; `machine` is the memory of the machine, or None."""

    weights: int
    kv: int
    side_states: int
    embedding: int
    buffers: int
    machine: int | None = None

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.side_states + self.embedding + self.buffers

    def json(self) -> dict:
        """The parts, `total`, and whether it `fits` this machine, or a Mac of as much
        memory."""
        sizes = asdict(self) | {"total": self.total, "fits": None, "fits_mac": None}
        if self.machine:
            sizes["fits"] = self.total <= usable_bytes(self.machine)
            sizes["fits_mac"] = self.total <= usable_bytes(self.machine, mac=True)
        return sizes


def usable_bytes(machine: int, mac: bool | None = None) -> int:
    """The bytes of a machine's memory that one process may use: all, on a Mac the share
    `MAC_SHARE`. `mac`: whether it is a Mac; default: whether this machine is."""
    if mac is None:
        mac = sys.platform == "darwin"
    return int(MAC_SHARE * machine) if mac else machine


def machine_bytes() -> int:
    """Physical memory of this machine."""
    import psutil

    return psutil.virtual_memory().total


def budget(
    source, options: Options | None = None, machine: int | None = None
) -> Budget:
    """The bytes of a bundle, from the sizes of its files and states; of a checkpoint
    with export options, predicted from tensor shapes. Call buffers are estimated."""
    if isinstance(source, Bundle):
        m, states = source.manifest, Counter()
        for shard in m.shards:
            states += _state_bytes(shard, m.options)
        weights = sum(shard.bytes for shard in m.shards)
        sizes = weights, states[True], states[False], m.embedding.file.bytes
        return Budget(*sizes, _buffers(m.dims, m.options), machine)
    plan, elements, table = _elements_of(source)
    dims, states = plan.dims, Counter()
    for i, layer in enumerate(plan.layers):
        rows = options.max_seq_len * layer.attends
        states[True] += 2 * 2 * options.batch * dims.H_kv * rows * dims.D
        for name, shape in plan.states(i, options).items():
            states[False] += 2 * options.batch * prod(shape) * (not is_cache(name))
    vectors = sum(n for name, n in elements.items() if len(source.shape(name)) < 2)
    matrices = sum(elements.values()) - vectors
    if not plan.tied:  # a tied head stores its own compressed copy of the table
        matrices -= table
    weights = stored(matrices, options.compress) + 2 * vectors
    sizes = weights, states[True], states[False], 2 * table
    return Budget(*sizes, _buffers(dims, options), machine)


def work(source, options: Options | None = None, T: int = 1) -> list[Work]:
    """The work of one call of T tokens, one expert per layer: of a bundle by shard, all
    head slices as one; of a checkpoint with export options all layers, and the head."""
    if isinstance(source, Bundle):
        return _work_of_bundle(source, T)
    plan, elements, table = _elements_of(source)
    dims, compress = plan.dims, options.compress
    calls = -(-dims.L // options.layers_per_shard)
    active = sum(elements.values()) - table * (1 if plan.tied else 2)
    head, idle = dims.V * dims.C, 0
    if options.moe == "routed":
        experts = sum(n for name, n in elements.items() if ".experts." in name)
        idle, calls = int(experts * (1 - 1 / plan.experts)), 2 * calls
    sizes, flops = budget(source, options), 2 * T * options.batch
    head_bytes = stored(head, compress)
    weights = sizes.weights - head_bytes - stored(idle, compress)
    states = sizes.kv + sizes.side_states
    return [
        Work("layers", weights, states, flops * (active - idle), calls, compress),
        Work("head", head_bytes, 0, flops * head, 1, compress),
    ]


def _work_of_bundle(bundle: Bundle, T: int) -> list[Work]:
    options, works = bundle.manifest.options, []
    chosen = {shard.name: shard for shard in bundle.shards("layers")}
    chosen |= {shard.name: shard for shard in bundle.shards("router")}
    for shard in sorted(bundle.shards("expert"), key=lambda shard: shard.bytes):
        chosen[shard.layers[0]] = shard  # the largest of each layer
    heads = bundle.shards("head")
    for shards in [*([shard] for shard in chosen.values()), heads]:
        weights = sum(
            f.bytes for s in shards for f in s.files if f.path.endswith(".bin")
        )
        states = sum(_state_bytes(s, options).total() for s in shards)
        # a multiply-add for each weight and token
        elements = 8 * weights / PRESETS[options.compress].stored_bits
        name = "head" if shards is heads else shards[0].name
        flops = 2 * T * options.batch * elements
        works.append(Work(name, weights, states, flops, 1, options.compress))
    # other exporters may have the head in the last layer's package
    return [work for work in works if work.weight_bytes]


def stored(elements: int, compress: str) -> int:
    """Bytes of matrices in a preset."""
    return int(elements * PRESETS[compress].stored_bits / 8)


def _state_bytes(shard: Shard, options: Options) -> Counter:
    """Bytes of a shard's states; True: of caches."""
    sizes = Counter()
    for name, state in shard.states.items():
        sizes[is_cache(name)] += VALUE_BYTES[options.program_dtype] * prod(state.shape)
    return sizes


def _elements_of(checkpoint):
    """(the family's plan, elements of each tensor, elements of the embedding table)."""
    from workbench.models import family_of

    plan = family_of(checkpoint.config).plan(checkpoint.config)
    elements = {name: prod(entry.shape) for name, entry in checkpoint.header.items()}
    table = next(name for name in elements if name.endswith("embed_tokens.weight"))
    return plan, elements, elements[table]


def _buffers(d: Dims, options: Options) -> int:
    """Bytes of the call buffers on the host, in the program's dtype, which all shards
    share: hidden in and out, two masks, logits."""
    T, B, S = options.t_max, options.batch, options.max_seq_len
    width = VALUE_BYTES[options.program_dtype]
    return width * B * (2 * d.C * T + 2 * T * S + T * d.V)


def parse_bytes(text: str) -> int:
    """`16G`, `512M`, `8GiB` or plain bytes → bytes (binary units)."""
    size = re.fullmatch(r"(.+?)([KMGT]?)(IB|B)?", text.strip().upper())
    with suppress(TypeError, ValueError, OverflowError):  # another form, or infinite
        if (total := int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))) > 0:
            return total
    needed = "a size above zero, such as 16G"
    step = "write a number and K, M, G or T"
    raise InputError("memory", repr(text), needed, step)


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
