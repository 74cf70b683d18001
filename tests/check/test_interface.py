"""Gate `interface`: GREEN on what the export writes, RED on what was changed on disk, with words
that name it; test_faults has more faults."""

import pytest
from circle import all_wide
from copies import Copy

from workbench import Bundle, Decoder, InputError
from workbench.bundle import PRESETS
from workbench.check.interface import interface_gate
from workbench.models.checkpoint import Checkpoint

CLEAN = {
    "llama": {"tokens": "4"},
    "qwen2": {"layers_per_shard": 2},
    "qwen3": {"kv_write": "slice", "layout": "bc1t"},
    "gemma3_text": {"sliding": "ring", "layers_per_shard": 2},
    "zaya": {"tokens": "1"},
    "zaya routed": {"moe": "routed"},
}


def described(copy: Copy, what: str, name: str):
    return next(
        v for v in getattr(copy.spec(copy.shard(1)).description, what) if v.name == name
    )


def array(copy: Copy, name: str):
    return described(copy, "input", name).type.multiArrayType


def enumerated(copy: Copy) -> None:
    x = array(copy, "x")
    x.ClearField("shapeRange")
    for T in (1, 4):
        x.enumeratedShapes.shapes.add().shape.extend([1, 64, T, 1])


def default_shape(copy: Copy) -> None:
    array(copy, "x").shape[2] = 9


def program_state(copy: Copy) -> None:
    function = copy.spec(copy.shard(1)).mlProgram.functions["main"]
    state = next(p for p in function.inputs if p.name == "v_state")
    state.type.stateType.wrappedType.tensorType.dimensions[2].constant.size = 16


def another_function(copy: Copy) -> None:
    functions = copy.spec(copy.shard(1)).mlProgram.functions
    functions["prefill"].CopyFrom(functions["main"])


def input_renamed(copy: Copy) -> None:
    described(copy, "input", "rope_sin").name = "rope_sine"


def old_version(copy: Copy) -> None:
    copy.spec(copy.shard(1)).specificationVersion = 7


def option(name: str, value):
    def plant(copy: Copy) -> None:
        copy.manifest["options"][name] = value

    return plant


def states_in_one_place(copy: Copy) -> None:
    states = copy.shard(1)["states"]
    states["layers.1.k_state"]["tensor"] = "v_state"


def no_tap(copy: Copy) -> None:
    copy.shard(1)["taps"].clear()


STATE = "layers_01_01: state {}_state: FLOAT16 [1, 2, 32, 32] in the manifest, {}"
X = "layers_01_01: input x: FLOAT16 [1, 64, 1..4, 1] in the manifest, "
# What changed → the first words of the reason: where, what it is, what it should be.
FAULTS = {
    "enumerated": (
        enumerated,
        X + "FLOAT16 [1, 64, 1, 1] of enumeratedShapes in the description",
    ),
    "default shape": (
        default_shape,
        X + "FLOAT16 [1, 64, 1..4, 1] by default [1, 64, 9, 1] in the description",
    ),
    "program state": (
        program_state,
        STATE.format("v", "FLOAT16 [1, 2, 16, 32] in the program"),
    ),
    "another function": (
        another_function,
        "layers_01_01: functions: ['main'] in the manifest, ['main', 'prefill'] in the program",
    ),
    "input renamed": (
        input_renamed,
        "layers_01_01: input rope_sin: FLOAT16 [1, 1, 1..4, 16] in the manifest, missing in the ",
    ),
    "old version": (
        old_version,
        "layers_01_01: specification version 7 for a program of 9",
    ),
    "states in one place": (
        states_in_one_place,
        "layers_01_01: state k_state: missing in the manifest, FLOAT16 [1, 2, 32, 32] in the ",
    ),
    "no tap": (no_tap, "layers_01_01: taps of layers [], not of [1]"),
    "t_max 20": (
        option("tokens", "1-20"),
        "layers_00_00: input attn_mask: FLOAT16 [1, 1, 1..20, 32] in the manifest, "
        "FLOAT16 [1, 1, 1..4, 32] in the description",
    ),
    "t fixed": (
        option("tokens", "4"),
        "layers_00_00: input attn_mask: FLOAT16 [1, 1, 4, 32] in the manifest, "
        "FLOAT16 [1, 1, 1..4, 32] in the description",
    ),
    "moe routed": (
        option("moe", "routed"),
        "experts: {(0, 1): [(0, 1)], (1, 2): [(0, 1)]} in the options, {(0, 1): []",
    ),
    "kv_write slice": (
        option("kv_write", "slice"),
        "cache writes of layers_00_00: ['slice'] in the options, ['mask'] in the list of shards",
    ),
    "layers_per_shard 2": (
        option("layers_per_shard", 2),
        "layers of shards: [(0, 2)] in the options, [(0, 1), (1, 2)] in the list of shards",
    ),
}


@pytest.fixture
def llama(exports, tmp_path):
    """A copy of a bundle in a preset."""

    def copy(compress: str) -> Copy:
        checkpoint = exports.checkpoint(
            "llama", tie_word_embeddings=False, dtype="float32"
        )
        return Copy(
            exports.bundle(checkpoint, compress=compress).root, tmp_path / "copy"
        )

    return copy


@pytest.mark.matrix(1, wide=5)
@pytest.mark.parametrize(("family", "compress"), [*zip(CLEAN, PRESETS, strict=True)])
def test_what_the_export_writes_is_green(exports, family, compress):
    checkpoint = exports.checkpoint(family.split()[0], dtype="float32")
    bundle = exports.bundle(checkpoint, compress=compress, **CLEAN[family])
    found = interface_gate(bundle, Checkpoint(checkpoint))
    assert found.verdict == "GREEN", found.reason
    assert "the checkpoint's" in found.reason


@pytest.mark.parametrize("compress", ["fp16", *all_wide("int8-channel", "lut4")])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_interface_changed_on_disk_is_red(llama, fault, compress):
    copy, (plant, cause) = llama(compress), FAULTS[fault]
    plant(copy)
    found = interface_gate(Bundle.open(copy.seal()))
    assert (
        found.verdict == "RED" and found.value >= 1 and found.reason.startswith(cause)
    )


@pytest.mark.parametrize("tap", ["no_such_value", "rope_cos", None])
def test_a_tap_of_an_inner_layer_is_a_value_like_the_output(exports, tmp_path, tap):
    checkpoint = exports.checkpoint("qwen2", dtype="float32")
    bundle = exports.bundle(checkpoint, compress="fp16", layers_per_shard=2)
    copy = Copy(bundle.root, tmp_path / "copy")
    taps = copy.shard(0)["taps"]
    taps["0"] = tap or taps["0"]
    found = interface_gate(Bundle.open(copy.seal()))
    assert found.verdict == ("RED" if tap else "GREEN")
    assert tap is None or "layer 0" in found.reason


@pytest.mark.matrix(6, wide=30)
@pytest.mark.parametrize("claim", PRESETS)
@pytest.mark.parametrize("compress", PRESETS)
def test_a_false_claim_of_compression_is_red(llama, compress, claim):
    copy = llama(compress)
    option("compress", claim)(copy)
    found = interface_gate(Bundle.open(copy.seal()))
    assert found.verdict == ("GREEN" if claim == compress else "RED")
    assert claim == compress or "is stored as" in found.reason


def test_one_scale_of_another_granularity_is_red_by_name(llama):
    copy = llama("int8-tensor")
    constant = copy.shard(1)["weights"]["model.layers.1.self_attn.v_proj.weight"]
    op = copy.constant(copy.shard(1), constant).arrays["scale"].value
    op.type.tensorType.dimensions[0].constant.size = 64
    found = interface_gate(Bundle.open(copy.seal()))
    assert found.verdict == "RED" and constant in found.reason and found.value == 1


TOKENS = {
    "bos: 2 in the manifest, 1 in the checkpoint": lambda c: c.manifest[
        "tokens"
    ].update(bos=2),
    "tokenizer file tokenizer.json: ": lambda c: c.file(
        "tokenizer/tokenizer.json", lambda data: data + b" "
    ),
    "family: qwen2 in the manifest, llama in the checkpoint": lambda c: (
        c.manifest.update(family="qwen2")
    ),
    "H: 8 in the manifest, 4 in the checkpoint": lambda c: c.manifest["dims"].update(
        H=8
    ),
}


@pytest.mark.parametrize("cause", TOKENS)
def test_tokens_of_another_checkpoint_are_red(
    llama_bundle, tiny_llama, tmp_path, cause
):
    copy = Copy(llama_bundle.root, tmp_path / "copy")
    TOKENS[cause](copy)
    bundle = Bundle.open(copy.seal())
    found = interface_gate(bundle, tiny_llama)
    assert (found.verdict, found.value) == ("RED", 1)
    assert found.reason.startswith(cause)
    alone = interface_gate(bundle)
    assert alone.verdict == "GREEN" and "not compared" in alone.reason


def test_a_tokenizer_file_that_is_missing_is_red(llama_bundle, tiny_llama, tmp_path):
    copy = Copy(llama_bundle.root, tmp_path / "copy")
    entry = copy.manifest["tokens"]["files"].pop()
    (copy.root / entry["path"]).unlink()
    found = interface_gate(Bundle.open(copy.seal()), tiny_llama)
    assert found.verdict == "RED" and entry["path"].rpartition("/")[2] in found.reason


def test_the_gate_needs_no_decoder(llama):
    """Decoders refuse a manifest of more tokens than the package takes; it is RED here."""
    copy = llama("fp16")
    option("tokens", "1-20")(copy)
    bundle = Bundle.open(copy.seal())
    with pytest.raises(InputError):
        Decoder(bundle, runtime="portable")
    found = interface_gate(bundle)
    assert found.verdict == "RED" and found.reason.startswith(FAULTS["t_max 20"][1])


def test_a_package_that_cannot_be_read_is_red(llama):
    copy = llama("fp16")
    path = next(
        e["path"] for e in copy.shard(1)["files"] if e["path"].endswith(".mlmodel")
    )
    copy.file(path, lambda data: data[: len(data) // 3])
    found = interface_gate(Bundle.open(copy.seal()))
    assert found.verdict == "RED" and "layers_01_01" in found.reason


def test_the_list_of_differences_is_cut_short(llama):
    copy = llama("int8-channel")
    option("compress", "lut6")(copy)
    found = interface_gate(Bundle.open(copy.seal()))
    assert "and 7 more" in found.reason and found.value == 15
