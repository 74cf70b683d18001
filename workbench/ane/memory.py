"""The bytes that a decoding process will need, against the memory of a machine."""

import re
import resource
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from workbench.ane.roofline import Work
from workbench.bundle import PRESETS, Bundle, Dims, Options
from workbench.bundle.names import is_cache
from workbench.errors import InputError

# of a Mac's memory, which the system and the GPU share; beyond it macOS swaps
MAC_SHARE = 0.7
VALUE_BYTES = {"fp16": 2, "fp32": 4}  # of a program's inputs, states and results
STORED_BITS = {name: preset.stored_bits for name, preset in PRESETS.items()}


def kv_bytes(L: int, H_kv: int, S: int, D: int, batch: int = 1) -> int:
    """Key and value caches in fp16: 2 tensors · L layers · batch · H_kv · S · D · 2
    bytes."""
    return 2 * L * batch * H_kv * S * D * 2


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


def budget_of_bundle(bundle: Bundle, machine: int | None = None) -> Budget:
    """The budget of a bundle from the sizes of its files and states; call buffers are
    estimated."""
    m, states = bundle.manifest, Counter()
    width = VALUE_BYTES[m.options.program_dtype]
    for shard in m.shards:
        for name, state in shard.states.items():
            states[is_cache(name)] += width * prod(state.shape)
    weights = sum(s.bytes for s in m.shards)
    buffers = _buffers(m.dims, m.options)
    embedding = m.embedding.file.bytes
    return Budget(weights, states[True], states[False], embedding, buffers, machine)


def budget_of_checkpoint(
    checkpoint, options: Options, machine: int | None = None
) -> Budget:
    """The predicted budget of a checkpoint's bundle, from tensor shapes and export
    options."""
    plan, elements, embedding = _elements_of(checkpoint)
    d, B, side, vectors = plan.dims, options.batch, 0, 0
    for name, count in elements.items():
        if len(checkpoint.shape(name)) < 2:
            vectors += count
    matrices = sum(elements.values()) - vectors
    if not plan.tied:  # a tied head stores its own compressed copy of the table
        matrices -= embedding
    for i in range(d.L):
        for name, shape in plan.states(i, options).items():
            if not is_cache(name):
                side += 2 * B * prod(shape)
    weights = int(matrices * STORED_BITS[options.compress] / 8) + vectors * 2
    attending = sum(layer.attends for layer in plan.layers)
    caches = kv_bytes(attending, d.H_kv, options.max_seq_len, d.D, B)
    return Budget(weights, caches, side, embedding * 2, _buffers(d, options), machine)


def decode_work(checkpoint, options: Options, T: int = 1) -> list[Work]:
    """The predicted work of one call of T tokens of a checkpoint's bundle: all layers,
    and the head (see `roofline.bundle_work`)."""
    plan, elements, embedding = _elements_of(checkpoint)
    budget = budget_of_checkpoint(checkpoint, options)
    d, compress = plan.dims, options.compress
    calls = -(-d.L // options.layers_per_shard)
    head, idle = d.V * d.C, 0
    active = sum(elements.values()) - embedding
    if not plan.tied:
        active -= head
    if options.moe == "routed":
        experts = sum(n for name, n in elements.items() if ".experts." in name)
        idle = experts * (1 - 1 / plan.experts)
        calls *= 2
    bits, flops = STORED_BITS[compress], 2 * T * options.batch
    head_bytes, idle_bytes = int(head * bits / 8), int(idle * bits / 8)
    weights = budget.weights - head_bytes - idle_bytes
    states = budget.kv + budget.side_states
    products = flops * (active - idle)
    row = max(d.H_kv * d.D, d.H * T)  # of a cache that is rewritten, or of scores
    largest = 2 * options.batch * options.max_seq_len * row
    return [
        Work("layers", weights, states, products, calls, compress, largest),
        Work("head", head_bytes, 0, float(flops * head), 1, compress),
    ]


def _elements_of(checkpoint):
    """(the family's plan, elements of each tensor, elements of the embedding table)."""
    from workbench.models import family_of

    plan = family_of(checkpoint.config).plan(checkpoint.config)
    elements = {}
    for name, entry in checkpoint.header.items():
        elements[name] = prod(entry.shape)
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
