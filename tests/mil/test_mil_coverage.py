"""Every operation that coremltools 9 can put into an ML Program of iOS 13 to 18 has a rule that
takes its parameters."""

import inspect

import pytest

from miltorch.ops import FUSED, OPERATIONS

# read by the reader; for coremltools' own tests
NOT_IN_PACKAGES = {"const", "_const_symbolic"}
NEURAL_NETWORK_ONLY = {"conv_quantized"}  # has no form in ML Programs
# these become blocks
NESTED = {"_true_fn", "_false_fn", "_existing_blocks", "_cond", "_body"}


@pytest.fixture(scope="module")
def versions(ct):
    """op → the parameter names of each of its versions up to iOS 18."""
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    return {
        kind: [
            set(version.input_spec.input_types)
            for target, version in by_target.items()
            if target <= ct.target.iOS18
        ]
        for kind, by_target in SSAOpRegistry.core_ops.items()
    }


def test_every_op_has_a_rule(versions):
    assert set(versions) - set(OPERATIONS) == NOT_IN_PACKAGES | NEURAL_NETWORK_ONLY
    # coremltools adds these two when it writes a package, `miltorch.fuse` its own
    written = {"coreml_update_state", "write_state"}
    assert set(OPERATIONS) - set(versions) == written | set(FUSED)


def test_rules_take_every_parameter_of_every_version(versions):
    for kind in set(versions) & set(OPERATIONS):
        accepted = set(inspect.signature(OPERATIONS[kind].function).parameters)
        for parameters in versions[kind]:
            assert parameters - NESTED <= accepted, kind
