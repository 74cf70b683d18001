"""Core AI bundles: bits, identity, refusals, every family on Apple's interpreter, crosscheck."""

import ast
import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import matrix
import numpy as np
import pytest
import tiny
import torch
from in_process import invoke

from workbench import Bundle, Decoder, InputError
from workbench.bundle.presets import PRESETS
from workbench.export import export, options, write
from workbench.models.checkpoint import Checkpoint
from workbench_coreai import template
from workbench_coreai.aimodel import dense, read_weight

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = [1, 42, 90, 7, 9, 3, 5, 8, 77, 20]


def coreai_bundle(exports, checkpoint, target="coreai-fp32", **chosen) -> Bundle:
    return exports.bundle(checkpoint, target=target, **chosen)


@pytest.fixture(scope="session")
def small(exports) -> Checkpoint:
    """Two layers of random weights."""
    return Checkpoint(exports.checkpoint("llama"))


# Options


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"target": "coreai", "kv_write": "slice"}, "kv_write = mask"),
        ({"target": "coreai-fp32", "tokens": "1,4"}, "one range"),
        ({"target": "coreai-fp64"}, "installed: coreai, coreai-fp32"),
    ],
)
def test_options_that_core_ai_lacks_are_refused_by_name(chosen, message):
    with pytest.raises(InputError, match=message):
        options(**chosen)


def test_a_core_ml_bundle_says_nothing_of_core_ai_and_does_not_run_there(llama_bundle):
    assert (
        "target"
        not in json.loads((llama_bundle.root / "bundle.json").read_text())["options"]
    )
    with pytest.raises(InputError, match="portable"):
        Decoder(llama_bundle, "coreai")


# The miscompile


class Product(torch.nn.Module):
    """w[1,1,64,1] @ x.reshape(1,2,32,T).transpose(2,3), the smallest module that shows it."""

    def forward(self, w, x):
        return w @ x.reshape(1, 2, 32, -1).transpose(2, 3)


@pytest.mark.parametrize("free", [False, True])
def test_a_fixed_t_of_1_is_miscompiled_and_a_free_t_is_not(free, tmp_path):
    """Apple's conversion makes reshape(w @ x) of it. Where this fails at a fixed T, the defect is
    gone, and `workbench_coreai.template.trace` may fix T = 1."""
    from coreai.runtime import NDArray
    from coreai_torch import TorchConverter, get_decomp_table

    from workbench_coreai.runtime import _call, _load, wait

    T = torch.export.Dim("T", min=1, max=2)
    w, x = torch.randn(1, 1, 64, 1), torch.randn(1, 64, 1, 1)
    program = torch.export.export(
        Product(),
        (w.repeat(1, 1, 1, 1 + free), x.repeat(1, 1, 1 + free, 1)),
        dynamic_shapes=({3: T}, {2: T}) if free else None,
        prefer_deferred_runtime_asserts_over_guards=True,
    ).run_decompositions(get_decomp_table())
    converter = TorchConverter()
    converter.add_exported_program(program, input_names=["w", "x"], output_names=["y"])
    converter.to_coreai().save_asset(tmp_path / "p.aimodel")
    function = wait(_load(tmp_path / "p.aimodel"))
    inputs = {"w": NDArray(w.numpy()), "x": NDArray(x.numpy())}
    y, expected = (
        wait(_call(function, inputs, {}))["y"].numpy(),
        Product()(w, x).numpy(),
    )
    error = np.abs(y - expected).max() / np.abs(expected).max()
    assert error < 1e-6 if free else error > 0.5


def test_a_bundle_of_one_token_a_call_is_right(exports, small):
    bundle = coreai_bundle(exports, small.path, tokens="1")
    exact = exports.decoder(small.path, tokens="1")
    logits = [decoder.prefill(IDS) for decoder in (Decoder(bundle), exact)]
    assert tiny.relative(*logits) < 1e-5


# Bits


@pytest.mark.parametrize(
    "family, preset, target",
    [
        *(("llama", preset, "coreai") for preset in PRESETS),
        ("llama", "int4-block32", "coreai-fp32"),
        ("zaya", "fp16", "coreai"),  # its scales would be folded into its convolutions
        ("zaya", "int8-channel", "coreai"),
        (
            "hunyuan_v1_dense",
            "fp16",
            "coreai",
        ),  # the score's scale would be folded into a norm
        ("qwen3_5_text", "fp16", "coreai"),
    ],
)
def test_stored_bits_are_those_of_the_core_ml_bundle_and_outputs_those_of_dense(
    family, preset, target, exports, small, tmp_path, monkeypatch
):
    import miltorch

    path = small.path if family == "llama" else exports.checkpoint(family)
    bundle = coreai_bundle(exports, path, target, compress=preset)
    portable = exports.bundle(path, compress=preset)
    for shard, other in zip(bundle.manifest.shards, portable.manifest.shards):
        constants = miltorch.Executable(miltorch.read(portable.package(other)), "exact")
        assert shard.weights.keys() == other.weights.keys()
        for tensor, text in shard.weights.items():
            stored = np.float32(dense(read_weight(bundle.package(shard), text)))
            theirs = constants.constants[other.weights[tensor]].float().numpy()
            assert np.array_equal(stored.reshape(theirs.shape), theirs), tensor
    with monkeypatch.context() as patched:
        patched.setattr(template, "shaped", dense_parts)
        plain = export(
            path, tmp_path / "plain", progress=False, **bundle_options(bundle)
        )
    assert outputs(bundle) == outputs(plain)


def dense_parts(
    weight, arrays, dtype, shaped=template.shaped
) -> dict[str, torch.Tensor]:
    parts = {role: part.numpy() for role, part in shaped(weight, arrays, dtype).items()}
    return {"val": torch.from_numpy(np.float16(dense(parts))).to(dtype)}


def bundle_options(bundle: Bundle) -> dict:
    return bundle.manifest.options.model_dump()


def outputs(bundle: Bundle) -> list[bytes]:
    decoder = Decoder(bundle)
    logits, (state, *_) = decoder.prefill(IDS), decoder.seqs.states
    return [
        logits.tobytes(),
        *(state.read(name).tobytes() for name in bundle.manifest.shards[0].states),
    ]


# Identity, bytes, bounds


# Apple's passes fold a weight of zaya's
@pytest.mark.parametrize("family", ["llama", "zaya"])
def test_two_processes_make_the_same_bytes(family, exports, tmp_path):
    checkpoint = exports.checkpoint(family)
    apple = coreai_bundle(exports, checkpoint)
    code = f"""
from workbench.export import export, write
print(export({str(checkpoint)!r}, {str(tmp_path / "b")!r}, progress=False,
             **{bundle_options(apple)!r}).identity)
"""
    how = dict(capture_output=True, text=True, check=True, cwd=tmp_path)
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert done.stdout.strip() == apple.identity
    assert Bundle.open(tmp_path / "b").manifest.shards == apple.manifest.shards
    program = (apple.package(apple.manifest.shards[0]) / "main.mlirb").read_bytes()
    assert str(Path.cwd()).encode() not in program


def test_a_weight_swapped_into_a_trace_gives_the_bytes_of_its_own_trace(
    small, tmp_path, monkeypatch
):
    how = {"progress": False, "target": "coreai", "max_seq_len": 32}
    swapped = export(small.path, tmp_path / "a", **how)
    shards = swapped.manifest.shards
    assert len({shard.template for shard in shards}) < len(shards)
    monkeypatch.setattr(write, "_shape", lambda spec, *_: spec.name)
    own = export(small.path, tmp_path / "b", **how)
    assert all(shard.template == shard.name for shard in own.manifest.shards)
    files = [[shard.files for shard in each.manifest.shards] for each in (swapped, own)]
    assert files[0] == files[1]


def test_a_flipped_byte_and_a_t_over_the_bound_are_refused(apple, tmp_path):
    copy = shutil.copytree(apple.root, tmp_path / "copy")
    program = copy / apple.manifest.shards[0].path / "main.mlirb"
    data = bytearray(program.read_bytes())
    data[len(data) // 2] ^= 1
    program.write_bytes(data)
    with pytest.raises(InputError, match="SHA-256"):
        Bundle.open(copy).verify()
    decoder = Decoder(apple)
    model, T = decoder.layers[0], np.array([4])
    io = decoder.host.inputs(0 * T, T, 4) | {
        "x": np.zeros((1, apple.manifest.dims.C, 4, 1))
    }
    shapes, inputs = model.shard.inputs, {name: io[name] for name in model.shard.inputs}
    assert model.predict(inputs, model.make_state())
    wide = {n: np.concatenate([a, a], shapes[n].index("T")) for n, a in inputs.items()}
    with pytest.raises(InputError, match="T = 8"):
        model.predict(wide, model.make_state())


def test_other_runtimes_refuse_a_core_ai_bundle(apple):
    with pytest.raises(InputError, match="run on coreai"):
        Decoder(apple, "portable")


# Every family


@pytest.mark.parametrize("case", matrix.sample(), ids=matrix.name_of)
def test_a_sample_of_every_family_computes_what_hugging_face_does(case, exports):
    figures = matrix.measure(exports, case)
    print(matrix.name_of(case), figures)
    assert matrix.faults(figures) == []


@pytest.mark.parametrize(
    "fault, seen",
    [("write row off by one at T > 1", "states"), ("wrong rope base", "update")],
)
def test_the_matrix_sees_a_fault(fault, seen, tmp_path):
    from planted_modules import FAULTS

    own = tiny.Exports(tmp_path)  # whose bundle with the fault no other test is given
    with FAULTS[fault]():
        assert seen in matrix.faults(matrix.measure(own, ("llama", {})))


# The runtime


def test_snapshots_and_reuse_go_on_as_if_nothing_had_been(apple):
    decoder = Decoder(apple)
    whole = decoder.prefill(IDS)
    decoder.begin()
    decoder.prefill(IDS[:6])
    snapshot = decoder.snapshot()
    decoder.begin(snapshot)
    assert np.array_equal(
        decoder.prefill(IDS[6:], tile=1), decoder_logits(apple, snapshot)
    )
    decoder.begin(snapshot)
    assert tiny.relative(decoder.prefill(IDS[6:]), whole) < 1e-5


def decoder_logits(bundle: Bundle, snapshot) -> np.ndarray:
    other = Decoder(bundle)
    other.begin(snapshot)
    return other.prefill(IDS[6:], tile=1)


def test_it_runs_inside_a_running_event_loop(apple):
    async def inside():
        return Decoder(apple).prefill(IDS)

    assert np.array_equal(asyncio.run(inside()), Decoder(apple).prefill(IDS))


def test_validate_trace_sweep_and_doctor_take_it(exports, tiny_llama, tmp_path):
    apple = coreai_bundle(exports, tiny_llama.path)
    ids = ",".join(map(str, IDS))
    verdict = invoke(
        "validate", apple.root, "--checkpoint", tiny_llama.path, "--prompt-ids", ids
    )
    gates = {gate["name"]: gate["verdict"] for gate in verdict["gates"]}
    assert (
        verdict["verdict"] == "GREEN"
        and gates["program"] == gates["weights"] == "GREEN"
    )
    traced = invoke("explain", apple.root, "--only", "ranges", "--prompt-ids", ids)[
        "ranges"
    ]
    assert traced["ops"] > 40 and traced["first_inf"] is None
    assert any("mlp" in row["module"] for row in traced["worst"])
    assert invoke("doctor")["plugins"]["workbench-coreai"]
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"checkpoint: {tiny_llama.path}\n"
        "export: {max_seq_len: [16], target: [coreai, coreai-fp32]}\n"
        "run: {depth: [0], n_gen: 2, repetitions: 1}\n"
    )
    assert invoke("sweep", grid, "--log", tmp_path / "log")["done"] == 2


# Three witnesses, and faults


def test_crosscheck_sets_three_witnesses_side_by_side(
    llama_bundle, tiny_llama, tmp_path
):
    ids = ",".join(map(str, IDS))
    result = invoke(
        *("crosscheck", llama_bundle.root, "--checkpoint", tiny_llama.path),
        *("--prompt-ids", ids, "--folder", tmp_path),
    )
    assert result["verdict"] == "GREEN", result["gates"]
    rows = {(row["name"], row["precision"]): row for row in result["runtimes"]}
    assert len(rows) == 4 and rows["coreai", "declared"]["kv_bits_equal"] >= 0.998


def test_faults_are_red_through_apples_runtime_and_module_against_asset_is_blind(
    small, tmp_path
):
    from planted_modules import fault_table

    table = fault_table(small, tmp_path, max_seq_len=32)
    print(table.to_string())
    assert (table["module_asset"] < 1e-6).all() and (
        table["module_asset_verdict"] == "GREEN"
    ).all()
    assert table["verdict"].tolist() == ["GREEN", "RED", "RED", "RED", "RED"], table


# The plug-in itself


def test_it_imports_no_private_name_of_the_workbench():
    for path in Path(template.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                module = getattr(node, "module", None) or ""
                names = [alias.name for alias in node.names]
                parts = [part for name in [module, *names] for part in name.split(".")]
                assert not any(part.startswith("_") for part in parts), path.name
