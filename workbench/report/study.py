"""One experiment while its notebook runs: shows figures and tables, then logs them in
one row.

The log's table `exhibits` holds the data of every figure and table, and `report` draws
the files of the write-up from these rows, so that every published figure comes from the
log."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from workbench import log, paths, plots, report, sweep
from workbench.ane.placement import suitable_units
from workbench.bundle import Bundle
from workbench.check import gates, golden, tasks
from workbench.check.validate import Validation, validate_stored
from workbench.decode import Decoder
from workbench.decode.transcript import encode_text
from workbench.errors import InputError
from workbench.export import options as export_options
from workbench.models.checkpoint import Checkpoint
from workbench.report import doctor, tables
from workbench.runtime import check_compute_units, named, resolve
from workbench.sweep import runs
from workbench.sweep.cell import find


@dataclass
class ExportedModel:
    """A checkpoint with its bundle, a decoder, and token ids with their text.

    `how` has runtime and compute units of its decoders; `stored` is the file of a
    golden of `ids`, None if the golden is in the folder `goldens`."""

    checkpoint: Checkpoint
    bundle: Bundle
    decoder: Decoder
    ids: list[int]
    tokens: list[str]
    goldens: Path
    how: dict[str, str]
    stored: Path | None = None

    def validate(
        self,
        Ts: Iterable[int] | None = None,
        *,
        reference: golden.Golden | None = None,
        max_kl: float = gates.MAX_KL,
    ) -> Validation:
        """Bug gates, kept in the bundle's verdict.json, and the price against
        `reference` (default: `golden`); `max_kl` is the user's limit on its mean KL in
        nats."""
        file = None if reference else self.stored
        reference = reference or self.golden
        file = file or golden.golden_path(self.checkpoint, reference.ids, self.goldens)
        how = {"path": file, "max_kl": max_kl}
        return validate_stored(self.decoder, reference, self.checkpoint, Ts, **how)

    @cached_property
    def golden(self) -> golden.Golden:
        """Hugging Face's values for `ids`, loaded or computed at first use."""
        if self.stored:
            return golden.Golden.load(self.stored)
        return golden.stored_golden(self.checkpoint, self.ids, self.goldens)


def token_texts(folder: Path, ids: list[int]) -> list[str]:
    """The text of each token id, or the id itself if `folder` has no tokenizer."""
    try:
        return tasks.load_tokenizer(folder).convert_ids_to_tokens(ids)
    except InputError:
        return [str(i) for i in ids]


class Study:
    """A numbered experiment while its notebook runs.

    Args:
        number: of the experiment, such as "05".
        names: the notebook's variables; those in capitals are its parameters and are
            logged. RUNTIME, COMPUTE_UNITS (None: chosen by `how`) and GOLDEN, the path
            of a stored golden, apply to every model that it opens.
    """

    def __init__(self, number: str, names: Mapping):
        self.experiment = report.experiment(number)
        self.root = log.default_root()
        self.project = log.project(self.root)
        data = self.project / "data"
        self.bundles = data / "bundles"
        self.goldens = data / "golden"
        self.tasks = data / "tasks" / "heldout.jsonl"
        self.parameters = {
            name: value for name, value in names.items() if name.isupper()
        }
        self._exhibits: dict[tuple[str, str], dict] = {}
        self.gates: list[gates.Gate] = []
        # the log's name of this machine, shown beside times in a notebook
        self.here = runs.here()

    @staticmethod
    def machine() -> Styler:
        """This machine's facts for display, with its default runtime and what it
        lacks."""
        facts = doctor.examine(None)
        facts["memory_bytes"] = f"{facts['memory_bytes']:,}"
        seen = {name: fact for name, fact in facts.items() if fact is not None}
        return tables.styled(tables.listing(seen))

    @staticmethod
    def scratch() -> Path:
        """A new folder outside the project, for temporary exports."""
        return Path(tempfile.mkdtemp())

    def how(self, checkpoint: str | Path) -> dict[str, str]:
        """`runtime` and `compute_units` of a checkpoint's decoders, from the notebook's
        parameters.

        Without COMPUTE_UNITS, a runtime other than the portable one uses the units that
        suit the size of the layers. `auto` stays `auto` where it means the portable
        runtime."""
        runtime = self.parameters.get("RUNTIME") or "auto"
        units = self.parameters.get("COMPUTE_UNITS")
        if resolve(runtime) != "portable":
            runtime = resolve(runtime)
            if units is None:
                source = Checkpoint(find(str(checkpoint), self.root))
                units = suitable_units(source)
        if units is None:
            units = "CPU_AND_NE"
        check_compute_units(units)
        return {"runtime": runtime, "compute_units": units}

    def axes(self, checkpoint: str | Path) -> dict[str, list[str]]:
        """`how`, as axes of a sweep's grid."""
        return {name: [value] for name, value in self.how(checkpoint).items()}

    def where(self, checkpoint: str | Path) -> str:
        """The runtime and compute units of a checkpoint's bundles in words, shown
        beside times; a stand-in's times are no measurement."""
        how = self.how(checkpoint)
        return self._ran_on(named(resolve(how["runtime"]))[0], how["compute_units"])

    def _ran_on(self, runtime: str, units: str) -> str:
        if runtime == "portable":
            return "the portable runtime"
        name = "Core ML"
        if runtime != "coreml":
            name = "a stand-in for Core ML, which measures nothing,"
        text = f"{name} on {units}"
        if units == "CPU_ONLY" and self.parameters.get("COMPUTE_UNITS") is None:
            text += ", its layers too small for the Neural Engine"
        return text

    @property
    def golden_file(self) -> str | None:
        """The path in GOLDEN; a relative one starts at the project's folder."""
        if name := self.parameters.get("GOLDEN"):
            return str(self.project / name)
        return None

    def open(
        self,
        checkpoint: str | Path,
        prompt: int | list[int] = 24,
        *,
        text: str = "",
        precision: str = "declared",
        fast: bool = False,
        **options,
    ) -> ExportedModel:
        """Opens a checkpoint's bundle of `data/bundles`; exports it if it is missing.

        Args:
            checkpoint: a Hugging Face folder, or the name of a model in the Hub's local
                cache; a relative path starts here or at the project's folder.
            prompt: token ids, or how many of the prompt to take (see `prompt`, also for
                `text`); with GOLDEN, its ids.
            precision: the decoder's arithmetic; `fast`: whether it may fuse operations,
                for timing.
            options: export options (see `workbench.export.options`).
        """
        source = Checkpoint(find(str(checkpoint), self.root))
        options = export_options(**options)
        bundle = sweep.bundle_for(source, options, self.bundles, progress=True)
        how = self.how(source.path)
        decoder = Decoder(bundle, precision=precision, fast=fast, **how)
        if self.golden_file:
            prompt = golden.Golden.load(self.golden_file).ids.tolist()
        if isinstance(prompt, int):
            ids, tokens = self.prompt(source, prompt, text)
        else:
            ids = prompt
            tokens = token_texts(source.path, prompt)
        stored = self.golden_file and Path(self.golden_file)
        about = ids, tokens, self.goldens, how, stored
        return ExportedModel(source, bundle, decoder, *about)

    def prompt(
        self, checkpoint: Checkpoint, count: int, text: str = ""
    ) -> tuple[list[int], list[str]]:
        """At most `count` token ids and their text.

        Args:
            text: the prompt, or the path of a file that holds it, which starts at the
                project's folder; by default the first held-out task, or seeded ids
                without a tokenizer.

        Raises:
            InputError: a `text` without a tokenizer, or a file of it that is not UTF-8.
        """
        source = checkpoint.path
        if text:
            ids = encode_text(source, self._contents(text))
        else:
            try:
                ids = encode_text(source, tasks.load_tasks(self.tasks)[0]["prompt"])
            except InputError:
                V = checkpoint.config.vocab_size
                ids = np.random.default_rng(0).integers(0, V, count).tolist()
        return ids[:count], token_texts(source, ids[:count])

    def _contents(self, text: str) -> str:
        """`text`, or the contents of the file that it names."""
        # too long or strange a text for a path
        with contextlib.suppress(OSError, ValueError):
            if (self.project / text).is_file():
                return paths.text(self.project / text)
        return text

    def answers(self, decoder: Decoder, checkpoint: Checkpoint) -> list[gates.Gate]:
        """Gates of every fourth held-out question, answered by bundle and golden; not
        run without a tokenizer."""
        try:
            questions = tasks.load_tasks(self.tasks)[::4]
            return tasks.answer_gates(decoder, checkpoint, questions)
        except InputError as problem:
            return [gates.not_run("answers", f"{problem.subject}: {problem.actual}")]

    def figure(
        self,
        name: str,
        draw: Callable,
        data: pd.DataFrame,
        *,
        alt: str,
        run_ids: Iterable[str] = (),
        **options,
    ) -> None:
        """Draws `data` with a function of `plots` and stores both for the write-up.

        Args:
            alt: a description for readers who cannot see the figure.
            run_ids: the runs of data without a column ``run_id``.
        """
        plot = draw.__name__
        if plot not in plots.__all__:
            raise InputError(
                f"figure {name}",
                f"{plot}()",
                "a function of workbench.plots",
                "add it there",
            )
        exhibit = report.exhibit(name, data, alt, plot, options, run_ids)
        self._exhibits["figure", name] = exhibit
        draw(data, **options)

    def table(self, name: str, frame: pd.DataFrame, caption: str) -> Styler:
        """Stores a table for the write-up and returns it for display."""
        self._exhibits["table", name] = report.exhibit(name, frame, caption)
        return tables.styled(frame)

    def add_gates(self, results: Iterable[gates.Gate]) -> Styler:
        """Adds gates to the verdict and returns them for display, RED first."""
        results = list(results)
        self.gates += results
        return tables.styled(tables.gates(results))

    def conclude(
        self,
        subject: Bundle | Decoder | None,
        words: str = "",
        *,
        T: int | None = None,
        fidelity: pd.DataFrame | None = None,
        samples: pd.DataFrame | None = None,
        layers: pd.DataFrame | None = None,
        **results,
    ) -> Styler:
        """Logs the run with its exhibits, writes figures, tables and report, prints the
        conclusion.

        Args:
            subject: the decoder, or the bundle, of the gates; None: the gates are of
                the figures' runs.
            words: the conclusion, printed before the verdict and its reasons.
            results: further mappings or records for the run's `config`.

        Returns:
            The log rows of the notebook and the versions that wrote them.
        """
        number = self.experiment.number
        decoder = None
        bundle = subject
        if isinstance(subject, Decoder):
            decoder = subject
            bundle = subject.bundle
        paragraphs = [words]
        row = {"command": f"notebook {number}", "T": T}
        if bundle:
            row |= {"runtime": "portable"} | runs.describe(bundle, decoder)
        if self.gates:
            row["verdict"] = gates.verdict(self.gates)
            paragraphs.append(tables.verdict_conclusion(bundle, self.gates))
        if decoder and decoder.runtime != "portable":
            place = self._ran_on(decoder.runtime, decoder.compute_units)
            paragraphs.append(f"The bundle ran on {place}.")
        words = "\n\n".join(filter(None, paragraphs))
        config = {
            "parameters": self.parameters,
            "gates": [gate.json() for gate in self.gates],
            "conclusion": words,
        }
        row["config"] = json.loads(json.dumps(config | results, default=str))
        run_id = runs.record_run(
            number,
            row,
            root=self.root,
            fidelity=fidelity,
            samples=samples,
            layers=layers,
            exhibits=list(self._exhibits.values()),
        )
        path = report.write_report(number, self.root, run_id)
        print(words)
        return tables.styled(runs.footer(run_id, report=path.relative_to(self.project)))
