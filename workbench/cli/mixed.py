"""The options of `export --compress mixed`, which chooses a format for every matrix."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat

from workbench import paths
from workbench.check.gates import MAX_KL
from workbench.cli.options import read_ids, reject_unused
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.bundle import Bundle, Options
    from workbench.exporter.calibrate import Text
    from workbench.exporter.mixed import SearchSettings
    from workbench.models.checkpoint import Checkpoint

MIXED = "mixed"  # workbench.bundle.presets, whose package imports NumPy, has it too
SELECTION = "data/selection.txt"
"""The text on which formats are chosen where none is named, in a checkout."""


@Parameter("*")
@dataclass(frozen=True)
class FormatTarget:
    """What --compress mixed aims at, and the text that it chooses formats on.

    Args:
        max_kl: For mixed only: minimize the bytes and keep the mean KL from Hugging
            Face's model, in nats on the text of --select, at or below this.
        size: For mixed only: minimize the mean KL and keep the matrices of the layers
            and the head within this many bytes, such as 90M. The embedding table and
            the programs come on top.
        ms_on: For mixed only: minimize the predicted time of a call on this chip, such
            as M4, and keep the mean KL at or below --max-kl (default: 0.05).
        select: For mixed only: file of text, UTF-8, about 2,500 tokens, on which formats
            are chosen; default: data/selection.txt, where the checkout has it.
        select_ids: For mixed only: that text as token ids: a NumPy file, or a JSON list.
    """

    max_kl: NonNegativeFloat | None = None
    size: Annotated[str | None, Parameter(name="--bytes")] = None
    ms_on: str | None = None
    select: Path | None = None
    select_ids: Path | None = None

    def check(self, compress: str) -> None:
        """Checks the options before anything heavy is imported.

        Raises:
            InputError: another preset, no target or two of them, a size or a chip that
                is none, two texts or none, a file that is not there.
        """
        if compress != MIXED:
            reject_unused(
                "--compress mixed",
                bytes=self.size,
                ms_on=self.ms_on,
                select=self.select,
                select_ids=self.select_ids,
                max_kl=self.max_kl,
            )
            return
        targets = {"--max-kl": self.max_kl, "--bytes": self.size, "--ms-on": self.ms_on}
        names = [name for name, value in targets.items() if value is not None]
        has_two = self.size is not None and len(names) > 1
        if not names or has_two:
            raise InputError(
                "--compress mixed",
                " and ".join(names) or "no target",
                "one target: --max-kl, --bytes, or --ms-on (with or without --max-kl)",
                "give for example --max-kl 0.05",
            )
        if self.size is not None:
            from workbench.ane.memory import parse_bytes

            parse_bytes(self.size, "--bytes")
        if self.ms_on is not None:
            from workbench.ane.chips import check_chip

            check_chip(self.ms_on)
        if self.select and self.select_ids:
            subject, step = "--select, --select-ids", "leave one of them out"
            raise InputError(subject, "both", "one text for selection", step)
        file = self.select or self.select_ids
        if file and not file.is_file():
            needed = "a text to choose formats on"
            raise InputError(str(file), "no file", needed, "check the path")
        if not file and not self.text_file().is_file():
            raise InputError(
                "--compress mixed",
                f"no {SELECTION}, since this is no checkout",
                "a text to choose formats on",
                "give one: --select TEXT",
            )

    def text_file(self) -> Path:
        """The file of text, where no ids are given."""
        return self.select or paths.find(SELECTION)

    def search_settings(
        self, source: "Checkpoint", options: "Options", calibration: "Text"
    ) -> "SearchSettings":
        """How the formats of an export are searched.

        Args:
            options: of the export.
            calibration: the text that weights are compressed for.

        Raises:
            InputError: a text that is not in the tokenizer's language or shares a part
                with the text of calibration, a chip or a size that is none.
        """
        from workbench.ane.memory import parse_bytes
        from workbench.ane.timing import CHIP, Timing
        from workbench.ane.work import call_work
        from workbench.check.text import share_part
        from workbench.exporter.allocation import Limit
        from workbench.exporter.mixed import SearchSettings

        text = self._read(source)
        if share_part(text.ids, calibration.ids):
            raise InputError(
                text.source,
                f"a part of {calibration.source}, with which weights are calibrated",
                "another text to choose formats on",
                "give another one: --select TEXT",
            )
        if self.size is not None:
            limit = Limit(bytes=parse_bytes(self.size, "--bytes"))
        else:
            limit = Limit(kl=MAX_KL if self.max_kl is None else self.max_kl)
        timing = None
        if not options.plugin:  # rates are those of Core ML programs
            alike = options.model_copy(update={"compress": "fp16"})
            timing = Timing(call_work(source, alike), self.ms_on or CHIP)
        elif self.ms_on:
            step = "leave --ms-on out"
            needed = "Core ML programs, whose times are predicted"
            raise InputError("--ms-on", f"target {options.target}", needed, step)
        minimizes = "ms" if self.ms_on else "bytes"
        return SearchSettings(text, limit, timing, minimizes)

    def _read(self, source: "Checkpoint") -> "Text":
        """The windows of the text for selection.

        Raises:
            InputError: a text that is not in the tokenizer's language, or too short.
        """
        from workbench.check.hf import check_ids
        from workbench.check.text import UNKNOWN_SHARE
        from workbench.decode.tokenizer import encode_text, load_tokenizer
        from workbench.exporter import mixed
        from workbench.exporter.calibrate import draw_windows

        path = self.select_ids or self.text_file()
        if self.select_ids:
            ids = read_ids(path)
        else:
            ids = encode_text(source.tokenizer, paths.read_text(path))
            unknown = ids.count(load_tokenizer(source.tokenizer).unk_token_id)
            if unknown > UNKNOWN_SHARE * len(ids):
                raise InputError(
                    str(path),
                    f"{unknown} of {len(ids)} tokens unknown to the tokenizer",
                    "a text in the model's language",
                    "give one: --select TEXT",
                )
        ids = check_ids(ids, source.config.vocab_size)
        return draw_windows(
            ids,
            path.name,
            bos=source.config.bos_token_id,
            window=mixed.WINDOW,
            windows=mixed.WINDOWS,
        )


def describe_choice(bundle: "Bundle") -> dict:
    """The choice of a search for a mixed bundle, as JSON: bytes and bits of the matrices,
    KL in nats, predicted milliseconds of a call with their 90% interval, and the number
    of matrices of each format."""
    from workbench.exporter.mixed import read_allocation

    selection = bundle.manifest.selection
    allocation = read_allocation(bundle.root / selection.allocation.path)
    chosen, exported = allocation.chosen, allocation.exported
    return {
        "matrix_bytes": chosen.bytes,
        "bits": chosen.bits,
        "kl": exported.kl,
        "kl_p99": exported.kl_p99,
        "perplexity_ratio": exported.perplexity_ratio,
        "selection_tokens": selection.tokens,
        "predicted_ms": chosen.ms,
        "predicted_low_ms": chosen.low_ms,
        "predicted_high_ms": chosen.high_ms,
        "predicted_chip": allocation.chip,
        "formats": count_formats(bundle.manifest.formats),
    }


def count_formats(formats: dict[str, str]) -> dict[str, int]:
    """Preset → the number of matrices that it stores, most first."""
    return dict(Counter(formats.values()).most_common())
