"""A row of the head that a bundle has lost is named, and whether it is an end token's."""

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from workbench import Bundle, export
from workbench.check import head_rows
from workbench.check.weights import weights_gate
from workbench.models.checkpoint import Checkpoint

END = 2  # the configuration's end token


def lose_rows(tokens, factor: float = 0.0):
    def plant(copy):
        weight = copy.weight("embed_tokens.weight")
        values = weight.read()
        values[list(tokens)] *= factor
        weight.write(values)

    return plant


@pytest.mark.parametrize("preset", ["fp16", "int8-channel", "int8-tensor"])
def test_a_row_of_zeros_is_named_and_said_to_be_an_end_token(broken, preset):
    """Planted: the end token's row and one of another token are zeros."""
    folder, checkpoint = broken(lose_rows([7, END]), preset)
    rows = head_rows.lost_rows(Bundle.open(folder), checkpoint)
    assert [(row.token, row.is_end) for row in rows] == [(END, True), (7, False)]
    assert all(0.8 < row.error < 1.2 for row in rows)
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert gate.verdict == "RED"
    assert gate.reason.startswith("rows of the head")
    assert f"token {END} '<eos>', an end token" in gate.reason
    assert "a text cannot end" in gate.reason


def test_a_row_of_another_token_is_named_without_a_word_on_ends(broken):
    folder, checkpoint = broken(lose_rows([50]))
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert gate.reason.startswith("row of the head") and "token 50 " in gate.reason
    assert "end token" not in gate.reason


def test_a_row_that_is_not_finite_is_lost(broken):
    folder, checkpoint = broken(lose_rows([3], np.nan))
    (row,) = head_rows.lost_rows(Bundle.open(folder), checkpoint)
    assert row.token == 3 and np.isnan(row.error)


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_row_that_is_only_scaled_is_not_lost(broken, factor):
    folder, checkpoint = broken(lose_rows([50], factor))
    assert head_rows.lost_rows(Bundle.open(folder), checkpoint) == []


def test_rows_that_are_equal_or_zero_in_the_checkpoint_are_no_fault(tmp_path):
    """SmolLM2 has 15 rows of unused tokens that are equal in the checkpoint itself."""
    folder = tiny.random_checkpoint(tmp_path / "llama", "llama")
    tensors = load_file(folder / tiny.WEIGHTS)
    table = tensors["model.embed_tokens.weight"]
    table[11] = table[12] = table[13]
    table[20] = 0
    save_file(tensors, folder / tiny.WEIGHTS, {"format": "pt"})
    checkpoint = Checkpoint(folder)
    bundle = export(folder, tmp_path / "bundle", compress="int8-tensor", max_seq_len=16)
    assert head_rows.lost_rows(bundle, checkpoint) == []
    assert weights_gate(bundle, checkpoint).verdict == "GREEN"


def test_many_lost_rows_are_counted(tiny_llama):
    rows = [head_rows.LostRow(token, 1.0, False) for token in range(10)]
    sentence = head_rows.describe_lost_rows(rows, tiny_llama)
    assert "and 2 more" in sentence
    assert head_rows.describe_lost_rows([], tiny_llama) == ""


def test_every_slice_of_the_head_is_read(broken, monkeypatch):
    """The last row of the head is in its last slice, and blocks are small."""
    monkeypatch.setattr(
        head_rows, "row_blocks", lambda array: [slice(0, 40), slice(40, 97)]
    )
    folder, checkpoint = broken(lose_rows([96]))
    (row,) = head_rows.lost_rows(Bundle.open(folder), checkpoint)
    assert row.token == 96 and torch.isfinite(torch.tensor(row.error))
