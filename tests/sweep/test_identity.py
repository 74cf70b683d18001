"""The hashes of the log do not depend on which preset is the default of an export."""

import pytest
from tiny import ROOT

from workbench import log
from workbench.bundle import Options
from workbench.exporter import make_options
from workbench.sweep import identity

SHIPPED = ROOT / "experiments" / "log"
RUN = {
    "runtime": "portable",
    "precision": "declared",
    "fast": True,
    "reads": "used",
    "compute_units": None,
    "hints": None,
}


def test_the_default_preset_has_a_scale_for_each_channel():
    assert make_options().compress == "int8-channel"


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("fp16", {}), ("int8-channel", {"compress": "int8-channel"})],
)
def test_hashes_leave_out_fp16_and_no_other_preset(preset, expected):
    """The digests were written down while fp16 was the default."""
    digests = {"fp16": "a612f6ccad360d24", "int8-channel": "2b3ff6cb17750c78"}
    chosen = identity.non_default_options(Options(compress=preset))
    assert chosen == expected
    computed = identity.setting_hash("0" * 64, chosen, RUN, {"T": 1, "depth": 0})
    assert computed == digests[preset]


def test_every_shipped_run_has_the_hash_that_its_columns_give():
    """Except those of experiment 38, whose bundle had options that no longer exist."""
    runs = log.plain(log.load("runs", SHIPPED)).to_dict("records")
    runs = [run for run in runs if run["values"] and run["experiment"] != "38"]
    assert {"fp16", "int8-tensor"} <= {run["compress"] for run in runs}
    for run in runs:
        columns = {name: run[name] for name in Options.model_fields if run[name]}
        chosen = identity.non_default_options(Options(**columns))
        assert (
            identity.values_hash(run["checkpoint_hash"], chosen, run) == run["values"]
        )
