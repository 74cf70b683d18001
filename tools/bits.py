"""What each preset costs a model in bits and in quality, on text that nothing was fitted to.

    python tools/bits.py measure CHECKPOINT --text prose=FILE --text code=FILE
    python tools/bits.py measure CHECKPOINT --preset --max-kl 0.05 0.02 --text prose=FILE
    python tools/bits.py gguf CHECKPOINT Q4_0=FILE.gguf --text prose=FILE
    python tools/bits.py table

`measure` exports the checkpoint in every preset: with `data/calibration.txt` for each seed, and
without where a preset needs no text; with `--max-kl` also with a preset for every matrix that keeps
this KL on `data/selection.txt` (`--compress mixed`). Hugging Face's model then runs on the stored
weights and on the checkpoint's, over windows of each text. `gguf` does the same with the weights of
llama.cpp's files. Each row is a file in `experiments/bits`. A row that is there is not measured
again, so that a run that was ended goes on. `table` writes the rows to docs/presets.md."""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from cpu_time import cpu_seconds_of_children
from page_blocks import replace_block

from workbench import Bundle
from workbench.ane.work import stored_format
from workbench.bundle.presets import MIXED, PRESETS, find_preset
from workbench.check.evaluate import open_reference
from workbench.check.golden import stored_weights
from workbench.check.hf import Reference, Weights
from workbench.check.text import check_held_out, share_part
from workbench.decode.tokenizer import encode_text
from workbench.errors import InputError
from workbench.exporter.calibrate import draw_windows
from workbench.files import write_whole
from workbench.log import machine
from workbench.models.checkpoint import Checkpoint

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "experiments" / "bits"
WORK = ROOT / "build" / "bits"
PAGE = ROOT / "docs" / "presets.md"
CALIBRATION = ROOT / "data" / "calibration.txt"
SELECTION = ROOT / "data" / "selection.txt"
WINDOW = 256  # tokens that the model reads at a time
WINDOWS = 17  # of a text; each but its first token is scored
SCORED = 256  # tokens whose logits are in memory at a time: 1.5 GB for 262,144 tokens
TAIL = 0.02  # share of the largest KLs that a row keeps
NOT_MEASURED = "not measured"
RULES = {
    "int8-channel": ["Q4", "Q6"],
    "int8-tensor": ["Q4", "Q6"],
    "lut4-g8": ["K10", "Q5", "Q7"],
    "int4-block32": ["Q3"],
}
"""Preset → rules of `data/sources/ane_rules.csv` that concern it."""


@dataclass(frozen=True)
class Score:
    """The figures of one set of weights on a text, beside the checkpoint's weights. Lists have a
    number for each window, except for `largest_kl`.

    Args:
        sha256: of the text's file.
        window: tokens of a window.
        scored: tokens whose distribution was compared.
        nll: nats of the text's tokens, summed; `golden_nll` with the checkpoint's weights.
        kl: nats from the checkpoint's distributions to the others, summed.
        same_top: tokens for which both have the same largest logit.
        largest_kl: the largest KLs of all tokens, a share `TAIL`, falling.
    """

    sha256: str
    window: int
    scored: list[int]
    nll: list[float]
    golden_nll: list[float]
    kl: list[float]
    same_top: list[int]
    largest_kl: list[float]

    @property
    def tokens(self) -> int:
        return sum(self.scored)

    @property
    def ratio(self) -> float:
        """Perplexity over that with the checkpoint's weights. A perplexity is the exponential
        of the mean nats of a token."""
        gain = (sum(self.nll) - sum(self.golden_nll)) / self.tokens
        return float(np.exp(gain))

    @property
    def mean_kl(self) -> float:
        """Nats of a token."""
        return sum(self.kl) / self.tokens

    @property
    def kl_99(self) -> float:
        """The 99% quantile of the KL, interpolated between tokens."""
        place = 0.01 * (self.tokens - 1)  # from the largest
        before = int(place)
        larger, smaller = self.largest_kl[before : before + 2]
        return larger + (place - before) * (smaller - larger)

    @property
    def same_top_share(self) -> float:
        return sum(self.same_top) / self.tokens


@dataclass(frozen=True)
class Windows:
    """A text as windows of token ids [windows, window], and the SHA-256 of its file."""

    name: str
    sha256: str
    ids: np.ndarray


def read_windows(source: Checkpoint, argument: str, count: int) -> Windows:
    """The windows of NAME=FILE.

    Raises:
        InputError: a text that is too short, or that shares a passage with the text of selection.
    """
    name, _, file = argument.partition("=")
    data = Path(file).read_bytes()
    ids = encode_text(source.tokenizer, data.decode())
    bos = source.config.bos_token_id
    ids = draw_windows(ids, file, bos=bos, window=WINDOW, windows=count).ids
    if len(ids) < count:
        step = "give a longer text, or fewer --windows"
        raise InputError(file, f"{len(ids)} windows of {WINDOW}", f"{count}", step)
    selection = encode_text(source.tokenizer, SELECTION.read_text(encoding="utf-8"))
    if share_part(ids, [selection]):
        needed = "a text that nothing is selected by"
        raise InputError(
            file, "a passage of data/selection.txt", needed, "give another"
        )
    return Windows(name, hashlib.sha256(data).hexdigest(), ids)


@torch.inference_mode()
def score(source: Checkpoint, weights: Weights, text: Windows) -> Score:
    """The figures of weights on a text.

    Args:
        weights: reads a tensor by its name in the checkpoint.
    """
    golden_model, model = open_reference(source), open_reference(source)
    model.weights = weights
    golden_hidden = last_hidden(source, golden_model, text)
    hidden = model.last_hidden(text.ids.astype(np.int64), use_cache=False)
    windows = [
        score_window(row, Head(golden_model, golden_row), Head(model, hidden_row))
        for row, golden_row, hidden_row in zip(text.ids, golden_hidden, hidden)
    ]
    kl_of_tokens = torch.cat([window.kl_of_tokens for window in windows])
    largest = kl_of_tokens.sort(descending=True).values
    return Score(
        sha256=text.sha256,
        window=text.ids.shape[1],
        scored=[len(window.kl_of_tokens) for window in windows],
        nll=[window.nll for window in windows],
        golden_nll=[window.golden_nll for window in windows],
        kl=[window.kl for window in windows],
        same_top=[window.same_top for window in windows],
        largest_kl=largest[: int(TAIL * len(largest)) + 2].tolist(),
    )


@dataclass(frozen=True)
class WindowScore:
    """The figures of one window, see `Score`."""

    nll: float
    golden_nll: float
    kl: float
    same_top: int
    kl_of_tokens: torch.Tensor
    """float64 [scored]."""


@dataclass(frozen=True)
class Head:
    """The head of a model over the hidden states [window, C] of one window."""

    model: Reference
    hidden: torch.Tensor

    def log_p(self, positions: slice) -> torch.Tensor:
        """The logarithms of the distributions [n, V] at some positions."""
        return torch.log_softmax(self.model.logits(self.hidden[positions]), -1)


def score_window(ids: np.ndarray, golden: Head, compressed: Head) -> WindowScore:
    """The figures of one window of token ids.

    Args:
        golden: with the checkpoint's weights.
        compressed: with the weights that are scored.
    """
    targets = torch.from_numpy(ids[1:].astype(np.int64))
    nll = golden_nll = kl = 0.0
    same_top, kl_of_tokens = 0, []
    for start in range(0, len(targets), SCORED):
        part = slice(start, min(start + SCORED, len(targets)))
        log_p, log_q = golden.log_p(part), compressed.log_p(part)
        # KL(p ‖ q) = Σ p · (log p − log q), over the vocabulary
        kl_of_part = (log_p.exp() * (log_p - log_q)).sum(-1).double()
        kl_of_tokens.append(kl_of_part)
        nll += nats_of(targets[part], log_q)
        golden_nll += nats_of(targets[part], log_p)
        kl += float(kl_of_part.sum())
        same_top += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    return WindowScore(nll, golden_nll, kl, same_top, torch.cat(kl_of_tokens))


def nats_of(targets: torch.Tensor, log_p: torch.Tensor) -> float:
    """The nats of tokens [n] under distributions of logarithms [n, V], summed."""
    return -float(log_p.gather(1, targets[:, None]).double().sum())


def last_hidden(source: Checkpoint, model: Reference, text: Windows) -> torch.Tensor:
    """The head's inputs [windows, window, C] with the checkpoint's weights; computed once
    for a text."""
    key = f"{source.sha256[:12]}-{hashlib.sha256(text.ids.tobytes()).hexdigest()[:12]}"
    path = WORK / f"{key}.npy"
    if not path.is_file():
        hidden = model.last_hidden(text.ids.astype(np.int64), use_cache=False)
        WORK.mkdir(parents=True, exist_ok=True)
        write_whole(path, partial(np.save, arr=hidden.numpy()))
    return torch.from_numpy(np.load(path))


@dataclass(frozen=True)
class Setting:
    """How the weights of a row are stored.

    Args:
        seed: of the calibration's windows; None: without a text.
        max_kl: of `mixed`, nats on the text of selection; None: another preset.
    """

    preset: str
    seed: int | None
    max_kl: float | None = None

    @property
    def label(self) -> str:
        """The preset, and of `mixed` the limit."""
        limit = "" if self.max_kl is None else f", KL ≤ {self.max_kl:g}"
        return self.preset + limit

    @property
    def row_name(self) -> str:
        """The name of the row's file."""
        limit = "" if self.max_kl is None else f"-{self.max_kl:g}"
        seed = "" if self.seed is None else f"-s{self.seed}"
        return self.preset + limit + seed

    def export_options(self) -> list[str]:
        """The words of `workbench export` behind checkpoint and bundle."""
        words = ["--compress", self.preset]
        if self.seed is not None:
            words += ["--calibrate", str(CALIBRATION), "--seed", str(self.seed)]
        if self.max_kl is not None:
            words += ["--max-kl", f"{self.max_kl:g}", "--select", str(SELECTION)]
        return words


def measure(source: Checkpoint, setting: Setting, texts: list[Windows]) -> None:
    """Exports one setting and scores it; writes its row."""
    name = setting.row_name
    folder = WORK / f"{source.name}-{name}"
    export = run_export(source, setting, folder)
    bundle = Bundle.open(folder)
    for text in texts:
        for ids in text.ids:
            check_held_out(bundle, ids)
    row = {
        "preset": setting.label,
        "seed": setting.seed,
        "bits": bits_of_bundle(source, bundle),
        "bytes": bundle.bytes,
        # an export that continued an interrupted one did only a part of the work
        "export_seconds": None if export.is_resumed else export.seconds,
        "export_cpu_seconds": None if export.is_resumed else export.cpu_seconds,
        "peak_rss_bytes": None if export.is_resumed else export.peak_rss_bytes,
    }
    if bundle.manifest.calibration:
        record = bundle.manifest.calibration.model_dump(exclude={"file"})
        row["calibration"] = record
    write_row(source, name, row, stored_weights(source, bundle), texts)
    shutil.rmtree(folder)


@dataclass(frozen=True)
class ExportRun:
    """An export in a process of its own.

    Args:
        is_resumed: whether it continued the calibration of an interrupted export.
    """

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int | None
    is_resumed: bool


def run_export(source: Checkpoint, setting: Setting, folder: Path) -> ExportRun:
    """Exports a setting into a folder, see `measure`.

    Raises:
        subprocess.CalledProcessError: the export fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    is_resumed = folder.with_name(f".{folder.name}.calibration").exists()
    command = [sys.executable, "-m", "workbench.cli", "export", source.path, folder]
    command += [*setting.export_options(), "--max-seq-len", "256", "--json"]
    cpu_start = cpu_seconds_of_children()
    output = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True)
    cpu_seconds = cpu_seconds_of_children() - cpu_start
    printed = json.loads(output.stdout)
    seconds, peak_rss_bytes = printed["seconds"], printed["peak_rss_bytes"]
    return ExportRun(seconds, cpu_seconds, peak_rss_bytes, is_resumed)


def write_row(
    source: Checkpoint, name: str, row: dict, weights: Weights, texts: list[Windows]
) -> None:
    """Scores weights on every text and writes their row, as JSON.

    Args:
        name: of the row's file.
        row: what is known of the weights without a text.
    """
    scores = {text.name: asdict(score(source, weights, text)) for text in texts}
    columns = environment_at_start()
    document = {
        "checkpoint": {"name": source.name, "sha256": source.sha256},
        **row,
        "machine": columns["machine"],
        "commit": columns["commit"],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "texts": scores,
    }
    path = row_path(source, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(rounded(document), indent=1) + "\n").encode())


@cache
def environment_at_start() -> dict:
    """Machine and commit as they are when `main` begins: the rows that it writes would mark the
    commit as one with changed files."""
    return machine.environment()


def row_path(source: Checkpoint, name: str) -> Path:
    """The file of a row."""
    return ROWS / source.name / f"{name}.json"


def rounded(value):
    """A document with six digits of every float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def bits_of_bundle(source: Checkpoint, bundle: Bundle) -> float:
    """Bits of a weight file for each of its weights: tables, scales and norms count."""
    files = [file for shard in bundle.manifest.shards for file in shard.files]
    stored = sum(file.bytes for file in files if file.path.endswith("weight.bin"))
    count = 0
    for shard in bundle.manifest.shards:
        # a slice of the head has some of its rows; (0, 0): the shard has none of the head
        head_rows = slice(*shard.rows) if shard.rows[1] else None
        for tensor in shard.weights:
            rows = head_rows if tensor == source.head else None
            count += int(np.prod(source.shape(tensor, rows)))
    return 8 * stored / count


def measure_gguf(source: Checkpoint, argument: str, texts: list[Windows]) -> None:
    """Scores NAME=FILE.gguf, a file of llama.cpp's with the checkpoint's weights."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    name, _, file = argument.partition("=")
    path = Path(file)
    tensors = GGUFReader(path).tensors
    stored = sum(int(tensor.n_bytes) for tensor in tensors)
    count = sum(int(tensor.n_elements) for tensor in tensors)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    values = model.state_dict()
    types = pd.Series([tensor.tensor_type.name for tensor in tensors])
    row = {
        "preset": f"llama.cpp {name}",
        "seed": None,
        "bits": 8 * stored / count,
        "bytes": path.stat().st_size,
        "types": types.value_counts().to_dict(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    write_row(source, f"llama.cpp-{name}", row, values.__getitem__, texts)


def is_current(path: Path, texts: list[Windows], checkpoint: str) -> bool:
    """Whether a row was measured on these windows with the checkpoint of this SHA-256."""
    if not path.is_file():
        return False
    row = json.loads(path.read_text())
    # text → SHA-256, number of windows, tokens of a window
    measured = {
        name: (score["sha256"], len(score["scored"]), score["window"])
        for name, score in row["texts"].items()
    }
    required = {text.name: (text.sha256, *text.ids.shape) for text in texts}
    return row["checkpoint"]["sha256"] == checkpoint and measured == required


@dataclass(frozen=True)
class Column:
    """A figure of a score in the tables of the page.

    Args:
        name: of the column, before the name of a text.
        value: the figure of a score.
        form: of the figure, such as "{:.3f}".
    """

    name: str
    value: Callable[[Score], float]
    form: str


AVERAGES = [
    Column("mean KL", lambda score: score.mean_kl, "{:.4f}"),
    Column("perplexity ratio", lambda score: score.ratio, "{:.3f}"),
]
TAILS = [
    Column("99% of KL", lambda score: score.kl_99, "{:.3f}"),
    Column("same top", lambda score: score.same_top_share, "{:.3f}"),
]


def table(folder: Path = ROWS) -> list[str]:
    """The lines of the page's tables. Each checkpoint has two, which begin with the same
    columns: averages over the tokens of the texts with the cost of the export, and the figures
    of single tokens."""
    lines = []
    for checkpoint in sorted(path for path in folder.glob("*") if path.is_dir()):
        rows = [
            json.loads(path.read_text()) for path in sorted(checkpoint.glob("*.json"))
        ]
        texts = list(dict.fromkeys(name for row in rows for name in row["texts"]))
        # preset, whether it was calibrated → a row for each seed
        groups: dict[tuple[str, bool], list[dict]] = {}
        for row in sorted(rows, key=place_in_table):
            key = row["preset"], row["seed"] is not None
            groups.setdefault(key, []).append(row)
        for title, columns, cost in (
            (checkpoint.name, AVERAGES, ["export", "peak"]),
            (f"{checkpoint.name}: single tokens", TAILS, []),
        ):
            figures = [f"{column.name}, {text}" for column in columns for text in texts]
            head = ["preset", "bits", "calibrated", *figures, *cost]
            lines += [f"### {title}", "", f"| {' | '.join(head)} |"]
            lines.append("|---" * len(head) + "|")
            for of_preset in groups.values():
                cells = [
                    *preset_cells(of_preset),
                    *figure_cells(of_preset, columns, texts),
                    *(export_cells(of_preset) if cost else ()),
                ]
                lines.append(f"| {' | '.join(cells)} |")
            lines.append("")
    return lines


def preset_cells(rows: list[dict]) -> list[str]:
    """The name of a preset, its bits, and with how many seeds it was calibrated.

    Args:
        rows: of the preset, one for each seed of a calibration, or one without.
    """
    preset, calibrated = rows[0]["preset"], "no"
    if rows[0]["seed"] is not None:
        calibrated = f"{len(rows)} seeds" if len(rows) > 1 else "1 seed"
    name = f"`{preset}`" if preset in PRESETS else preset
    return [name, f"{rows[0]['bits']:.2f}", calibrated]


def figure_cells(
    rows: list[dict], columns: Sequence[Column], texts: Sequence[str]
) -> list[str]:
    """The figures of a preset on every text, over the seeds of `rows`."""
    scores = {
        text: [Score(**row["texts"][text]) for row in rows if text in row["texts"]]
        for text in texts
    }
    return [
        spread([column.value(score) for score in scores[text]], column.form)
        for column in columns
        for text in texts
    ]


def export_cells(rows: list[dict]) -> list[str]:
    """The CPU seconds and the peak memory of a preset's export."""
    cpu_seconds = [row.get("export_cpu_seconds") for row in rows]
    return [
        spread(cpu_seconds, "{:.0f} CPU s"),
        spread([megabytes(row) for row in rows], "{:.0f} MB"),
    ]


def place_in_table(row: dict) -> tuple[int, str, bool]:
    """Sorts rows: presets in their order, then other formats by their names; of each those
    without a text first."""
    order = [*PRESETS]
    name = row["preset"]
    rank = order.index(name) if name in order else len(order)
    return rank, name, row["seed"] is not None


def megabytes(row: dict) -> float | None:
    """The peak of resident memory of an export in 10⁶ bytes; None: not measured."""
    peak = row.get("peak_rss_bytes")
    return None if peak is None else peak / 1e6


def spread(values: list[float | None], form: str) -> str:
    """The value, or the least and the largest of several, in a format such as "{:.0f} MB"."""
    values = [value for value in values if value is not None]
    if not values:
        return NOT_MEASURED
    low, high = form.format(min(values)), form.format(max(values))
    if low == high:
        return low
    number = form[: form.index("}") + 1]  # without the unit
    return f"{number.format(min(values))}–{high}"


def presets_table() -> list[str]:
    """Bits, need of a text, and the chips that stream each preset as it is stored."""
    streams = pd.read_csv(ROOT / "data/sources/weight_streams.csv").set_index("format")
    rules = pd.read_csv(ROOT / "data/sources/ane_rules.csv")
    known_ids = {re.sub(r"^\d+:", "", rule) for rule in rules["id"]}
    lines = [
        "| preset | bits | needs a text | streamed as stored on | rules |",
        "|---|---|---|---|---|",
    ]
    for preset in PRESETS.values():
        bits = preset.stored_bits
        if preset.group:
            table_bits = 2**preset.bits * 16  # entries in fp16
            bits = f"{bits}, plus {table_bits} for each table of {preset.group} rows"
        first = streams["from_generation"].get(stored_format(preset))
        chips = "every chip" if first == 1 else f"M{first} and later"
        rule_ids = RULES.get(preset.name, [])
        assert set(rule_ids) <= known_ids, rule_ids
        cells = [
            f"`{preset.name}`",
            str(bits),
            "yes" if preset.needs_calibration else "no",
            chips,
            ", ".join(rule_ids) if rule_ids else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_page(page: Path = PAGE, folder: Path = ROWS) -> None:
    """Writes the tables into the page's block `presets`."""
    replace_block(page, "presets", [*presets_table(), "", *table(folder)])


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    measuring, gguf = actions.add_parser("measure"), actions.add_parser("gguf")
    for action in (measuring, gguf):
        action.add_argument("checkpoint", type=Path)
        action.add_argument("--text", action="append", default=[], help="NAME=FILE")
        action.add_argument("--windows", type=int, default=WINDOWS)
    measuring.add_argument("--preset", nargs="*", default=[*PRESETS])
    measuring.add_argument("--max-kl", nargs="*", type=float, default=[])
    measuring.add_argument("--seed", nargs="*", type=int, default=[0])
    gguf.add_argument("files", nargs="+", help="NAME=FILE.gguf")
    actions.add_parser("table")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.action == "table":
        write_page()
        return
    environment_at_start()
    source = Checkpoint(arguments.checkpoint)
    texts = [read_windows(source, text, arguments.windows) for text in arguments.text]
    if arguments.action == "gguf":
        for file in arguments.files:
            name = f"llama.cpp-{file.partition('=')[0]}"
            measure_row = partial(measure_gguf, source, file, texts)
            complete_row(source, name, texts, measure_row)
        return
    for setting in list_settings(arguments.preset, arguments.max_kl, arguments.seed):
        measure_row = partial(measure, source, setting, texts)
        complete_row(source, setting.row_name, texts, measure_row)


def list_settings(
    presets: list[str], limits: list[float], seeds: list[int]
) -> list[Setting]:
    """Every preset without a text and with each seed, where it can be; then `mixed` with each
    limit of the KL and each seed."""
    settings = []
    for seed in (None, *seeds):
        for preset in map(find_preset, presets):
            if preset.bits == 16 and seed is not None:
                continue  # fp16 has nothing to calibrate
            if preset.needs_calibration and seed is None:
                continue
            settings.append(Setting(preset.name, seed))
    for seed in seeds:
        settings += [Setting(MIXED.name, seed, limit) for limit in limits]
    return settings


def complete_row(
    source: Checkpoint, name: str, texts: list[Windows], measure_row: Callable[[], None]
) -> None:
    """Calls `measure_row`, which writes a row, unless the row was measured on these texts; prints
    the row's file and the seconds."""
    start = time.monotonic()
    path = row_path(source, name)
    if not is_current(path, texts, source.sha256):
        measure_row()
    print(f"{path.relative_to(ROOT)}  {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
