"""The parameters of a notebook: the names that its cell tagged `parameters` sets, and
their values, as Python has them, as `--set` gives them and as a report writes them.

The cell is Python. Its names are read from its symbols; a notebook takes their values
from its kernel. A command needs values before a kernel runs: those that are literals
are read here, and where one is an expression, a kernel executes the cell."""

import ast
import json
import os
import symtable
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from workbench import kernel, paths
from workbench.errors import InputError
from workbench.experiment.notebooks import cells_of, find_notebook, named_notebook
from workbench.experiment.sources import Source
from workbench.files import checkout, sha256
from workbench.nbformat_import import import_nbformat

TAG = "parameters"
LENGTHS = {
    "05": ("POSITIONS", "T_MAX"),
    "30": ("POSITIONS", "T_MAX", "DEPTH"),
    "31": ("POSITIONS",),
    "32": ("TOKENS",),
    "34": ("POSITIONS",),
    "35": ("POSITIONS",),
}
"""Number of an experiment → its parameters that count tokens of one sequence, which the
cache of MAX_SEQ_LEN rows must hold."""
CALLS_BEHIND_DEPTH = 9
"""The calls of one token that experiment 30 profiles behind DEPTH tokens (see
`timing.profile`)."""
# Executed in the kernel behind the evaluated cell, whose last output it prints. Braces are
# doubled because `str.format` fills in the names.
REPORT_VALUES_CELL = """
def _evaluated(values):
    import json
    from IPython.display import publish_display_data
    from workbench.experiment.parameters import split_settable
    publish_display_data({{"application/json": split_settable(values, {names!r}).json()}})
_evaluated(globals())
"""


@dataclass(frozen=True)
class Parameters:
    """Values of a notebook's parameters."""

    values: dict[str, object] = field(default_factory=dict)
    """Name → value, of the parameters that `--set` can override, because JSON has their
    types."""
    fixed: dict[str, str] = field(default_factory=dict)
    """Name → `repr` of the value, of all other parameters."""

    def json(self) -> dict:
        return {"values": self.values, "fixed": self.fixed}


def parameter_source(path: Path | None) -> str:
    """The Python of a notebook's cells tagged `parameters`."""
    cells = cells_of(path) if path else []
    tagged = [c for c in cells if TAG in c.metadata.get("tags", [])]
    return "\n".join(cell.source for cell in tagged)


def parameter_names(source: str) -> list[str]:
    """Names that the code of a cell sets, without imports, functions and classes, and
    without those that begin with an underscore.

    Raises:
        InputError: it is not Python.
    """
    code = TransformerManager().transform_cell(source)
    try:
        symbols = symtable.symtable(code, "parameters", "exec").get_symbols()
    except SyntaxError as problem:
        actual = f"{problem.msg} in line {problem.lineno}"
        raise InputError(
            "cell Parameters", actual, "valid Python", "correct the cell"
        ) from None
    return [
        symbol.get_name()
        for symbol in symbols
        if symbol.is_assigned()
        and not symbol.is_imported()
        and not symbol.is_namespace()
        and not symbol.get_name().startswith("_")
    ]


def split_settable(values: Mapping, names: list[str]) -> Parameters:
    """Divides parameters into those that `--set` can override and all others.

    Args:
        values: name → value; may have other names too, as a namespace has.
        names: of the parameters; those without a value are left out.
    """
    settable, fixed = {}, {}
    for name in names:
        if name in values:
            value = values[name]
            if _is_json(value):
                settable[name] = value
            else:
                fixed[name] = repr(value)
    return Parameters(settable, fixed)


def _is_json(value: object) -> bool:
    """Whether JSON has the value's type; tuples are lists there."""
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(
            map(_is_json, value.values())
        )
    return value is None or type(value) in (bool, int, float, str)


def notebook_parameters(number: str) -> Parameters:
    """The parameters of an experiment's notebook before anything overrides them.

    The names come from the cell's symbols, and the values from its text where the cell
    assigns literals and does nothing else. Any other cell is executed in a kernel.

    Raises:
        InputError: there is no such notebook, or its cell is not Python.
        CellError: the cell raised an error.
    """
    path = find_notebook(number)
    source = parameter_source(path)
    names = parameter_names(source)
    if (literals := _literals(source)) is not None:
        return split_settable(literals, names)
    return _evaluate(source, names, path.parent)


def check_lengths(number: str, values: Mapping) -> None:
    """Refuses numbers of tokens that do not fit the cache of an experiment's bundles,
    before an export takes its time.

    Args:
        number: of the experiment.
        values: parameter → value; other names are not read.

    Raises:
        InputError: names the parameter to change.
    """
    lengths = values.get("MAX_SEQ_LEN")
    # of several caches, the first one is validated
    S = lengths[0] if isinstance(lengths, list | tuple) and lengths else lengths
    if type(S) is not int:
        return
    for name in LENGTHS.get(number, ()):
        count = values.get(name)
        # a prompt of its own may be shorter than POSITIONS
        if type(count) is not int or (name == "POSITIONS" and values.get("PROMPT")):
            continue
        most = S - CALLS_BEHIND_DEPTH if name == "DEPTH" else S
        if count > most:
            needed = f"at most {most}, since MAX_SEQ_LEN is {S}"
            step = f"raise MAX_SEQ_LEN to {S + count - most}"
            if most >= 1:
                step = f"lower {name} (--set {name}={most}), or {step}"
            raise InputError(name, f"{count} tokens", needed, step)


def _literals(source: str) -> dict | None:
    """The values of a cell that assigns literals to names and does nothing else: none
    for an empty cell, and None for a cell that does anything else."""
    values = {}
    try:
        for line in ast.parse(source).body:
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    values[name] = ast.literal_eval(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    values[name] = ast.literal_eval(value)
                case _:
                    return None
    except (SyntaxError, ValueError, TypeError):
        return None
    return values


def _evaluate(source: str, names: list[str], folder: Path) -> Parameters:
    """The values of the cell in a kernel that executes it alone."""
    nbformat = import_nbformat()  # here: see `cells_of`
    new_code_cell, new_notebook = nbformat.v4.new_code_cell, nbformat.v4.new_notebook
    report_values = REPORT_VALUES_CELL.format(names=names)
    cells = [new_code_cell(source), new_code_cell(report_values)]
    words = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": words})
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "parameters.ipynb")
        nbformat.write(notebook, path)
        kernel.execute(path, path, {}, progress=False, folder=folder)
        outputs = cells_of(path)[-1].outputs
    return Parameters(**outputs[-1].data["application/json"])


def recorded_parameters(name: str, namespace: Mapping) -> Parameters:
    """The parameters of a running notebook, with the values that its kernel's namespace
    has for them."""
    source = parameter_source(named_notebook(name))
    return split_settable(namespace, parameter_names(source))


def parse_value(name: str, text: str, default: object) -> object:
    """Reads a value of the type of a parameter's default, as JSON or YAML. A text is
    returned as it is where the default is a text.

    Raises:
        InputError: a value of another type.
    """
    import yaml
    from pydantic import TypeAdapter

    if isinstance(default, str):
        return text
    try:
        try:
            value = json.loads(text)  # 1e-5 is a number for JSON, a text for YAML
        except ValueError:
            value = yaml.safe_load(text)
        if isinstance(default, tuple) and isinstance(value, list):
            value = tuple(value)
        kind = object if default is None else type(default)
        return TypeAdapter(kind).validate_python(value, strict=True)
    except (yaml.YAMLError, ValueError):
        needed = f"a value like {default!r}"
        step = f"write --set '{name}={value_text(default, default)}'"
        raise InputError(f"--set {name}", text, needed, step) from None


def value_text(value: object, default: object) -> str:
    """Writes a value as the text from which `parse_value` reads it, given the same
    default."""
    if isinstance(default, str) and isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def portable_values(parameters: Parameters, source: Source) -> dict[str, object]:
    """The values of settable parameters, without paths that only this machine has.

    A path inside the project becomes relative to it. A checkpoint outside of the project
    is named by its label (see `Source.label`), another file or folder by its name. The
    name of a model on the Hub stays as it is.
    """
    values = {}
    for name, value in parameters.values.items():
        values[name] = value
        if isinstance(value, str):
            values[name] = _portable_text(name, value, source)
    return values


def _portable_text(name: str, text: str, source: Source) -> str:
    project = checkout().resolve()
    is_checkpoint = name == "CHECKPOINT"
    is_path = Path(text).is_absolute() or text.startswith("~") or is_checkpoint
    if "\n" in text or not text or not is_path:
        return text
    if is_checkpoint and paths.hub_id(text, project):
        return text
    path = paths.find(text) if is_checkpoint else Path(text)
    # a link inside the project is a path of the project, wherever it leads
    for candidate in (Path(os.path.abspath(path)), path.resolve()):
        if candidate.is_relative_to(project):
            return candidate.relative_to(project).as_posix()
    if is_checkpoint:
        return source.label
    if not path.expanduser().exists():
        return text
    if path.is_file():
        return f"{path.name}-{sha256(path)[:8]}"
    return path.name


def default_values(name: str) -> dict:
    """The values that the cell of a notebook sets now; none where a value is not a
    literal, or where there is no such notebook."""
    return _literals(parameter_source(named_notebook(name))) or {}
