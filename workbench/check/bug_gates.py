"""The bug gates: which there are (`BUG_GATES`), how they run on a bundle (`bug_gates`), and
when a stored verdict stands for them (`load_or_run_gates`).

The gates themselves are in files of their names, those on states in `states`. Here each
has a function `run_…_gate` of `GateInputs`, so that they share decoders, the values of
the bundle's files, and results of other bundles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial

from workbench.bundle import Bundle
from workbench.check import distinct, gates, host, interface, program, states, weights
from workbench.check.gates import Gate
from workbench.check.golden import StoredWeights, check_exported_from, stored_weights
from workbench.check.hf import Reference
from workbench.check.shared import (
    SharedResults,
    StoredKey,
    StretchesKey,
    find_or_compute,
)
from workbench.check.states import STATE_GATES, ShardNames
from workbench.check.stretches import Stretches, reference_stretches
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import stage


@dataclass
class GateInputs:
    """A bundle whose bug gates run, and what the gates share. A property is computed when the
    first gate reads it.

    Attributes:
        decoder: runs the gates that it can; None: decoders are opened.
        read_weights: gives the values of the bundle's files, in their stored dtype; None:
            they are read.
        shared: results of other bundles that count for this one.
    """

    bundle: Bundle
    checkpoint: Checkpoint
    decoder: Decoder | None = None
    read_weights: Callable[[], StoredWeights] | None = None
    shared: SharedResults = field(default_factory=SharedResults)

    @cached_property
    def stored_key(self) -> StoredKey:
        return StoredKey.of(self.bundle, self.checkpoint)

    @cached_property
    def weights_gate(self) -> Gate:
        """Gate `weights`, which also says what the gates behind it have to test."""
        return find_or_compute(
            self.shared.weights_gates,
            self.stored_key,
            lambda: weights.weights_gate(self.bundle, self.checkpoint),
        )

    @cached_property
    def representatives(self) -> ShardNames:
        """See `shards_to_test`."""
        return shards_to_test(self.bundle, self.checkpoint, [self.weights_gate])

    @cached_property
    def program_decoder(self) -> Decoder:
        """The decoder whose program is compared; see `exact_decoder`."""
        return program.exact_decoder(self.bundle, self.decoder)

    @cached_property
    def host_decoder(self) -> Decoder:
        """The decoder whose host and states are checked. The states of a device have
        gates of their own (see `load_or_run_gates`)."""
        if self.decoder and not self.decoder.is_device:
            return self.decoder
        return self.program_decoder

    def compute_stretches(self, chained_end: bool) -> Stretches:
        """What gate `program` compares with; see `reference_stretches`."""
        if self.read_weights:
            values = self.read_weights()
        else:
            values = stored_weights(
                self.checkpoint, self.bundle, keep_dtype=True, head=False
            )
        reference = Reference(self.checkpoint, values)
        return reference_stretches(self.bundle.manifest, reference, chained_end)


def shards_to_test(
    bundle: Bundle, checkpoint: Checkpoint, results: Sequence[Gate]
) -> ShardNames:
    """Names of one shard per distinct program; None, for every shard, if gate `weights`
    is not GREEN among the results, since only the weights that it compares may differ
    between shards of one program."""
    verdicts = {gate.name: gate.verdict for gate in results}
    if verdicts.get("weights") != gates.GREEN:
        return None
    return distinct.representatives(bundle, checkpoint)


def run_interface_gate(inputs: GateInputs) -> Gate:
    return interface.interface_gate(inputs.bundle, inputs.checkpoint)


def run_weights_gate(inputs: GateInputs) -> Gate:
    return inputs.weights_gate


def run_host_gate(inputs: GateInputs) -> Gate:
    return host.host_gate(inputs.host_decoder, inputs.checkpoint)


def run_program_gate(inputs: GateInputs) -> Gate:
    if inputs.program_decoder.precision != "exact":
        target = inputs.bundle.manifest.options.target
        reason = f"needs fp32 arithmetic, which target {target} lacks"
        return gates.not_run("program", reason, applies=False)
    chained_end = not program.can_feed_layers(inputs.program_decoder)
    stretches = find_or_compute(
        inputs.shared.stretches,
        StretchesKey(inputs.stored_key, chained_end),
        partial(inputs.compute_stretches, chained_end),
    )
    return program.program_gate(
        inputs.program_decoder, inputs.checkpoint, inputs.representatives, stretches
    )


def run_state_gate(name: str, inputs: GateInputs) -> Gate:
    """One of `STATE_GATES`."""
    return STATE_GATES[name](inputs.host_decoder.plain, inputs.representatives)


# The gates that need no tuning, in the order in which they run.
BUG_GATES: dict[str, Callable[[GateInputs], Gate]] = {
    "interface": run_interface_gate,
    "weights": run_weights_gate,
    "host": run_host_gate,
    "program": run_program_gate,
} | {name: partial(run_state_gate, name) for name in STATE_GATES}
RUN_PROGRAMS = {"program", *STATE_GATES}  # the gates that run the bundle's programs


def bug_gates(
    bundle: Bundle,
    checkpoint: Checkpoint,
    *,
    decoder: Decoder | None = None,
    read_weights: Callable[[], StoredWeights] | None = None,
    shared: SharedResults | None = None,
) -> list[Gate]:
    """Runs `BUG_GATES`, which are the same for every compression.

    Args:
        decoder: its host and states are checked, and its program if its arithmetic is
            `exact`. Instead of a device or of other arithmetic, a decoder of the bundle's
            interpreter is opened (see `exact_decoder`).
        read_weights, shared: see `GateInputs`.

    Raises:
        InputError: a file whose SHA-256 is not the manifest's; see also
            `gates_after_failure`.
    """
    check_exported_from(checkpoint, bundle)
    bundle.verify()  # before `shared` is asked for results of these files
    shared = SharedResults() if shared is None else shared
    inputs = GateInputs(bundle, checkpoint, decoder, read_weights, shared)
    results: list[Gate] = []
    for name, run_gate in BUG_GATES.items():
        stage(f"validate: {name}")
        try:
            results.append(run_gate(inputs))
        except InputError as problem:
            return results + gates_after_failure(problem, results)
    return results


def gates_after_failure(problem: InputError, results: Sequence[Gate]) -> list[Gate]:
    """The bug gates that follow `results`; the first of them has raised `problem`.

    No decoder opens or runs a bundle whose gate `interface` is RED, so that they are
    not_run. In another bundle a program that stops with an error is RED, and the gates
    behind it are not_run.

    Raises:
        InputError: `problem`, of a gate that runs no program: the checkpoint or the
            bundle cannot be read.
    """
    verdicts = {gate.name: gate.verdict for gate in results}
    failed, *others = [name for name in BUG_GATES if name not in verdicts]
    if verdicts.get("interface") == gates.RED:
        return unopened_gates(problem, [failed, *others])
    if failed not in RUN_PROGRAMS:
        raise problem
    reason = f"the program does not run: {problem.subject}: {problem.actual}"
    red = gates.holds(failed, False, reason)
    return [red, *unopened_gates(problem, others)]


def unopened_gates(problem: InputError, names: Sequence[str]) -> list[Gate]:
    """Gates `names` as not_run, for a bundle that no decoder runs because of
    `problem`."""
    reason = f"the bundle cannot be run: {problem.subject}: {problem.actual}"
    return [gates.not_run(name, reason) for name in names]


class GateSource(Enum):
    """Where the bug gates of a validation come from."""

    RUN = "all of them run"
    STORED = "verdict.json has them"
    BUNDLE_ALONE = "those run that need nothing but the bundle; the others are not_run"


def choose_source(
    *, has_checkpoint: bool, stored_counts: bool, run_on_decoder: bool
) -> GateSource:
    """Where the bug gates come from:

    | checkpoint | verdict.json counts | `run_on_decoder` | source |
    | --- | --- | --- | --- |
    | given | no | either | `RUN` |
    | given | yes | True | `RUN` |
    | given | yes | False | `STORED` |
    | none | yes | either | `STORED` |
    | none | no | either | `BUNDLE_ALONE` |
    """
    if has_checkpoint and (run_on_decoder or not stored_counts):
        return GateSource.RUN
    return GateSource.STORED if stored_counts else GateSource.BUNDLE_ALONE


def load_or_run_gates(
    decoder: Decoder,
    source: Checkpoint | None = None,
    *,
    run_on_decoder: bool = False,
    ignore_stored: bool = False,
    trusted_hash: str | None = None,
    read_weights: Callable[[], StoredWeights] | None = None,
    shared: SharedResults | None = None,
) -> list[Gate]:
    """The bug gates of a decoder's bundle, from the source that `choose_source` gives.
    Gates that run with the checkpoint are stored in verdict.json.

    The gates on the states of a device run on the device.

    Args:
        source: the checkpoint.
        run_on_decoder, ignore_stored: see `validate`.
        trusted_hash: of the verdict.json that the user's golden names.
        read_weights, shared: see `GateInputs`.

    Raises:
        InputError: see `bug_gates` and `save_verdict`.
    """
    bundle = decoder.bundle
    stored = None if ignore_stored else gates.stored_verdict(bundle, trusted_hash)
    chosen = choose_source(
        has_checkpoint=source is not None,
        stored_counts=stored is not None and stored.counts,
        run_on_decoder=run_on_decoder,
    )
    if chosen is GateSource.RUN:
        results = bug_gates(
            bundle,
            source,
            # a verdict that is stored for the files must not come from a decoder that
            # may have been changed in memory
            decoder=decoder if run_on_decoder else None,
            read_weights=read_weights,
            shared=shared,
        )
        gates.save_verdict(bundle, results)
    else:
        bundle.verify()
        if chosen is GateSource.BUNDLE_ALONE:
            unknown = _unknown_gates(bundle, stored, ignore_stored)
            run_here = [interface.interface_gate(bundle), *states.state_gates(decoder)]
            return _with_results(unknown, run_here)
        results = stored.gates
    if decoder.is_device:
        return _with_results(results, states.state_gates(decoder))
    return results


def _with_results(results: Sequence[Gate], run_here: Sequence[Gate]) -> list[Gate]:
    """`results` with those gates that ran on this decoder in the place of the same gates.
    One that is RED for the files stays RED."""
    by_name = {gate.name: gate for gate in run_here}
    return [g if g.verdict == gates.RED else by_name.get(g.name, g) for g in results]


def _unknown_gates(
    bundle: Bundle, stored: gates.StoredVerdict | None, ignore_stored: bool
) -> list[Gate]:
    """The bug gates as not_run, with the bundle's own claim about each and the command
    that runs it."""
    if not stored:
        exists = (bundle.root / gates.VERDICT).is_file()
        state = "is of another bundle or by other gates" if exists else "is missing"
        if ignore_stored:
            state = "does not count with --fresh"
        reason = f"needs --checkpoint: the bundle's {gates.VERDICT} {state}"
        return [gates.not_run(name, reason) for name in BUG_GATES]
    command = f"workbench validate {bundle.root.name} --checkpoint CHECKPOINT"
    stated = {gate.name: gate.verdict for gate in stored.gates}
    return [
        gates.not_run(
            name,
            f"stated by the bundle, not checked here: {stated.get(name, 'nothing')}; "
            f"run: {command}",
        )
        for name in BUG_GATES
    ]
