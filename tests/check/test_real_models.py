"""Real language models from checkpoint to verdict: equal to Hugging Face's, GREEN where sound, and RED
where a fault is planted. They run where the package index has the models."""

import numpy as np
import pytest
import real
import tiny
from cases import Subject, run_gate
from faults import find_fault
from faults.copies import Copy

from workbench import Decoder, InputError, validate
from workbench.check.gates import RED
from workbench.check.golden import Golden
from workbench.check.text import COUNT, default_ids, paragraphs
from workbench.decode.tokenizer import encode_text
from workbench.models.checkpoint import Checkpoint

pytestmark = [pytest.mark.wide, pytest.mark.slow("exports or runs a real model")]
S, PROMPT, NEW = 128, 24, 16
# logits of two tokens that lie nearer than this are a tie in fp16
TIE = 0.05
each_model = pytest.mark.parametrize("name", real.MODELS)


@pytest.fixture(scope="session")
def real_model():
    """A function from a model's name to its checkpoint, which is fetched once; the test is
    skipped where that fails."""

    def checkpoint(name: str) -> Checkpoint:
        try:
            return Checkpoint(real.make(name))
        except InputError as problem:
            pytest.skip(str(problem))

    return checkpoint


@pytest.fixture(scope="session")
def golden_of(shared_folder):
    """A function from a checkpoint to its golden on English text."""

    def golden(source: Checkpoint) -> Golden:
        return Golden.of(source, default_ids(source, PROMPT), shared_folder / "golden")

    return golden


def bundle_of(exports, source: Checkpoint, preset: str):
    return exports.bundle(source.path, max_seq_len=S, compress=preset)


@each_model
def test_its_tokenizer_knows_the_paragraphs(real_model, name):
    source = real_model(name)
    assert len(encode_text(source.path, paragraphs())) >= 600
    assert len(set(default_ids(source, PROMPT))) > PROMPT / 2


@each_model
def test_the_default_ids_are_those_of_transformers_tokenizer(real_model, name):
    from transformers import AutoTokenizer

    source = real_model(name)
    ids = AutoTokenizer.from_pretrained(source.path)(paragraphs()).input_ids
    assert default_ids(source) == ids[:COUNT]


@each_model
def test_logits_in_exact_arithmetic_are_hugging_face_s(real_model, exports, name):
    source = real_model(name)
    golden = tiny.golden(exports.hf(source.path), default_ids(source, PROMPT))
    decoder = Decoder(bundle_of(exports, source, "fp16"), "portable", "exact")
    assert tiny.logits_error(decoder, golden, 1, 4, 3) < 1e-5


@each_model
@pytest.mark.parametrize("precision", ["exact", "declared"])
def test_greedy_text_is_hugging_face_s_up_to_ties(real_model, exports, name, precision):
    """At every token the one that the bundle picks is Hugging Face's, or as likely."""
    source = real_model(name)
    ids = default_ids(source, PROMPT)
    decoder = Decoder(bundle_of(exports, source, "fp16"), "portable", precision)
    tokens = decoder.generate(ids, NEW)
    logits = tiny.golden(exports.hf(source.path), ids + tokens[:-1]).logits
    logits = logits[len(ids) - 1 :]
    behind = logits.max(-1) - logits[np.arange(len(tokens)), tokens]
    print(decoder.bundle.root, tokens, behind)
    assert behind.max() < (1e-3 if precision == "exact" else TIE)


@each_model
@pytest.mark.parametrize("preset", ["fp16", "int8-channel"])
def test_a_sound_bundle_is_green(real_model, golden_of, exports, name, preset):
    source = real_model(name)
    decoder = Decoder(bundle_of(exports, source, preset), "portable")
    result = validate(decoder, golden_of(source))
    red = [gate for gate in result.gates if gate.verdict == RED]
    assert not red and result.verdict == "GREEN", red


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("memory", "future left visible"),
        ("memory", "write address off by one at T above 1"),
        ("disk", "one frequency off by a hundredth"),
        ("disk", "one weight of another sign"),
        ("disk", "RMS epsilon times 10 in one norm"),
    ],
)
def test_a_planted_fault_is_red(real_model, exports, tmp_path, place, name):
    source = real_model("smollm2")
    bundle = bundle_of(exports, source, "fp16")
    fault = find_fault(place, name)
    if place == "disk":
        copy = Copy(bundle.root, tmp_path / "copy")
        fault.plant_in(copy)
        subject = Subject(copy.seal(), source)
    else:
        subject = Subject(bundle.root, source, fault)
    assert run_gate(subject, fault.gate).verdict == RED
