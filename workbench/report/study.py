"""One experiment as its notebook tells it: figures and tables as they come, then one log row that holds them all.

In: what was measured. Out: rows of the log (`exhibits` holds the data of every figure and table), and the files of the
write-up, which `report` draws from those rows. So a figure on paper is a figure of the log. Knows nothing of how a
result came about.
"""

import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from workbench import log, plots, report
from workbench.bundle import Bundle
from workbench.check import gates, tasks
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.report import doctor, tables
from workbench.sweep import runs


class Study:
    """A numbered experiment while its notebook runs.

    Args:
        number: of the experiment, such as "05".
        names: the notebook's variables; the ones in capitals are its parameters and go into the log.
    """

    def __init__(self, number: str, names: Mapping):
        self.experiment, self.root = report.experiment(number), log.default_root()
        self.project = log.project(self.root)
        self.bundles, self.goldens = self.project / "data" / "bundles", self.project / "data" / "golden"
        self.parameters = {name: value for name, value in names.items() if name.isupper()}
        self._exhibits: dict[tuple[str, str], dict] = {}
        self.gates: list[gates.Gate] = []

    @property
    def here(self) -> str:
        """This machine's name, as the log has it: times that a notebook shows stand beside it."""
        return runs.here()

    @staticmethod
    def machine() -> Styler:
        """What this machine is, which runtime it uses, and what it cannot show."""
        found = doctor.examine()
        found["memory_bytes"] = f"{found['memory_bytes']:,}"
        return tables.shown(tables.listing({name: value for name, value in found.items() if value is not None}))

    def prompt(self, checkpoint: Checkpoint, count: int) -> tuple[list[int], list[str]]:
        """At most `count` token ids and their text: the first held-out task, or seeded ids without a tokenizer."""
        try:
            coder = tasks.checkpoint_tokenizer(checkpoint.path)
        except InputError:
            ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, count).tolist()
            return ids, [str(i) for i in ids]
        ids = coder.encode(tasks.load_tasks(self.tasks)[0]["prompt"])[:count]
        return ids, coder.convert_ids_to_tokens(ids)

    @property
    def tasks(self):
        """The file of held-out prompts with known answers."""
        return self.project / "data" / "tasks" / "heldout.jsonl"

    def answers(self, decoder: Decoder, checkpoint: Checkpoint, stride: int = 4) -> list[gates.Gate]:
        """Every `stride`-th held-out question, asked of bundle and golden; not run without a tokenizer."""
        try:
            return tasks.answer_gates(decoder, checkpoint, tasks.load_tasks(self.tasks)[::stride])
        except InputError as problem:
            return [gates.not_run("answers", f"{problem.subject}: {problem.actual}")]

    def figure(self, name: str, draw: Callable, data: pd.DataFrame, *, alt: str, run_ids: Iterable[str] = (), **options) -> None:
        """Draws `data` with a function of `plots` here and keeps both.

        `alt` is for those who cannot see the figure; `run_ids` are the runs behind data without a column ``run_id``.
        """
        if draw.__name__ not in plots.__all__:
            raise InputError(f"figure {name}", f"{draw.__name__}()", "a function of workbench.plots", "add it there")
        self._exhibits["figure", name] = report.exhibit(name, data, alt, draw.__name__, options, run_ids)
        draw(data, **options)

    def table(self, name: str, frame: pd.DataFrame, caption: str) -> Styler:
        """Keeps a table for the write-up and shows it here."""
        self._exhibits["table", name] = report.exhibit(name, frame, caption)
        return tables.shown(frame)

    def judge(self, found: Iterable[gates.Gate]) -> Styler:
        """Counts gates in for the verdict and shows them, RED first."""
        found = list(found)
        self.gates += found
        return tables.shown(tables.gates(found))

    def conclude(self, made: Bundle | Decoder | None, words: str = "", *, T: int | None = None,
                 fidelity: pd.DataFrame | None = None, samples: pd.DataFrame | None = None,
                 layers: pd.DataFrame | None = None, **results) -> Styler:  # fmt: skip
        """Logs the run with its exhibits, writes figures, tables and report, says the conclusion.

        Args:
            made: the decoder, or the bundle, that was judged; None: the runs that the figures name.
            words: the conclusion, before the verdict and its reasons.
            results: further mappings or records to keep in the run's `config`.

        Returns:
            The log rows the notebook stands on and the versions that made them.
        """
        decoder = made if isinstance(made, Decoder) else None
        bundle = decoder.bundle if decoder else made
        verdict = [tables.verdict_conclusion(bundle, self.gates)] if self.gates else []
        words = "\n\n".join(filter(None, [words, *verdict]))
        config = {"parameters": self.parameters, "gates": [g.json() for g in self.gates], "conclusion": words} | results
        row = {"runtime": "portable"} | runs.describe(bundle, decoder) if bundle else {}
        row |= {"command": f"notebook {self.experiment.number}", "T": T, "config": json.loads(json.dumps(config, default=str)),
                "verdict": gates.verdict(self.gates) if verdict else None}  # fmt: skip
        run_id = runs.record_run(self.experiment.number, row, root=self.root, fidelity=fidelity,
                             samples=samples, layers=layers, exhibits=list(self._exhibits.values()))  # fmt: skip
        path = report.write_report(self.experiment.number, self.root, run_id)
        print(words)
        return tables.shown(runs.footer(run_id, report=path.relative_to(self.project)))
