"""The contents of `bundle.json`: one pydantic model per part, cross-checked when built.
`names` explains the axes."""

import operator
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from workbench import plugins
from workbench.bundle.foreign import Foreign
from workbench.bundle.names import (
    ACC,
    ATTN_MASK,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HANDED_ON,
    HIDDEN,
    KV_WRITE_MASK,
    LOGITS,
    ROPE_COS,
    ROPE_SIN,
    X,
    is_cache,
    split_layer,
)
from workbench.bundle.presets import PRESETS, Preset
from workbench.bundle.states import KINDS, StateKind, state_kind
from workbench.plugins import Target

MANIFEST_VERSION = 2
COREML = "coreml"  # the target of Core ML programs
# The constants of sound packages of five exporters, in fp16, cost at most 0.01 (1 − cosine
# of 5e-5); the smallest fault measured in published ones costs 0.23.
FOREIGN_ERROR = 0.02
# more tokens than any model is made for; masks are as long as the cache
MAX_SEQ_LEN = 1 << 24
# characters: leaves room for the folder that a bundle lies in
MAX_PATH, MAX_NAME = (512, 200)


class ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    longest = max(map(len, parts), default=0)
    if len(path) > MAX_PATH or longest > MAX_NAME or not path.isprintable():
        raise ValueError(
            f"a path of {len(path)} characters, not of at most {MAX_PATH} that print, "
            f"{MAX_NAME} in a name"
        )
    if ".." in parts or not parts or re.search(r"^/|\\|^[A-Za-z]:", path):
        raise ValueError(f"path {path!r} must stay inside the bundle")
    return path


RelativePath = Annotated[str, AfterValidator(_inside)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]  # Core ML's shapes are no larger
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Dims(ManifestModel):
    """Sizes of the model; `names` explains the axes."""

    C: Count
    H: Count
    H_kv: Count
    D: Count
    L: Count
    V: Count

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.H % self.H_kv:
            raise ValueError(
                f"H = {self.H} query heads need a multiple of H_kv = {self.H_kv}"
            )
        return self


class Options(ManifestModel):
    """The export options. `t_max` = 1 makes fixed T = 1 shards, more makes
    RangeDim(1..t_max).

    `sliding` = ring gives layers with an attention window a cache of `window + t_max -
    1` rows, just enough for a call of t_max tokens not to overwrite a row that its own
    first token still attends to; window one of exactly `window` rows, as packages of
    other exporters have that move their rows.

    `functions` are the T of which each shard has a function of its own, in ascending
    order; with them `t` is fixed and `t_max` the largest of them. They are written only
    where there are some.

    `target` names the kind of programs that an installed plug-in makes; it is written
    only where they are not Core ML's."""

    max_seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)] = 512
    t_max: Count = 4
    batch: Count = 1
    layers_per_shard: Count = 1
    compress: Literal[*PRESETS] = "fp16"
    kv_write: Literal["mask", "slice"] = "mask"
    layout: Literal["bct1", "bc1t"] = "bct1"
    moe: Literal["dense", "routed"] = "dense"
    t: Literal["range", "fixed"] = "range"
    sliding: Literal["mask", "ring", "window"] = "mask"
    functions: tuple[Count, ...] = Field((), exclude_if=operator.not_)
    target: str = Field(COREML, exclude_if=COREML.__eq__)

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, chosen):
        """Derives the options that `functions` determine."""
        functions = chosen.get("functions") if isinstance(chosen, dict) else None
        if not functions or not isinstance(functions, list | tuple):
            return chosen
        return {"t": "fixed", "t_max": functions[-1]} | chosen

    @model_validator(mode="after")
    def _fits(self):
        if self.t_max > self.max_seq_len:
            raise ValueError(
                f"t_max = {self.t_max} must not exceed max_seq_len = {self.max_seq_len}"
            )
        shapes = self.functions
        if shapes and (
            list(shapes) != sorted(set(shapes))
            or len(shapes) < 2
            or (self.t, self.t_max) != ("fixed", shapes[-1])
        ):
            raise ValueError(
                f"functions = {list(shapes)} must be two or more T in ascending order, "
                "the last one "
                f"t_max, with t = fixed; t_max is {self.t_max}, t is {self.t}"
            )
        if self.sliding == "ring" and self.kv_write == "slice":
            raise ValueError(
                "sliding = ring needs kv_write = mask: a slice cannot wrap around"
            )
        if self.moe == "routed" and self.layers_per_shard > 1:
            raise ValueError(
                "moe = routed needs layers_per_shard = 1: the host picks experts between layers"
            )
        return self

    @property
    def plugin(self) -> Target | None:
        """What the plug-in says of its programs; None: they are Core ML's.

        Raises:
            InputError: no installed package offers the target.
        """
        if self.target == COREML:
            return None
        return plugins.load("targets", self.target)

    @property
    def interpreter(self) -> str:
        """The runtime that runs the programs as they are written, on no device."""
        return self.plugin.runtime if self.plugin else "portable"

    @property
    def program_dtype(self) -> str:
        """`fp16` or `fp32`, of a program's inputs, states and results."""
        exact = self.plugin and self.plugin.precision == "exact"
        return "fp32" if exact else "fp16"

    @property
    def preset(self) -> Preset:
        return PRESETS[self.compress]

    @property
    def function_names(self) -> dict[str, int]:
        """The functions of a shard: name → T."""
        return {f"t{T}": T for T in self.functions}

    @property
    def shapes(self) -> tuple[int, ...]:
        """The only T with which shards can be called; empty if any T up to t_max is
        possible."""
        return self.functions or ((self.t_max,) if self.t == "fixed" else ())

    def width(self, T: int) -> int:
        """Columns of a call of `T` tokens: T of them, or as many as the next fixed
        shape has."""
        return next((n for n in self.shapes if n >= T), T)

    def tokens(self, limit: int) -> int:
        """How many of `limit` tokens the next call takes: all of them, or, for a slice
        write, which takes no dummy columns, as many as the largest fixed shape that is
        not larger."""
        fitting = [n for n in self.shapes if n <= limit and self.kv_write == "slice"]
        return max(fitting, default=limit)

    def slots(self, window: int | None) -> int:
        """Rows of the cache of a layer that attends to `window` tokens (None: all)."""
        return self.ring(window) or self.max_seq_len

    def ring(self, window: int | None) -> int | None:
        """Rows of that cache if it is a ring buffer, else None."""
        if not window or self.sliding == "mask":
            return None
        more = self.t_max - 1 if self.sliding == "ring" else 0
        return min(self.max_seq_len, window + more)

    def plane(self, width: int) -> list[int | str]:
        """The shape of an activation of `width` channels: [B, width, T, 1] or [B,
        width, 1, T]."""
        if self.layout == "bct1":
            return [self.batch, width, "T", 1]
        return [self.batch, width, 1, "T"]

    def layer_inputs(self, layer: "Layer", half: int) -> dict[str, list[int | str]]:
        """Shapes of the rotary tables (`half` = D_rotary / 2) and masks of a layer; a
        ring has a separate write mask."""
        B = self.batch
        rows = self.slots(layer.window)
        suffix = layer.suffix
        write_mask = KV_WRITE_MASK
        if self.ring(layer.window):
            write_mask += suffix
        return {
            ROPE_COS + suffix: [B, 1, "T", half],
            ROPE_SIN + suffix: [B, 1, "T", half],
            ATTN_MASK + suffix: [B, 1, "T", rows],
            write_mask: [B, 1, rows, "T"],
        }


class Rope(ManifestModel):
    """One rotary table, made by the host: angle = position · inv_freq, cos and sin
    times `scale`.

    `name` is "" or the suffix of its inputs (`rope_cos_local`), `nope` for layers that
    turn nothing; `inv_freq` has D_rotary / 2 entries (radians per token)."""

    name: Literal["", "local", "global", "nope"] = ""
    inv_freq: Annotated[list[Finite], Field(min_length=1)]
    scale: Finite = 1.0


class Layer(ManifestModel):
    """What the host needs for one decoder layer: its attention window in tokens (None:
    all) and its rope table.

    Layers with one rope table have one window, so that `suffix` names the inputs of
    both (`rope_cos_local`, `attn_mask_local`). A layer that does not attend has no
    cache and takes none of these inputs."""

    window: Count | None = None
    rope: Literal["", "local", "global", "nope"] = ""
    attends: bool = Field(True, exclude_if=bool)

    @property
    def suffix(self) -> str:
        return f"_{self.rope}" if self.rope else ""


class FileEntry(ManifestModel):
    path: RelativePath
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class StateEntry(ManifestModel):
    """A logical state: the Core ML state `tensor` that holds it, and its shape. `ring`
    is the number of rows of a ring buffer: position p lives in row p mod ring."""

    tensor: str
    shape: list[Count]
    ring: Count | None = None


class Shard(ManifestModel):
    """One `.mlpackage`, or a plug-in's package: its interface, its files, and where its contents
    came from.

    `rows` are the rows [start, stop) that the shard holds of the checkpoint tensors it
    holds in part: vocabulary rows of a head slice, the one expert of an expert shard.
    """

    name: str
    kind: Literal["layers", "router", "expert", "head"]
    path: RelativePath
    layers: tuple[int, int] = (0, 0)  # decoder layers [start, stop)
    rows: tuple[int, int] = (0, 0)
    # how to run packages of another exporter, all of them below `path`
    foreign: Foreign | None = Field(None, exclude_if=operator.not_)
    inputs: dict[str, list[int | Literal["T"]]]
    outputs: dict[str, list[int | Literal["T"]]]
    states: dict[str, StateEntry] = {}
    taps: dict[int, str] = {}  # layer → name of the value that holds its hidden output
    # checkpoint tensor → name of the constant that holds it
    weights: dict[str, str] = {}
    # checkpoint tensor → what was added to it before it was stored (Gemma's 1 + γ)
    offsets: dict[str, float] = {}
    modules: dict[str, str] = {}  # program value → source module
    template: str  # the shard whose shape was converted
    # program's function → the T that it takes; none: the program has `main` alone
    functions: dict[str, Count] = Field({}, exclude_if=operator.not_)
    bytes: Annotated[int, Field(ge=0)]
    files: Annotated[list[FileEntry], Field(min_length=1)]

    def kind_of(self, state: str) -> StateKind:
        """The kind of one of `states`, by its name there."""
        return state_kind(state, self.states[state].ring)


class Embedding(ManifestModel):
    """Token embedding kept on the host: hidden = (weight[id] + bias) · scale, in
    float32."""

    file: FileEntry
    scale: Finite = 1.0


class Tokens(ManifestModel):
    """Special tokens and, when the checkpoint has one, the tokenizer's files."""

    bos: int | None = None
    eos: list[int] = []
    files: list[FileEntry] = []


class Manifest(ManifestModel):
    """`bundle.json`."""

    format: Literal["workbench-bundle"] = "workbench-bundle"
    version: Literal[2] = MANIFEST_VERSION
    family: str
    dims: Dims
    options: Options
    rope: list[Rope]
    layers: list[Layer]
    embedding: Embedding
    tokens: Tokens
    checkpoint: dict[str, str]  # name, sha256, dtype
    packages: dict[str, str]
    # `x` and `hidden` of every shard are 2^-exponent of the model's
    residual_exponent: int = 0
    shards: list[Shard]

    @property
    def own_programs(self) -> bool:
        """Whether the workbench wrote the programs as Core ML's: what lies in them then
        follows from the options."""
        foreign = any(shard.foreign for shard in self.shards)
        return not foreign and self.options.plugin is None

    @property
    def shows_hidden(self) -> bool:
        """Whether every shard of layers gives the output of its last layer, and reads
        that of the layer before: otherwise only caches and logits can be compared."""
        kinds = "layers", "router"
        layers = [shard for shard in self.shards if shard.kind in kinds]
        return not any(LOGITS in s.outputs or HANDED_ON in s.outputs for s in layers)

    @property
    def gives_logits(self) -> bool:
        """Whether logits of every token come out, or the top tokens alone."""
        return all(s.foreign is None or s.foreign.gives_logits for s in self.shards)

    @property
    def constants_error(self) -> float:
        """Relative RMS of keys and values that constants of the programs, which the
        manifest does not show (rope tables, scales), may cost beside the weights."""
        return FOREIGN_ERROR if any(shard.foreign for shard in self.shards) else 0.0

    @property
    def stream_scale(self) -> float:
        """What `x` and `hidden` of every shard are divided by, a power of two."""
        return 2.0**self.residual_exponent

    @model_validator(mode="after")
    def _whole(self):
        L = self.dims.L
        V = self.dims.V
        ropes = [rope.name for rope in self.rope]
        used = {layer.rope for layer in self.layers}
        windows = {(layer.rope, layer.window) for layer in self.layers}
        paths = {shard.path for shard in self.shards}
        covered = []
        edges = [0]
        for shard in self.shards:
            if shard.kind in ("layers", "router"):
                covered += range(*shard.layers)
            if LOGITS in shard.outputs:
                edges += shard.rows
        edges.append(V)
        for fault, text in (
            (len(self.layers) != L, f"{len(self.layers)} layer entries for L = {L}"),
            (
                len(windows) > len(used),
                "layers of one rope table differ in their windows",
            ),
            (
                covered != list(range(L)),
                "the shards do not cover every decoder layer once, in order",
            ),
            (
                edges[::2] != edges[1::2],
                "the head slices do not cover the vocabulary once, in order",
            ),
            (len(paths) < len(self.shards), "two shards have one path"),
            (
                len(set(ropes)) < len(ropes) or not used <= set(ropes),
                f"rope tables {_listed(ropes)} for layers that use {_listed(sorted(used))}",
            ),
        ):
            if fault:
                raise ValueError(text)
        for shard in self.shards:
            for entry in shard.files:
                if PurePosixPath(shard.path) not in PurePosixPath(entry.path).parents:
                    raise ValueError(
                        f"shard {shard.name}: file {entry.path} lies outside {shard.path}"
                    )
            if shard.functions != self.options.function_names:
                raise ValueError(
                    f"shard {shard.name}: functions {shard.functions}, but options say "
                    f"{self.options.function_names}"
                )
            self._check_shapes(shard)
            self._check_states(shard)
        return self

    def _check_shapes(self, shard: Shard) -> None:
        """Checks what follows from dimensions and options; a family may have more
        inputs."""
        planes = X, HIDDEN, HANDED_ON, BASE, EXPERT_IN, ACC
        widths = dict.fromkeys(planes, self.dims.C)
        widths |= {EXPERT_WEIGHT: 1, LOGITS: shard.rows[1] - shard.rows[0]}
        expected = {name: self.options.plane(width) for name, width in widths.items()}
        halves = {rope.name: len(rope.inv_freq) for rope in self.rope}
        for layer in self.layers[slice(*shard.layers)]:
            expected |= self.options.layer_inputs(layer, halves[layer.rope])
        for name, shape in [*shard.inputs.items(), *shard.outputs.items()]:
            needed = expected.get(name, shape)
            if shape != needed:
                raise ValueError(
                    f"shard {shard.name}: {name} {shape}, but dims and options say {needed}"
                )

    def _check_states(self, shard: Shard) -> None:
        for name, state in shard.states.items():
            where = f"shard {shard.name}: state {name}"
            index, leaf = split_layer(name)
            if index not in range(*shard.layers) or name != f"layers.{index}.{leaf}":
                raise ValueError(f"{where} is of none of its layers")
            if leaf not in KINDS:
                raise ValueError(f"{where} is of no kind that a decoder knows")
            window = self.layers[index].window
            ring = None
            if is_cache(name):
                options = self.options
                d = self.dims
                ring = options.ring(window)
                shape = [options.batch, d.H_kv, options.slots(window), d.D]
                if state.shape != shape:
                    raise ValueError(
                        f"{where} {state.shape}, but dims and options say {shape}"
                    )
            if state.ring != ring:
                raise ValueError(
                    f"{where} has ring = {state.ring}, but options say {ring}"
                )


def first_fault(problem: ValidationError, whole: str) -> tuple[str, dict[str, Any]]:
    """Name of the field that pydantic refuses first (`whole` for the model itself), and
    its error: `msg`, `input`, `type`."""
    error = problem.errors(include_url=False)[0]
    error["msg"] = error["msg"].removeprefix("Value error, ")
    return ".".join(map(str, error["loc"])) or whole, error


def _listed(names: list[str]) -> str:
    return ", ".join(name or '""' for name in names) or "none"
