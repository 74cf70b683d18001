"""The settings of an export: how the values of its matrices are chosen, and whether its
options apply to a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from workbench.bundle import Options
from workbench.bundle.manifest import first_fault
from workbench.bundle.names import MATRIX_STATE
from workbench.bundle.presets import MIXED, REPLACED, find_preset
from workbench.checkpoint_checks import positions_error
from workbench.errors import InputError, needed_value
from workbench.exporter.weights import all_weights, find_presets
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

if TYPE_CHECKING:
    from workbench.exporter.calibrate import Text
    from workbench.exporter.mixed import SearchSettings

MATRIX_T_MAX = 8  # the most tokens of a call where layers keep a matrix state


@dataclass(frozen=True)
class Compression:
    """How the stored values of the matrices are chosen.

    A mixed bundle has `formats` or `search`; other bundles have neither.

    Attributes:
        text: the matrices are compressed for their inputs on it; None: each weight is
            rounded to the nearest.
        formats: checkpoint tensor → name of its preset, of every matrix.
        search: how a search chooses the presets.
    """

    text: "Text | None" = None
    formats: Mapping[str, str] | None = None
    search: "SearchSettings | None" = None

    @property
    def key(self) -> list:
        """Everything beside the options that decides the stored values, as JSON."""
        parts = []
        if self.text is not None:
            parts += [self.text.sha256, self.text.source, self.text.seed]
        if self.formats is not None:
            parts.append(dict(self.formats))
        if self.search is not None:
            parts.append(self.search.key)
        return parts


def check_formats(options: Options, compression: Compression) -> None:
    """Raises an InputError for `mixed` without formats or with two sources of them, for
    formats without `mixed`, and for a preset that no matrix can have."""
    has_formats = compression.formats is not None
    has_search = compression.search is not None
    if has_formats and has_search:
        needed = "the presets, or a search that chooses them"
        raise InputError("formats", "formats and a search", needed, "leave one out")
    if (has_formats or has_search) and options.preset != MIXED:
        actual = f"compress = {options.compress}"
        raise InputError("formats", actual, "compress = mixed", "leave formats out")
    if options.preset != MIXED:
        return
    if not has_formats and not has_search:
        raise InputError(
            "--compress mixed",
            "no preset for each matrix",
            "the presets, or a search that chooses them",
            "run: workbench export CHECKPOINT BUNDLE --compress mixed --calibrate TEXT "
            "--max-kl 0.05",
        )
    for tensor, name in (compression.formats or {}).items():
        subject, step = f"format of {tensor!r}", "choose another one"
        try:
            preset = find_preset(name)
        except ValueError as problem:
            raise InputError(subject, name, str(problem), step) from None
        if preset == MIXED or name in REPLACED:
            raise InputError(subject, name, "a preset of one matrix", step)


def check_all_named(
    checkpoint: Checkpoint, plan: Plan, options: Options, formats: Mapping[str, str]
) -> None:
    """Raises an InputError unless `formats` names every matrix of a bundle and nothing
    else."""
    # raises for a matrix without a preset
    weights = all_weights(checkpoint, plan, options, find_presets(formats))
    matrices = {weight.tensor for weight in weights if weight.is_compressible}
    for tensor in sorted(formats.keys() - matrices):
        needed, step = "the name of a matrix", "choose the formats again"
        raise InputError(f"format of {tensor!r}", "no matrix", needed, step)


def read_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint, once `check_options` has accepted the
    options: no weight is read before.

    Raises:
        InputError: a family or configuration that is not supported; see
            `check_options`.
    """
    family = family_of(checkpoint.config)
    try:
        plan = family.plan(checkpoint.config)
    except ValidationError as problem:
        name, error = first_fault(problem, "config.json")
        actual, step = repr(error.get("input")), "check config.json"
        raise InputError(name, actual, needed_value(error), step) from None
    except TypeError as problem:  # null in place of a number
        needed, step = "a number wherever the family reads one", "check config.json"
        raise InputError("config.json", str(problem), needed, step) from problem
    check_options(options, plan)
    if hasattr(family, "with_weights"):
        return family.with_weights(plan, checkpoint)
    return plan


def check_options(options: Options, plan: Plan) -> None:
    """Raises an InputError for options that do not apply to a family or to its
    configuration."""
    config = plan.config

    def refuse(option: str, needed: str, next_step: str) -> NoReturn:
        actual = f"a {config.model_type} checkpoint"
        raise InputError(option, actual, needed, next_step)

    if options.sliding == "window":
        needed = "mask or ring: only other exporters' packages have such a cache"
        refuse("sliding = window", needed, "leave out --sliding")
    if options.sliding == "ring" and not any(layer.window for layer in plan.layers):
        needed = "a family with sliding attention"
        refuse("sliding = ring", needed, "leave out --sliding")
    if options.moe == "routed" and not plan.experts:
        refuse("moe = routed", "a family with experts", "leave out --moe")
    has_matrix = any(MATRIX_STATE in states for states in plan.side_states)
    if has_matrix and options.t_max > MATRIX_T_MAX:
        needed = (
            f"at most {MATRIX_T_MAX}: fp16 cannot hold what a longer call does to a "
            "matrix state"
        )
        step = f"export with --tokens 1-{MATRIX_T_MAX} or fewer"
        refuse(f"tokens = {options.tokens}", needed, step)
    max_seq_len = f"max_seq_len = {options.max_seq_len}"
    if plan.max_positions and options.max_seq_len > plan.max_positions:
        needed = (
            f"at most {plan.max_positions}, the length beyond which its positions are "
            "scaled"
        )
        refuse(max_seq_len, needed, "export with a smaller --max-seq-len")
    trained = getattr(config, "max_position_embeddings", None)
    if trained and options.max_seq_len > trained:
        raise positions_error(config.model_type, options.max_seq_len, trained)
