"""The rules of the Neural Engine (`data/sources/ane_rules.csv`), and the test of each on
a program's graph.

Most rules are measurements that others published of an undocumented unit, so each has a
source, a confidence (H documented or measured several times, M one good measurement, L
an anecdote) and advice. `disputed` names a contradicting source; a disputed rule is
reported, and changes the placement only in the count of operations that remain if the
disputed rules hold. `EFFECTS` has the effects.

The column `of` names the subjects of a rule, the parts of a program that it is tested on.
Subjects that are values (a `Type` each) are `inputs`, `states`, `interface` (inputs and
outputs) and `results` (of every operation). Subjects that are operations (an `Op` each)
are the `weights` in 8 or 4 bits, and operations whose kind fits a pattern such as
`scatter*`. A rule with "-" is documented in the table and never tested.

A test says whether a subject breaks the rule. It is in `VALUE_TESTS` or `OPERATION_TESTS`,
by the kind of its subject, or in `PROGRAM_TESTS` where all subjects of a program break the
rule or none does. A rule without a test is broken by every subject."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from miltorch import Program, Type
from miltorch.graph import Graph
from miltorch.program import Op, Ref
from workbench.ane.chips import published
from workbench.ane.work import is_blocked, is_int4, palette_entries

EFFECTS = {
    "cpu": "cannot run on the Neural Engine",
    "stays": "could run there and is reported to stay on the CPU",
    "fails": "the program is reported not to compile or not to run there",
    "wrong": "runs and may give wrong or non-finite values",
    "slow": "runs slower than an equivalent program",
}
"""The effect of a rule on what breaks it, in words; in the order of the legend."""
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
    "GCC": "gemma-coreml-chat",
    "ZOO": "cards of john-rocky's model zoo",
}
# Operations that a sweep found on the Neural Engine, in one minimal program each (source
# AF). Rules K1 and K5 say when those on states and slices do not run there.
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
# The kinds of operations that compute weights from integers of 8 or 4 bits and scales: the
# subject `weights` of a rule.
SCALED_WEIGHTS = ("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")
# The types of results that T3 lets pass. Float32 breaks T1 instead.
SUPPORTED_DTYPES = ("FLOAT16", "FLOAT32", "INT8", "UINT8", "INT16", "UINT16", "BOOL")


LISTED_NAMES = 5
"""The most names that the JSON of a finding lists."""


@dataclass(frozen=True)
class Rule:
    """A row of `ane_rules.csv`."""

    id: str
    of: str
    """The subjects, or "-" (see the module)."""
    effect: str
    confidence: str
    source: str
    """Abbreviations in `RULE_SOURCES`, separated by spaces; `CT#2757` names an issue."""
    says: str
    advice: str
    disputed: str
    """A source that contradicts the rule; empty without one."""

    @property
    def sources(self) -> dict[str, str]:
        """Abbreviation → the source in words."""
        return {
            word: RULE_SOURCES[word.partition("#")[0]] for word in self.source.split()
        }


@dataclass(frozen=True)
class Finding:
    """A rule that a program breaks."""

    rule: Rule
    names: list[str]
    """The subjects that break it, in the program's order, each once."""

    def json(self) -> dict:
        """The finding by the keys of `workbench plan --json`."""
        return asdict(self.rule) | {
            "names": self.names[:LISTED_NAMES],
            "sources": self.rule.sources,
            "count": len(self.names),
        }


class LintGraph(Graph):
    """The def-use index of a program, with the properties of its package and of the chip
    that rules test.

    Args:
        program: a function of a package.
        weight_bytes: bytes of its weight file.
        functions: number of the package's functions.
        generation: the chip's generation of the M series.
        programs: number of programs that a process loads to run the whole bundle.
        largest_file: bytes of the package's largest weight file; default: of its only
            one, which has `weight_bytes`.
    """

    def __init__(
        self,
        program: Program,
        weight_bytes: int,
        functions: int = 1,
        generation: int = 4,
        programs: int = 1,
        largest_file: int | None = None,
    ):
        super().__init__(program)
        self.largest_file = weight_bytes if largest_file is None else largest_file
        self.weight_bytes, self.functions = weight_bytes, functions
        self.generation, self.programs = generation, programs

    def constant(self, op: Op, parameter: str):
        """The value of an argument that is a literal or an uncompressed constant, else
        None."""
        return self.literal(op.inputs.get(parameter))

    def shape(self, op: Op, parameter: str) -> tuple:
        """The shape of an argument, None for sizes that vary; () for a missing
        argument."""
        return self.shape_of(op.inputs.get(parameter))


def rules() -> list[Rule]:
    """The rows of the table."""
    return [Rule(**row) for row in published("ane_rules.csv").to_dict("records")]


def lint(graph: LintGraph) -> list[Finding]:
    """The rules that a program breaks, in the order of the table."""
    subjects = _subjects(graph)
    findings = []
    for rule in rules():
        candidates = subjects.get(rule.of)
        if candidates is None:
            candidates = _matching_operations(graph, rule.of.split())
        names = [
            name for name, subject in candidates if _breaks(rule.id, graph, subject)
        ]
        if names:
            findings.append(Finding(rule, list(dict.fromkeys(names))))
    return findings


def _breaks(id: str, graph: LintGraph, subject: Op | Type) -> bool:
    """Whether a subject of a graph breaks a rule."""
    if test := PROGRAM_TESTS.get(id):
        return test(graph)
    test = VALUE_TESTS.get(id) or OPERATION_TESTS.get(id)
    return test is None or bool(test(graph, subject))


def _matching_operations(
    graph: LintGraph, patterns: list[str]
) -> list[tuple[str, Op | Type]]:
    """The (name, operation) pairs whose kind fits a pattern such as `scatter*`."""
    return [
        (op.name, op)
        for op in graph.program.block.walk()
        if any(fnmatchcase(op.kind, pattern) for pattern in patterns)
    ]


def _subjects(graph: LintGraph) -> dict[str, Iterable[tuple[str, Op | Type]]]:
    """For each word of the column `of`: the (name, object) pairs that it stands for. A
    weight has the name of the operation that reads it."""
    program = graph.program
    inputs = program.inputs.items()
    outputs = [(n, graph.types[n]) for n in program.outputs if n in graph.types]
    results, weights = [], []
    for op in graph.ops:
        for _, type in op.outputs:
            if type.kind == "tensor":
                results.append((op.name, type))
        for source in op.inputs.values():
            producer = graph.producer(source)
            if producer and producer.kind in SCALED_WEIGHTS:
                weights.append((op.name, producer))
    return {
        "inputs": inputs,
        "states": program.states.items(),
        "interface": [*inputs, *outputs],
        "results": results,
        "weights": weights,
        # the operations that run; the pattern `*` would also fit constants
        "*": [(op.name, op) for op in graph.ops],
    }


def _changes_last_axis(graph: LintGraph, op: Op) -> bool:
    """Whether a reshape or a transpose changes the last axis."""
    shape = graph.shape(op, "x")
    if op.kind == "reshape":
        return shape[-1:] != op.outputs[0][1].shape[-1:]
    return int(np.ravel(graph.constant(op, "perm"))[-1]) not in (-1, len(shape) - 1)


def _is_padded(graph: LintGraph, value: Type) -> bool:
    """Whether rows of an fp16 input or output, of fewer than 32 values, are padded to 64
    bytes; an axis that varies counts as 1."""
    if value.dtype != "FLOAT16" or not value.shape:
        return False
    return (value.shape[-1] or 1) < 32


def _last_axis_is_no_multiple_of_32(graph: LintGraph, state: Type) -> bool:
    """Whether the last axis of a state is no multiple of 32."""
    return bool(state.shape) and (state.shape[-1] or 0) % 32 > 0


def _has_long_axis(graph: LintGraph, value: Type) -> bool:
    """Whether an axis is longer than the chip takes; channels have a limit of their
    own."""
    longest = 16384 if graph.generation <= 3 else 65536
    for axis, size in enumerate(value.shape):
        limit = 65536 if axis == 1 else longest
        if size and size > limit:
            return True
    return False


def _exceeds_working_set(graph: LintGraph, value: Type) -> bool:
    """Whether an fp16 result is larger than the chip's working set, 2 MB on an M1 and
    4.7 MB on an M5."""
    limit = 2e6 if graph.generation < 5 else 4.7e6  # bytes
    size = 2 * prod(n or 1 for n in value.shape)
    return value.dtype == "FLOAT16" and size > limit


def _is_state(graph: LintGraph, source: Ref | None) -> bool:
    """Whether a value is that of a state, or a slice of it."""
    op = graph.producer(source)
    if op and op.kind == "slice_by_index":
        return _is_state(graph, op.inputs["x"])
    return bool(op) and op.kind == "read_state"


def _blends_a_state(graph: LintGraph) -> bool:
    """Whether the program multiplies the value of a state, as a write by a mask does."""
    operands = [
        value for o in graph.ops if o.kind == "mul" for value in o.inputs.values()
    ]
    return any(_is_state(graph, value) for value in operands)


def _writes_part_of_state(graph: LintGraph, op: Op) -> bool:
    """Whether a part of a state is written in place. A write of all of it leaves no row
    of the buffer before."""
    update = graph.producer(op.inputs.get("data"))
    if update is None or update.kind != "slice_update":
        return False
    return graph.shape(update, "update") != graph.shape(update, "x")


def _channels_of_group(graph: LintGraph, op: Op) -> int:
    """The number of output channels that share a palette [groups, …, entries, vector];
    0: one palette serves the whole weight."""
    lut, weight = graph.shape(op, "lut"), op.outputs[0][1].shape
    if len(lut) < 3 or lut[0] == 1:
        return 0
    return weight[0] // lut[0]


def _columns(graph: LintGraph, op: Op) -> int:
    """The number of columns, such as tokens, of a product by a weight; a size that
    varies counts as 2."""
    shape = graph.shape(op, "x")
    # linear [.., columns, C]; a convolution [B, C, H, W] has H · W columns
    sizes = shape[-2:-1] if op.kind == "linear" else shape[2:]
    return prod(size or 2 for size in sizes)


def _softmax_axis_is_not_channels(graph: LintGraph, op: Op) -> bool:
    """Whether a softmax runs over another axis than channels, axis 1."""
    axis = graph.constant(op, "axis")
    axis = -1 if axis is None else int(np.ravel(axis)[0])
    rank = max(len(graph.shape(op, "x")), 1)  # the input may have no shape
    return axis % rank != 1


def _is_fixed_beside_varying(graph: LintGraph, value: Type) -> bool:
    """Whether an input has a fixed shape, beside state and an input whose size varies."""
    if not graph.program.states or None in value.shape:
        return False
    return any(None in other.shape for other in graph.program.inputs.values())


def _has_functions_of_several_tokens(graph: LintGraph) -> bool:
    """Whether a package with state has several functions and this one computes T above 1,
    so that no product by a weight has a single column."""
    if graph.functions == 1:
        return False
    products = [op for op in graph.ops if op.kind in ("conv", "linear")]
    return min((_columns(graph, op) for op in products), default=0) > 1


# Each of these tables is rule → test. The comment above a test names the rule's subjects
# and what breaks it; the column `says` has the whole rule, with sources.
PROGRAM_TESTS: dict[str, Callable[[LintGraph], bool]] = {
    # states: three or more
    "K3": lambda graph: len(graph.program.states) >= 3,
    # states: several functions, and T above 1 in this one
    "K4": _has_functions_of_several_tokens,
    # writes of a state: a cache written by a mask
    "K14": _blends_a_state,
    # all operations: under 0.6 MB of weights
    "G1": lambda graph: graph.weight_bytes < 600_000,
    # all operations: over 2 GB of weights
    "G2": lambda graph: graph.weight_bytes > 2_000_000_000,
    # all operations: more than 128 programs that one process loads
    "G3": lambda graph: graph.programs > 128,
    # all operations: over 1 GB of weights
    "G4": lambda graph: graph.weight_bytes > 1_000_000_000,
    # all operations: one weight file above 2 GiB
    "G5": lambda graph: graph.largest_file > 2**31,
    # all operations: over 1.70 GB of weights
    "G6": lambda graph: graph.weight_bytes > 1_700_000_000,
}
VALUE_TESTS: dict[str, Callable[[LintGraph, Type], bool]] = {
    # results: float32
    "T1": lambda graph, value: value.dtype == "FLOAT32",
    # results: neither fp16, int8, int16 nor bool
    "T3": lambda graph, value: value.dtype not in SUPPORTED_DTYPES,
    # results: rank above 5
    "T4": lambda graph, value: len(value.shape) > 5,
    # inputs and outputs: rows that are padded
    "S1": _is_padded,
    # results: an axis longer than the chip takes
    "S4": _has_long_axis,
    # results: larger than the working set
    "S12": _exceeds_working_set,
    # inputs: a size known only at run time (D1: slow, D3: off the Neural Engine)
    "D1": lambda graph, value: None in value.shape,
    "D3": lambda graph, value: None in value.shape,
    # inputs: the same beside state
    "D7": lambda graph, value: bool(graph.program.states) and None in value.shape,
    # inputs: a fixed shape beside state and an input whose size varies
    "D8": _is_fixed_beside_varying,
    # states: a last axis that is no multiple of 32
    "K2": _last_axis_is_no_multiple_of_32,
    # states: a cache [1, heads, rows, width] of more than 1024 rows
    "K12": lambda graph, value: len(value.shape) == 4 and (value.shape[2] or 0) > 1024,
}
OPERATION_TESTS: dict[str, Callable[[LintGraph, Op], bool]] = {
    # reshapes and transposes: the last axis changes
    "S10": _changes_last_axis,
    # palettes: of 4 bits, which have 16 entries, beside state
    "K10": lambda graph, op: graph.program.states and palette_entries(graph, op) == 16,
    # writes of a state: a part of it, in place
    "K16": _writes_part_of_state,
    # all operations: one that no sweep found on the Neural Engine
    "O1": lambda graph, op: op.kind not in ON_ANE,
    # topk before M2, sin and cos before M3
    "O3": lambda graph, op: graph.generation < (2 if op.kind == "topk" else 3),
    # softmax: over another axis than channels
    "O15": _softmax_axis_is_not_channels,
    # fused attention: with a mask
    "O16": lambda graph, op: "attn_mask" in op.inputs,
    # weights: int4 with a scale for each block of inputs
    "Q3": lambda graph, weight: (
        is_blocked(graph.shape(weight, "scale")) and is_int4(graph, weight)
    ),
    # weights: int8
    "Q4": lambda graph, weight: not is_int4(graph, weight),
    # palettes: of 4 bits
    "Q5": lambda graph, op: palette_entries(graph, op) == 16,
    # weights in integers: int8 on an M1
    "Q6": lambda graph, op: graph.generation == 1 and not is_int4(graph, op),
    # palettes: of 4 bits, for each group of 8 output channels
    "Q7": lambda graph, op: (
        palette_entries(graph, op) == 16 and _channels_of_group(graph, op) == 8
    ),
}
