"""What to do about the verdicts: whether the export is faulty, whether its cost exceeds
the user's limit, and which preset keeps that limit."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench.check import gates
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.check.validate import chained_kl
from workbench.decode import Decoder
from workbench.exporter import export

PRESETS = ("int8-channel", "fp16")  # the cheaper one first
COLUMNS = ["compress", "MiB", "kl_mean", "passes"]


def measure_presets(
    golden: Golden,
    results: Sequence[Gate],
    compress: str,
    *,
    Ts: Sequence[int] | None = None,
    runtime: str = "auto",
    compute_units: str = "CPU_AND_NE",
    **options,
) -> pd.DataFrame:
    """Measures other presets, one after the other, until one keeps the user's limit on
    the mean KL. Nothing is measured, and there are no rows, where the bundle keeps the
    limit or its export is RED.

    Args:
        golden: with its checkpoint; the mean KL is that on its tokens.
        results: the gates of the bundle.
        compress: the preset of the bundle.
        Ts: tokens a call, as in the validation that gave `results`.
        options: of the export.

    Returns:
        Columns compress, MiB (of the bundle), kl_mean (nats), passes.
    """
    rows = []
    limit = next(gate for gate in results if gate.name == gates.MAX_KL_GATE)
    presets = [preset for preset in PRESETS if preset != compress]
    if gates.faults(results) or limit.verdict != gates.OVER:
        presets = []
    for preset in presets:
        bundle = export(golden.source.path, compress=preset, **options)
        decoder = Decoder(bundle, runtime, compute_units=compute_units)
        cost = float(np.mean(chained_kl(decoder, golden, Ts)))
        rows.append((preset, bundle.bytes / 2**20, cost, cost <= limit.threshold))
        if cost <= limit.threshold:
            break
    return pd.DataFrame(rows, columns=COLUMNS)


def describe_verdict(results: Sequence[Gate], presets: pd.DataFrame) -> list[str]:
    """Sentences that tell a fault of the export from a cost above the user's limit, and
    name the next step.

    Args:
        results: the gates of a bundle.
        presets: see `measure_presets`.
    """
    gates_that_ran = [
        gate for gate in results if gate.verdict in (gates.GREEN, gates.RED)
    ]
    limits = [
        gate
        for gate in results
        if gate.name == gates.MAX_KL_GATE and gate.verdict != gates.NOT_RUN
    ]
    other_checks_over = [
        gate
        for gate in results
        if gate.name != gates.MAX_KL_GATE and gate.verdict == gates.OVER
    ]
    faults = gates.faults(gates_that_ran)
    count = len(gates_that_ran)
    if faults:
        names = ", ".join(gate.name for gate in faults)
        sentences = [
            f"Export RED: {len(faults)} of {count} gates on it are RED ({names}). "
            "Next step: workbench explain names the cause."
        ]
    else:
        names_not_run = [gate.name for gate in results if gate.verdict == gates.NOT_RUN]
        not_run_note = ""
        if names_not_run:
            not_run_note = f"; not run: {', '.join(names_not_run)}"
        word = "not run" if gates.missing(results) else "GREEN"
        sentences = [f"Export {word}: {count} gates on it are GREEN{not_run_note}."]
    within = "It " if other_checks_over else "Quality WITHIN: it "
    for limit in limits:
        cost = f"a mean KL of {limit.value:.3g} nats from Hugging Face's model"
        if faults:
            sentences.append(
                f"Quality not judged: {cost} is measured, and the fault has a part in it."
            )
        elif limit.verdict == gates.WITHIN:
            sentences.append(
                f"{within}costs {cost}, at most your limit of {limit.threshold:g}."
            )
        else:
            sentences.append(
                f"Quality OVER: it costs {cost}, more than your limit of "
                f"{limit.threshold:g}. This is the cost of compression and no fault."
            )
    if not faults:
        sentences += [
            f"Quality OVER: {gate.name} is {gate.value:.3g}, less than your limit of "
            f"{gate.threshold:.3g} ({gate.reason})."
            for gate in other_checks_over
        ]
    for row in presets.to_dict("records"):
        measured = f"{row['kl_mean']:.3g} nats, measured on the same tokens"
        if row["passes"]:
            sentences.append(
                f"Next step: export with compress = {row['compress']}, which keeps the "
                f"limit ({measured}; a bundle of {row['MiB']:.0f} MiB)."
            )
        else:
            sentences.append(
                f"Stored as {row['compress']} it exceeds the limit too ({measured})."
            )
    if limits and not faults and len(presets) and not presets["passes"].any():
        sentences.append(
            "None of the presets tried keeps the limit. Next step: raise MAX_KL."
        )
    return sentences
