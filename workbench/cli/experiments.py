"""Experiments: `run` executes notebooks, `report` writes them up again, `sweep` measures
the cells of a grid."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import workbench
from workbench import paths
from workbench.check.gates import NOT_RUN
from workbench.cli import ending
from workbench.cli.options import Json, check_runnable, reject_unused
from workbench.cli.output import (
    command_line,
    fit_terminal,
    format_result,
    format_verdicts,
    print_and_exit,
)
from workbench.errors import InputError, visible
from workbench.files import write_whole
from workbench.progress import end_stage, stage

# The notebooks whose question is the cost of presets: OVER is their answer, and no
# failure.
ASK_THE_COST = ("30", "31", "34", "35")
# Verdicts and qualities of a run, worst first. not_run counts only if there is no other.
VERDICTS = "RED", "GREEN"
QUALITIES = "OVER", "WITHIN"
# Keys of a sweep's JSON → their names in its text.
NAMES_IN_TEXT = {"done": "measured now", "resumed": "in the log before"}
# Characters: sentences of a paragraph are printed until there are as many.
LEAST_SENTENCES = 60
# The export that the conclusion of a run recommends (see `recommend.sentences`).
RECOMMENDED_EXPORT = re.compile(
    "^Recommended: .* Next step: (workbench export .+)$", re.MULTILINE
)


def run(
    numbers: list[str] | None = None,
    /,
    *,
    set_: list[str] | None = None,
    list_: Annotated[bool, Parameter(negative=())] = False,
    publish: bool = False,
    beside: bool = False,
    json: Json = False,
) -> None:
    """Runs experiment notebooks headless: verdicts, figures, log rows, report.

    The results go to build/experiments, which git ignores. The exit code is 1 if an
    export is RED, 3 if a cell raises, and 4 if the quality is OVER in a notebook that
    does not ask about the cost (30, 31, 34 and 35 do).

    Example: workbench run 05 --set CHECKPOINT=/models/Llama-3.2-1B --set MAX_SEQ_LEN=512

    Args:
        numbers: Experiments, such as 05 34.
        set_: NAME=VALUE, a notebook's parameter; of several notebooks, those without
            this parameter ignore it.
        list_: Print the notebooks with their questions and parameters; run none.
        publish: Make these the shipped write-ups.
        beside: Ship these too, beside write-ups of another checkpoint.
    """
    if publish and beside:
        needed, step = "one of the two", "leave one out"
        raise InputError("--publish, --beside", "both", needed, step)
    for assignment in set_ or []:
        if "=" not in assignment:
            raise _no_value_error(assignment)
    if not numbers and not list_:
        step = "name some, such as 05, or see them all: workbench run --list"
        raise InputError("run", "no NUMBERS", "the numbers of experiments", step)
    stage("run: reading the notebooks")
    from workbench import experiment

    if list_:
        from workbench.experiment.notebooks import notebooks_by_number

        return _list_notebooks(numbers or sorted(notebooks_by_number()), json)
    numbers = [number.zfill(2) for number in numbers]
    for number in numbers:
        experiment.find_notebook(number)  # refuses all before any of them runs
    experiment.check_writable(f"workbench run {' '.join(numbers)}")
    settings = _notebook_settings(numbers, set_ or [])
    for values in settings.values():
        if checkpoint := values.get("CHECKPOINT"):
            # refuses a wrong path before a kernel starts
            paths.locate_checkpoint(paths.find(str(checkpoint)))
    results = []
    for number in numbers:
        result = experiment.run_notebook(
            number, settings[number], publish=publish, beside=beside, progress=not json
        )
        results.append(result)
        if not json:
            _print_run(result)
    verdict = _worst_word(results, "verdict", VERDICTS)
    words = {"verdict": verdict, "quality": _worst_word(results, "quality", QUALITIES)}
    not_about_cost = [r for r in results if r["experiment"][:2] not in ASK_THE_COST]
    counted_quality = _worst_word(not_about_cost, "quality", QUALITIES)
    code = ending.verdict_code(verdict, counted_quality)
    page = command_line("report", numbers[0], "--html")
    step = _recommended_export(results) or _full_run(settings, set_ or []) or page
    result = words | {"experiments": results}
    print_and_exit(
        result, json, _verdict_lines(words, results), code, next_command=step
    )


def _list_notebooks(numbers: Sequence[str], json: bool) -> None:
    """Prints the question and the parameters of notebooks."""
    from workbench import experiment
    from workbench.experiment.notebooks import title_of
    from workbench.experiment.parameters import value_text

    notebooks = []
    lines = []
    for number in numbers:
        name = experiment.find_notebook(number).stem
        parameters = experiment.notebook_parameters(number).values
        question = title_of(name).rpartition(" · ")[2]
        entry = {"experiment": name, "question": question, "parameters": parameters}
        notebooks.append(entry)
        words = (
            f"{key}={value_text(value, value)}" for key, value in parameters.items()
        )
        lines += [f"{name}: {question}", f"    {'; '.join(words)}", ""]
    step = command_line("run", numbers[0])
    print_and_exit({"notebooks": notebooks}, json, lines[:-1], next_command=step)


def _recommended_export(results: list[dict]) -> str | None:
    """The command of the first export that a run recommends in place of its own, whose
    quality is OVER; None where none does."""
    for result in results:
        command = RECOMMENDED_EXPORT.search(result["conclusion"])
        if result["quality"] == "OVER" and command:
            return command[1]
    return None


def _full_run(
    settings: dict[str, dict[str, object]], assignments: list[str]
) -> str | None:
    """The command that runs all cells and rounds of the notebooks of which this run took
    an extract, with their other parameters; None where it took none.

    Args:
        settings: of `_notebook_settings`.
        assignments: NAME=VALUE, as the user gave them.
    """
    extracts = [number for number in settings if settings[number].get("EXTRACT")]
    if not extracts:
        return None
    parameters = {name for number in extracts for name in settings[number]}
    parameters.remove("EXTRACT")
    words = ["run", *extracts]
    for assignment in assignments:
        # a parameter of the other notebooks alone would be refused
        if assignment.partition("=")[0] in parameters:
            words += ["--set", assignment]
    return f"{command_line(*words)}  (all cells and rounds)"


def _verdict_lines(words: dict[str, str], results: list[dict]) -> list[str]:
    """The lines of a verdict and a quality; where gates were run and none of them judges
    an export, the sentences of the report.

    Args:
        results: of the runs that the words describe.
    """
    from workbench.experiment.report import describe_own_gates

    is_own = not any(result["judges_export"] for result in results)
    if is_own and words["verdict"] != NOT_RUN:
        return [describe_own_gates(words["verdict"])]
    return format_verdicts(words)


def _worst_word(results: list[dict], key: str, worst_first: Sequence[str]) -> str:
    """The worst verdict or quality of several runs; not_run if none has one.

    Args:
        key: of the word in a result.
    """
    words = {result[key] for result in results}
    return next((word for word in worst_first if word in words), NOT_RUN)


def _notebook_settings(
    numbers: list[str], assignments: list[str]
) -> dict[str, dict[str, object]]:
    """The parameters that `NAME=VALUE` assignments give each notebook, typed as its
    defaults are. A notebook without the name is left out; a name that no notebook has
    stays, so that the first notebook refuses it.

    Raises:
        InputError: a value of another type, or none where no default is an empty text.
    """
    from workbench import experiment

    settings = {number: {} for number in numbers}
    if not assignments:
        return settings
    defaults = {n: experiment.notebook_parameters(n).values for n in numbers}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        with_name = [number for number in numbers if name in defaults[number]]
        is_empty_default = [defaults[number][name] == "" for number in with_name]
        if not text and with_name and not any(is_empty_default):
            raise _no_value_error(name)
        for number in with_name or numbers:
            default = defaults[number].get(name)
            settings[number][name] = experiment.parse_value(name, text, default)
    return settings


def _no_value_error(name: str) -> InputError:
    """The error for a parameter that is named without a value."""
    needed = "NAME=VALUE, such as MAX_SEQ_LEN=512"
    return InputError(f"--set {name}", "no value", needed, f"write --set {name}=VALUE")


def _print_run(result: dict) -> None:
    """Prints verdict, conclusion, figures and files of one notebook's run."""
    lines = _answer_lines(result["conclusion"])
    # all figures are in one folder
    for folder in {Path(figure["path"]).parent: None for figure in result["figures"]}:
        lines.append(f"figures   {folder}")
    for figure in result["figures"]:
        lines.append(f"  {Path(figure['path']).name}: {figure['alt']}")
    lines += [f"report    {result['report']}", f"notebook  {result['executed']}"]
    end_stage()
    print(f"experiment {result['experiment']}")
    lines = [*_verdict_lines(result, [result]), *lines]
    lines = fit_terminal([f"  {line}" for line in lines])
    print(visible("\n".join(lines)), end="\n\n")


def _answer_lines(conclusion: str) -> list[str]:
    """An answer as a terminal shows it: headings without Markdown, and the first sentences
    of every paragraph. The report has the rest, as the last line says."""
    from workbench.experiment.overview import first_sentences

    lines = []
    is_cut = False
    for line in conclusion.splitlines():
        if line.startswith("#"):
            lines += ["", f"{line.lstrip('# ')}:"]
            continue
        start = first_sentences(line, LEAST_SENTENCES)
        rest = " …" if len(start) < len(line.strip()) else ""
        is_cut = is_cut or bool(rest)
        lines.append(f"{start}{rest}")
    return [*lines, "", *(["…: the report has the rest"] if is_cut else [])]


# As cyclopts gives it: None without the option, [] for `--html`, [FILE] for `--html FILE`.
OptionalFile = Annotated[list[Path] | None, Parameter(consume_multiple=(0, 1))]


PAGE_ENDINGS = {"--html": (".html", ".htm"), "--markdown": (".md", ".markdown", ".txt")}
"""Option of a page → the endings of files that it replaces."""


@dataclass(frozen=True)
class HtmlOption:
    """The option `--html` of a report.

    Attributes:
        is_given: with a file or without one.
        file: None where none is named.
    """

    is_given: bool
    file: Path | None

    @classmethod
    def of(cls, value: list[Path] | None) -> "HtmlOption":
        """The option from its value as `OptionalFile`."""
        return cls(value is not None, value[0] if value else None)


def report(
    subject: str,
    /,
    *,
    html: OptionalFile = None,
    markdown: Path | None = None,
    figure: Path | None = None,
    redraw: bool = False,
    publish: bool = False,
    json: Json = False,
) -> None:
    """Writes what was measured for a bundle, or in an experiment, as a page.

    For a bundle: both verdicts, heatmap, cost, what was run, gates, transcript and the
    commands that repeat it, from the file that `workbench validate` wrote into its
    folder. The page is printed as Markdown, or written as files; --figure writes the
    heatmap alone. Results that this checkout did not produce are marked as stated by the
    bundle.

    For an experiment: redraws the figures of its newest run from their data and
    rewrites its report. If you have no run, the shipped one is used, whose files are
    changed by --redraw alone.

    Example: workbench report build/llama --html llama.html

    Args:
        subject: A bundle's folder, or the number of an experiment, such as 05.
        html: One self-contained HTML file, which prints on A4. For an experiment, FILE
            may be left out.
        markdown: For a bundle: the page as Markdown, for an issue or a pull request.
        figure: For a bundle: the heatmap, as .svg, .pdf or .png.
        redraw: For an experiment: redraw the shipped run too, in experiments/.
        publish: For an experiment: make this the shipped write-up.
    """
    html_option = HtmlOption.of(html)
    outputs = {"--markdown": markdown, "--html": html_option.file, "--figure": figure}
    for option, path in outputs.items():
        if path:
            _check_folder(option, path)
            _check_replaced(option, path)
            paths.prepare_output(option, path)
    if re.fullmatch(r"\d{1,2}", subject):
        reject_unused("a bundle", markdown=markdown, figure=figure)
        result = _report_experiment(subject, html_option, redraw, publish)
        print_and_exit(result, json, list(result.values()))
        return
    if not Path(subject).exists():
        needed = "a bundle's folder, or the number of an experiment, such as 05"
        raise InputError(f"report {subject}", "nothing there", needed, "check the path")
    reject_unused("the number of an experiment", redraw=redraw, publish=publish)
    if html_option.is_given and html_option.file is None:
        needed, step = "a file for the page of a bundle", "write --html page.html"
        raise InputError("--html", "no file", needed, step)
    _report_bundle(Path(subject), html_option.file, markdown, figure, json)


def _check_folder(option: str, path: Path) -> None:
    """Refuses a file in a folder that does not exist, before the page is computed. The
    folder is not made, because its name may be misspelled."""
    if not path.parent.is_dir():
        actual, step = f"no folder {path.parent}", "make the folder, or name another"
        raise InputError(f"{option} {path}", actual, "a folder that is there", step)


def _check_replaced(option: str, path: Path) -> None:
    """Refuses to replace a file whose ending is not that of the page: a path that was
    written by mistake would destroy another file. --figure checks its endings itself."""
    endings = PAGE_ENDINGS.get(option)
    if endings and path.is_file() and path.suffix.lower() not in endings:
        needed = f"a new file, or one that ends in {' or '.join(endings)}"
        actual = "another file that is there"
        raise InputError(f"{option} {path}", actual, needed, "name another file")


def _report_experiment(
    number: str, html: HtmlOption, redraw: bool, publish: bool
) -> dict[str, str]:
    """Writes an experiment's report; returns the path of each file. The files of a shipped
    run, which git tracks, are left alone unless `redraw` asks for them."""
    stage("report: reading the experiment")
    from workbench import experiment

    run = experiment.last_run(number)
    experiment.check_writable(f"workbench report {number}")
    run = experiment.writable_run(run, experiment.read_run(run))
    if experiment.is_shipped(run) and not redraw and not publish:
        folder, document = run, experiment.find_report(run)
    else:
        folder = experiment.publish_run(run) if publish else run
        document = experiment.redraw_run(folder)
    result = {"report": str(document)}
    if html.is_given:
        result["html"] = str(experiment.write_html(folder, html.file))
    return result


def _report_bundle(
    folder: Path,
    html: Path | None,
    markdown: Path | None,
    figure: Path | None,
    json: bool,
) -> None:
    """Writes the page of a bundle, or its figure, or prints the page."""
    if figure:
        _check_figure(figure)
    bundle = workbench.Bundle.open(folder)
    stage("report: reading the validation")
    from workbench.check.record import load_record
    from workbench.experiment import page
    from workbench.experiment.validation import validation_page

    record = load_record(bundle)
    document = validation_page(record)
    result = {"verdict": record.results.verdict, "quality": record.results.quality}
    if not record.is_noted:
        # this checkout did not produce the results: the bundle only states them
        result = {"verdict": NOT_RUN, "quality": NOT_RUN, "stated": result}
    if html:
        write_whole(html, page.html(document).encode())
        result["html"] = str(html)
    if figure:
        write_whole(figure, _encode_figure(record, figure))
        result["figure"] = str(figure)
    if markdown:
        write_whole(markdown, page.markdown(document).encode())
        result["markdown"] = str(markdown)
    lines = [str(path) for path in (html, markdown, figure) if path]
    if not lines:
        lines = [page.markdown(document).rstrip("\n")]
    # the page says what the verdicts are; writing it went well
    print_and_exit(result, json, lines, code=0)


def _check_figure(path: Path) -> None:
    """Refuses a path whose end names no kind of drawing, before anything is read."""
    kinds = "svg", "pdf", "png"
    if path.suffix.removeprefix(".") not in kinds:
        needed = "a name that ends in .svg, .pdf or .png"
        step = f"write --figure {path.stem}.pdf"
        raise InputError("--figure", f"a file {path.name}", needed, step)


def _encode_figure(record, path: Path) -> bytes:
    """The heatmap of a validation as the bytes of a file of the path's kind.

    Raises:
        InputError: no layer was measured.
    """
    from workbench import plots
    from workbench.experiment.validation import draw_errors, page_title

    title = page_title(record)
    if not record.is_noted:
        title += " · stated by the bundle, not checked here"
    figure = draw_errors(record, title)
    if figure is None:
        name = record.bundle.root.name
        step = f"run: workbench validate {name} --checkpoint CHECKPOINT"
        needed = "a validation that measured layers"
        raise InputError(f"validation of bundle {name}", "no errors", needed, step)
    return plots.encode(figure, path.suffix.removeprefix("."), title)


def sweep(
    grid_or_bundle: str,
    /,
    *,
    T: Annotated[str, Parameter("--T")] = "1",
    depth: str = "0",
    rounds: Annotated[int, Parameter(alias="-r")] = 1,
    runtime: str = "auto",
    part: str = "1/1",
    scheduler: str | None = None,
    log: Path | None = None,
    json: Json = False,
) -> None:
    """Measures a grid's cells, each in a fresh process, and prints their table. Cells
    that the log has are not measured again. The exit code is 1 if an export is RED, 3
    if a cell failed, and 4 if a cost is above the limit.

    Give a grid, which is a YAML file; or a finished bundle with the options below; or
    `first-light`, which runs the checks that need a Mac (then: workbench log pack).

    Example: workbench sweep BUNDLE --T 1,4 --depth 0,64 -r 5

    Args:
        grid_or_bundle: A grid (YAML file), the folder of a bundle, or first-light.
        T: For a bundle: tokens in a call, such as 1,4.
        rounds: For a bundle: processes that measure each cell.
        depth: For a bundle: tokens in the cache before the timed ones, such as 0,64.
        runtime: For a bundle or first-light: auto, portable, coreml, stand-in.
        part: 1/3: every third cell, for the first of three machines.
        scheduler: Measure on a Dask cluster's ANE workers: tcp://host:8786.
        log: Folder of the log; default: experiments/log of the checkout.
    """
    portion = _parse_part(part)
    _check_grid(grid_or_bundle)
    stage("sweep: reading the grid")
    grids = _make_grids(grid_or_bundle, T, depth, rounds, runtime, log)
    from workbench.sweep.grid import locate
    from workbench.sweep.summary import summary
    from workbench.sweep.table import table_lines

    for path in (path for grid in grids for path in grid.bundle):
        check_runnable(workbench.Bundle.open(locate(path, log)))
    results = [
        workbench.sweep.sweep(grid, root=log, scheduler=scheduler, part=portion)
        for grid in grids
    ]
    settings = [setting for result in results for setting in result["settings"]]
    rows = summary(log, {"setting": settings})
    totals = _total_results(results) | _worst_verdicts(rows)
    code = ending.verdict_code(totals["verdict"], totals["quality"])
    if totals["failed"] and code != ending.RED:
        code = ending.UNFINISHED
    # `evaluate` resumes windows, a sweep leaves out whole cells
    counts = {NAMES_IN_TEXT.get(name, name): value for name, value in totals.items()}
    lines = [*table_lines(rows), "", *format_result(counts)]
    step = command_line("log", "--sort", "-tokens_per_s")
    print_and_exit(totals, json, lines, code, next_command=step)


def _check_grid(grid_or_bundle: str) -> None:
    """Refuses what is neither a bundle nor a readable grid, and a grid with a wrong
    preset, before the imports that take seconds."""
    from workbench.sweep.grid_file import FIRST_LIGHT, check_presets, read_grid_file

    if grid_or_bundle == FIRST_LIGHT:
        return
    path = Path(grid_or_bundle)
    if path.is_dir():
        paths.check_bundle(path)
        return

    check_presets(read_grid_file(path))


def _make_grids(
    grid_or_bundle: str, T: str, depth: str, rounds: int, runtime: str, log: Path | None
) -> list:
    """The `Grid`s of a sweep, from the arguments of `sweep`.

    Raises:
        InputError: options that the grid does not read, or a wrong grid.
    """
    bundle_options = {"T": T != "1", "depth": depth != "0", "rounds": rounds != 1}
    if grid_or_bundle == "first-light":
        reject_unused("a bundle", **bundle_options)
        from workbench.sweep.seeded import first_light

        return first_light(workbench.log.project(log), runtime)
    if Path(grid_or_bundle).is_dir():
        run = {"T": T.split(","), "depth": depth.split(",")}
        run |= {"rounds": rounds, "runtime": [runtime]}
        grid = {"bundle": [grid_or_bundle], "run": run}
        return [workbench.sweep.make_grid(grid, "sweep of a bundle")]
    bundle_options["runtime"] = runtime != "auto"
    reject_unused("a bundle in place of a grid", **bundle_options)
    return [workbench.sweep.load_grid(grid_or_bundle)]


def _total_results(results: list[dict]) -> dict:
    """The log and the sums of several results of `workbench.sweep.sweep`."""
    totals = {"log": results[0]["log"]}
    for name in ("cells", "done", "resumed", "failed", "invalid"):
        totals[name] = sum(result[name] for result in results)
    totals["reasons"] = [reason for result in results for reason in result["reasons"]]
    return totals


def _worst_verdicts(rows) -> dict[str, str | None]:
    """The verdict and the quality of a sweep, from a table of `summary`: they name what is
    wrong, RED or OVER, and decide the exit code. Where nothing is, both are null, whether
    or not the cells were validated."""
    is_red = (rows["verdict"] == "RED").any()
    # a RED export withholds the quality
    is_over = (rows["quality"] == "OVER").any() and not is_red
    if not is_red and not is_over:
        return {"verdict": None, "quality": None}
    return {
        "verdict": "RED" if is_red else "GREEN",
        "quality": "OVER" if is_over else "not_run",
    }


def _parse_part(text: str) -> tuple[int, int]:
    """(i, n) of `i/n` with 1 ≤ i ≤ n: part i of n."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise InputError(
            "--part", text, "i/n with i from 1 to n, such as 1/3", "correct it"
        )
    return int(numbers[1]), int(numbers[2])
