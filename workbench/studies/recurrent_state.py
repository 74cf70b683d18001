"""States that do not grow with the sequence: what a matrix loses in fp16, what undo and
a second state cost, and from which length on they are smaller than a cache.

Drift is arithmetic alone: the same inputs in fp16 and in float64. Sizes are the
planner's, from configurations."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice

import numpy as np
import pandas as pd
import torch

from workbench.ane import roofline
from workbench.ane.memory import STORED_BITS, budget_of_bundle
from workbench.ane.roofline import Work
from workbench.bundle import Options
from workbench.bundle.names import MATRIX_STATE, REMAINDER_STATE
from workbench.check import gates
from workbench.check.metrics import rms
from workbench.decode import Decoder, Snapshot
from workbench.models import family_of
from workbench.models.recurrence import expm1, write_pair

WIDTH, BETA = 32, 0.1  # of keys and values; how far each token corrects the matrix
# what six independent roundings of at most 2^-11 leave: k S, its decay, v less it,
# times β, the outer product, the matrix
ROUNDED = 6**0.5 * 2.0**-11
SCALED = "S · exp g"
ADDED = "S + S · expm1 g"
PAIR = "the same, a pair of states"
CONFIGS: dict[str, tuple[str, str, dict]] = {
    "LFM 2": ("lfm2", "conv", {}),
    "Qwen 3.5": ("qwen3_5_text", "linear_attention", {}),
    "Granite 4": ("granitemoehybrid", "linear_attention", {"num_local_experts": 0}),
}
"""Model → its `model_type`, the kind of its recurrent layers, what is not transformers' default."""
SETTINGS: dict[str, dict] = {
    "neither": {},
    "undo": {"undo": True},
    "state_pair": {"state_pair": True},
    "undo and state_pair": {"undo": True, "state_pair": True},
}
"""Name → export options."""
RECURRENT = "one in four attends"
ATTENTION = "attention alone"


class _States:
    """The states of one matrix, as a layer's cache gives them."""

    def __init__(self, matrix: torch.Tensor):
        self.values = {MATRIX_STATE: matrix, REMAINDER_STATE: torch.zeros_like(matrix)}

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def write(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value


def _scaled(states: _States, g, added) -> None:
    states.write(MATRIX_STATE, states.read(MATRIX_STATE) * torch.exp(g) + added)


def _added(states: _States, g, added) -> None:
    matrix = states.read(MATRIX_STATE)
    states.write(MATRIX_STATE, matrix + (matrix * expm1(g) + added))


def _pair(states: _States, g, added) -> None:
    write_pair(states, states.read(MATRIX_STATE), g, added)


FORMS: dict[str, Callable] = {SCALED: _scaled, ADDED: _added, PAIR: _pair}


def drift(half_lives: Sequence[int], tokens: Sequence[int], seeds: int) -> pd.DataFrame:
    """RMS error of DeltaNet's matrix over its RMS after so many `tokens`, one a call,
    by form, half-life in tokens and seed: every operation rounded to fp16, against
    float64 on the same inputs."""
    decay = -np.log(2) / torch.tensor(half_lives, dtype=torch.float64).reshape(-1, 1, 1)
    decay = decay.half()
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        shape = max(tokens), len(half_lives), 1, WIDTH
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        k = torch.nn.functional.normalize(k, dim=-1).half()
        inputs = k, v.half()
        doubles = (x.double() for x in inputs)
        exact = _matrices(_scaled, decay.double(), *doubles, tokens)
        for form, update in FORMS.items():
            matrices = _matrices(update, decay, *inputs, tokens)
            for count, matrix in matrices.items():
                errors = _rms(matrix - exact[count]) / _rms(exact[count])
                for half_life, error in zip(half_lives, errors.tolist(), strict=True):
                    rows.append((form, half_life, count, seed, error))
    return pd.DataFrame(rows, columns=["form", "half_life", "tokens", "seed", "error"])


def _rms(matrices: torch.Tensor) -> torch.Tensor:
    """The RMS of each matrix."""
    return matrices.square().mean((1, 2)).sqrt()


def _matrices(
    update: Callable, g, k, v, tokens: Sequence[int]
) -> dict[int, torch.Tensor]:
    """The matrices [half-lives, WIDTH, WIDTH] after so many tokens, float64."""
    states = _States(torch.zeros(len(g), WIDTH, WIDTH, dtype=k.dtype))
    matrices = {}
    enter = torch.exp(g)
    for count in range(1, max(tokens) + 1):
        key = k[count - 1]
        value = v[count - 1]
        delta = (value - (key @ states.read(MATRIX_STATE)) * enter) * BETA
        update(states, g, key.transpose(1, 2) @ delta)
        if count in tokens:
            matrices[count] = states.read(MATRIX_STATE).double()
    return matrices


def drift_table(errors: pd.DataFrame) -> pd.DataFrame:
    """Medians after the last token: a row for each form, a column for each
    half-life."""
    last = errors[errors["tokens"] == errors["tokens"].max()]
    table = last.pivot_table("error", "form", "half_life", "median", sort=False)
    return table.rename(columns="{} tokens".format)


def drift_gates(errors: pd.DataFrame) -> list[gates.Gate]:
    """What the three forms are for, after the last token: a pair is off by no more than
    the roundings on a token's way into the matrix, at every half-life, and never more
    than the other forms; where the product with e^g errs most, the sum errs a third of
    it at most."""
    table = drift_table(errors)
    worst = table.loc[PAIR].max()
    slow = table.loc[SCALED].idxmax()
    least = bool((table.loc[PAIR] < table.drop(PAIR)).all(axis=None))
    share = table.loc[ADDED, slow] / table.loc[SCALED, slow]
    return [
        gates.at_most(
            "pair_keeps_the_matrix", worst, ROUNDED, "a pair at its worst half-life"
        ),
        gates.holds(
            "pair_errs_least",
            least,
            "a pair against the other forms at every half-life",
        ),
        gates.at_most(
            "expm1_keeps_slow_decays", share, 1 / 3, f"{ADDED} over {SCALED}, {slow}"
        ),
    ]


def price_of_options(
    decoders: Mapping[str, Decoder], tokens: int, rounds: int
) -> pd.DataFrame:
    """What each setting costs after `tokens` random ones, one a call.

    Returns:
        setting; `state_bytes` of one sequence, caches left out; `samples`, the ms of
        calls of one token, all settings in turn; `error`, the RMS by which all matrices
        are off those of `exact` arithmetic, over their RMS.
    """
    rows = []
    calls = []
    for name, decoder in decoders.items():
        rng = np.random.default_rng(0)
        ids = rng.integers(0, decoder.manifest.dims.V, tokens + 1).tolist()
        matrices = _matrices_after(decoder, ids[:-1])
        exact = Decoder(decoder.bundle, "portable", "exact")
        reference = _matrices_after(exact, ids[:-1])
        error = float(rms(matrices - reference) / rms(reference))
        size = budget_of_bundle(decoder.bundle).side_states // decoder.options.batch
        rows.append({"setting": name, "state_bytes": size, "error": error})
        calls.append(partial(_call_ms, decoder, ids[-1], decoder.snapshot()))
    turns = []
    for _ in range(rounds + 1):
        turns.append([call() for call in calls])
    samples = np.transpose(turns[1:])  # the first calls warm up
    return pd.DataFrame(rows).assign(samples=samples.tolist())


def _call_ms(decoder: Decoder, token: int, start: Snapshot) -> float:
    """Milliseconds of a call; the sequence begins anew from `start` where the cache is
    full."""
    if decoder.offsets[0] == decoder.options.max_seq_len:
        decoder.begin(start)
    begun = time.perf_counter()
    decoder.decode_one_token(token)
    return 1e3 * (time.perf_counter() - begun)


def price_table(prices: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, milliseconds as median and range."""
    ms = prices["samples"]
    columns = {"ms": ms.map(np.median), "fastest": ms.map(min), "slowest": ms.map(max)}
    return prices.drop(columns="samples").assign(**columns)


def _matrices_after(decoder: Decoder, ids: Sequence[int]) -> np.ndarray:
    """All matrices, flat, after `ids`, a call each."""
    decoder.begin()
    for token in ids:
        decoder.decode_one_token(token)
    matrices = []
    for state, name in decoder.named_states:
        if name.endswith(MATRIX_STATE):
            matrices.append(np.ravel(state.read(name)))
    return np.concatenate(matrices).astype(float)


def crossover(lengths: Iterable[int], compress: str, chip: str) -> pd.DataFrame:
    """Bytes of states and predicted tok/s of `CONFIGS` at each max_seq_len, where one
    layer in four attends and where every layer does.

    Weights are those of transformers' default configuration, stored as `compress`, a
    shard for each layer; a call of one token reads every weight, and reads and writes
    every state."""
    rows = []
    bytes_per_weight = STORED_BITS[compress] / 8
    for model, (family, recurrent, changes) in CONFIGS.items():
        for layers in (RECURRENT, ATTENTION):
            config = _config(family, recurrent, layers, changes)
            plan = family_of(config).plan(config)
            weights, head = _elements(config)
            size = int(weights * bytes_per_weight)
            head_size = int(head * bytes_per_weight)
            L = plan.dims.L
            for S in lengths:
                options = Options(max_seq_len=S, compress=compress)
                states = sum(_state_bytes(plan.states(i, options)) for i in range(L))
                work = [
                    Work("layers", size, states, 2.0 * weights, L, compress),
                    Work("head", head_size, 0, 2.0 * head, 1, compress),
                ]
                ms = roofline.predict_ms(work, chip)["ms"].sum()
                row = {
                    "model": model,
                    "layers": layers,
                    "max_seq_len": S,
                    "state_bytes": states,
                    "weight_bytes": size,
                    "tokens_per_s": 1e3 / ms,
                    "chip": chip,
                }
                rows.append(row)
    return pd.DataFrame(rows)


def _config(family: str, recurrent: str, layers: str, changes: Mapping):
    """transformers' default configuration of a family, but for its kinds of layers."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **changes)
    others = "full_attention"
    if layers == RECURRENT:
        others = recurrent
    kinds = cycle([others, others, others, "full_attention"])
    config.layer_types = list(islice(kinds, config.num_hidden_layers))
    return config


def _elements(config) -> tuple[int, int]:
    """Weights of the layers, and of the head."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    return layers, model.lm_head.weight.numel()


def _state_bytes(states: Mapping[str, tuple[int, ...]]) -> int:
    return sum(2 * int(np.prod(shape)) for shape in states.values())


def crossover_table(sizes: pd.DataFrame) -> pd.DataFrame:
    """Per model: the shortest of the lengths at which its states are the smaller ones,
    and at the longest the bytes of both and the tok/s."""
    rows = []
    longest = sizes["max_seq_len"].max()
    for model, one in sizes.groupby("model", sort=False):
        table = one.pivot(index="max_seq_len", columns="layers", values="state_bytes")
        smaller = table.index[table[RECURRENT] < table[ATTENTION]]
        last = one[one["max_seq_len"] == longest].set_index("layers")
        row = {"model": model, "smaller from": min(smaller, default=None)}
        for layers in (RECURRENT, ATTENTION):
            row[f"MiB, {layers}"] = last.loc[layers, "state_bytes"] / 2**20
            row[f"tok/s, {layers}"] = last.loc[layers, "tokens_per_s"]
        rows.append(row)
    return pd.DataFrame(rows)


def conclusion(errors: pd.DataFrame, prices: pd.DataFrame, sizes: pd.DataFrame) -> str:
    """What the three parts say, a line each."""
    worst = drift_table(errors).max(axis=1)
    tokens = errors["tokens"].max()
    lines = [
        f"After {tokens:,} tokens a matrix in fp16 is off by at most {worst[SCALED]:.2g} of its "
        f"RMS as {SCALED}, by {worst[ADDED]:.2g} as {ADDED}, and by {worst[PAIR]:.2g} as a pair of "
        "states."
    ]
    cost = price_table(prices).set_index("setting")
    for name, one in cost.iloc[1:].iterrows():
        ratio = one / cost.iloc[0]
        lines.append(
            f"{name}: {ratio['state_bytes']:.2f} times the bytes of states, "
            f"{one['ms']:.2f} ms a call "
            f"({one['fastest']:.2f} to {one['slowest']:.2f}) against {cost['ms'].iloc[0]:.2f} "
            f"({cost['fastest'].iloc[0]:.2f} to {cost['slowest'].iloc[0]:.2f}), "
            f"{ratio['error']:.2f} times the error of the matrices."
        )
    longest = sizes["max_seq_len"].max()
    for row in crossover_table(sizes).itertuples(index=False):
        model, shortest, own, speed, other, other_speed = row
        place = "at no length"
        if pd.notna(shortest):
            place = f"from max_seq_len {shortest:.0f} on"
        lines.append(
            f"{model}: states smaller than those of attention alone {place}; at {longest:,} "
            f"{own:,.0f} against {other:,.0f} MiB, {speed:.0f} against {other_speed:.0f} tok/s "
            "(predicted)."
        )
    return "\n".join(f"- {line}" for line in lines)
