"""Which kind of state a name stands for, and that the kinds say what the host must know."""

import json

import pytest

from workbench import Bundle, InputError
from workbench.bundle.states import KINDS, state_kind


@pytest.mark.parametrize(
    "name, ring, kind",
    [
        ("layers.3.k_state", None, "rows"),
        ("v_state", 8, "ring"),
        ("layers.0.conv_state", None, "tail"),
        ("v_delayed_state", None, "tail"),
        ("layers.12.matrix_state", None, "matrix"),
    ],
)
def test_the_kind_of_a_state_follows_from_its_name(name, ring, kind):
    assert state_kind(name, ring).name == kind


def test_every_state_of_a_bundle_has_a_kind_whose_inputs_its_shard_takes(exports):
    for family in ("gemma3_text", "zaya", "lfm2"):
        bundle = exports.bundle(exports.checkpoint(family))
        for shard in bundle.shards("layers"):
            for name in shard.states:
                kind = shard.kind_of(name)
                assert kind is KINDS[name.rpartition(".")[2]]
                optional = {"tail_keep"}  # of tails of more than two columns
                for leaf in set(kind.inputs) - optional:
                    assert any(entry.startswith(leaf) for entry in shard.inputs), (
                        name,
                        leaf,
                    )


def test_a_state_of_no_known_kind_is_refused(exports, tmp_path):
    source = exports.bundle(exports.checkpoint("llama"))
    manifest = json.loads((source.root / "bundle.json").read_text())
    states = manifest["shards"][0]["states"]
    states["layers.0.other_state"] = states.pop("layers.0.k_state")
    (tmp_path / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="layers.0.other_state.*should match"):
        Bundle.open(tmp_path)
