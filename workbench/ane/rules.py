"""The rules of the Neural Engine, and the test of each on a program's graph.

Most rules are measurements that others published of an undocumented unit, so each has a
source, a confidence and advice. `disputed` names a contradicting source; a disputed
rule is reported and changes no placement. Effects:

    cpu    the operation cannot run on the Neural Engine
    stays  it could run there and is expected not to
    fails  the program is reported not to compile or not to run there
    wrong  it runs and may give wrong or non-finite values
    slow   it runs slower than an equivalent program
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import numpy as np

from miltorch import Program, Type
from miltorch.graph import Graph
from miltorch.program import Op

RULE_SOURCES = {
    "NER": "Apple's published models, Neural Engine rules",
    "AP": "Apple, Deploying Transformers on the Neural Engine",
    "CT": "coremltools documentation, source or issue",
    "AF": "ANEForge sweeps",
    "JR": "CoreML-LLM documents",
    "AB": "ane-book",
    "ANM": "Anemll",
    "SMP": "smpanaro's notes",
    "ET": "ExecuTorch",
    "STB": "stablehlo-coreml",
    "DR": "arXiv 2606.22283, by the direct route past Core ML",
    "MOB": "FluidInference/mobius",
    "SC": "huggingface/swift-chat",
}
# AF, one minimal program each; state and slice ops by K1 and K5
ON_ANE = frozenset(
    """
    add sub mul real_div maximum minimum abs sign square pow floor ceil round clip threshold inverse
    equal not_equal greater greater_equal less less_equal sqrt rsqrt exp exp2 log erf
    relu relu6 leaky_relu prelu clamped_relu elu thresholded_relu scaled_tanh sigmoid sigmoid_hard
    tanh silu gelu softplus softplus_parametric softsign linear_activation softmax
    conv conv_transpose linear matmul einsum scaled_dot_product_attention
    avg_pool max_pool l2_pool layer_norm instance_norm batch_norm l2_norm local_response_norm
    reduce_sum reduce_mean reduce_max reduce_min reduce_sum_square reduce_l1_norm reduce_l2_norm
    reduce_log_sum reduce_log_sum_exp topk sin cos quantize dequantize cast identity fill
    concat split stack reshape reshape_like transpose squeeze expand_dims tile pad flatten2d
    slice_by_index slice_by_size slice_update select read_state write_state coreml_update_state
    resize_bilinear resize_nearest_neighbor upsample_bilinear upsample_nearest_neighbor
    pixel_shuffle pixel_unshuffle depth_to_space space_to_depth
""".split()
)


class LintGraph(Graph):
    """The def-use index that rules search, with properties of the package and the chip.

    Args:
        program: a function of a package.
        weight_bytes: bytes of its weight file.
        functions: number of the package's functions.
        generation: the chip's generation of the M series.
        programs: number of programs that a process loads to run the whole bundle.
    """

    def __init__(
        self,
        program: Program,
        weight_bytes: int,
        functions: int = 1,
        generation: int = 4,
        programs: int = 1,
    ):
        super().__init__(program)
        self.weight_bytes, self.functions = weight_bytes, functions
        self.generation, self.programs = generation, programs

    def of(self, *kinds: str) -> list[Op]:
        return [op for op in self.ops if op.kind in kinds]

    def source(self, op: Op, parameter: str) -> Op | None:
        """The operation whose result an argument is; None for inputs, literals and
        missing ones."""
        return self.producer(op.inputs.get(parameter))

    def constant(self, op: Op, parameter: str):
        """The value of an argument that is a literal or an uncompressed constant, else
        None."""
        return self.literal(op.inputs.get(parameter))

    def shape(self, op: Op, parameter: str) -> tuple:
        """The shape of an argument, None for sizes that vary; () for a missing
        argument."""
        return self.shape_of(op.inputs.get(parameter))


@dataclass(frozen=True)
class Rule:
    """A row of `rules.csv`. `of` names the subjects of the rule (see `_subjects`); a
    rule of "-" is known and not looked for."""

    id: str
    of: str
    effect: str
    confidence: str  # H documented or measured several times, M one good measurement, L anecdote
    source: str
    says: str
    advice: str
    disputed: str


@dataclass(frozen=True)
class Finding:
    """A broken rule and the names of the subjects that break it."""

    rule: Rule
    names: tuple[str, ...]


with Path(__file__).with_name("rules.csv").open(encoding="utf-8", newline="") as file:
    RULES = {row["id"]: Rule(**row) for row in csv.DictReader(file)}


def lint(graph: LintGraph) -> list[Finding]:
    """Every rule that a graph breaks, with the names of the subjects that break it."""
    findings = []
    for rule in RULES.values():
        test, names = TESTS.get(rule.id, lambda graph, subject: True), {}
        for name, subject in _subjects(graph, rule.of):
            if name not in names and test(graph, subject):
                names[name] = None
        if names:
            findings.append(Finding(rule, tuple(names)))
    return findings


def _subjects(g: LintGraph, of: str) -> Iterable[tuple[str, Op | Type]]:
    """The subjects that a rule's column `of` names.

    These are pairs (name, type) of `inputs`, `states`, `interface` (inputs and outputs)
    or `results` (of every operation), pairs (reader, weight) of the `weights` in 8 or 4
    bits, or pairs (name, operation) of the operations whose kind fits one of the
    patterns in `of`, such as `scatter*`."""
    if of == "results":
        return [(op.name, t) for op in g.ops for t in results(op)]
    if of == "interface":
        outputs = {name: g.types[name] for name in g.program.outputs if name in g.types}
        return (g.program.inputs | outputs).items()
    if of in ("inputs", "states"):
        return getattr(g.program, of).items()
    if of == "weights":
        reads = [
            (op.name, w) for op in g.ops for w in map(g.producer, op.inputs.values())
        ]
        return [(name, w) for name, w in reads if w is not None and w.kind in SCALED]
    ops = g.producers.values() if of.startswith("constexpr_") else g.ops
    patterns = of.split()
    return [
        (op.name, op) for op in ops if any(fnmatchcase(op.kind, p) for p in patterns)
    ]


def results(op: Op) -> list[Type]:
    return [t for _, t in op.outputs if t.kind == "tensor"]


def _moves_width(g, op) -> bool:
    shape = g.shape(op, "x")
    if op.kind == "reshape":
        return shape[-1:] != op.outputs[0][1].shape[-1:]
    return int(np.ravel(g.constant(op, "perm"))[-1]) not in (-1, len(shape) - 1)


def _long_axis(g, t) -> bool:
    cap = 16384 if g.generation <= 3 else 65536
    return any(n and n > (65536 if i == 1 else cap) for i, n in enumerate(t.shape))


def _spills(g, t) -> bool:
    limit = 2e6 if g.generation < 5 else 4.7e6
    return t.dtype == "FLOAT16" and 2 * prod(n or 1 for n in t.shape) > limit


def _has_range(g) -> bool:
    return any(None in t.shape for t in g.program.inputs.values())


def _is_blended(g, op) -> bool:
    """Whether what a state is set to is a sum, of which one part is a product of the
    state."""
    for total in _makers(g, op, ("slice_update", "concat")):
        if total.kind != "add":
            continue
        for product in (g.source(total, "x"), g.source(total, "y")):
            if product is not None and product.kind == "mul":
                makers = _makers(g, product, ("slice_by_index",))
                if "read_state" in [maker.kind for maker in makers]:
                    return True
    return False


def _makers(g, op, kinds) -> list[Op]:
    """The operations whose results `op` takes, directly or through operations of
    `kinds`."""
    makers, waiting = {}, [op]
    while waiting:
        for value in waiting.pop().reads():
            maker = g.producers.get(value)
            if maker is not None and value not in makers:
                makers[value] = maker
                if maker.kind in kinds:
                    waiting.append(maker)
    return list(makers.values())


def _columns(g, op) -> int:
    """The number of columns, such as tokens, of a product by a weight; 1 for a
    convolution that is not pointwise. A size that varies counts as 2."""
    sizes = g.shape(op, "x")[2:]
    if op.kind == "linear":
        sizes = g.shape(op, "x")[-2:-1]
    elif prod(g.shape(op, "weight")[2:]) != 1:
        return 1
    return prod(n or 2 for n in sizes)


def _is_spatial(g, op) -> bool:
    axis = g.constant(op, "axis")
    axis = -1 if axis is None else int(np.ravel(axis)[0])
    return axis % max(len(g.shape(op, "x")), 1) != 1


def _entries(g, op) -> int:
    """The number of entries of a palette [groups…, entries, vector]."""
    return (g.shape(op, "lut") or (0, 0))[-2]


def _is_blocked(g, op) -> bool:
    """Whether a weight's scales vary along more than its output channels."""
    return sum(n > 1 for n in g.shape(op, "scale")) > 1


def _is_int4(g, op) -> bool:
    """Whether a weight is stored in 4 bits, by the range of its values, since the
    program's reader returns one value per byte."""
    data = g.constant(op, "data")
    if data is None or not data.size:
        return False
    largest = 15 if data.dtype == np.uint8 else 7
    return -8 <= int(data.min()) and int(data.max()) <= largest


FLOATS = ("FLOAT16", "FLOAT32")  # float32 breaks T1
NARROW = ("INT8", "UINT8", "INT16", "UINT16", "BOOL")
SCALED = ("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")

# rule → whether a graph's subject breaks it; a rule without a test is broken by every
# subject
TESTS = {
    "T1": lambda g, t: t.dtype == "FLOAT32",
    "T3": lambda g, t: t.dtype not in (*FLOATS, *NARROW),
    "T4": lambda g, t: len(t.shape) > 5,
    "S1": lambda g, t: t.dtype == "FLOAT16" and t.shape and (t.shape[-1] or 1) < 32,
    "S4": _long_axis,
    "S10": _moves_width,
    "S12": _spills,
    "D1": lambda g, t: None in t.shape,
    "D3": lambda g, t: None in t.shape,
    "D7": lambda g, t: g.program.states and None in t.shape,
    "D8": lambda g, t: g.program.states and _has_range(g) and None not in t.shape,
    "K2": lambda g, t: t.shape and (t.shape[-1] or 0) % 32,
    "K3": lambda g, t: len(g.program.states) >= 3,
    "K4": lambda g, t: (
        g.functions > 1 and {_columns(g, op) for op in g.of("conv", "linear")} - {1}
    ),
    "K10": lambda g, op: g.program.states and _entries(g, op) == 16,
    "K12": lambda g, t: len(t.shape) == 4 and (t.shape[2] or 0) > 1024,
    "K14": _is_blended,
    "O1": lambda g, op: op.kind not in ON_ANE,
    "O3": lambda g, op: g.generation < (2 if op.kind == "topk" else 3),
    "O15": _is_spatial,
    "G1": lambda g, op: g.weight_bytes < 600_000,
    "G2": lambda g, op: g.weight_bytes > 2_000_000_000,
    "G3": lambda g, op: g.programs > 128,
    "G4": lambda g, op: g.weight_bytes > 1_000_000_000,
    "Q3": lambda g, weight: _is_blocked(g, weight) and _is_int4(g, weight),
    "Q4": lambda g, weight: not _is_int4(g, weight),
    "Q5": lambda g, op: _entries(g, op) == 16,
    "Q6": lambda g, op: g.generation == 1 and not _is_int4(g, op),
}
