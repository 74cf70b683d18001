"""What coremltools' own conversion makes of every shard of a bundle."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from miltorch.quiet import coremltools
from workbench.bundle import Bundle, FileEntry, file_entries
from workbench.exporter import export, read_plan, template
from workbench.exporter.shards import specs
from workbench.exporter.template import read_package
from workbench.exporter.weights import blank, load_values, weight_sources
from workbench.models.checkpoint import Checkpoint


def small(checkpoint: Path, target: Path, **options) -> Bundle:
    return export(
        checkpoint, target, **{"max_seq_len": 16, "compress": "fp16"} | options
    )


def files(bundle: Bundle) -> dict[str, list[FileEntry]]:
    """The files of each shard of a bundle."""
    return {shard.name: shard.files for shard in bundle.manifest.shards}


def exact_tables(stack: ExitStack) -> None:
    """Makes coremltools' palettization choose tables by its exact k-means, for tensors of every
    size, until `stack` ends."""
    from coremltools.optimize.coreml import _quantization_passes as passes

    palettes, name = passes.palettize_weights, "_get_kmeans_lookup_table_and_weight"
    compress, cluster = palettes.blockwise_compress, getattr(passes, name)

    def by_clusters(self, data, mode, *options, **more):
        return compress(data, "KMEANS", *options, **more)

    def exact(nbits, weight, **_):
        return cluster(nbits, weight, force_kmeans1d=True)

    stack.enter_context(patch.object(palettes, "blockwise_compress", by_clusters))
    stack.enter_context(patch.object(passes, name, exact))


def conversions(
    bundle: Bundle, checkpoint: Path, folder: Path
) -> dict[str, list[FileEntry]]:
    """The files of each shard as coremltools' own code converts it from the checkpoint with the
    bundle's options, with its exact k-means."""
    coremltools()
    source, options = Checkpoint(checkpoint), bundle.manifest.options
    plan = read_plan(source, options)
    converted = {}
    for spec in specs(plan, options):
        package = folder / f"{spec.name}.mlpackage"
        module, programs = blank(spec, plan, options), {}
        weights = weight_sources(spec, source, plan, options)
        for weight in weights:
            values = load_values(weight, source).float().reshape(weight.shape)
            module.get_parameter(weight.path).data = values
        module.requires_grad_(False).eval()
        with ExitStack() as stack:
            exact_tables(stack)
            for name, T in (options.tiling.functions or {"main": None}).items():
                model = template.to_program(module, spec, options, weights, T)
                programs[name] = folder / "parts" / f"{name}.mlpackage"
                shutil.rmtree(programs[name], ignore_errors=True)
                model.save(str(programs[name]))
            template.joined(programs).rename(package)
        model, listed = read_package(package), template.pinned_manifest(package)
        (package / template.MODEL).write_bytes(template.serialize(model))
        (package / template.MANIFEST).write_text(listed)
        converted[spec.name] = file_entries(folder, package)
    return converted
