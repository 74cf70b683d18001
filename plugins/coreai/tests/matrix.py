"""Every family × shards × options through Apple's interpreter, in fp32, against Hugging Face's
model.

    python plugins/coreai/tests/matrix.py                  the whole, into build/coreai_matrix.csv
    python plugins/coreai/tests/matrix.py zaya moe=routed  cases whose names contain all of these

A shard is isolated: it is fed Hugging Face's input at every position, in calls of 1 token, and of
4, 1, 3 and 2 in turn; sequences of a batch have different prompts and take different T, so that
calls have dummy columns, which hold garbage. An inner layer of a shard cannot be isolated: Apple's
logger replaces no value, and residual sums are fused away before it. There the update is that of
the whole shard, and the states are those of every layer. Exits 1 when a case is beyond a limit.
"""

import os
import random
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests")]

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402

from workbench import Decoder  # noqa: E402
from workbench.bundle.names import (  # noqa: E402
    ACC,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    ROUTER_STATE,
    X,
)

LAYERS = ({}, {"layers_per_shard": 9})
VARIANTS = ({}, {"layout": "bc1t"}, {"sliding": "ring"}, {"batch": 2})
VARIANTS += ({"layout": "bc1t", "sliding": "ring", "batch": 2},)
SIZES = ([1], [4, 1, 3, 2])
LENGTH = 12  # tokens of a prompt
# 1 − cosine of updates, routers, experts and heads; relative deviation of states and logits;
# positions of another best token
LIMITS = dict.fromkeys(("update", "router", "expert", "head"), 1e-11)
LIMITS |= {"states": 1e-5, "logits": 1e-5, "wrong_tokens": 0.0}
Case = tuple[str, dict]


def all_cases() -> Iterator[Case]:
    """(family, export options), those that mean something to the family."""
    for family, dims in tiny.DIMS.items():
        windows = "sliding_window" in dims
        kinds = [*LAYERS, *([{"moe": "routed"}] if family == "zaya" else [])]
        for kind in kinds:
            for variant in VARIANTS:
                own = {
                    name: value for name, value in variant.items() if name != "sliding"
                }
                if windows or own:
                    yield family, kind | (variant if windows else own)
                elif not variant:
                    yield family, kind


def sample(seed: int = 162) -> list[Case]:
    """One case of every family, and one of routed experts; each variant is among them."""
    rng, by_family = random.Random(seed), defaultdict(list)
    for family, chosen in all_cases():
        by_family[family, chosen.get("moe")].append((family, chosen))
    return [rng.choice(cases) for cases in by_family.values()]


def name_of(case: Case) -> str:
    return " ".join(
        [case[0], *(f"{option}={value}" for option, value in case[1].items())]
    )


def measure(exports: tiny.Exports, case: Case) -> dict[str, float]:
    """The worst figures of a case, by the names of `LIMITS`; absent where a bundle has no such
    shard."""
    family, chosen = case
    checkpoint = exports.checkpoint(family)
    bundle = exports.bundle(checkpoint, target="coreai-fp32", **chosen)
    decoder, hf = Decoder(bundle), exports.hf(checkpoint)
    goldens = [golden(hf, seed) for seed in range(decoder.options.batch)]
    worst = defaultdict(float, wrong_tokens=0)

    def note(name: str, value: float) -> None:
        worst[name] = max(worst[name], float(value))

    for sizes in SIZES:
        for isolated in (True, False):
            one = Run(decoder, goldens, isolated)
            one.run(sizes)
            for seq, g in enumerate(goldens):
                for error in one.state_errors(seq):
                    note("states", error)
                if isolated:
                    for name, *pair in one.pairs(seq):
                        note(name, 1 - tiny.cosine(*pair))
                else:
                    logits = decoder.logits(
                        one.hidden[len(g.inputs) - 1].transpose(0, 2, 1)
                    )[seq]
                    note("logits", tiny.relative(logits, g.logits))
                    worst["wrong_tokens"] += int(
                        (logits.argmax(-1) != g.logits.argmax(-1)).sum()
                    )
    for g in goldens:
        last = np.stack([g.outputs[-1].T] * len(goldens))
        note("head", 1 - tiny.cosine(decoder.logits(last)[0], g.logits))
    for name, *pair in expert_pairs(decoder, hf, goldens[0]):
        note(name, 1 - tiny.cosine(*pair))
    return dict(worst)


def golden(hf, seed: int) -> tiny.Golden:
    return tiny.golden(hf, tiny.prompt(90, LENGTH, seed))


class Run:
    """One run of every sequence's tokens through the layer shards; what it records has the layout
    `hidden[layer]`, `router[layer]` [B, n, width]."""

    def __init__(self, decoder: Decoder, goldens: list[tiny.Golden], isolated: bool):
        self.decoder, self.goldens, self.isolated = decoder, goldens, isolated
        self.hidden, self.router = {}, {}
        self.spans: list[tuple[int, int]] = []

    def run(self, sizes: list[int]) -> None:
        """All tokens, sequence `seq` in calls of `sizes[seq]`, `sizes[seq + 1]` … tokens."""
        n, stops, turn = len(self.goldens[0].ids), [0] * len(self.goldens), 0
        self.states = [model.make_state() for model in self.decoder.layers]
        while min(stops) < n:
            starts = stops
            stops = [
                min(start + sizes[(turn + seq) % len(sizes)], n)
                for seq, start in enumerate(starts)
            ]
            self.spans, turn = list(zip(starts, stops)), turn + 1
            self.call()

    def call(self) -> None:
        decoder, starts = self.decoder, np.array(self.spans)[:, 0]
        counts = np.array(self.spans)[:, 1] - starts
        T = int(counts.max())
        io = decoder.host.inputs(starts, counts, T)
        if not self.isolated:
            ids = np.zeros((len(counts), T), int)
            for row, g, (a, b) in zip(ids, self.goldens, self.spans):
                row[: b - a] = g.ids[a:b]
            io[X] = decoder.plane(decoder.bundle.embed(ids).transpose(0, 2, 1))
        for index, model in enumerate(decoder.layers):
            first, stop = model.shard.layers
            if self.isolated:
                io[X] = self.fed([g.inputs[first] for g in self.goldens], T)
                if self.goldens[0].routers is not None and first:
                    io[ROUTER_STATE] = self.fed(
                        [g.routers[first - 1] for g in self.goldens], T
                    )
            io = decoder.run_layer(model, self.states[index], io, counts)
            self.note(self.hidden, stop - 1, io[X])
            if ROUTER_STATE in io:
                self.note(self.router, stop - 1, io[ROUTER_STATE])

    def fed(self, rows: list[np.ndarray], T: int) -> np.ndarray:
        """The spans of each sequence's rows as a plane, garbage in dummy columns."""
        planes = [
            tiny.columns(self.decoder, r[a:b], T) for r, (a, b) in zip(rows, self.spans)
        ]
        return np.concatenate(planes)

    def note(
        self, record: dict[int, np.ndarray], layer: int, plane: np.ndarray
    ) -> None:
        B, width = plane.shape[:2]
        rows = record.setdefault(
            layer, np.zeros((B, len(self.goldens[0].ids), width), np.float32)
        )
        for row, columns, (a, b) in zip(rows, plane.reshape(B, width, -1), self.spans):
            row[a:b] = columns[:, : b - a].T

    def pairs(self, seq: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(name, values, Hugging Face's) of every shard's update and router state."""
        g = self.goldens[seq]
        for first, stop in (model.shard.layers for model in self.decoder.layers):
            x, expected = g.inputs[first], g.outputs[stop - 1]
            yield "update", self.hidden[stop - 1][seq] - x, expected - x
        for layer, states in self.router.items():
            yield "router", states[seq], g.routers[layer]

    def state_errors(self, seq: int) -> Iterator[float]:
        for state in self.states:
            for layer in range(*state.shard.layers):
                yield from tiny.state_errors(
                    state, layer, self.goldens[seq], seq
                ).values()


def expert_pairs(decoder: Decoder, hf, g: tiny.Golden) -> Iterator[tuple]:
    """("expert", output, Hugging Face's) of every expert shard that the prompt takes, fed what
    Hugging Face's experts are fed."""
    shards = [shard for shard in decoder.manifest.shards if shard.kind == "expert"]
    calls, scaled = {}, {}
    hooks = []
    for i, layer in enumerate(hf.model.layers if shards else ()):
        hooks += [
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, arguments, i=i: calls.__setitem__(i, arguments)
            ),
            layer.post_mlp_residual_scale.register_forward_hook(
                lambda module, arguments, result, i=i: scaled.__setitem__(
                    i,
                    result
                    - module.forward(torch.zeros_like(arguments[0]), arguments[1]),
                )
            ),
        ]
    if shards:
        tiny.golden(hf, g.ids)
    for hook in hooks:
        hook.remove()
    for shard in shards:
        inputs, picked, weights = calls[shard.layers[0]]
        own = (picked[:, 0] == shard.rows[0]).nonzero()[:4, 0]
        if len(own):
            weight = weights[own].T if weights.ndim == 2 else weights[own][None]
            io = {
                EXPERT_IN: inputs[own].T,
                EXPERT_WEIGHT: weight,
                ACC: 0 * inputs[own].T,
            }
            B = decoder.options.batch
            planes = {
                n: decoder.plane(np.stack([v.numpy()] * B)) for n, v in io.items()
            }
            output = decoder.experts.model(*shard.layers[:1], shard.rows[0]).predict(
                planes
            )[HIDDEN]
            expected = scaled[shard.layers[0]][0, own].numpy()
            yield "expert", output[0].reshape(output.shape[1], -1).T, expected


def faults(figures: dict[str, float]) -> list[str]:
    """The names of figures beyond their limits."""
    return [name for name, value in figures.items() if not value <= LIMITS[name]]


def main(words: list[str]) -> int:
    warnings.simplefilter("ignore")
    cases = [
        case for case in all_cases() if all(word in name_of(case) for word in words)
    ]
    rows, table = [], ROOT / "build" / "coreai_matrix.csv"
    table.parent.mkdir(exist_ok=True)
    for family in tiny.DIMS:
        with tempfile.TemporaryDirectory() as folder:
            exports = tiny.Exports(Path(folder))
            for case in (case for case in cases if case[0] == family):
                start = time.process_time()
                figures = measure(exports, case)
                rows.append(
                    {"case": name_of(case)}
                    | figures
                    | {"faults": " ".join(faults(figures))}
                )
                rows[-1]["cpu_s"] = time.process_time() - start
                print(rows[-1], flush=True)
                pd.DataFrame(rows).to_csv(table, index=False)
    frame = pd.DataFrame(rows)
    print(
        frame.reindex(columns=list(LIMITS)).max().to_string(),
        f"\n{len(frame)} cases, {table}",
    )
    return int(frame["faults"].any())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
