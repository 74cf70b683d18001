"""Every operation that coremltools 9 can put into an ML Program of iOS 13 to 18 has a rule in
`miltorch/ops` that takes its parameters."""

import inspect

import pytest

from miltorch.ops import FUSED, OPERATIONS

# `const` is evaluated by the reader; the other is of coremltools' own tests
NOT_IN_PACKAGES = {"const", "_const_symbolic"}
NEURAL_NETWORK_ONLY = {"conv_quantized"}  # ML Programs cannot hold it
# coremltools adds these two when it writes a package, so that its registry lacks them
ADDED_BY_THE_WRITER = {"coreml_update_state", "write_state"}
# parameters of `cond` and `while_loop` that are nested blocks in a package, not operands
BLOCK_PARAMETERS = {"_true_fn", "_false_fn", "_existing_blocks", "_cond", "_body"}


@pytest.fixture(scope="module")
def parameters_of(ct) -> dict[str, list[set[str]]]:
    """Kind of operation → the names of its parameters, for each version up to iOS 18."""
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    return {
        kind: [
            set(version.input_spec.input_types)
            for target, version in versions.items()
            if target <= ct.target.iOS18
        ]
        for kind, versions in SSAOpRegistry.core_ops.items()
    }


def test_every_operation_has_a_rule(parameters_of):
    without_rule = set(parameters_of) - set(OPERATIONS)
    assert without_rule == NOT_IN_PACKAGES | NEURAL_NETWORK_ONLY


def test_every_rule_is_of_an_operation_in_packages_or_of_a_fused_one(parameters_of):
    unregistered = set(OPERATIONS) - set(parameters_of)
    assert unregistered == ADDED_BY_THE_WRITER | set(FUSED)


def test_rules_take_every_parameter_of_every_version(parameters_of):
    for kind in set(parameters_of) & set(OPERATIONS):
        accepted = set(inspect.signature(OPERATIONS[kind].function).parameters)
        for parameters in parameters_of[kind]:
            assert parameters - BLOCK_PARAMETERS <= accepted, kind
