from pathlib import Path

import pytest
from memory import export

from miltorch.quiet import quiet


@pytest.fixture(scope="session")
def models(ct):
    """The exported Memory, stored in five ways: name → coremltools model."""
    from coremltools.optimize import coreml as cto

    plain, linear = export(), cto.OpLinearQuantizerConfig

    def stored(compress, config):
        return compress(plain, cto.OptimizationConfig(global_config=config))

    with quiet():
        return {
            "fp16": plain,
            "int8": stored(
                cto.linear_quantize_weights,
                linear(weight_threshold=0, granularity="per_channel"),
            ),
            "int4": stored(
                cto.linear_quantize_weights,
                linear(
                    weight_threshold=0,
                    dtype="int4",
                    granularity="per_block",
                    block_size=32,
                ),
            ),
            "lut6": stored(
                cto.palettize_weights,
                # k-means of so few weights would need scikit-learn
                cto.OpPalettizerConfig(mode="uniform", nbits=6, weight_threshold=0),
            ),
            "sparse": stored(
                cto.prune_weights,
                cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=0),
            ),
        }


@pytest.fixture(scope="session")
def packages(models, tmp_path_factory) -> dict[str, Path]:
    """The models of `models` as packages on disk."""
    folder = tmp_path_factory.mktemp("packages")
    for name, model in models.items():
        model.save(str(folder / f"{name}.mlpackage"))
    return {name: folder / f"{name}.mlpackage" for name in models}
