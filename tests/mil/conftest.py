"""Packages of the module `memory.Memory`, which the tests of the reader share."""

from pathlib import Path

import pytest
from memory import export

from miltorch.coremltools_import import quiet


@pytest.fixture(scope="session")
def models(ct) -> dict:
    """The exported Memory as coremltools models, by how the weight matrix is stored: fp16, int8,
    int4, lut6 (a table of 64 values) and sparse."""
    from coremltools.optimize import coreml as cto

    fp16 = export()

    def compress(function, config):
        return function(fp16, cto.OptimizationConfig(global_config=config))

    int8 = cto.OpLinearQuantizerConfig(weight_threshold=0, granularity="per_channel")
    int4 = cto.OpLinearQuantizerConfig(
        weight_threshold=0, dtype="int4", granularity="per_block", block_size=32
    )
    # uniform, because k-means of so few weights would need scikit-learn
    lut6 = cto.OpPalettizerConfig(mode="uniform", nbits=6, weight_threshold=0)
    sparse = cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=0)
    with quiet():
        return {
            "fp16": fp16,
            "int8": compress(cto.linear_quantize_weights, int8),
            "int4": compress(cto.linear_quantize_weights, int4),
            "lut6": compress(cto.palettize_weights, lut6),
            "sparse": compress(cto.prune_weights, sparse),
        }


@pytest.fixture(scope="session")
def packages(models, tmp_path_factory) -> dict[str, Path]:
    """The models of `models` as packages on disk."""
    folder = tmp_path_factory.mktemp("packages")
    paths = {name: folder / f"{name}.mlpackage" for name in models}
    for name, model in models.items():
        model.save(str(paths[name]))
    return paths
