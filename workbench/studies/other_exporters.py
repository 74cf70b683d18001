"""Packages with another exporter's interface, sound and with two faults that published packages
had, for the gates of `workbench.adopt`.

The interface is that of Apple's Llama recipe: token ids, one mask that grows, keys and values in
two states, rows written at end − q. The torch code is the workbench's own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from miltorch import shim
from miltorch.quiet import coremltools, quiet
from workbench.adopt import propose
from workbench.adopt.adapter import Adopted
from workbench.adopt.validate import Cause, Validation, conclusion, explain, validate
from workbench.check import gates
from workbench.errors import InputError
from workbench.export.convert import lean, no_progress
from workbench.models.checkpoint import Checkpoint

FACTS = Path("data/sources/other_exporters.csv")
SOUND, ONE_MASK, NORM_ORDER = "sound", "one mask", "norm order"
CAUSES = {SOUND: "as configured", ONE_MASK: "no window", NORM_ORDER: "q/k norm after rope"}


class Recipe(nn.Module):
    """Gemma 3 for one sequence, of Hugging Face's projections and norms; `fault` is a key of
    `CAUSES`."""

    def __init__(self, checkpoint: Checkpoint, context: int, fault: str):
        import transformers

        super().__init__()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=torch.float32
        )
        self.base, self.head, self.fault, c = model.model, model.lm_head, fault, model.config
        self.kinds, self.window = c.layer_types, c.sliding_window
        shape = c.num_hidden_layers, 1, c.num_key_value_heads, context, c.head_dim
        self.register_buffer("keyCache", torch.zeros(shape))
        self.register_buffer("valueCache", torch.zeros(shape))
        positions = torch.arange(context)[None]
        for kind in set(self.kinds):
            tables = self.base.rotary_emb(torch.zeros(1), positions, kind)
            self.register_buffer(f"rope_{kind}", torch.cat(tables))

    def forward(self, ids, mask):
        q, end = ids.shape[-1], mask.shape[-1]
        positions = end - q + torch.arange(q)
        away = positions[:, None] - torch.arange(end) >= self.window
        x = self.base.embed_tokens(ids)
        for i, (layer, kind) in enumerate(zip(self.base.layers, self.kinds)):
            slides = kind == "sliding_attention" and self.fault != ONE_MASK
            own = mask - 1e4 * away.to(mask.dtype) if slides else mask
            rope = getattr(self, f"rope_{kind}")[:, positions]
            x = x + layer.post_attention_layernorm(
                self.attend(i, layer.self_attn, layer.input_layernorm(x), own, rope, end - q, end)
            )
            y = layer.mlp(layer.pre_feedforward_layernorm(x))
            x = x + layer.post_feedforward_layernorm(y)
        return self.head(self.base.norm(x))

    def attend(self, i, a, x, mask, rope, start, end):
        """Attention `a` of layer i over x [1, q, C]; writes cache rows start to end."""
        queries, keys, values = (
            project(x).unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
            for project in (a.q_proj, a.k_proj, a.v_proj)
        )
        if self.fault == NORM_ORDER:
            queries, keys = a.q_norm(turned(queries, rope)), a.k_norm(turned(keys, rope))
        else:
            queries, keys = turned(a.q_norm(queries), rope), turned(a.k_norm(keys), rope)
        self.keyCache[i, :, :, start:end] = keys
        self.valueCache[i, :, :, start:end] = values
        keys, values = (
            cache[i, :, :, :end].repeat_interleave(a.num_key_value_groups, 1)
            for cache in (self.keyCache, self.valueCache)
        )
        weights = torch.softmax(queries @ keys.transpose(2, 3) * a.scaling + mask, -1)
        return a.o_proj((weights @ values).transpose(1, 2).flatten(2))


def turned(x, rope):
    """Rope on x [1, heads, q, D] with cosines and sines [2, q, D]."""
    a, b = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-b, a], -1) * rope[1]


def make_package(checkpoint: Checkpoint, context: int, fault: str, path: Path) -> Path:
    """Exports `Recipe` to the .mlpackage `path`; q and end are free up to `context`.

    Raises:
        InputError: the checkpoint is of another family.
    """
    if checkpoint.config.model_type != "gemma3_text":
        raise InputError(
            f"checkpoint {checkpoint.path}",
            checkpoint.config.model_type,
            "gemma3_text, whose layers slide and norm q and k",
            "give a Gemma 3 checkpoint, or leave FAULTS empty and give PACKAGES",
        )
    ct = coremltools()
    q, end = (ct.RangeDim(1, context, default=1) for _ in range(2))
    ids = ct.TensorType("inputIds", (1, q), dtype=np.int32)
    mask = ct.TensorType("causalMask", (1, 1, q, end), dtype=np.float16)
    examples = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 5)
    with quiet(), no_progress(), lean(), torch.no_grad(), shim.mended_converter():
        module = Recipe(checkpoint, context, fault).eval()
        shape = tuple(module.keyCache.shape)
        states = [
            ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name)
            for name in ("keyCache", "valueCache")
        ]
        package = ct.convert(
            torch.jit.trace(module, examples, check_trace=False),
            inputs=[ids, mask],
            outputs=[ct.TensorType("logits")],
            states=states,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
    package.save(str(path))
    return path


@dataclass
class Finding:
    """What `validate` and `explain` say of packages that were adopted as proposed."""

    validation: Validation
    cause: Cause


def adopt_packages(packages: list[Path], checkpoint: Checkpoint, folder: Path, **how) -> Finding:
    """Proposes a foreign.yaml in the new `folder`, and validates and explains what it describes;
    `how`: runtime and compute units."""
    foreign, notes = propose.propose(packages, checkpoint, folder)
    propose.write(foreign, notes, propose.target(folder))
    adopted = Adopted.open(folder)
    return Finding(validate(adopted, checkpoint, **how), explain(adopted, checkpoint))


def findings(
    checkpoint: Checkpoint,
    context: int,
    faults: Iterable[str],
    packages: list[Path],
    folder: Path,
    **how,
) -> dict[str, Finding]:
    """What is found in a sound package and one for each of `faults`, made in `folder`, and in
    `packages`, which are "yours"."""
    groups = {
        name: [make_package(checkpoint, context, name, folder / f"{name}.mlpackage")]
        for name in [SOUND, *faults] * bool(faults)
    }
    if packages:
        groups["yours"] = packages
    return {
        name: adopt_packages(group, checkpoint, folder / name, **how)
        for name, group in groups.items()
    }


def gate_table(found: dict[str, Finding]) -> pd.DataFrame:
    """A row for each gate, a column of verdicts for each name."""
    verdicts = {
        name: {gate.name: gate.verdict for gate in finding.validation.gates}
        for name, finding in found.items()
    }
    return pd.DataFrame(verdicts).rename_axis("gate").reset_index()


def cause_table(found: dict[str, Finding]) -> pd.DataFrame:
    """What K and V say of each name, and which variant of the model it computes."""
    rows = []
    for name, finding in found.items():
        by_name = {gate.name: gate for gate in finding.validation.gates}
        kv, best = by_name["keys_and_values"], finding.cause.variants.iloc[0]
        row = {"packages": name, "K and V": kv.reason, "computes": conclusion(finding.cause)}
        rows.append(row | {"relative RMS": best["relative_rms"]})
    return pd.DataFrame(rows)


def key_rows(found: dict[str, Finding]) -> pd.DataFrame:
    """Rows of the `fidelity` table for K, in calls of the fewest and the most tokens."""
    columns = ["packages", "layer", "position", "T", "tensor", "mode", "cosine", "finite"]
    frames = []
    for name, finding in found.items():
        rows = finding.validation.rows
        ends = rows["tile"].isin([rows["tile"].min(), rows["tile"].max()])
        frames.append(rows[ends & (rows["tensor"] == "k")].assign(packages=name))
    return pd.concat(frames)[columns].drop_duplicates(columns[:4])


def finding_gates(found: dict[str, Finding]) -> list[gates.Gate]:
    """A package made here must be GREEN if it is sound, else RED, and its cause named; packages of
    the user must be GREEN."""
    checks = []
    for name, finding in found.items():
        verdict, fits = finding.validation.verdict, finding.cause.fits
        expected = gates.GREEN if name in (SOUND, "yours") else gates.RED
        reason = f"{verdict}; the packages compute: {fits or 'none of the variants'}"
        as_expected = verdict == expected and fits == CAUSES.get(name, fits)
        checks.append(gates.holds(f"{name.replace(' ', '_')}_is_{expected}", as_expected, reason))
    return checks


def facts(project: Path) -> pd.DataFrame:
    """What was measured of public exporters: `data/sources/other_exporters.csv`."""
    return pd.read_csv(project / FACTS, keep_default_na=False)


def adopt_conclusion(found: dict[str, Finding], measured: pd.DataFrame) -> str:
    """The answer in sentences."""
    exporters, faulty = measured["exporter"].nunique(), measured[measured["fault"] != ""]
    words = (
        f"Not always: of {len(measured)} kinds of packages of {exporters} exporters {len(faulty)} "
        f"compute something else than the checkpoint ({faulty['exporter'].nunique()} exporters)."
    )
    names = [f"- {n}: {f.validation.verdict}. {conclusion(f.cause)}" for n, f in found.items()]
    return "\n".join([words + " Packages checked here:", "", *names])
