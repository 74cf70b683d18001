"""Checks of a program before it is bound or fused, whoever wrote it."""

from miltorch.errors import InputError
from miltorch.ops import FUSED, OPERATIONS
from miltorch.program import Block, Program


def check_program(program: Program) -> None:
    """Raises an InputError that names every operation of `program` without a rule, a
    state that holds no floats (iOS 26 has some), or values that nothing computes, or
    that are computed twice."""
    kinds = {op.kind for op in program.block.walk()}
    supported_kinds = OPERATIONS.keys() | {"const"}
    # MIL has no such operations: only `fuse` makes them
    if not program.is_fused:
        supported_kinds -= FUSED.keys()
    missing = kinds - supported_kinds
    if missing:
        raise InputError(
            str(program.package),
            f"operations without a rule: {', '.join(sorted(missing))}",
            "operations the portable runtime knows",
            "run it on a Mac, or add rules in miltorch/ops",
        )
    for name, declared in program.states.items():
        if not declared.dtype.startswith("FLOAT"):
            raise InputError(
                f"state {name!r} of {program.package}",
                f"dtype {declared.dtype}",
                "a state of floats",
                "run it on a Mac, or export it with float16 states",
            )
    _check_names(program, program.block, {*program.inputs, *program.states})


def _check_names(program: Program, block: Block, outer: set[str]) -> None:
    """Checks the values that a block reads and computes; `outer` are the names that the
    block sees from around it."""
    defined = outer | dict(block.inputs).keys()
    for op in block.ops:
        _refuse_names(program, set(op.reads()) - defined)
        for inner in op.blocks:
            _check_names(program, inner, defined)
        results = dict(op.outputs).keys()
        _refuse_names(program, results & defined, "are computed twice")
        defined |= results
    _refuse_names(program, set(block.outputs) - (defined - program.states.keys()))


def _refuse_names(
    program: Program, names: set[str], fault: str = "nothing before them computes"
) -> None:
    if names:
        raise InputError(
            str(program.package),
            f"values {sorted(names)} that {fault}",
            "a whole program",
            "export the model again",
        )
