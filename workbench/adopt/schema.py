"""The schema of `foreign.yaml`, which describes packages of another exporter as a
manifest describes a bundle. `workbench adopt --schema` prints it as a JSON schema."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench import paths
from workbench.bundle.manifest import first_fault
from workbench.errors import InputError

FILE = paths.FOREIGN
Axis = Annotated[int, Field(ge=1)] | Literal["T", "S", "E", "C", "D", "H", "L", "V"]
Position = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Rows = Literal["absolute", "ring", "shift", "right"]
INPUT_AXES: dict[str, list[Axis]] = {
    "ids": [1, "T"],
    "hidden": [1, "T", "C"],
    "positions": ["T"],
    "start": [1],
    "end": [1],
    "mask": [1, 1, "T", "S"],
    "write": [1, 1, "S", "T"],
    "cos": [1, "T", "D"],
    "sin": [1, "T", "D"],
    "constant": [],
}
OUTPUT_AXES: dict[str, list[Axis]] = {
    "hidden": [1, "T", "C"],
    "logits": [1, "T", "V"],
    "top": [],
    "top_value": [],
    "ignored": [],
}
AXES_HELP = (
    "The axes of the array, in order, each a size (nearly always 1) or a letter: `T` tokens of the "
    "call; `S` cache rows, or the columns of a mask, as many as the package declares; `E` columns "
    "of a mask where there is one for every token in the cache once the call is done, start + T; "
    "`C` channels of the residual stream; `D` width of a head, of a rope table its own; `H` "
    "key/value heads; `L` planes of a packed state; `V` vocabulary. T may be written 1 where calls "
    "have one token. "
)
ROWS_HELP = (
    "Which row holds which position. `absolute`: row r holds position r. `ring`: position p is in "
    "row p modulo the number of rows. `shift`: rows fill from 0 on; once all are full, every call "
    "moves them up and writes at the end. `right`: every call moves them up and writes at the end, "
    "from the first token on."
)


class Described(BaseModel):
    """A part of the file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class Tensor(Described):
    """An input or an output, whose kind decides the letters of its axes."""

    usual: ClassVar[dict[str, list[Axis]]]

    @model_validator(mode="after")
    def _check_axes(self):
        """Sets missing axes; refuses letters that a kind of array lacks, repeated
        letters, and missing ones except T."""
        usual = self.usual[self.kind]
        self.axes = self.axes or list(usual)
        letters = [axis for axis in self.axes if axis != 1]
        if self.kind == "mask":
            letters = ["S" if axis == "E" else axis for axis in letters]
        needed = set(usual) - {1}
        whole = needed - {"T"} <= set(letters) <= needed
        if usual and not (whole and len(letters) == len(set(letters))):
            raise ValueError(
                f"axes {self.axes} of {self.kind} are not, in some order, those of {usual}"
            )
        return self


class Input(Tensor):
    """One input of a package: its meaning, and the values that the host writes into
    it."""

    usual = INPUT_AXES
    kind: Literal[tuple(INPUT_AXES)] = Field(
        description="`ids`: token ids. `hidden`: what the part before hands on; in the first part "
        "the embeddings, looked up by the host. `positions`: the position of every token. `start`: "
        "the position of the first token, where a package writes at `current_pos`. `end`: tokens "
        "in the cache once the call is done. `mask`: added to the attention scores, 0 where a "
        "token may look and `blocked` where not. `write`: one-hot columns, 1 at the row that each "
        "token is written to. `cos`, `sin`: rope tables made by the host from the checkpoint's "
        "configuration. `constant`: always `value`."
    )
    axes: list[Axis] = Field(
        default_factory=list,
        description=AXES_HELP
        + "Left out: ids [1, T], hidden [1, T, C], positions [T], start and "
        "end [1], mask [1, 1, T, S], write [1, 1, S, T], cos and sin [1, T, D], constant as the "
        "package declares it.",
    )
    blocked: float = Field(
        default=-1e4, description="mask: what keeps a token from looking, -1e4 or -inf."
    )
    window: Count | None = Field(
        default=None,
        description="mask: also blocks positions this many or more before the token; null: none.",
    )
    rows: Rows = Field(default="absolute", description=f"mask, write: {ROWS_HELP}")
    width: Literal["half", "full"] = Field(
        default="full",
        description="cos, sin: `full`, D angles of which the second half repeats the first; "
        "`half`, D / 2 of them.",
    )
    layer_type: str | None = Field(
        default=None,
        description="cos, sin: which of the checkpoint's rope tables, where layers of several "
        "types have their own (full_attention, sliding_attention).",
    )
    theta: float | None = Field(
        default=None,
        gt=0,
        description="cos, sin: the base that the exporter's host uses, unscaled; null: base and "
        "scaling of the checkpoint's configuration.",
    )
    value: float = Field(default=0.0, description="constant: every element.")


class Output(Tensor):
    """One output of a package."""

    usual = OUTPUT_AXES
    kind: Literal[tuple(OUTPUT_AXES)] = Field(
        description="`hidden`: goes into the next part. `logits`: of the whole vocabulary, or a "
        "slice of it: slices are joined in the order of the parts and of their outputs. `top`: the "
        "token with the largest logit, where the argmax is inside; `top_value`: that logit."
    )
    axes: list[Axis] = Field(
        default_factory=list,
        description=AXES_HELP
        + "Left out: hidden [1, T, C], logits [1, T, V]; top and top_value "
        "are read as they come, the pieces of one token side by side.",
    )
    offsets: list[Position] = Field(
        default_factory=list,
        description="top: the first token of every vocabulary slice, where the ids in the output "
        "count from the start of a slice; empty: they are tokens.",
    )


class Function(Described):
    """One way to call a package: the numbers of tokens and the positions that it
    takes."""

    name: str | None = Field(
        default=None, description="The function of the package; null: its default one."
    )
    t_min: Count = Field(default=1, description="Fewest tokens of a call.")
    t_max: Count = Field(default=1, description="Most tokens of a call.")
    first: Position = Field(
        default=0, description="Smallest position that a call may start at."
    )
    until: Position | None = Field(
        default=None,
        description="A call must end at or before this position (start + T ≤ until); null: the "
        "context.",
    )
    logits: bool = Field(
        default=True,
        description="false: what a call hands on gives no logits (a prefill that leaves out the "
        "end of the last layer). The token whose logits are needed is then run by another one.",
    )

    @model_validator(mode="after")
    def _ordered(self):
        if self.t_min > self.t_max:
            raise ValueError(f"t_min = {self.t_min} is above t_max = {self.t_max}")
        return self


class Part(Described):
    """One package. Parts run in the order of the file: those with a state once per
    call, those without one (embeddings, heads) as often as their own T requires."""

    package: str = Field(
        description="Path of the .mlpackage, absolute or relative to the folder of this file."
    )
    functions: list[Function] = Field(
        default_factory=lambda: [Function()],
        min_length=1,
        description="The functions that are called, the preferred one first where several fit.",
    )
    inputs: dict[str, Input] = Field(
        description="Every input, by its name in the package. Those that a function does not have "
        "are left out when it is called."
    )
    outputs: dict[str, Output] = Field(
        description="Every output, by its name in the package."
    )


class State(Described):
    """One state tensor: its layers, its contents (keys, values or both) and its
    axes."""

    name: str = Field(
        description="The name in the package (Core ML turns dots into underscores)."
    )
    part: Position | None = Field(
        default=None,
        description="The part that has this state, counted from 0; null: one state is shared by "
        "all parts and functions that declare the name.",
    )
    layers: list[Position] = Field(
        min_length=1,
        description="The decoder layers whose rows it holds, in the order it has.",
    )
    holds: Literal["kv", "k", "v"] = Field(
        default="kv", description="Keys, values, or both."
    )
    order: Literal["halves", "pairs"] = Field(
        default="halves",
        description="kv: `halves`, plane i of n layers holds the i-th layer's keys and plane n + i "
        "its values; `pairs`, planes 2i and 2i + 1.",
    )
    axes: list[Axis] = Field(
        default=["L", "H", "S", "D"],
        description=AXES_HELP + "A state of one plane may have no L.",
    )
    rows: Rows = Field(default="absolute", description=ROWS_HELP)


class Embedding(Described):
    """The embedding table of the host, needed if the first part takes `hidden`."""

    file: str | None = Field(
        default=None,
        description="A file of float16 numbers [V, C] that the exporter wrote, absolute or "
        "relative to this file; null: the checkpoint's table, rounded to float16.",
    )
    scale: float | None = Field(
        default=None,
        description="A factor of what is looked up; null: that of the checkpoint's model (√C for "
        "Gemma, else 1).",
    )


class Foreign(Described):
    """Packages of another exporter that together form one language model with a
    cache."""

    version: Literal[1] = Field(default=1, description="Of this format.")
    exporter: str = Field(
        default="", description="Whose packages these are; only shown."
    )
    checkpoint: str | None = Field(
        default=None,
        description="The Hugging Face folder that was exported, absolute or relative to this file; "
        "null: commands that need it take --checkpoint.",
    )
    context: Count = Field(description="Positions that a sequence may have.")
    parts: list[Part] = Field(
        min_length=1, description="The packages, in the order they run in."
    )
    states: list[State] = Field(min_length=1, description="The caches of all layers.")
    embedding: Embedding = Field(
        default_factory=Embedding, description="Only where the host embeds the tokens."
    )


def parse(raw: object, name: str) -> Foreign:
    """The description in `raw`, the contents of a YAML file.

    Raises:
        InputError: names the first value that does not fit.
    """
    try:
        return Foreign.model_validate(raw)
    except ValidationError as problem:
        where, fault = first_fault(problem, FILE)
        raise InputError(
            f"{name}: {where}",
            str(fault.get("input", "nothing"))[:200],
            fault["msg"],
            "correct it; workbench adopt --schema describes every field",
        ) from None


def load(path: Path) -> Foreign:
    """Reads a `foreign.yaml`."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise InputError(
            str(path),
            str(problem).splitlines()[0],
            "a YAML file that describes packages",
            "run: workbench adopt PACKAGES --checkpoint HF --out FOLDER",
        ) from None
    return parse(raw, str(path))


def dump(foreign: Foreign) -> str:
    """The YAML text of a description, without default values."""
    return yaml.safe_dump(
        foreign.model_dump(mode="json", exclude_defaults=True) | {"version": 1},
        sort_keys=False,
        width=98,
        default_flow_style=None,
        allow_unicode=True,
    )
