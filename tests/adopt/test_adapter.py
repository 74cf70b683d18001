"""Adopted packages run token by token and in batches; states, masks and functions of other
kinds."""

import numpy as np
import pytest
from test_adopt import changed

import miltorch
from workbench.adopt import passes, propose
from workbench.adopt.adapter import Adapter
from workbench.adopt.decoder import AdoptedDecoder
from workbench.adopt.folder import Adopted
from workbench.check import metrics
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import package as packages
from workbench.studies.exporter_model import Apply, convert, plain

SAME_CACHES = 1e-5  # relative RMS in exact arithmetic: sums in another order


@pytest.mark.matrix(2)
@pytest.mark.parametrize("style", ["chunks", "rotating", "recipe", "shards"])
def test_token_by_token_and_in_batches_the_caches_are_equal(adoptions, style):
    adapter = adoptions.adapter(style)
    ids = passes.prompt(adapter)
    one, batch = (passes.run(adapter, ids, T) for T in (1, max(adapter.tiles)))
    assert set(one.T) == {1} and max(batch.T) > 1
    for name in "kv":
        a, b = getattr(one, name), getattr(batch, name)
        assert metrics.relative_rms(a, np.where(np.isnan(b), a, b)) < SAME_CACHES
        assert np.isfinite(b).mean() > 0.7


def test_what_a_silent_function_puts_out_is_not_read(adoptions, tmp_path):
    def silent(raw):
        (part,) = raw["parts"]
        part["functions"] = [
            {"t_min": 1, "t_max": 1, "until": 8, "logits": False},
            {"first": 8},
        ]

    folder = Adopted.open(changed(adoptions, "monolith", tmp_path, silent))
    adapter = Adapter(folder, "portable", "exact")
    state = adapter.begin()
    assert adapter.advance(state, [1], 0).top is None
    decoder = AdoptedDecoder(folder, "portable")
    assert np.isnan(decoder.logits(decoder.advance([[1]], 1))).all()


def test_a_state_of_float32_is_kept_whole(adoptions, monkeypatch):
    read = miltorch.read

    def widened(path, function=None):
        program = read(path, function)
        program.states = {
            name: miltorch.Type("FLOAT32", kind.shape, "state")
            for name, kind in program.states.items()
        }
        return program

    value = np.float32(1 / 3)
    path = adoptions.packages("recipe") / "Stateful.mlpackage"
    for wide in (False, True):
        if wide:
            monkeypatch.setattr(packages.miltorch, "read", widened)
        state = packages.load_package(path, None, "portable").make_state()
        state.write("keyCache", np.full((2, 1, 2, 64, 32), value))
        assert (state.read("keyCache") == value).all() == wide


def test_masks_of_sliding_layers_are_proposed_with_their_window(adoptions, tmp_path):
    inputs = [
        plain(name, (1, 1, 1, S))
        for name, S in (("mask_sliding", 32), ("mask_local", 8))
    ]
    model = convert(Apply(None, lambda _, a, b: a[..., :8] + b), inputs, ["hidden"])
    model.save(str(tmp_path / "masks.mlpackage"))
    package = propose._read(tmp_path / "masks.mlpackage")
    source = Checkpoint(adoptions.checkpoint("rotating"))
    maker = propose._Maker(source, [package], tmp_path)
    (program,) = package.programs.values()
    whole, own = (maker.input(package, program, name) for name, *_ in inputs)
    assert (whole.window, whole.rows) == (8, "absolute")
    assert (own.window, own.rows) == (8, "ring")
