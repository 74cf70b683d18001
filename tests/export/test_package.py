"""A shard's package as other tools leave it: whoever opens it with coremltools leaves its bytes as
they were."""

from miltorch.quiet import coremltools, quiet
from workbench import Bundle
from workbench.bundle import sha256
from workbench.export import export


def test_a_bundle_survives_being_opened_with_coremltools(exports, tmp_path):
    made = export(
        exports.checkpoint("llama"), tmp_path / "b", progress=False, max_seq_len=16
    )
    before = {
        path: sha256(path) for path in sorted(made.root.rglob("*")) if path.is_file()
    }
    for shard in made.manifest.shards:
        with quiet():
            coremltools().models.MLModel(str(made.package(shard)), skip_model_load=True)
    assert {
        path: sha256(path) for path in sorted(made.root.rglob("*")) if path.is_file()
    } == before
    Bundle.open(made.root).verify()
