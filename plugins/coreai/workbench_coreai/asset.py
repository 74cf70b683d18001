"""Writes a traced program and its weights to an `.aimodel` folder, with equal bytes in
every process, and finds the weights in it."""

import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from workbench.bundle.presets import Preset
from workbench.exporter.shards import Spec
from workbench.exporter.weights import pack_bits
from workbench_coreai.aimodel import StoredPart, format_place, import_apple
from workbench_coreai.weights import part_name

# a constant whose bytes stand apart from the operation, and those bytes, as printed
RESOURCE = re.compile(r"dense_resource<(resource_\d+)>")
BLOB = re.compile(r'resource_\d+: "0x([0-9A-Fa-f]+)"')
DATE = "20270101T000000Z"  # of every asset, so that equal assets have equal bytes


def save(
    program: torch.export.ExportedProgram,
    spec: Spec,
    weights: dict[str, dict[str, torch.Tensor]],
    path: Path,
) -> None:
    """Writes a traced program with these weights. The same trace and weights give the
    same bytes, in any process.

    Args:
        weights: path of the parameter → role → part.
    """
    for parameter, parts in weights.items():
        for role, part in parts.items():
            program.state_dict[part_name(parameter, role)] = part
    torch_converter = import_apple("coreai_torch").TorchConverter
    with open(os.devnull, "w") as null, redirect_stdout(null):
        converter = torch_converter(mode=torch_converter.Mode.RELEASE)
        converter.add_exported_program(
            program,
            input_names=list(spec.inputs),
            output_names=list(spec.outputs),
            state_names=[state.tensor for state in spec.states.values()],
        )
        asset = converter.to_coreai()
        name_constants(asset._module._mlir_module)
        path.parent.mkdir(parents=True, exist_ok=True)
        asset.save_asset(path)
    metadata = json.loads((path / "metadata.json").read_text()) | {"creationDate": DATE}
    (path / "metadata.json").write_text(json.dumps(metadata, indent=1, sort_keys=True))


def name_constants(module) -> None:
    """Names the large constants of an MLIR module `weight_0`, `weight_1` … in their
    order, because Apple's names differ in every process."""
    ir = import_apple("coreai._compiler.ir")
    named = {}  # Apple's name → the constant under its new name

    def rename(op):
        value = op.attributes["value"] if "value" in op.attributes else None
        # the whole text may be long; the name is at its beginning
        if resource := RESOURCE.match(str(value)[:200]):
            apples_name = resource[1]
            if apples_name not in named:
                raw, alignment = resource_bytes(op)
                named[apples_name] = ir.DenseResourceElementsAttr.get_from_buffer(
                    raw, f"weight_{len(named)}", value.type, alignment
                )
            op.attributes["value"] = named[apples_name]
        return ir.WalkResult.ADVANCE

    with module.context, ir.Location.unknown():
        module.operation.walk(rename)


def resource_bytes(op) -> tuple[np.ndarray, int]:
    """The bytes, uint8, of the one large constant of an MLIR operation, and their
    alignment. Apple's Python interface gives no access to them, so that they are read
    from the hexadecimal digits of a module that has this operation alone: an alignment
    of four bytes, then the bytes of the constant."""
    ir = import_apple("coreai._compiler.ir")
    module = ir.Module.create()
    op.clone(ir.InsertionPoint(module.body))
    (digits,) = BLOB.findall(str(module))
    blob = np.frombuffer(bytes.fromhex(digits), np.uint8)
    alignment = int(blob[:4].view(np.uint32)[0])
    return blob[4:].copy(), alignment


def locate(
    program: bytes, parts: dict[str, torch.Tensor], preset: Preset
) -> str | None:
    """The place (see `aimodel`) of a weight in the bytes of a program; None where the
    converter did not store the weight as it is: it writes a constant of one repeated
    value as that value.

    Two equal weights may have the same place; their bytes are equal."""
    located = []
    for role, part in parts.items():
        array = part.numpy()
        kind, bits = "fp", 8 * array.itemsize
        if role in ("data", "indices"):
            kind, bits = ("uint" if role == "indices" else "int"), preset.bits
            array = pack_bits(array, bits)
        offset = program.find(array.tobytes())
        if offset < 0:
            return None
        located.append(StoredPart(role, kind, bits, tuple(part.shape), offset))
    return format_place(located)
