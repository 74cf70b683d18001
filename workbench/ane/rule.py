"""Neural Engine rules: a program in, the rules it breaks out, each with its confidence, its source
and what to do.

Most rules are other people's measurements of an undocumented unit, so each says who found it, and
`disputed` says who found otherwise: a disputed rule is reported and changes no placement. Effects:

    cpu    the operation cannot run on the Neural Engine
    stays  it could, and is expected not to
    fails  the program is reported not to compile or not to run there
    wrong  it runs, and may give wrong or non-finite values
    slow   it runs, slower than it needs to
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from miltorch import Program, Type
from miltorch.graph import Graph
from miltorch.program import Op

RULE_SOURCES = {
    "NER": "Apple coreai-models, Neural Engine rules",
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
MIB, FP16_TINY = 1 << 20, 6.1e-5

ON_ANE = frozenset(
    """
    add sub mul real_div maximum minimum abs sign square pow floor ceil round clip threshold inverse equal not_equal greater
    greater_equal less less_equal sqrt rsqrt exp exp2 log erf relu relu6 leaky_relu prelu clamped_relu elu
    thresholded_relu scaled_tanh sigmoid sigmoid_hard tanh silu gelu softplus softplus_parametric softsign linear_activation
    softmax conv conv_transpose linear matmul einsum avg_pool max_pool l2_pool layer_norm instance_norm batch_norm l2_norm
    local_response_norm reduce_sum reduce_mean reduce_max reduce_min reduce_sum_square reduce_l1_norm reduce_l2_norm
    reduce_log_sum reduce_log_sum_exp concat split stack reshape reshape_like transpose squeeze expand_dims tile pad
    slice_by_index slice_by_size slice_update select scaled_dot_product_attention topk sin cos quantize dequantize
    resize_bilinear resize_nearest_neighbor upsample_bilinear upsample_nearest_neighbor pixel_shuffle pixel_unshuffle
    depth_to_space space_to_depth cast identity read_state write_state coreml_update_state fill flatten2d
""".split()
)  # AF, one minimal program each; state and slice ops by K1 and K5


class LintGraph(Graph):
    """The def-use index that rules search, with what they need to know about the package and the
    chip.

    Args:
        program: a function of a package.
        weight_bytes: bytes of its weight file.
        functions: how many functions the package has.
        generation: of the chip's M series.
        programs: how many programs a process loads to run the whole bundle, this one among them.
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
        """The operation that makes an argument; None for inputs, literals and what is left out."""
        return self.producer(op.inputs.get(parameter))

    def constant(self, op: Op, parameter: str):
        """An argument that is a literal or a plain constant."""
        return self.literal(op.inputs.get(parameter))

    def fixed(self, op: Op, parameter: str) -> bool:
        """Whether an argument is known before the program runs: plain, or a compressed weight."""
        producer = self.source(op, parameter)
        if producer is None:
            return self.constant(op, parameter) is not None
        return producer.constant

    def shape(self, op: Op, parameter: str) -> tuple:
        """Shape of an argument, None for sizes known only at run time; () where there is none."""
        return self.shape_of(op.inputs.get(parameter))

    def weights(self, *kinds: str) -> list[tuple[Op, Op]]:
        """(compressed weight, operation that reads it)."""
        return [
            (weight, reader)
            for reader in self.ops
            for weight in map(self.producer, reader.inputs.values())
            if weight is not None and weight.kind in kinds
        ]


@dataclass(frozen=True)
class Rule:
    """A row of `rules.csv`. `of` says what the rule looks at, see `_subjects`; where it is empty,
    at the whole graph."""

    id: str
    of: str
    effect: str
    confidence: str  # H documented or measured several times, M one good measurement, L anecdote
    source: str
    says: str
    advice: str
    disputed: str

    def find(self, graph: LintGraph) -> Iterable[str]:
        """The names of the operations, inputs, outputs or states of a graph that break the rule."""
        test = TESTS.get(self.id, lambda graph, subject: True)
        if not self.of:
            return test(graph)
        return [name for name, subject in _subjects(graph, self.of) if test(graph, subject)]


@dataclass(frozen=True)
class Finding:
    """A broken rule and the names of what breaks it."""

    rule: Rule
    names: tuple[str, ...]


TESTS: dict[str, Callable] = {}
with Path(__file__).with_name("rules.csv").open(encoding="utf-8", newline="") as file:
    RULES = {row["id"]: Rule(**row) for row in csv.DictReader(file)}


def rule(test):
    """Registers the test of the rule with whose id its name begins, `T1_float32`. A rule without a
    test is broken by every subject; a second test of a rule is an error of ours.

    The test takes a graph and one `_subjects(graph, of)`, and returns whether that one breaks the
    rule; where `of` is empty it takes a graph and returns names.
    """
    id = test.__name__.partition("_")[0]
    assert id in RULES.keys() - TESTS.keys(), id
    TESTS[id] = test
    return test


def _subjects(g: LintGraph, of: str) -> Iterable[tuple[str, Op | Type]]:
    """(name, type) of `inputs`, `states`, `interface` (inputs and outputs) or `results` (of every
    operation); else (name, operation) of the compute operations whose kind fits one of the patterns
    in `of`, such as `scatter*`."""
    if of == "results":
        return [(op.name, t) for op in g.ops for t in results(op)]
    if of == "interface":
        return (
            g.program.inputs | {n: g.types[n] for n in g.program.outputs if n in g.types}
        ).items()
    if of in ("inputs", "states"):
        return getattr(g.program, of).items()
    if of.startswith("constexpr_"):
        ops = g.producers.values()
    else:
        ops = g.ops
    return [(op.name, op) for op in ops if any(fnmatchcase(op.kind, kind) for kind in of.split())]


def results(op: Op) -> list[Type]:
    return [t for _, t in op.outputs if t.kind == "tensor"]
