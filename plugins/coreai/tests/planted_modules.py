"""Faults planted in modules, seen by two tests: the asset against its module, as
Apple's tools compare them, and the bundle against Hugging Face's model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch

import workbench.export as exporting
from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, X
from workbench.check import gates, metrics
from workbench.check.program import program_gate
from workbench.decode import Decoder
from workbench.export import write
from workbench.models.cache import Cache
from workbench.models.checkpoint import Checkpoint
from workbench.models.layers import AttentionGeometry
from workbench_coreai.template import CoreAITemplate

SAME = 1e-6  # 1 − cosine up to which an asset computes what its module does
LENGTH = 7  # tokens of the comparison between module and asset, in calls of 4


def _later_rows_shifted(self, name, rows, io, suffix, append=Cache.append):
    """A fault: every token of a call but its first is written one row too far."""
    mask = io[KV_WRITE_MASK]
    shifted = torch.cat([mask[:, :, -1:], mask[:, :, :-1]], 2)
    # the row before is written too
    later = shifted.sum(-1, keepdim=True).transpose(2, 3) @ mask
    mixed = mask * (1 - later) + shifted * later
    return append(self, name, rows, io | {KV_WRITE_MASK: mixed}, suffix)


def _merged_without_transpose(self, x):
    """A fault: heads and tokens are exchanged in the output of attention, which has no
    effect at T = 1."""
    return self.plane(x, self.H * self.D)


def _mask_of_ones_and_zeros(self, q, k, v, cache, io, attend=AttentionGeometry.attend):
    """A fault: the additive mask is 1 to attend and 0 to block, as a multiplicative
    one."""
    name = ATTN_MASK + self.suffix
    return attend(self, q, k, v, cache, io | {name: (io[name] > -1).to(io[name].dtype)})


def _wrong_rope_base(source, options, read_plan=exporting.read_plan):
    """A fault: the rotary frequencies are of another base."""
    plan = read_plan(source, options)
    rope = []
    for one in plan.rope:
        frequencies = [frequency**1.1 for frequency in one.inv_freq]
        rope.append(one.model_copy(update={"inv_freq": frequencies}))
    return replace(plan, rope=rope)


_REPLACEMENTS = {
    "none": (exporting, "read_plan", exporting.read_plan),
    "write row off by one at T > 1": (Cache, "append", _later_rows_shifted),
    "heads permuted": (AttentionGeometry, "merge", _merged_without_transpose),
    "wrong rope base": (exporting, "read_plan", _wrong_rope_base),
    "mask 1/0": (AttentionGeometry, "attend", _mask_of_ones_and_zeros),
}
FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    name: partial(patch.object, *function) for name, function in _REPLACEMENTS.items()
}


def fault_table(checkpoint: Checkpoint, folder: Path, **options) -> pd.DataFrame:
    """One row per fault: 1 − cosine of the first shard's module and its asset and the
    verdict of that comparison alone, gate `program` of the fp32 bundle through Apple's
    runtime, both on the program that the fault was exported into."""
    rows = []
    options = {"target": "coreai-fp32"} | options
    for number, (name, planted) in enumerate(FAULTS.items()):
        modules = []
        make_module = CoreAITemplate.module

        def record(template, stored, modules=modules, make_module=make_module):
            modules.append(make_module(template, stored))
            return modules[-1]

        with (
            planted(),
            patch.object(CoreAITemplate, "module", record),
            patch.object(write, "MAX_THREADS", 1),  # the first shard comes first
        ):
            path = folder / f"fault_{number}"
            bundle = exporting.export(checkpoint.path, path, progress=False, **options)
            decoder = Decoder(bundle)
            distance = module_against_asset(modules[0], decoder)
        program = program_gate(decoder, checkpoint)
        asset_gate = gates.at_most("module_asset", distance, SAME, "")
        row = {
            "fault": name,
            "module_asset": distance,
            "module_asset_verdict": asset_gate.verdict,
            "program": program.value,
            "verdict": program.verdict,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def module_against_asset(module: torch.nn.Module, decoder: Decoder) -> float:
    """1 − cosine of the results of the first shard's module and of its asset for the
    same inputs and states, in the worst call."""
    model = decoder.layers[0]
    rng = np.random.default_rng(0)
    worst = 0.0
    state = model.make_state()
    B = decoder.options.batch
    for start in range(0, LENGTH, 4):
        T = min(4, LENGTH - start)
        io = decoder.host.inputs(np.full(B, start), np.full(B, T), T)
        io[X] = decoder.plane(rng.standard_normal((B, decoder.manifest.dims.C, T)))
        inputs = {name: np.float32(io[name]) for name in model.shard.inputs}
        with torch.no_grad():
            results = module(*map(torch.from_numpy, inputs.values()))
        outputs = model.predict(inputs, state)
        for name, result in zip(model.shard.outputs, results):
            pair = result.numpy().reshape(1, -1), outputs[name].reshape(1, -1)
            worst = max(worst, 1 - float(metrics.cosine(*pair)[0]))
    return worst
