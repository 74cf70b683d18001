"""The rules of the Neural Engine: their table, their tests, and the graph that the
tests search.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

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
FP16_TINY = 6.1e-5

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

    def fixed(self, op: Op, parameter: str) -> bool:
        """Whether an argument is a constant, uncompressed or compressed."""
        producer = self.source(op, parameter)
        if producer is None:
            return self.constant(op, parameter) is not None
        return producer.constant

    def shape(self, op: Op, parameter: str) -> tuple:
        """The shape of an argument, None for sizes that vary; () for a missing
        argument."""
        return self.shape_of(op.inputs.get(parameter))

    def weights(self, *kinds: str) -> list[tuple[Op, Op]]:
        """Pairs (compressed weight, operation that reads it) of weights of these
        kinds."""
        pairs = []
        for reader in self.ops:
            for weight in map(self.producer, reader.inputs.values()):
                if weight is not None and weight.kind in kinds:
                    pairs.append((weight, reader))
        return pairs


@dataclass(frozen=True)
class Rule:
    """A row of `rules.csv`. `of` names the subjects of the rule (see `_subjects`); an
    empty one is the whole graph, and a rule of "-" is known and not looked for."""

    id: str
    of: str
    effect: str
    confidence: str  # H documented or measured several times, M one good measurement, L anecdote
    source: str
    says: str
    advice: str
    disputed: str

    def find(self, graph: LintGraph) -> Iterable[str]:
        """The names of the operations, inputs, outputs or states of a graph that break
        the rule."""
        if self.of == "-":
            return []
        test = TESTS.get(self.id, lambda graph, subject: True)
        if not self.of:
            return test(graph)
        subjects = _subjects(graph, self.of)
        return [name for name, subject in subjects if test(graph, subject)]


@dataclass(frozen=True)
class Finding:
    """A broken rule and the names of the subjects that break it."""

    rule: Rule
    names: tuple[str, ...]


TESTS: dict[str, Callable] = {}
with Path(__file__).with_name("rules.csv").open(encoding="utf-8", newline="") as file:
    RULES = {row["id"]: Rule(**row) for row in csv.DictReader(file)}


def rule(test):
    """Registers the test of the rule whose id begins its name, such as `T1_float32`.

    The test takes a graph and one of `_subjects(graph, of)`, and returns whether that
    subject breaks the rule. If `of` is empty, the test takes a graph and returns names.
    A rule without a test is broken by every subject."""
    id = test.__name__.partition("_")[0]
    assert id in RULES.keys() - TESTS.keys(), id
    TESTS[id] = test
    return test


def _subjects(g: LintGraph, of: str) -> Iterable[tuple[str, Op | Type]]:
    """The subjects that a rule's column `of` names.

    These are pairs (name, type) of `inputs`, `states`, `interface` (inputs and outputs)
    or `results` (of every operation), or pairs (name, operation) of the compute
    operations whose kind fits one of the patterns in `of`, such as `scatter*`."""
    if of == "results":
        subjects = []
        for op in g.ops:
            subjects += [(op.name, result) for result in results(op)]
        return subjects
    if of == "interface":
        outputs = {name: g.types[name] for name in g.program.outputs if name in g.types}
        return (g.program.inputs | outputs).items()
    if of in ("inputs", "states"):
        return getattr(g.program, of).items()
    ops, subjects = g.ops, []
    if of.startswith("constexpr_"):
        ops = g.producers.values()
    for op in ops:
        if any(fnmatchcase(op.kind, pattern) for pattern in of.split()):
            subjects.append((op.name, op))
    return subjects


def results(op: Op) -> list[Type]:
    return [t for _, t in op.outputs if t.kind == "tensor"]
