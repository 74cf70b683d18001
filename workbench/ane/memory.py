"""Bytes a decoding process needs, before anything is allocated, against the machine it shall run on."""

import re
import resource
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from workbench.ane.roofline import Work
from workbench.bundle import PRESETS, Bundle, Dims, Options
from workbench.bundle.names import is_cache
from workbench.errors import InputError

STORED_BITS = {name: preset.stored_bits for name, preset in PRESETS.items()}


def kv_bytes(L: int, H_kv: int, S: int, D: int, batch: int = 1) -> int:
    """Key and value caches in fp16: 2 tensors · L layers · batch · H_kv · S · D · 2 bytes."""
    return 2 * L * batch * H_kv * S * D * 2


@dataclass(frozen=True)
class Budget:
    """Bytes by part; `machine` is what the machine has, None when it was not asked."""

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
        return asdict(self) | {"total": self.total, "fits": None if self.machine is None else self.total <= self.machine}


def machine_bytes() -> int:
    """Physical memory of this machine."""
    import psutil

    return psutil.virtual_memory().total


def budget_of_bundle(bundle: Bundle, machine: int | None = None) -> Budget:
    """Measured from the bundle's own files and states: nothing is estimated but the call buffers."""
    states = {name: state for shard in bundle.manifest.shards for name, state in shard.states.items()}
    kv = sum(prod(s.shape) * 2 for n, s in states.items() if is_cache(n))
    side = sum(prod(s.shape) * 2 for n, s in states.items() if not is_cache(n))
    weights = sum(s.bytes for s in bundle.manifest.shards)
    m = bundle.manifest
    return Budget(weights, kv, side, m.embedding.file.bytes, _buffers(m.dims, m.options), machine)


def budget_of_checkpoint(checkpoint, options: Options, machine: int | None = None) -> Budget:
    """Predicted from a checkpoint's tensor shapes and export options: nothing is read but headers."""
    plan, elements, table = _elements_of(checkpoint)
    d, B = plan.dims, options.batch
    matrices = sum(n for name, n in elements.items() if name != table and len(checkpoint.shape(name)) > 1)
    matrices += elements[table] if plan.tied else 0  # the head stores its own copy, compressed
    vectors = sum(n for name, n in elements.items() if len(checkpoint.shape(name)) < 2)
    side = sum(prod(shape) for shape in plan.side_states.values()) * d.L * B * 2
    stored = int(matrices * STORED_BITS[options.compress] / 8) + vectors * 2
    caches = kv_bytes(d.L, d.H_kv, options.max_seq_len, d.D, B)
    return Budget(stored, caches, side, elements[table] * 2, _buffers(d, options), machine)


def decode_work(checkpoint, options: Options, T: int = 1) -> list[Work]:
    """What one call of T tokens would make the shards of a checkpoint do, as `roofline.work` tells of a bundle."""
    plan, elements, table = _elements_of(checkpoint)
    budget, d = budget_of_checkpoint(checkpoint, options), plan.dims
    head = int(d.V * d.C * STORED_BITS[options.compress] / 8)
    experts = sum(n for name, n in elements.items() if ".experts." in name)
    idle = experts * (1 - 1 / plan.experts) if options.moe == "routed" else 0
    layers = budget.weights - head - int(idle * STORED_BITS[options.compress] / 8)
    products = 2 * T * options.batch * (sum(elements.values()) - elements[table] - (0 if plan.tied else d.V * d.C) - idle)
    calls = -(-d.L // options.layers_per_shard) * (2 if options.moe == "routed" else 1)
    return [Work("layers", layers, budget.kv + budget.side_states, products, calls),
            Work("head", head, 0, 2.0 * T * options.batch * d.V * d.C)]  # fmt: skip


def _elements_of(checkpoint):
    """(the family's plan, elements of each tensor, name of the embedding table)."""
    from workbench.models import family_of

    plan = family_of(checkpoint.config).plan(checkpoint.config)
    elements = {name: prod(entry.shape) for name, entry in checkpoint.header.items()}
    return plan, elements, next(n for n in elements if n.endswith("embed_tokens.weight"))


def _buffers(d: Dims, options: Options) -> int:
    """Host-side call buffers in fp16: hidden in and out, two masks, logits; one set, reused by every shard."""
    T, B, S = options.t_max, options.batch, options.max_seq_len
    return 2 * B * (2 * d.C * T + 2 * T * S + T * d.V)


def parse_bytes(text: str) -> int:
    """`16G`, `512M`, `8GiB` or plain bytes → bytes (binary units)."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    number, unit = (stripped[:-1], stripped[-1]) if stripped[-1:] in units and stripped else (stripped, "")
    with suppress(ValueError, OverflowError):  # no number, or infinite
        if (size := int(float(number) * units[unit])) > 0:
            return size
    raise InputError("memory", repr(text), "a size above zero, such as 16G", "write a number and K, M, G or T")


def peak_rss() -> int | None:
    """Most bytes this process has held resident (Linux's VmHWM, macOS' ru_maxrss), imports included.

    On Linux ru_maxrss would do only for a process whose parent was small: it survives exec.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found and int(found[1]) * 1024
