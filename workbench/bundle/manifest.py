"""The contents of `bundle.json`: one pydantic model per part, `Manifest` the whole.
`names` explains the axes; gate `interface` compares the parts with each other.

Names of fields are keys of the file. A field with `exclude_if` is newer than the first
bundles: it is left out of the file where it has its default, so that earlier bundles, and
those that do not use it, keep their bytes and hashes."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from workbench import paths, plugins
from workbench.bundle.fields import Count, ManifestModel, NonNegative, RelativePath
from workbench.bundle.foreign import Foreign
from workbench.bundle.names import (
    ATTN_MASK,
    K_ROWS,
    KV_WRITE_MASK,
    LOGITS,
    ROPE_COS,
    ROPE_SIN,
    STATES,
    V_ROWS,
)
from workbench.bundle.presets import Preset, find_preset
from workbench.bundle.tiling import Tiling
from workbench.plugins import Target

MANIFEST_VERSION = 2
COREML = "coreml"  # the target of Core ML programs
# Relative RMS. The fp16 constants of sound packages of five exporters cost at most 0.01
# (1 − cosine of 5e-5); the smallest fault measured in published packages costs 0.23.
FOREIGN_ERROR = 0.02
# more tokens than any model is made for; masks are as long as the cache
MAX_SEQ_LEN = 1 << 24


# for `exclude_if`
def _is_empty(value: object) -> bool:
    return not value


def _is_none(value: int | None) -> bool:
    """Unlike `_is_empty`, this keeps a `source` of 0 in the file."""
    return value is None


def _is_coreml(target: object) -> bool:
    return target == COREML


def _check_tokens(text: str) -> str:
    if not re.fullmatch(r"1-[1-9]\d*|[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError("numbers from 1 on, in a form like 1-4, 4 or 1,64")
    return text


def _check_preset(name: str) -> str:
    find_preset(name)
    return name


PresetName = Annotated[str, AfterValidator(_check_preset)]
TokensOfCall = Annotated[
    str, Field(coerce_numbers_to_str=True), AfterValidator(_check_tokens)
]
StateName = Annotated[str, Field(pattern=rf"^layers\.\d{{1,9}}\.({'|'.join(STATES)})$")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
RopeName = Literal["", "local", "global", "nope"]
Shapes = dict[str, list[int | Literal["T"]]]


class Dims(ManifestModel):
    """Sizes of the model; `names` explains the axes."""

    C: Count
    H: Count
    H_kv: Count
    D: Count
    L: Count
    V: Count
    P: NonNegative = Field(0, exclude_if=_is_empty)


class Options(ManifestModel):
    """The export options.

    Args:
        tokens: the tokens of a call. `1-4`: any number up to 4 (RangeDim); `4`: always
            four; `1,64`: one or 64, with a function for each in every shard.
        layers_per_shard: decoder layers in one package.
        compress: how weights are stored, a name that `find_preset` knows.
        kv_write: how a call writes its cache rows: by a one-hot `mask`, or as a `slice`
            at `pos`.
        layout: the axes of activations: [B, C, T, 1] or [B, C, 1, T].
        moe: whether a graph holds all experts (`dense`) or the host picks expert shards
            (`routed`).
        sliding: the cache of layers with an attention window. An export has `mask`:
            max_seq_len rows; or `ring`: `window + t_max - 1` rows, just enough for a call
            of t_max tokens not to overwrite a row that its first token still attends to.
            Only adopted packages have `window`: exactly `window` rows, which the packages
            may order otherwise than a ring (`Foreign.moves`).
        target: the kind of programs that an installed plug-in makes; written only where
            they are not Core ML's.
    """

    max_seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)] = 512
    tokens: TokensOfCall = "1-4"
    batch: Count = 1
    layers_per_shard: Count = 1
    compress: PresetName = "int8-channel"
    kv_write: Literal["mask", "slice"] = "mask"
    layout: Literal["bct1", "bc1t"] = "bct1"
    moe: Literal["dense", "routed"] = "dense"
    sliding: Literal["mask", "ring", "window"] = "mask"
    target: str = Field(COREML, exclude_if=_is_coreml)

    @model_validator(mode="after")
    def _check_combination(self):
        if sorted(set(self.fixed_sizes)) != list(self.fixed_sizes):
            raise ValueError(f"tokens = {self.tokens} needs numbers that ascend")
        if self.t_max > self.max_seq_len:
            raise ValueError(
                f"tokens = {self.tokens} needs max_seq_len = {self.t_max} or more"
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
    def tiling(self) -> Tiling:
        """The calls that the shards take."""
        return Tiling.parse(self.tokens, takes_dummies=self.kv_write == "mask")

    @property
    def fixed_sizes(self) -> tuple[int, ...]:
        """See `Tiling`."""
        return self.tiling.fixed_sizes

    @property
    def t_max(self) -> int:
        """See `Tiling`."""
        return self.tiling.t_max

    @property
    def plugin(self) -> Target | None:
        """The plug-in's description of its programs; None: they are Core ML's.

        Raises:
            InputError: no installed package offers the target.
        """
        if self.target == COREML:
            return None
        return plugins.load("targets", self.target)

    @property
    def interpreter(self) -> str:
        """The name of the runtime that executes the programs in software, as they are
        written."""
        return self.plugin.runtime if self.plugin else "portable"

    @property
    def program_dtype(self) -> str:
        """The dtype of a program's inputs, states and results: `fp16` or `fp32`."""
        is_exact = self.plugin and self.plugin.precision == "exact"
        return "fp32" if is_exact else "fp16"

    @property
    def preset(self) -> Preset:
        """The preset that `compress` names."""
        return find_preset(self.compress)

    def cache_rows(self, window: int | None) -> int:
        """Rows of the cache of a layer that attends to `window` tokens (None: all)."""
        return self.ring_rows(window) or self.max_seq_len

    def ring_rows(self, window: int | None) -> int | None:
        """Rows of the cache of such a layer if the cache is a ring buffer, in which position
        p is in row p modulo the rows; else None.

        That also holds for `window`: the bundle's order is that of a ring, whatever the
        order inside the packages. `StateEntry.ring` records the number."""
        if not window or self.sliding == "mask":
            return None
        rows = window
        if self.sliding == "ring":
            rows += self.t_max - 1
        return min(self.max_seq_len, rows)

    def activation_shape(self, channels: int) -> list[int | str]:
        """[B, channels, T, 1] or, in the layout bc1t, [B, channels, 1, T]."""
        if self.layout == "bct1":
            return [self.batch, channels, "T", 1]
        return [self.batch, channels, 1, "T"]

    def layer_inputs(
        self, layer: "Layer", rotary_half: int
    ) -> dict[str, list[int | str]]:
        """Shapes of the rotary tables and masks that a layer reads, by their names.

        Args:
            rotary_half: D_rotary / 2, the width of the tables.
        """
        B, rows, suffix = self.batch, self.cache_rows(layer.window), layer.suffix
        return {
            ROPE_COS + suffix: [B, 1, "T", rotary_half],
            ROPE_SIN + suffix: [B, 1, "T", rotary_half],
            ATTN_MASK + suffix: [B, 1, "T", rows],
            self.write_mask_name(layer.window, suffix): [B, 1, rows, "T"],
        }

    def write_mask_name(self, window: int | None, suffix: str) -> str:
        """The name of the write mask that layers read.

        Layers whose caches have max_seq_len rows write the same rows and share one write
        mask, whatever their rope tables. A ring has other rows, and so a write mask of
        its own.

        Args:
            window: the layers' attention window in tokens; None: all tokens.
            suffix: of the names of the layers' rope tables.
        """
        is_ring = self.ring_rows(window) is not None
        return KV_WRITE_MASK + suffix if is_ring else KV_WRITE_MASK


class Rope(ManifestModel):
    """One rotary table, which the host computes: angle = position · inv_freq, cos and
    sin times `scale`.

    Args:
        name: "" or the suffix of its inputs (`local` of `rope_cos_local`); `nope` for
            layers that rotate nothing.
        inv_freq: D_rotary / 2 entries, radians per token.
    """

    name: RopeName = ""
    inv_freq: Annotated[list[Finite], Field(min_length=1)]
    scale: Finite = 1.0


class Layer(ManifestModel):
    """What the host needs for one decoder layer.

    Layers with one rope table have one window, so that `suffix` names the inputs of
    both (`rope_cos_local`, `attn_mask_local`).

    Args:
        window: the attention window in tokens (None: all).
        rope: the name of the rope table.
        attends: whether the layer has attention. A layer without it has no cache and reads
            no rope tables or masks.
        H_kv, D: where they differ from the model's.
        source: the earlier layer whose cache rows this layer keeps a copy of, in place
            of rows of its own.
    """

    window: Count | None = None
    rope: RopeName = ""
    attends: bool = True
    H_kv: Count | None = Field(None, exclude_if=_is_none)
    D: Count | None = Field(None, exclude_if=_is_none)
    source: NonNegative | None = Field(None, exclude_if=_is_none)

    def heads(self, dims: Dims) -> tuple[int, int]:
        """The number of key heads and the channels of a head."""
        return self.H_kv or dims.H_kv, self.D or dims.D

    @property
    def shared_rows(self) -> tuple[str, str]:
        """Names of the tensors that carry a call's K and V rows from a source to the
        layers that copy them."""
        return K_ROWS + self.suffix, V_ROWS + self.suffix

    @property
    def suffix(self) -> str:
        """The end of the names of the layer's rope tables and masks."""
        return f"_{self.rope}" if self.rope else ""


class FileEntry(ManifestModel):
    """A file of the bundle: its path in the folder, its size, its hash."""

    path: RelativePath
    bytes: NonNegative
    sha256: Sha256


class StateEntry(ManifestModel):
    """Where a logical state is stored.

    Args:
        tensor: the name of the Core ML state that holds it; in a shard of another
            exporter's packages, the text of a `foreign.PlaneName`.
        shape: of the state.
        ring: the number of rows of a ring buffer, in which position p is in row p mod
            ring (None: no ring).
    """

    tensor: str
    shape: list[Count]
    ring: Count | None = None


class Shard(ManifestModel):
    """One `.mlpackage`, or a plug-in's package: its interface, its files, and the origin
    of its contents.

    Args:
        kind: `layers`: decoder layers; with routed experts `router`, one layer up to its
            router, and `expert`, one expert of it; `head`: a slice of the LM head.
        path: of the package.
        layers: the decoder layers [start, stop); (0, 0) in a head.
        rows: the rows [start, stop) of the checkpoint tensors that the shard holds in
            part; (0, 0) where it holds none in part. Which tensors these are follows
            from `kind`. `head`: vocabulary rows of the LM head. `expert`: the one row of
            a stack of experts that the shard holds, the number of the expert. `layers`:
            the rows of Gemma 4's projection per layer that belong to the layers.
        foreign: describes packages of another exporter, all of them below `path`.
        taps: layer → name of the program's value that holds its hidden output.
        weights: checkpoint tensor → name of the constant that holds it, or names of its
            pieces.
        offsets: checkpoint tensor → number that was added before it was stored (Gemma's
            1 + γ).
        modules: program value → source module.
        template: the name of the shard whose conversion gave this one its program.
        functions: program's function → the T that it takes; empty: the program has
            `main` alone.
        bytes: of all files.
    """

    name: str
    kind: Literal["layers", "router", "expert", "head"]
    path: RelativePath
    layers: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    foreign: Foreign | None = None
    inputs: Shapes
    outputs: Shapes
    states: dict[StateName, StateEntry] = {}
    taps: dict[int, str] = {}
    weights: dict[str, str | list[str]] = {}
    offsets: dict[str, float] = {}
    modules: dict[str, str] = {}
    template: str
    functions: dict[str, Count] = {}
    bytes: NonNegative
    files: Annotated[list[FileEntry], Field(min_length=1)]

    @property
    def layer_range(self) -> range:
        """The numbers of the decoder layers in the shard."""
        return range(*self.layers)

    @property
    def expert(self) -> int | None:
        """The number of the expert; None in a shard of another kind."""
        return self.rows[0] if self.kind == "expert" else None


class Embedding(ManifestModel):
    """Token embedding kept on the host, in float32:

        hidden = (weight[id] + bias) · scale_vector · scale

    Args:
        file: holds the table `weight` [V, C] and, where the family has them, the vectors
            `bias` and `scale` [C] (`scale_vector` above).
        scale: one number for all channels.
    """

    file: FileEntry
    scale: Finite = 1.0


class Tokens(ManifestModel):
    """Special tokens and, when the checkpoint has one, the tokenizer's files.

    Args:
        suppressed: tokens that generation never picks. Left out where there are none.
    """

    bos: int | None = None
    eos: list[int] = []
    suppressed: list[NonNegative] = Field([], exclude_if=_is_empty)
    files: list[FileEntry] = []


class Calibration(ManifestModel):
    """The text with which the weights were calibrated.

    Args:
        file: `calibration.npy`, the text's token ids, int32 [windows, window].
        ids_sha256: SHA-256 of these ids, little-endian int32, row after row.
        tokens: their number, windows · window.
        window: tokens that Hugging Face's model read at a time.
        seed: draws the windows from a longer text.
        method: `gptq`, the error feedback of arXiv 2210.17323 onto the entries of
            tables and onto integers.
        source: the name of the text's file.
        nearest: the compressed tensors that were not fitted to the text, such as stacks of
            experts: their weights are rounded to the nearest. Left out where every matrix
            was fitted.
    """

    file: FileEntry
    ids_sha256: Sha256
    tokens: Count
    window: Count
    seed: NonNegative
    method: Literal["gptq"] = "gptq"
    source: str
    nearest: list[str] = Field([], exclude_if=_is_empty)


class Selection(ManifestModel):
    """The text on which the formats of a mixed bundle were chosen, and the choice.

    Args:
        file: `selection.npy`, the text's token ids, int32 [windows, window].
        allocation: `allocation.json`, which `workbench.exporter.mixed` reads: the
            choices with their bytes, predicted milliseconds and KL, and the one that
            is stored.
        ids_sha256: SHA-256 of the ids, little-endian int32, row after row.
        tokens: their number, windows · window.
        window: tokens that Hugging Face's model read at a time.
        source: the name of the text's file.
    """

    file: FileEntry
    allocation: FileEntry
    ids_sha256: Sha256
    tokens: Count
    window: Count
    source: str


class Manifest(ManifestModel):
    """`bundle.json`.

    Args:
        checkpoint: `name`, `sha256` and `dtype` of the checkpoint.
        packages: versions of the Python packages that the bundle's bytes and values
            depend on, by name. Everywhere else a package is an `.mlpackage`.
        residual_exponent: `x` and `hidden` of every shard are the model's divided by
            2^exponent (`stream_scale`).
        formats: tensor → name of its preset, where that is not `options.compress`: of every
            matrix where `options.compress` is `mixed`; elsewhere of the matrices whose rows
            the groups of its tables do not divide, which have smaller groups.
        calibration: None, and left out of the file, where weights were rounded one by one.
        selection: None, and left out of the file, where no search chose the formats.
    """

    format: Literal["workbench-bundle"] = "workbench-bundle"
    version: Literal[2] = MANIFEST_VERSION
    family: str
    dims: Dims
    options: Options
    rope: list[Rope]
    layers: list[Layer]
    embedding: Embedding
    tokens: Tokens
    checkpoint: dict[str, str]
    packages: dict[str, str]
    residual_exponent: int = 0
    formats: dict[str, PresetName] = Field({}, exclude_if=_is_empty)
    calibration: Calibration | None = Field(None, exclude_if=_is_empty)
    selection: Selection | None = Field(None, exclude_if=_is_empty)
    shards: list[Shard]

    @property
    def foreign(self) -> Foreign | None:
        """The description of another exporter's packages, if the bundle consists of
        them."""
        return self.shards[0].foreign

    def preset_of(self, tensor: str) -> Preset:
        """How the matrix of a checkpoint's tensor is stored."""
        return find_preset(self.formats.get(tensor, self.options.compress))

    @property
    def shows_hidden(self) -> bool:
        """Whether every shard of layers outputs the hidden state of its last layer and
        reads that of the layer before; otherwise only caches and logits can be
        compared."""
        return self.foreign is None

    @property
    def gives_logits(self) -> bool:
        """Whether the packages output logits, not only the top tokens."""
        return not self.foreign or "top" not in self.foreign.roles.values()

    @property
    def constants_error(self) -> float:
        """The relative RMS by which K and V may be off because of constants inside
        another exporter's programs that the manifest does not list (rope tables,
        scales); 0 for the workbench's own programs."""
        return FOREIGN_ERROR if self.foreign else 0.0

    @property
    def stream_scale(self) -> float:
        """The power of two by which `x` and `hidden` of every shard are divided."""
        return 2.0**self.residual_exponent

    @model_validator(mode="after")
    def _check_shards(self):
        layers = [s.layers for s in self.shards if s.kind in ("layers", "router")]
        rows = [s.rows for s in self.shards if LOGITS in s.outputs]
        for part, ranges, count in (
            ("layer", layers, self.dims.L),
            ("row of the vocabulary", rows, self.dims.V),
        ):
            if not _cover_once(ranges, count):
                raise ValueError(f"the shards do not hold every {part} once, in order")
        return self

    @model_validator(mode="after")
    def _check_suppressed_tokens(self):
        if any(token >= self.dims.V for token in self.tokens.suppressed):
            raise ValueError("suppressed tokens are not of the vocabulary")
        return self

    @model_validator(mode="after")
    def _check_layers(self):
        used = {layer.rope for layer in self.layers}
        if len(self.layers) != self.dims.L or used - {rope.name for rope in self.rope}:
            raise ValueError("layers and rope tables are not those of L layers")
        return self

    def save(self, folder: Path) -> None:
        """Writes `bundle.json`."""
        (folder / paths.BUNDLE).write_text(self.model_dump_json(indent=1))


def _cover_once(ranges: list[tuple[int, int]], count: int) -> bool:
    """Whether ranges [start, stop), one after the other, hold every number below `count`
    once: [(0, 2), (2, 5)] those below 5."""
    end = 0
    for start, stop in ranges:
        if start != end:
            return False
        end = stop
    return end == count


def first_fault(problem: ValidationError, whole: str) -> tuple[str, dict[str, Any]]:
    """The name of the field that pydantic refuses first (`whole` for the model itself),
    and the error: `msg`, `input`, `type`."""
    error = problem.errors(include_url=False)[0]
    error["msg"] = re.sub("^(Value error, |Input should be )", "", error["msg"])
    return ".".join(map(str, error["loc"])) or whole, error
