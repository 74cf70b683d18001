"""What coremltools' own conversion makes of every shard of a bundle."""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from tiny import build

from miltorch.quiet import coremltools
from workbench.bundle import Bundle, FileEntry, file_entries
from workbench.export import convert, export, read_plan
from workbench.export.shards import specs
from workbench.export.template import (
    WEIGHTS,
    find_slots,
    operations,
    read_package,
    save_package,
    values_of,
)
from workbench.models.checkpoint import Checkpoint


def small(checkpoint: Path, target: Path, **options) -> Bundle:
    return export(checkpoint, target, progress=False, **{"max_seq_len": 16} | options)


def files(bundle: Bundle) -> dict[str, list[FileEntry]]:
    """The files of each shard of a bundle."""
    return {shard.name: shard.files for shard in bundle.manifest.shards}


def exact_tables():
    """Context manager inside which coremltools' palettization uses its exact k-means
    for tensors of every size."""
    from coremltools.optimize.coreml import _quantization_passes as passes

    cluster = passes._get_kmeans_lookup_table_and_weight

    def exact(nbits, weight, **_):
        return cluster(nbits, weight, force_kmeans1d=True)

    return patch.object(passes, "_get_kmeans_lookup_table_and_weight", exact)


def conversions(
    bundle: Bundle, checkpoint: Path, folder: Path
) -> dict[str, list[FileEntry]]:
    """The files of each shard as coremltools converts it from the checkpoint with the
    bundle's options: by its own code alone, if with its exact k-means."""
    coremltools()
    source, options = Checkpoint(checkpoint), bundle.manifest.options
    plan = read_plan(source, options)
    made = {}
    for spec in specs(plan, options):
        package = folder / f"{spec.name}.mlpackage"
        module, weights = build(spec, source, plan, options)
        programs = {}
        with ExitStack() as stack:
            stack.enter_context(exact_tables())
            for name, T in (options.functions or {"main": None}).items():
                model = convert.to_program(module, spec, options, weights, T)
                programs[name] = folder / "parts" / f"{name}.mlpackage"
                programs[name].parent.mkdir(parents=True, exist_ok=True)
                save_package(model, programs[name])
            convert.joined(programs).rename(package)
        made[spec.name] = file_entries(folder, package)
    return made


def contents(package: Path) -> tuple[list[str], dict[str, list[bytes]]]:
    """The kinds of a program's operations but constants, and the bytes of each constant
    by the name of its result."""
    ops = operations(read_package(package))
    blob = (package / WEIGHTS).read_bytes()
    values = {}
    for name, slots in find_slots(ops, blob).items():
        values[name] = []
        for slot in slots:
            inline = values_of(ops[slot.op])[slot.role].immediateValue.tensor
            held = blob[slot.start : slot.stop] if slot.stop else inline.bytes.values
            values[name].append((slot.role, held))
    return [op.type for op in ops if not op.type.startswith("const")], values
