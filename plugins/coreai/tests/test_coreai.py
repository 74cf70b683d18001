"""Core AI bundles: bits, identity, refusals, every family on Apple's interpreter, crosscheck."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from in_process import invoke

import miltorch
import workbench.export as exporting
from workbench import Bundle, Decoder, InputError
from workbench.ane import memory
from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, X
from workbench.bundle.presets import PRESETS
from workbench.check.program import program_gate
from workbench.export import export, options
from workbench.models.checkpoint import Checkpoint
from workbench.models.layers import AttentionGeometry
from workbench_coreai import template
from workbench_coreai.aimodel import dense, read_weight

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = [1, 42, 90, 7, 9, 3, 5, 8, 77, 20]
PROMPT = "--prompt-ids", ",".join(map(str, IDS))


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
    y = wait(_call(function, inputs, {}))["y"].numpy()
    error = tiny.relative(y, Product()(w, x).numpy())
    assert error < 1e-6 if free else error > 0.5


def test_a_bundle_of_one_token_a_call_is_right(exports, small):
    bundle = exports.bundle(small.path, target="coreai-fp32", tokens="1")
    exact = exports.decoder(small.path, tokens="1")
    logits = [decoder.prefill(IDS) for decoder in (Decoder(bundle), exact)]
    assert tiny.relative(*logits) < 1e-5


@pytest.mark.parametrize(
    "family, preset",
    [
        *(("llama", preset) for preset in PRESETS),
        # Apple's passes would fold scales into convolutions, into a norm
        ("zaya", "fp16"),
        ("zaya", "int8-channel"),
        ("hunyuan_v1_dense", "fp16"),
        ("qwen3_5_text", "fp16"),
    ],
)
def test_stored_bits_are_those_of_the_core_ml_bundle_and_outputs_those_of_dense(
    family, preset, exports, tmp_path, monkeypatch
):
    how = {"compress": preset, "max_seq_len": 32}
    path = exports.checkpoint(family)
    bundle = exports.bundle(path, target="coreai", **how)
    portable = exports.bundle(path, **how)
    for shard, other in zip(bundle.manifest.shards, portable.manifest.shards):
        constants = miltorch.Executable(miltorch.read(portable.package(other)), "exact")
        assert shard.weights.keys() == other.weights.keys()
        for tensor, text in shard.weights.items():
            stored = np.float32(dense(read_weight(bundle.package(shard), text)))
            theirs = constants.constants[other.weights[tensor]].float().numpy()
            assert np.array_equal(stored.reshape(theirs.shape), theirs), tensor
    monkeypatch.setattr(template, "shaped", dense_parts)
    plain = export(path, tmp_path / "plain", target="coreai", **how)
    assert outputs(bundle) == outputs(plain)


def dense_parts(
    weight, arrays, dtype, shaped=template.shaped
) -> dict[str, torch.Tensor]:
    parts = {role: part.numpy() for role, part in shaped(weight, arrays, dtype).items()}
    return {"val": torch.from_numpy(np.float16(dense(parts))).to(dtype)}


def outputs(bundle: Bundle) -> list[bytes]:
    decoder = Decoder(bundle)
    logits, (state, *_) = decoder.prefill(IDS), decoder.seqs.states
    rows = [state.read(name) for name in bundle.manifest.shards[0].states]
    return [array.tobytes() for array in (logits, *rows)]


# Apple's passes fold a weight of zaya's
@pytest.mark.parametrize("family", ["llama", "zaya"])
def test_two_processes_make_the_same_bytes(family, exports, tmp_path):
    checkpoint = exports.checkpoint(family)
    how = {"max_seq_len": 32, "target": "coreai-fp32"}
    apple = exports.bundle(checkpoint, **how)
    code = f"""from workbench.export import export
export({str(checkpoint)!r}, {str(tmp_path / "b")!r}, **{how!r})"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert Bundle.open(tmp_path / "b").identity == apple.identity
    shards = apple.manifest.shards
    assert len({shard.template for shard in shards}) < len(shards)


def test_a_flipped_byte_and_a_t_over_the_bound_are_refused(apple, tmp_path):
    copy = shutil.copytree(apple.root, tmp_path / "copy")
    program = copy / apple.manifest.shards[0].path / "main.mlirb"
    program.write_bytes(program.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match="SHA-256"):
        Bundle.open(copy).verify()
    decoder = Decoder(apple)
    model, T = decoder.layers[0], np.array([8])
    io = decoder.host.inputs(0 * T, T, 8)
    io[X] = decoder.plane(np.zeros((1, apple.manifest.dims.C, 8)))
    with pytest.raises(InputError, match="8, 1.*1 to 4"):
        model.predict({n: io[n] for n in model.shard.inputs}, model.make_state())


VARIANTS = [{}, {"layers_per_shard": 9}, {"layout": "bc1t"}, {"batch": 2}]


def every_family():
    """Each with one variant in turn; rings and routed experts where there are any."""
    for i, (family, dims) in enumerate(tiny.DIMS.items()):
        ring = {"sliding": "ring"} if "sliding_window" in dims else {}
        yield family, VARIANTS[i % len(VARIANTS)] | ring
    yield "zaya", {"moe": "routed"}


@pytest.mark.parametrize("family, chosen", list(every_family()))
def test_every_family_computes_what_hugging_face_does(family, chosen, exports):
    """Updates, states, routers and logits, isolated and chained, with dummy columns."""
    path = exports.checkpoint(family)
    bundle = exports.bundle(path, target="coreai-fp32", **chosen)
    gate = program_gate(Decoder(bundle), Checkpoint(path))
    assert gate.verdict == "GREEN", gate


def later_rows_shifted(self, held, rows, io, append=AttentionGeometry.append):
    """Every token of a call but its first is written one row too far."""
    mask = io[KV_WRITE_MASK]
    shifted = torch.cat([mask[:, :, -1:], mask[:, :, :-1]], 2)
    # the row before is written too
    later = shifted.sum(-1, keepdim=True).transpose(2, 3) @ mask
    mixed = mask * (1 - later) + shifted * later
    return append(self, held, rows, io | {KV_WRITE_MASK: mixed})


def merged_without_transpose(self, x):
    """Heads and tokens are exchanged, which has no effect at T = 1."""
    return self.plane(x, self.H * self.D)


def mask_of_ones_and_zeros(self, q, k, v, cache, io, attend=AttentionGeometry.attend):
    name = ATTN_MASK + self.suffix
    return attend(self, q, k, v, cache, io | {name: (io[name] > -1).to(io[name].dtype)})


def wrong_rope_base(source, options, read_plan=exporting.read_plan):
    plan = read_plan(source, options)
    wrong = [frequency**1.1 for frequency in plan.rope[0].inv_freq]
    return replace(plan, rope=[plan.rope[0].model_copy(update={"inv_freq": wrong})])


@pytest.mark.parametrize(
    "owner, name, fault",
    [
        (AttentionGeometry, "append", later_rows_shifted),
        (AttentionGeometry, "merge", merged_without_transpose),
        (exporting, "read_plan", wrong_rope_base),
        (AttentionGeometry, "attend", mask_of_ones_and_zeros),
    ],
)
def test_a_fault_in_a_module_is_red(owner, name, fault, small, tmp_path, monkeypatch):
    how = {"max_seq_len": 32, "target": "coreai-fp32"}
    with monkeypatch.context() as planted:
        planted.setattr(owner, name, fault)
        bundle = export(small.path, tmp_path / "b", **how)
    assert program_gate(Decoder(bundle), small).verdict == "RED"


def test_snapshots_go_on_as_if_nothing_had_been(apple):
    decoder = Decoder(apple)
    whole = decoder.prefill(IDS)
    decoder.begin()
    decoder.prefill(IDS[:6])
    snapshot, made = decoder.snapshot(), []
    for each in (decoder, Decoder(apple)):
        each.begin(snapshot)
        made.append(each.prefill(IDS[6:]))
    assert np.array_equal(*made) and tiny.relative(made[0], whole) < 1e-5


def test_it_runs_inside_a_running_event_loop(apple):
    async def inside():
        return Decoder(apple).prefill(IDS)

    assert np.array_equal(asyncio.run(inside()), Decoder(apple).prefill(IDS))


def test_commands_take_its_bundles(exports, tiny_llama, tmp_path):
    apple = exports.bundle(tiny_llama.path, target="coreai-fp32")
    checkpoint = "--checkpoint", tiny_llama.path
    found = invoke("validate", apple.root, *checkpoint, *PROMPT)
    gates = {gate["name"]: gate["verdict"] for gate in found["gates"]}
    assert found["verdict"] == gates["program"] == gates["weights"] == "GREEN"
    explain = "explain", apple.root, *PROMPT, "--only"
    ranges = invoke(*explain, "ranges")["ranges"]
    assert ranges["ops"] > 40 and ranges["first_inf"] is None
    assert any("mlp" in row["module"] for row in ranges["worst"])
    parts = invoke(*explain, "parts", *checkpoint)
    assert all(0 < layer["reauthoring"] < 1e-5 for layer in parts["parts"])
    assert invoke("explain", apple.root, *checkpoint, "--only", "variant")["fits"]
    assert invoke("doctor")["plugins"]["workbench-coreai"]
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"checkpoint: {tiny_llama.path}\n"
        "export: {max_seq_len: [16], target: [coreai, coreai-fp32]}\n"
        "run: {depth: [0], n_gen: 2, repetitions: 1}\n"
    )
    assert invoke("sweep", grid, "--log", tmp_path / "log")["done"] == 2


def labelled(bundle: Bundle, folder, target: str) -> Bundle:
    """A copy of a Core ML bundle whose manifest names Core AI programs."""
    path = shutil.copytree(bundle.root, folder / target) / "bundle.json"
    manifest = json.loads(path.read_text())
    manifest["options"] |= {"target": target}
    path.write_text(json.dumps(manifest))
    return Bundle.open(path.parent)


@pytest.mark.parametrize(
    "command, message",
    [
        (("explain", "--only", "parts"), "fp16 programs.*coreai.*export it"),
        (("explain", "--only", "variant"), "fp16 programs.*coreai.*export it for"),
        (("validate", "--runtime", "portable"), "portable.*run on coreai"),
    ],
)
def test_what_core_ai_cannot_answer_is_refused_with_the_next_step(
    command, message, llama_bundle, tiny_llama, tmp_path
):
    bundle = labelled(llama_bundle, tmp_path, "coreai")
    name, *chosen = command
    with pytest.raises(InputError, match=message):
        invoke(name, bundle.root, *chosen, "--checkpoint", tiny_llama.path)


def test_memory_counts_states_and_buffers_of_fp32_programs_twice(
    llama_bundle, tmp_path
):
    half, whole = (
        memory.budget(labelled(llama_bundle, tmp_path, target))
        for target in ("coreai", "coreai-fp32")
    )
    assert memory.budget(llama_bundle) == half
    for name in ("kv", "buffers"):
        assert whole[name] == 2 * half[name]
    assert whole["weights"] == half["weights"]  # as they are stored


def test_crosscheck_sets_three_witnesses_side_by_side(
    llama_bundle, tiny_llama, tmp_path
):
    result = invoke(
        *("crosscheck", llama_bundle.root, "--checkpoint", tiny_llama.path),
        *(*PROMPT, "--folder", tmp_path),
    )
    assert result["verdict"] == "GREEN", result["gates"]
    rows = {(row["name"], row["precision"]): row for row in result["runtimes"]}
    assert len(rows) == 4 and rows["Apple", "declared"]["kv_bits_equal"] >= 0.998
