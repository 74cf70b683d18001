"""The table of presets: figures of a text, rows that are there, and the page made of them."""

import json
from dataclasses import asdict, replace

import bits
import numpy as np
import pytest
import torch
from tiny import ROOT

from workbench.models.checkpoint import Checkpoint


def windows(V: int, seed: int = 0) -> bits.Windows:
    ids = np.random.default_rng(seed).integers(0, V, (3, 40)).astype(np.int32)
    return bits.Windows("random", f"{seed}", ids)


def test_figures_are_those_of_their_definitions(exports, tmp_path, monkeypatch):
    monkeypatch.setattr(bits, "WORK", tmp_path)
    monkeypatch.setattr(bits, "SCORED", 7)
    monkeypatch.setattr(bits, "TAIL", 0.1)
    source = Checkpoint(exports.checkpoint("llama", num_hidden_layers=2))
    text = windows(source.config.vocab_size)
    same = bits.score(source, source.tensor, text)
    assert same.ratio == 1 and same.mean_kl == 0 and same.same_top_share == 1

    def changed(name: str) -> torch.Tensor:
        return source.tensor(name) * (1.3 if "mlp" in name else 1)

    result = bits.score(source, changed, text)
    logits = []
    for weights in (None, changed):
        model = bits.open_reference(source)
        model.weights = weights
        hidden = model.last_hidden(text.ids.astype(np.int64), use_cache=False)
        logits.append(torch.stack([model.logits(row[:-1]) for row in hidden]).double())
    p, q = (torch.log_softmax(value, -1) for value in logits)
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    targets = torch.from_numpy(text.ids[:, 1:].astype(np.int64))[..., None]
    gain = (p.gather(2, targets) - q.gather(2, targets)).mean()
    assert result.tokens == 3 * 39 and result.scored == [39, 39, 39]
    assert result.mean_kl == pytest.approx(kl.mean().item(), rel=1e-4) and kl.mean() > 0
    assert result.kl_99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-4)
    assert result.ratio == pytest.approx(gain.exp().item(), rel=1e-5)
    same_top = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert result.same_top_share == pytest.approx(same_top)


def row(preset: str, seed: int | None, kl: float) -> dict:
    score = bits.Score("0", 5, [4], [2.0], [1.0], [4 * kl], [3], [3 * kl, 2 * kl])
    return {
        "preset": preset,
        "seed": seed,
        "bits": 4.054,
        "export_cpu_seconds": None if seed is None else 100.0 + seed,
        "texts": {"prose": asdict(score)},
    }


def test_the_table_gives_the_range_of_the_seeds_and_says_what_is_missing(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    rows = [row("int8-channel", None, 0.5), row("lut4-g8", 0, 0.1)]
    rows += [row("lut4-g8", 1, 0.2), row("llama.cpp Q4_0", None, 0.3)]
    for number, document in enumerate(rows):
        (folder / f"{number}.json").write_text(json.dumps(document))
    lines = bits.table(tmp_path)
    title, _, head, _, int8, lut4, llama, _ = lines[:8]
    first = "| preset | bits | calibrated |"
    assert title == "### model" and head == (
        f"{first} mean KL, prose | perplexity ratio, prose | export | peak |"
    )
    assert lut4 == (
        "| `lut4-g8` | 4.05 | 2 seeds | 0.1000–0.2000 | 1.284 | 100–101 CPU s "
        "| not measured |"
    )
    title, _, head, _, _, tails, *_ = lines[8:]
    assert title == "### model: single tokens"
    assert head == f"{first} 99% of KL, prose | same top, prose |"
    assert tails.startswith("| `lut4-g8` | 4.05 | 2 seeds | 0.297–0.594 | 0.750 |")
    assert int8.endswith("| not measured | not measured |")
    assert llama.startswith("| llama.cpp Q4_0 | 4.05 | no |")


def test_settings_leave_out_what_cannot_be_exported():
    settings = bits.list_settings(["fp16", "lut6-g16", "lut4-g8"], [0.05, 0.02], [0, 1])
    assert [setting.row_name for setting in settings] == [
        *["fp16", "lut6-g16"],  # without a text, which lut4-g8 needs
        *["lut6-g16-s0", "lut4-g8-s0", "lut6-g16-s1", "lut4-g8-s1"],
        *["mixed-0.05-s0", "mixed-0.02-s0", "mixed-0.05-s1", "mixed-0.02-s1"],
    ]
    fp16, mixed = settings[0], settings[-4]
    assert fp16.export_options() == ["--compress", "fp16"]
    assert mixed.label == "mixed, KL ≤ 0.05"
    words = ["--max-kl", "0.05", "--select", str(bits.SELECTION)]
    assert mixed.export_options()[-4:] == words


@pytest.mark.slow("exports a bundle in a process of its own")
def test_a_preset_is_exported_and_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(bits, "WORK", tmp_path / "work")
    monkeypatch.setattr(bits, "ROWS", tmp_path / "rows")
    source = Checkpoint(ROOT / "data" / "tiny-llama")
    text = windows(source.config.vocab_size)
    bits.measure(source, bits.Setting("int4-block32", None), [text])
    document = json.loads(bits.row_path(source, "int4-block32").read_text())
    assert 4.5 < document["bits"] < 5.5 and document["export_cpu_seconds"] > 0
    result = bits.Score(**document["texts"]["random"])
    assert 0 < result.mean_kl < result.kl_99 and result.tokens == 3 * 39
    assert bits.is_current(bits.row_path(source, "int4-block32"), [text], source.sha256)
    assert [path.suffix for path in (tmp_path / "work").iterdir()] == [".npy"]


def test_a_row_of_other_texts_is_measured_again(tmp_path):
    path = tmp_path / "lut4-g8.json"
    text = windows(9)
    assert not bits.is_current(path, [text], "c")
    score = {"sha256": "0", "scored": [39] * 3, "window": 40}
    row = {"checkpoint": {"sha256": "c"}, "texts": {"random": score}}
    path.write_text(json.dumps(row))
    assert bits.is_current(path, [text], "c")
    assert not bits.is_current(path, [windows(9, seed=1)], "c")
    assert not bits.is_current(path, [text, windows(9, seed=1)], "c")
    assert not bits.is_current(path, [replace(text, ids=text.ids[:2])], "c")
    assert not bits.is_current(path, [text], "d")


def test_the_page_is_made_of_the_rows(tmp_path):
    page = tmp_path / "presets.md"
    text = (ROOT / "docs" / "presets.md").read_text()
    page.write_text(text)
    bits.write_page(page)
    assert page.read_text() == text


def test_the_page_says_how_much_a_text_lowers_the_kl_of_every_row():
    """Of both models, every seed and every text."""
    gains = []
    for path in bits.ROWS.glob("*/*-s*.json"):
        plain = path.with_name(f"{path.stem.rpartition('-s')[0]}.json")
        if not plain.exists():  # a preset that needs a text
            continue
        fitted, nearest = json.loads(path.read_text()), json.loads(plain.read_text())
        for name, text in fitted["texts"].items():
            reference = bits.Score(**nearest["texts"][name])
            gains.append(bits.Score(**text).mean_kl / reference.mean_kl)
    assert len(gains) == 20 * 3
    said = f"mean KL with a text is {min(gains):.2f} to {max(gains):.2f} times"
    assert said in bits.PAGE.read_text()


def test_the_page_says_what_the_rows_show():
    scores: dict[str, list[bits.Score]] = {}
    bits_of: dict[str, float] = {}
    for path in (bits.ROWS / "smollm2-135m-instruct").glob("*.json"):
        document = json.loads(path.read_text())
        bits_of[path.stem] = document["bits"]
        texts = [bits.Score(**text) for text in document["texts"].values()]
        assert [text.tokens for text in texts] == [4335] * 3
        scores[path.stem] = texts

    def kl_ratios(name: str, other: str) -> list[float]:
        pairs = zip(scores[name], scores[other], strict=True)
        return [score.mean_kl / reference.mean_kl for score, reference in pairs]

    def kl_ratios_of_seeds(name: str, preset: str) -> list[float]:
        """Over the texts and the seeds of a calibrated preset."""
        return [r for seed in (0, 1, 2) for r in kl_ratios(name, f"{preset}-s{seed}")]

    of_both = [
        bits.Score(**text).ratio
        for path in bits.ROWS.glob("*/lut6-g16-s*.json")
        for text in json.loads(path.read_text())["texts"].values()
    ]
    assert 0.013 < max(abs(ratio - 1) for ratio in of_both) < 0.014
    ratios = [score.ratio for s in (0, 1, 2) for score in scores[f"lut4-g8-s{s}"]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" == "1.15 to 1.21"
    folder = bits.ROWS / "gemma3-270m"
    gemma = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}

    def gemma_scores(name: str) -> list[bits.Score]:
        return [bits.Score(**text) for text in gemma[name]["texts"].values()]

    fitted = [gemma_scores(f"lut4-g8-s{seed}") for seed in (0, 1, 2)]
    ratios = [score.ratio for of_seed in fitted for score in of_seed]
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" == "1.13 to 1.18"
    weighted = gemma["llama.cpp-Q4_0-imatrix"]
    assert f"{weighted['bits']:.2f}" == "7.01"
    for of_seed in fitted:
        pairs = zip(of_seed, gemma_scores("llama.cpp-Q4_0-imatrix"), strict=True)
        assert all(score.mean_kl < other.mean_kl for score, other in pairs)
    minutes = [
        json.loads(path.read_text())["export_cpu_seconds"] / 60
        for path in bits.ROWS.glob("*/*-s*.json")
        if not path.stem.startswith("mixed")
    ]
    assert f"{min(minutes):.1f} to {max(minutes):.1f}" == "1.4 to 4.3"
    ratios = kl_ratios_of_seeds("llama.cpp-Q4_K_M-imatrix", "lut6-g16")
    assert f"{min(ratios):.1f} to {max(ratios):.1f}" == "2.3 to 2.7"
    ratios = kl_ratios_of_seeds("llama.cpp-Q6_K-imatrix", "int8-channel")
    assert 1.95 < min(ratios) and max(ratios) < 2.2
    assert round(bits_of["llama.cpp-Q8_0"] / bits_of["int8-channel-s0"], 2) == 1.06
    ratios = kl_ratios_of_seeds("llama.cpp-Q8_0", "int8-channel")
    assert (round(100 - 100 * max(ratios)), round(100 - 100 * min(ratios))) == (15, 23)
    ratios = kl_ratios_of_seeds("llama.cpp-Q4_0-imatrix", "lut4-g8")
    assert (round(100 - 100 * max(ratios)), round(100 - 100 * min(ratios))) == (5, 22)
    mixed, other = "mixed-0.05-s0", "llama.cpp-Q4_0-imatrix"
    assert bits_of[mixed] < bits_of[other] and min(kl_ratios(other, mixed)) > 3
    ratios = [score.ratio for score in scores[other]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" == "1.06 to 1.09"
    ratios = [score.ratio for score in scores[mixed]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" == "1.03 to 1.04"
    assert f"{bits_of[mixed]:.2f}" == "5.16"
    kls = [score.mean_kl for score in scores[mixed]]
    assert f"{min(kls):.3f} to {max(kls):.3f}" == "0.050 to 0.053"
    strict = "mixed-0.02-s0"
    kls = [score.mean_kl for score in scores[strict]]
    assert f"{min(kls):.3f} to {max(kls):.3f}" == "0.022 to 0.024"
    assert f"{bits_of[strict]:.2f}" == "5.77"
    kls = [score.mean_kl for score in gemma_scores(mixed)]
    assert f"{min(kls):.3f} to {max(kls):.3f}" == "0.050 to 0.060"
    assert f"{gemma[mixed]['bits']:.2f}" == "4.60" and max(kls) / 0.05 - 1 < 0.201
