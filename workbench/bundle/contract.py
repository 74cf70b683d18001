"""The words of `bundle.json`: one pydantic model per part, cross-checked when built.

Axes, everywhere: B batch; C channels (d_model); T tokens in this call; S max_seq_len; H query heads; H_kv key/value
heads; D head_dim; L decoder layers; V vocabulary; R router width. A dimension written "T" in a shape is the free one.
"""

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

VERSION = 1

# Names that cross the Core ML boundary.
X, HIDDEN, LOGITS = "x", "hidden", "logits_k"
ROPE_COS, ROPE_SIN = "rope_cos", "rope_sin"
ATTN_MASK, KV_WRITE_MASK, POS = "attn_mask", "kv_write_mask", "pos"
TAIL_SELECT = "tail_select"
ROUTER_STATE, ROUTER_STATE_OUT = "router_state", "router_state_out"
K_STATE, V_STATE, CONV_STATE, V_DELAYED_STATE = "k_state", "v_state", "conv_state", "v_delayed_state"

MASKED = -1e4  # additive mask value of a blocked position: finite in fp16, far below any real score


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or re.match(r"^[A-Za-z]:", path) or not pure.parts:
        raise ValueError(f"path {path!r} must stay inside the bundle")
    return path


RelativePath = Annotated[str, AfterValidator(_inside)]
Count = Annotated[int, Field(ge=1)]


class Dims(Part):
    """Sizes of the model; see the axis glossary above."""

    C: Count
    H: Count
    H_kv: Count
    D: Count
    L: Count
    V: Count

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.H % self.H_kv:
            raise ValueError(f"H = {self.H} query heads need a multiple of H_kv = {self.H_kv}")
        return self


class Options(Part):
    """What the user chose at export. `t_max` = 1 makes fixed T = 1 shards, more makes RangeDim(1..t_max)."""

    max_seq_len: Count = 512
    t_max: Count = 4
    batch: Count = 1
    layers_per_shard: Count = 1
    compress: Literal["fp16", "int8-tensor", "int8-channel", "int4-block32", "lut4", "lut6"] = "fp16"
    kv_write: Literal["mask", "slice"] = "mask"
    layout: Literal["bct1", "bc1t"] = "bct1"
    states: Literal["separate", "packed"] = "separate"
    moe: Literal["dense", "routed"] = "dense"
    t: Literal["range", "fixed"] = "range"
    sliding: Literal["mask", "ring"] = "mask"

    @model_validator(mode="after")
    def _fits(self):
        if self.t_max > self.max_seq_len:
            raise ValueError(f"t_max = {self.t_max} must not pass max_seq_len = {self.max_seq_len}")
        return self


class Rope(Part):
    """One rotary table, made by the host: angle = position · inv_freq, cos and sin times `scale`.

    `name` is "" or the suffix of its inputs (`rope_cos_local`); `inv_freq` has D_rotary / 2 entries (radians per token).
    """

    name: Literal["", "local", "global"] = ""
    inv_freq: list[float]
    scale: float = 1.0


class Layer(Part):
    """What the host must know of one decoder layer: its attention window in tokens (None: all) and its rope table."""

    window: Count | None = None
    rope: Literal["", "local", "global"] = ""


class FileEntry(Part):
    path: RelativePath
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class State(Part):
    """A logical state and where it lives: Core ML state `tensor`, or the slice [start, stop) of its axis `axis`.

    `ring` is the number of slots of a ring buffer: row p lives in slot p mod ring.
    """

    tensor: str
    shape: list[Count]
    axis: int | None = None
    start: int = 0
    stop: int = 0
    ring: Count | None = None


class Shard(Part):
    """One `.mlpackage`: its interface, its files, and where its contents came from."""

    name: str
    kind: Literal["layers", "router", "expert", "head"]
    path: RelativePath
    layers: tuple[int, int] = (0, 0)  # decoder layers [start, stop)
    rows: tuple[int, int] = (0, 0)  # vocabulary rows [start, stop) of a head slice
    expert: int | None = None
    inputs: dict[str, list[int | Literal["T"]]]
    outputs: dict[str, list[int | Literal["T"]]]
    states: dict[str, State] = {}
    taps: dict[int, str] = {}  # layer → name of the value that holds its hidden output
    weights: dict[str, str] = {}  # checkpoint tensor → name of the constant that holds it
    modules: dict[str, str] = {}  # program value → source module
    how: Literal["converted", "stamped"] = "converted"
    bytes: Annotated[int, Field(ge=0)]
    files: list[FileEntry]


class Embedding(Part):
    """Token embedding kept on the host: hidden = (weight[id] + bias) · scale, in float32."""

    file: FileEntry
    scale: float = 1.0


class Tokens(Part):
    """Special tokens and, when the checkpoint has one, the tokenizer's files."""

    bos: int | None = None
    eos: list[int] = []
    files: list[FileEntry] = []


class Manifest(Part):
    """`bundle.json`."""

    format: Literal["workbench-bundle"] = "workbench-bundle"
    version: Literal[1] = VERSION
    family: str
    dims: Dims
    options: Options
    rope: list[Rope]
    layers: list[Layer]
    embedding: Embedding
    tokens: Tokens
    checkpoint: dict[str, str]  # name, sha256, dtype
    packages: dict[str, str]
    residual_exponent: int = 0  # the stream inside the shards is 2^-exponent of the model's
    shards: list[Shard]

    @model_validator(mode="after")
    def _whole(self):
        if len(self.layers) != self.dims.L:
            raise ValueError(f"{len(self.layers)} layer entries for L = {self.dims.L}")
        covered = [i for s in self.shards if s.kind in ("layers", "router") for i in range(*s.layers)]
        if sorted(set(covered)) != list(range(self.dims.L)):
            raise ValueError("the shards do not cover every decoder layer")
        rows = sorted(s.rows for s in self.shards if s.kind == "head")
        if [r[0] for r in rows] + [self.dims.V] != [0] + [r[1] for r in rows]:
            raise ValueError("the head slices do not cover the vocabulary")
        return self
