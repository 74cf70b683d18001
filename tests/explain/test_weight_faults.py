"""`explain` names the fault of a wrong tensor where its stored values follow from the
checkpoint's."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import invoke

sys.path.append(str(Path(__file__).parents[1] / "check"))  # for its planted faults

from faults.copies import Copy

from workbench.bundle import Bundle
from workbench.check.golden import stored_weights
from workbench.check.weights import weights_gate
from workbench.explain import weight_faults
from workbench.explain.weight_faults import describe_weight_faults, find_weight_fault
from workbench.models.checkpoint import Checkpoint

LAYERS = "model.layers."
D = 32  # channels of a head


@pytest.fixture(scope="module", params=["fp16", "int8-channel", "lut4-g8"])
def sound(exports, request):
    """A checkpoint, its bundle in one preset."""
    path = exports.checkpoint("llama")
    return Checkpoint(path), exports.bundle(
        path, max_seq_len=64, compress=request.param
    )


@pytest.fixture(scope="module")
def sound_fp16(exports):
    path = exports.checkpoint("llama")
    return Checkpoint(path), exports.bundle(path, max_seq_len=64, compress="fp16")


def by_head(order):
    """A change of the rows of every head."""

    def change(values):
        heads = values.reshape(-1, D, *values.shape[1:])
        return heads[:, order].reshape(values.shape)

    return change


def interleave(values):
    return by_head(np.arange(D).reshape(2, -1).T.ravel())(values)


def split_halves(values):
    return by_head(np.arange(D).reshape(-1, 2).T.ravel())(values)


def transpose(values):
    matrix = values.reshape(len(values), -1)
    return np.ascontiguousarray(matrix.T).reshape(values.shape)


def enlarge_row(values):
    values[7] *= 1.3
    return values


# tensor, change, kind, words of the clause
CHANGES = {
    "interleaved": (
        "0.self_attn.q_proj.weight",
        interleave,
        "rotary order",
        "from half-split to interleaved rotary order",
    ),
    "half-split": (
        "1.self_attn.k_proj.weight",
        split_halves,
        "rotary order",
        "from interleaved to half-split rotary order",
    ),
    "transposed": ("0.mlp.up_proj.weight", transpose, "transposed", "is transposed"),
    "reversed": (
        "0.mlp.gate_proj.weight",
        lambda values: values[::-1],
        "reversed",
        "has its rows in reverse",
    ),
    "shifted": (
        "1.mlp.down_proj.weight",
        lambda values: np.roll(values, 3, axis=0),
        "shifted",
        "shifted by 3: row 3 holds the checkpoint's row 0",
    ),
    "shifted back": (
        "1.mlp.down_proj.weight",
        lambda values: np.roll(values, -2, axis=0),
        "shifted",
        "shifted by -2: row 0 holds the checkpoint's row 2",
    ),
    "heads": (
        "1.self_attn.q_proj.weight",
        lambda values: np.concatenate([values[D : 2 * D], values[:D], values[2 * D :]]),
        "row order",
        "block 0 holds the checkpoint's block 1",
    ),
}


def name_fault(sound, folder: Path, tensor: str, plant):
    """Plants a fault, shows that gate `weights` is RED by the tensor, and finds the
    fault."""
    checkpoint, bundle = sound
    copy = Copy(bundle.root, folder / "planted")
    plant(copy)
    planted = Bundle.open(copy.seal())
    gate = weights_gate(planted, checkpoint)
    assert gate.verdict == "RED" and LAYERS + tensor in gate.tensors
    stored = stored_weights(checkpoint, planted, head=False)
    return find_weight_fault(planted.manifest, checkpoint, stored, LAYERS + tensor)


@pytest.mark.parametrize("name", CHANGES)
def test_the_order_of_stored_values_is_named(sound, tmp_path, name):
    tensor, change, kind, words = CHANGES[name]

    def plant(copy):
        weight = copy.weight(f"layers.{tensor}")
        weight.write(change(weight.read()))

    fault = name_fault(sound, tmp_path, tensor, plant)
    assert (fault.kind, words in fault.clause) == (kind, True), fault


@pytest.mark.parametrize("factor", [1.2, 0.5, -1.0])
def test_a_factor_is_named(sound, tmp_path, factor):
    tensor = "1.self_attn.v_proj.weight"

    def plant(copy):
        weight = copy.weight(f"layers.{tensor}")
        if factor > 0:
            weight.scale(factor)
        else:
            weight.write(-weight.read())

    fault = name_fault(sound, tmp_path, tensor, plant)
    assert fault.kind == "scaled"
    assert float(fault.clause.split()[-1]) == pytest.approx(factor, rel=0.02)


def test_a_wrong_row_is_named(sound_fp16, tmp_path):
    tensor = "0.self_attn.o_proj.weight"

    def plant(copy):
        weight = copy.weight(f"layers.{tensor}")
        weight.write(enlarge_row(weight.read()))

    fault = name_fault(sound_fp16, tmp_path, tensor, plant)
    assert fault.kind == "some rows"
    assert "1 wrong row of 64; the worst is number 7, scaled by 1.3" in fault.clause


@pytest.mark.parametrize("tensor", ["1.self_attn.v_proj", "0.self_attn.q_proj"])
@pytest.mark.parametrize("preset", ["fp16", "int8-channel"])
def test_a_zeroed_head_is_named_by_its_number(exports, tmp_path, tensor, preset):
    """Half of the rows are wrong where a tensor has two heads. No table of lut4-g8 has a
    zero."""
    path = exports.checkpoint("llama")
    bundle = exports.bundle(path, max_seq_len=64, compress=preset)

    def plant(copy):
        weight = copy.weight(f"layers.{tensor}.weight")
        values = weight.read()
        values[D : 2 * D] = 0
        weight.write(values)

    fault = name_fault((Checkpoint(path), bundle), tmp_path, f"{tensor}.weight", plant)
    assert fault.kind == "some rows", fault
    assert "has 32 wrong rows of" in fault.clause
    assert fault.clause.endswith(", numbers 32 to 63 (head 1); they hold zeros")


def test_the_zeroed_columns_of_a_head_are_named(sound_fp16, tmp_path):
    tensor = "1.self_attn.o_proj.weight"

    def plant(copy):
        weight = copy.weight(f"layers.{tensor}")
        values = weight.read()
        values[:, D : 2 * D] = 0
        weight.write(values)

    fault = name_fault(sound_fp16, tmp_path, tensor, plant)
    assert fault.clause == (
        "has 32 wrong columns of 128, numbers 32 to 63 (head 1); they hold zeros"
    )


def test_ones_in_a_norm_and_noise_are_named(sound_fp16, tmp_path):
    tensor = "0.mlp.up_proj.weight"

    def fill(copy):
        weight = copy.weight(f"layers.{tensor}")
        weight.write(np.full_like(weight.read(), 0.25))

    fault = name_fault(sound_fp16, tmp_path, tensor, fill)
    assert (fault.kind, fault.clause) == ("constant", "holds 0.25 in every element")

    def draw(copy):
        weight = copy.weight(f"layers.{tensor}")
        shape = weight.read().shape
        weight.write(np.random.default_rng(0).normal(0, 0.1, shape))

    (tmp_path / "other").mkdir()
    assert name_fault(sound_fp16, tmp_path / "other", tensor, draw).kind == "unknown"


def exchange(copy):
    """Exchanges two matrices of one shape, of two layers."""
    up = copy.weight("layers.0.mlp.up_proj.weight")
    gate = copy.weight("layers.1.mlp.gate_proj.weight")
    up.swap(gate)


def test_an_exchange_is_named_from_both_sides(sound, tmp_path):
    checkpoint, bundle = sound
    copy = Copy(bundle.root, tmp_path / "planted")
    exchange(copy)
    planted = Bundle.open(copy.seal())
    gate = weights_gate(planted, checkpoint)
    stored = stored_weights(checkpoint, planted, head=False)
    clauses, faults = describe_weight_faults(planted, checkpoint, stored, gate.tensors)
    assert {fault.kind for fault in faults} == {"other tensor"} and len(faults) == 2
    first, second = gate.tensors
    assert clauses == [f"{first} and {second} hold the values of each other"]
    assert {first, second} == {
        f"{LAYERS}0.mlp.up_proj.weight",
        f"{LAYERS}1.mlp.gate_proj.weight",
    }


def test_a_fault_of_many_layers_has_one_clause(exports):
    path = exports.checkpoint("llama", num_hidden_layers=6)
    checkpoint, bundle = Checkpoint(path), exports.bundle(path, compress="fp16")
    names = [f"{LAYERS}{i}.self_attn.{x}_proj.weight" for x in "qk" for i in range(6)]

    def permute(name: str) -> torch.Tensor:
        return interleave(checkpoint.tensor(name))

    clauses, faults = describe_weight_faults(bundle, checkpoint, permute, names)
    assert {fault.tensor for fault in faults} == {*names}
    assert {fault.kind for fault in faults} == {"rotary order"}
    (clause,) = clauses
    assert clause.startswith(
        f"each of 12 tensors ({names[0]}, {names[6]}, {names[1]}, …) has the rows of its "
        "heads permuted from half-split to interleaved rotary order"
    )


@pytest.mark.parametrize("small, count", [(0, 4), (1 << 25, 12)])
def test_tensors_that_are_not_explained_are_counted(
    sound_fp16, monkeypatch, small, count
):
    """Large tensors take longer: four of them are examined."""
    checkpoint, bundle = sound_fp16
    monkeypatch.setattr(weight_faults, "SMALL", small)
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("up", "gate", "down")
    ]
    names = [f"{LAYERS}{i}.{part}.weight" for i in (0, 1) for part in parts]

    def draw(name: str) -> torch.Tensor:
        return torch.randn(checkpoint.shape(name))

    clauses, faults = describe_weight_faults(bundle, checkpoint, draw, names)
    assert {fault.kind for fault in faults} == {"unknown"}
    # the worst of each place in a layer is examined first
    assert [fault.tensor for fault in faults] == names[:count]
    rest = len(names) - count
    ellipsis = ", …" if rest > 3 else ""
    listed = ", ".join(names[count:][:3])
    assert clauses[-1] == f"{rest} more were not explained ({listed}{ellipsis})"


@pytest.mark.parametrize("preset", ["fp16", "int8-channel"])
def test_explain_says_that_the_program_is_right_and_which_weights_are_not(
    exports, tmp_path, preset
):
    checkpoint = exports.checkpoint("llama")
    bundle = exports.bundle(checkpoint, max_seq_len=64, compress=preset)
    copy = Copy(bundle.root, tmp_path / "planted")
    exchange(copy)
    options = "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    explained = invoke("explain", copy.seal(), *options)
    verdicts = {gate["name"]: gate["verdict"] for gate in explained["gates"]}
    assert (verdicts["weights"], verdicts["program"]) == ("RED", "GREEN")
    for words in (
        "The program is right",
        "The stored weights are not the checkpoint's",
        "hold the values of each other",
        "compare the exporter's weight conversion",
    ):
        assert words in explained["conclusion"]
    # both directions of the exchange
    assert "hold the values of each other" in explained["fits"]
