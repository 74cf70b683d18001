"""Where bundle.json, package, inputs and states disagree, a runtime refuses, and writes nothing
elsewhere."""

import json
import shutil

import numpy as np
import pytest

import miltorch
from miltorch import shim
from workbench import Bundle, Decoder
from workbench.errors import InputError
from workbench.runtime import base

SLOTS = 32  # of every bundle here


@pytest.fixture
def changed(exports, tmp_path):
    """Copies a bundle and changes its manifest: `changed(change, **options)`, where `change` takes
    the parsed bundle.json."""

    def copy(change, family: str = "llama", **options) -> Bundle:
        root = shutil.copytree(
            exports.bundle(exports.checkpoint(family), **options).root,
            tmp_path / "bundle",
        )
        manifest = json.loads((root / "bundle.json").read_text())
        change(manifest)
        (root / "bundle.json").write_text(json.dumps(manifest))
        return Bundle.open(root)

    return copy


def layers(manifest) -> dict:
    return manifest["shards"][0]


CHANGES = {
    "an input is missing": (
        lambda m: layers(m)["inputs"].pop("rope_cos"),
        "inputs of shard",
    ),
    "an input is unknown": (
        lambda m: layers(m)["inputs"].update(y=[1]),
        "inputs of shard",
    ),
    "an output is missing": (
        lambda m: layers(m)["outputs"].update(y=layers(m)["outputs"].pop("hidden")),
        "outputs of shard",
    ),
    "a state is missing": (
        lambda m: layers(m)["states"].pop("layers.0.v_state"),
        "states of shard",
    ),
    "a state is smaller": (
        lambda m: layers(m)["states"]["layers.0.v_state"].update(shape=[1, 2, 31, 32]),
        "layers.0.v_state",
    ),
    "an input is longer": (
        lambda m: layers(m)["inputs"]["attn_mask"].__setitem__(3, 128),
        "attn_mask",
    ),
    "T reaches further": (lambda m: m["options"].update(tokens="1-9"), "T from 1 to 9"),
}


@pytest.mark.matrix(6, wide=20)
@pytest.mark.shim
@pytest.mark.parametrize("runtime", ["portable", "coreml"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_manifest_that_disagrees_with_its_package_is_refused_on_loading(
    changed, tmp_path, what, runtime
):
    """With coreml over the shim, before anything is compiled."""
    change, subject = CHANGES[what]
    shim.install()
    try:
        with pytest.raises(InputError, match=subject):
            Decoder(changed(change), runtime)
        assert not (tmp_path / ".bundle.compiled").exists()
    finally:
        shim.uninstall()


@pytest.mark.parametrize(
    ("field", "shapes", "words"),
    [
        ("outputs", {"hidden": [1, 65, "T", 1]}, "output 'hidden'"),
        ("inputs", {"x": [1, 64, 2, 1]}, "input 'x'"),
    ],
)
def test_a_shape_that_the_package_does_not_have_is_refused(
    exports, field, shapes, words
):
    """Opening a bundle already refuses these; the check of the runtime stands below it."""
    bundle = exports.bundle(exports.checkpoint("llama"))
    shard = bundle.shards("layers")[0]
    changed = shard.model_copy(update={field: getattr(shard, field) | shapes})
    with pytest.raises(InputError, match=words + ".*in the package"):
        base.check_interface(
            changed, miltorch.read(bundle.package(shard)), bundle.manifest.options.t_max
        )


def test_an_input_of_another_dtype_is_refused_on_loading(exports, tmp_path):
    bundle = exports.bundle(exports.checkpoint("llama"), kv_write="slice")
    shard = bundle.shards("layers")[0]
    program = miltorch.read(bundle.package(shard))
    program.inputs["pos"] = miltorch.Type("FLOAT16", (1,))
    with pytest.raises(InputError, match="INT32"):
        base.check_interface(shard, program, bundle.manifest.options.t_max)


@pytest.mark.matrix(4, wide=12)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("position", [SLOTS, SLOTS + 90, 1_200_000, -SLOTS - 1])
@pytest.mark.parametrize("T", [1, 2])
def test_a_position_past_the_cache_is_refused_and_nothing_is_written(
    exports, fast, position, T
):
    decoder = Decoder(
        exports.bundle(exports.checkpoint("llama"), kv_write="slice"),
        "portable",
        fast=fast,
    )
    decoder.prefill([1, 2, 3])
    before = {
        name: decoder.seqs.states[0].read(name)
        for name in decoder.seqs.states[0].shard.states
    }
    io = decoder.host.inputs(np.array([3]), np.array([T]), T)
    io |= {
        "x": np.ones((1, 64, T, 1), np.float32),
        "pos": np.array([position], np.int32),
    }
    model = decoder.layers[0]
    with pytest.raises(InputError):
        model.predict(
            {name: io[name] for name in model.shard.inputs}, decoder.seqs.states[0]
        )
    for name, value in before.items():
        assert np.array_equal(decoder.seqs.states[0].read(name), value)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("which", ["inputs", "states"])
def test_inputs_or_states_of_other_sizes_than_the_program_has_are_refused(
    exports, fast, which
):
    """128 slots for a program of 32, or a state of 8 rows."""
    bundle = exports.bundle(exports.checkpoint("llama"))
    decoder = Decoder(bundle, "portable", fast=fast)
    decoder.prefill([1, 2, 3], tile=1)
    model, io = decoder.layers[0], decoder.host.inputs(np.array([3]), np.array([1]), 1)
    io["x"] = np.ones((1, 64, 1, 1), np.float32)
    if which == "inputs":
        io["attn_mask"] = np.zeros((1, 1, 1, 128), np.float32)
        io["kv_write_mask"] = np.eye(128, 1, -100, np.float32)[None, None]
    else:
        for cell in decoder.seqs.states[0].raw.cells.values():
            cell.value = cell.value[:, :, :8].clone()
    inputs = {name: io[name] for name in model.shard.inputs}
    with pytest.raises(InputError, match="shape"):
        model.predict(inputs, decoder.seqs.states[0])
