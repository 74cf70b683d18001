"""Tokens that generation_config.json suppresses are never picked, as in Hugging Face's `generate`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from in_process import invoke
from refusal import refused

from workbench import Decoder
from workbench.bundle import Bundle
from workbench.check import transcript as texts
from workbench.check.interface import interface_gate
from workbench.decode import Sampling
from workbench.decode.timed import timed_generation
from workbench.models.checkpoint import Checkpoint

IDS, NEW = [2, 17, 42, 3, 88], 16
PROMPTS = ["set river amber ; get river", "The keeper of the light"]


def generated(path: Path, ids: list[int] = IDS) -> list[int]:
    """Hugging Face's greedy tokens, by the checkpoint's own generation configuration."""
    with torch.inference_mode():
        tokens = tiny.hf(path).generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False
        )
    return tokens[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def suppressing(exports, tmp_path_factory) -> tuple[Path, list[int]]:
    """A checkpoint with the tokenizer of tiny-llama that suppresses what its model would write,
    and these tokens. One id lies outside the vocabulary."""
    folder = tmp_path_factory.mktemp("suppressing") / "checkpoint"
    source = exports.checkpoint("llama", vocab_size=256)
    shutil.copytree(source, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.DATA / "tiny-llama" / name, folder)
    prompts = [IDS, *(texts.encode(folder, prompt) for prompt in PROMPTS)]
    preferred = [token for ids in prompts for token in generated(source, ids)]
    fields = {"eos_token_id": [1], "suppress_tokens": sorted({*preferred, 400})}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder, preferred


@pytest.fixture(scope="module")
def bundle(exports, suppressing) -> Bundle:
    return exports.bundle(suppressing[0])


@pytest.mark.slow("exports a bundle for one sequence and one for two")
def test_every_way_to_generate_takes_hugging_face_s_tokens(
    exports, suppressing, bundle
):
    path, preferred = suppressing
    expected = generated(path)
    assert not {*expected} & {*preferred}
    decoder = Decoder(bundle, "portable", "exact")
    assert decoder.generate(IDS, NEW) == expected
    assert [record.token for record in decoder.stream(IDS, NEW)] == expected
    assert timed_generation(decoder, IDS, NEW)["tokens"] == expected
    sampled = decoder.generate(IDS, NEW, sampling=Sampling(2.0, seed=3))
    assert not {*sampled} & {*preferred}
    together = exports.decoder(path, batch=2)
    assert together.generate([IDS, IDS], NEW) == [expected, expected]
    command = "generate", bundle.root, "--max-new", NEW, "--precision", "exact"
    printed = invoke(*command, "--prompt-ids", ",".join(map(str, IDS)))
    assert printed["tokens"] == expected


def test_the_manifest_names_them_and_none_where_there_are_none(
    exports, suppressing, bundle
):
    path, preferred = suppressing
    assert bundle.manifest.tokens.suppressed == sorted({*preferred})
    plain = exports.bundle("llama")
    assert "suppressed" not in (plain.root / "bundle.json").read_text()
    with refused("suppress_tokens 'x'.*a list of them"):
        changed_checkpoint(path, bundle.root.parent / "wrong", "x").tokens.suppressed  # noqa: B018


def changed_checkpoint(path: Path, folder: Path, value) -> Checkpoint:
    """A copy of a checkpoint whose generation configuration suppresses `value`."""
    shutil.copytree(path, folder)
    tiny.edit_json(folder / "generation_config.json", ("suppress_tokens", value))
    return Checkpoint(folder)


def test_the_checkpoint_s_hash_covers_them(suppressing, tmp_path):
    path, _ = suppressing
    other = changed_checkpoint(path, tmp_path / "other", [7])
    none = changed_checkpoint(path, tmp_path / "none", None)
    hashes = {Checkpoint(path).sha256, other.sha256, none.sha256}
    assert len(hashes) == 3


def test_the_transcript_compares_tokens_that_may_be_picked(
    suppressing, bundle, tmp_path
):
    checkpoint = Checkpoint(suppressing[0])
    result = texts.transcribe(Decoder(bundle, "portable"), checkpoint, PROMPTS, 12)
    assert result.agreed == 1
    # planted: a bundle that has lost them
    forgetful = tiny.edited_copy(
        bundle, tmp_path / "forgetful", ("tokens", tiny.without("suppressed"))
    )
    decoder = Decoder(forgetful, "portable")
    assert texts.transcribe(decoder, checkpoint, PROMPTS, 12).agreed < 1
    gate = interface_gate(forgetful, checkpoint)
    assert gate.verdict == "RED" and "suppressed" in gate.reason
    assert interface_gate(bundle, checkpoint).verdict == "GREEN"


def test_packages_with_the_argmax_inside_that_pick_one_are_refused():
    logits = np.full(9, -np.inf)
    logits[4] = 0.0
    assert Sampling().pick(logits, 3, [2]) == 4
    with refused("suppressed token 4"):
        Sampling().pick(logits, 3, [4])
    # of two slices of the vocabulary, the second best token of the better one is unknown
    logits[7] = -1.0
    with refused("suppressed token 4"):
        Sampling().pick(logits, 3, [4])
    assert Sampling().pick(logits, 3, [7]) == 4
