"""Small bundles, and the files that coremltools' own conversion makes of each of their shards."""

import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import tiny

from miltorch.coremltools_import import coremltools
from workbench.bundle import Bundle, FileEntry, file_entries
from workbench.exporter import read_plan, template
from workbench.exporter.shards import specs
from workbench.exporter.tables import group_tables, nearest_entries
from workbench.exporter.template import read_package
from workbench.exporter.weights import empty_module, load_values, weight_sources
from workbench.models.checkpoint import Checkpoint


def export_small(checkpoint: Path, target: Path, **options) -> Bundle:
    """Exports a checkpoint with `max_seq_len` 16 in fp16, unless `options` has others."""
    options = {"max_seq_len": 16, "compress": "fp16"} | options
    return tiny.export(checkpoint, target, **options)


def list_files(bundle: Bundle) -> dict[str, list[FileEntry]]:
    """Name of a shard → its files."""
    return {shard.name: shard.files for shard in bundle.manifest.shards}


def use_exporter_tables(stack: ExitStack) -> None:
    """Until `stack` ends, coremltools' palettization takes the exporter's lookup table of each
    group instead of its own, so that a comparison shows only how tables are stored."""
    from coremltools.optimize.coreml import _quantization_passes as passes

    palettes, name = passes.palettize_weights, "_get_kmeans_lookup_table_and_weight"
    compress = palettes.blockwise_compress

    def by_clusters(self, data, mode, *options, **more):
        return compress(data, "KMEANS", *options, **more)

    def cluster(nbits, weight, **_):
        values = weight.reshape(1, -1).astype(np.float16)
        table = group_tables(values, 1, 1 << nbits)
        indices = nearest_entries(np.float32(values), np.float32(table))
        return table[0], indices.reshape(-1)

    stack.enter_context(patch.object(palettes, "blockwise_compress", by_clusters))
    stack.enter_context(patch.object(passes, name, cluster))


def convert_shards(
    bundle: Bundle, checkpoint: Path, folder: Path
) -> dict[str, list[FileEntry]]:
    """Converts each shard of a bundle by coremltools' own code, with all work of its passes, from
    the checkpoint with the bundle's options and the exporter's lookup tables. Returns name of a
    shard → its files."""
    coremltools()
    source, options = Checkpoint(checkpoint), bundle.manifest.options
    plan = read_plan(source, options)
    converted = {}
    for spec in specs(plan, options):
        package = folder / f"{spec.name}.mlpackage"
        module, programs = empty_module(spec, plan, options), {}
        weights = weight_sources(spec, source, plan, options)
        for weight in weights:
            values = load_values(weight, source).float().reshape(weight.shape)
            module.get_parameter(weight.path).data = values
        module.requires_grad_(False).eval()
        with ExitStack() as stack:
            use_exporter_tables(stack)
            stack.enter_context(patch.object(template, "lean_passes", nullcontext))
            for name, T in (options.tiling.functions or {"main": None}).items():
                model = template.convert_module(module, spec, options, weights, T)
                programs[name] = folder / "parts" / f"{name}.mlpackage"
                shutil.rmtree(programs[name], ignore_errors=True)
                model.save(str(programs[name]))
            template.join_functions(programs).rename(package)
        model, listed = read_package(package), template.read_pinned_manifest(package)
        (package / template.MODEL).write_bytes(template.serialize(model))
        (package / template.MANIFEST).write_text(listed)
        converted[spec.name] = file_entries(folder, package)
    return converted
