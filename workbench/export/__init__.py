"""Exports a checkpoint as a bundle: stateful Core ML shards, host tables and manifest.
Nothing here depends on how shards are run."""

import errno
import hashlib
import json
import sys
import types
from pathlib import Path

from pydantic import ValidationError

from miltorch.quiet import coremltools
from workbench import paths
from workbench.bundle import Bundle, Options, Writer
from workbench.bundle.manifest import MANIFEST_VERSION, first_fault
from workbench.bundle.names import MATRIX_STATE
from workbench.errors import InputError
from workbench.export import cached
from workbench.export.write import write_bundle
from workbench.files import locked, project_root
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

__all__ = ["bundle_for", "bundle_name", "export", "options", "read_plan", "versions"]
# no room left: on the disk, for this user, in one file
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
MATRIX_T_MAX = 8  # most tokens a call where layers keep a matrix


def options(**chosen) -> Options:
    """Export options from keywords; a value that is out of range or unknown is refused
    by name."""
    try:
        settings = Options(**chosen)
    except ValidationError as problem:
        name, error = first_fault(problem, "export options")
        limits = error.get("ctx", {})
        choices = str(limits.get("expected")).replace(" or ", ", ").replace("'", "")
        needed = {
            "extra_forbidden": f"one of the options {', '.join(Options.model_fields)}",
            "literal_error": f"one of {choices}",
            "string_pattern_mismatch": "tokens of a call: 1-4, 4 or 1,64",
            "greater_than_equal": f"at least {limits.get('ge')}",
            "less_than_equal": f"at most {limits.get('le')}",
        }.get(error["type"], error["msg"])
        raise InputError(
            name, repr(error.get("input")), needed, "see: workbench export --help"
        ) from None
    if settings.plugin:
        settings.plugin.check(settings)
    return settings


def export(
    checkpoint: str | Path,
    bundle: str | Path | None = None,
    *,
    progress: bool = True,
    **chosen,
) -> Bundle:
    """Exports the Hugging Face folder `checkpoint` to the new folder `bundle`, or opens
    the bundle of that checkpoint and these options in `data/bundles`, where it is
    exported if it is missing.

    Args:
        checkpoint: folder with config.json and safetensors (fp32, fp16 or bf16, whole
            or sharded).
        bundle: where the bundle shall be; it is there as a whole or not at all.
        progress: show a progress bar.
        chosen: fields of `workbench.bundle.Options`.

    Returns:
        The opened bundle.

    Raises:
        InputError: unusable checkpoint, unsupported family or option, target that is
            taken, no room on the disk.
    """
    coremltools()  # quietly, before a part of it is imported by itself
    settings = options(**chosen)
    source = Checkpoint(paths.find(checkpoint))
    if bundle is None:
        project = project_root(Path.cwd()) or Path.cwd()
        return bundle_for(source, settings, project / "data" / "bundles", progress)
    plan = read_plan(source, settings)
    try:
        with Writer(Path(bundle)) as writer:
            packages = versions(settings)
            manifest = write_bundle(writer, source, plan, settings, packages, progress)
            return writer.finish(manifest)
    except OSError as problem:
        raise _stopped(f"bundle {bundle}", problem) from problem


def bundle_name(checkpoint: str, sha256: str, options: Options) -> str:
    """Checkpoint and a hash of everything that decides a bundle's bytes."""
    parts = [MANIFEST_VERSION, sha256, options.model_dump(), versions(options)]
    text = json.dumps(parts, sort_keys=True)
    return f"{checkpoint}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def bundle_for(
    checkpoint: Checkpoint, options: Options, folder: Path, progress: bool = False
) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` by one process at
    a time.

    An existing bundle is opened; a damaged one is exported again, with a warning that
    has the reason."""
    path = folder / bundle_name(checkpoint.name, checkpoint.sha256, options)
    with locked(cached.lock(path)):
        return cached.opened(path) or export(
            checkpoint.path, path, progress=progress, **options.model_dump()
        )


def _stopped(subject: str, problem: OSError) -> InputError:
    """The InputError for an OSError during an export; it advises to free room only if
    the disk is full."""
    reason = f"{problem.strerror or problem}"
    if problem.errno in FULL:
        needed = "a writable disk with room for the bundle"
        step = "free some room and export again"
        return InputError(subject, reason, needed, step)
    if problem.filename:
        reason += f" ({problem.filename})"
    needed = "files that can be written and read"
    return InputError(subject, reason, needed, "correct this, or choose another target")


def versions(options: Options) -> dict[str, str]:
    """Versions of the packages that a bundle's bytes and values depend on, by name."""
    from importlib.metadata import version

    names = ["coremltools", "numpy", "torch", "transformers", "workbench"]
    if options.plugin:
        names += options.plugin.packages
    return {name: version(name) for name in names}


def read_plan(source: Checkpoint, options: Options) -> Plan:
    """The family's plan for a checkpoint. Raises an InputError for options that do not
    apply to the family."""
    family = family_of(source.config)
    subject = f"a {source.config.model_type} checkpoint"
    plan = family.plan(source.config)
    windows = any(layer.window for layer in plan.layers)
    matrices = any(MATRIX_STATE in states for states in plan.side_states)
    longest = plan.max_positions or options.max_seq_len
    # (does not apply, option, what is needed, next step)
    refusals = [
        (
            options.sliding == "window",
            "sliding = window",
            "mask or ring: only other exporters' packages have such a cache",
            "leave out --sliding",
        ),
        (
            options.moe == "routed" and not plan.experts,
            "moe = routed",
            "a family with experts",
            "leave out --moe",
        ),
        (
            options.sliding == "ring" and not windows,
            "sliding = ring",
            "a family with sliding attention",
            "leave out --sliding",
        ),
        (
            options.t_max > MATRIX_T_MAX and matrices,
            f"tokens = {options.tokens}",
            f"at most {MATRIX_T_MAX}: "
            "fp16 cannot hold what more tokens at once do to a matrix state",
            f"export with --tokens 1-{MATRIX_T_MAX} or fewer",
        ),
        (
            options.max_seq_len > longest,
            f"max_seq_len = {options.max_seq_len}",
            f"at most {longest}, the length beyond which its positions are scaled",
            "export with a smaller --max-seq-len",
        ),
    ]
    for refused, option, needed, step in refusals:
        if refused:
            raise InputError(option, subject, needed, step)
    if hasattr(family, "settle"):
        return family.settle(plan, source)
    return plan


class _CallableModule(types.ModuleType):
    """`from workbench import export` gives this module, and `export(CHECKPOINT)` calls
    its function of the same name."""

    def __call__(self, *args, **options) -> Bundle:
        return export(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
