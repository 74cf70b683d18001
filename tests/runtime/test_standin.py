"""The stand-in for Core ML: its verdicts are those of the portable runtime, without an illegal call,
and each fault that it imitates ends in the row, the message and the exit code of a Mac's fault."""

import json
import re
import shutil
import sys
from dataclasses import replace
from unittest import mock

import pytest
from in_process import cli
from refusal import refused

from miltorch import shim
from miltorch.coremltools_import import coremltools
from workbench import Decoder, core_ml_log, log, plugins, process, runtime, sweep
from workbench.ane import placement
from workbench.check import golden, units
from workbench.explain.running import Runner
from workbench.exporter import export
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import coreml

pytestmark = pytest.mark.shim

IDS = [5, 17, 42, 3, 88, 9]
OPTIONS = {"max_seq_len": 16, "tokens": "1-2", "compress": "fp16"}
FAULTS = {
    name.removeprefix("stand-in-")
    for name in plugins.find_plugins("runtimes")
    if name.startswith("stand-in-")
}


@pytest.fixture(scope="module", autouse=True)
def in_forks(forking_python):
    """Cells and plans run in children of this process: in forks, which start at once."""
    with mock.patch.object(sys, "executable", forking_python):
        yield


@pytest.fixture(scope="module")
def source(exports):
    return exports.checkpoint("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def bundle(exports, source):
    return exports.bundle(source, **OPTIONS)


# --- which runtime --------------------------------------------------------------------------------


def test_the_variable_says_what_auto_means(monkeypatch, bundle):
    assert runtime.resolve("stand-in-kill") == "stand-in-kill"
    meant = {
        "portable": "portable",
        "auto": "portable",
        "stand-in-chatter": "stand-in-chatter",
    }
    for name, expected in meant.items():
        monkeypatch.setenv("WORKBENCH_RUNTIME", name)
        assert runtime.resolve() == runtime.resolve("auto") == expected
    assert Decoder(bundle).runtime == "stand-in-chatter"
    assert Decoder(bundle, "portable").runtime == "portable"


@pytest.mark.parametrize("name", ["stand-in-no", "portable-kill", "core", "stand-in-"])
def test_names_that_are_no_runtime_are_refused(name, monkeypatch, bundle):
    monkeypatch.setenv("WORKBENCH_RUNTIME", name)
    for use in (
        lambda: runtime.resolve(name),
        runtime.resolve,
        lambda: Decoder(bundle, name),
    ):
        with refused("one of"):
            use()
    with refused("runtime"):
        sweep.make_grid({"checkpoint": "x", "run": {"runtime": [name]}})


def test_on_macos_the_stand_in_is_refused_with_one_message(monkeypatch, bundle):
    monkeypatch.setattr(runtime.platform, "system", lambda: "Darwin")
    for use in runtime.resolve, lambda name: Decoder(bundle, name):
        with refused("macOS, which has Core ML itself"):
            use("stand-in")


def test_the_stand_in_leaves_coremltools_as_it_was(bundle):
    Decoder(bundle, "stand-in-plan-none")
    model = coremltools().models.model
    assert model._MLModelProxy is None
    with refused("macOS 15"):
        runtime.resolve("coreml")
    shim.install()
    Decoder(bundle, "stand-in-plan-none")
    assert model._MLModelProxy is shim.Proxy and runtime.resolve("coreml") == "coreml"
    shim.uninstall()


# --- no fault: portable's verdicts, and no illegal call -------------------------------------------

COMMANDS = {
    "own": ["validate"],
    "validate": ["validate", "--prompt-ids", "5,17", "--checkpoint"],
    "generate": ["generate", "--max-new", 2, "--prompt-ids", "5,17,42"],
    "plan": ["plan"],
}


def command_line(name: str, bundle, source, runtime: str) -> list[str]:
    """The arguments of one of `COMMANDS` on a runtime."""
    verb, *options = COMMANDS[name]
    checkpoint = [source] if name == "validate" else []
    arguments = [verb, bundle.root, *options, *checkpoint, "--runtime", runtime]
    return list(map(str, arguments))


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"plan"}))
def test_commands_end_as_on_portable_without_an_illegal_call(name, source, bundle):
    """The shim prints every array that the binding would refuse, which is no JSON."""
    results = []
    for where in ("stand-in", "portable"):
        ended = cli(*command_line(name, bundle, source, where), "--json")
        assert ended.exit_code == 0, ended.output
        results.append(json.loads(ended.stdout))
    ours, portable = results
    if "verdict" in ours:
        verdicts, others = (
            {gate["name"]: gate["verdict"] for gate in result["gates"]}
            for result in results
        )
        # portable is what devices are compared with
        device = {"device": "GREEN"} if name == "validate" else {}
        assert verdicts == others | device and ours["verdict"] == portable["verdict"]
    if name == "generate":
        assert ours["tokens"] == portable["tokens"] and ours["runtime"] == "stand-in"


# --- faults: rows ---------------------------------------------------------------------------------

DIED, PLANLESS = {"status": "failed"}, {"status": "ok", "placement_source": None}
ON_CPU = {"status": "invalid", "placement_source": "simulated", "ane_ops_share": 0.0}
ON_ENGINE = {"status": "ok", "placement_source": "simulated", "ane_ops_share": 1.0}
NOWHERE = "not on the Neural Engine: the plan puts 0 of "
# fault → columns of its row, words of the row's reason, words of the reason in its config why
# there is no placement
ROWS = {
    "": (PLANLESS, "", "MLComputePlan"),
    "load14": (DIED, "error code: -14", ""),
    "fallback": (ON_CPU, NOWHERE, ""),
    "kill": (DIED, "killed by SIGKILL", ""),
    "chatter": (PLANLESS, "", "MLComputePlan"),
    "plan-raises": (PLANLESS, "", "Failed to load the compute plan"),
    "plan-none": (PLANLESS, "", "found None"),
    "plan-aborts": (PLANLESS, "", "killed by SIGABRT"),
    "batch-one": (DIED, "the batch of 2 collapsed to 1; needs [2, 64, 1, 1]", ""),
    "plan-ane": (ON_ENGINE, "", ""),
}


def runtime_with(fault: str) -> str:
    """The name of the stand-in with a fault; "": without one."""
    return f"stand-in-{fault}" if fault else "stand-in"


@pytest.fixture(scope="module")
def swept(source, tmp_path_factory):
    """The log folder of one cell for each fault."""
    assert {*filter(None, ROWS)} == FAULTS
    folder, alone = tmp_path_factory.mktemp("faults"), {"batch-one"}
    for batch, faults in (2, alone), (1, ROWS.keys() - alone):
        grid = {"checkpoint": str(source), "validate_ids": IDS}
        sizes = {"max_seq_len": [16], "tokens": ["1-2"], "batch": [batch]}
        runtimes = sorted(map(runtime_with, faults))
        run = {"runtime": runtimes, "n_gen": 2, "repetitions": 1}
        cells = sweep.make_grid(grid | {"export": sizes, "run": run})
        where = {"root": folder / "log", "bundles": folder / "bundles"}
        sweep.sweep(cells, progress=False, **where)
    return folder / "log"


@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_ends_in_its_row(swept, fault):
    columns, reason, placement_reason = ROWS[fault]
    rows = log.load("runs", root=swept)
    configs = rows["config"].map(json.loads)
    is_row = [config["run"]["runtime"] == runtime_with(fault) for config in configs]
    (row,), (config,) = rows[is_row].to_dict("records"), configs[is_row]
    row = {name: None if value != value else value for name, value in row.items()}
    assert row["runtime"] == runtime_with(fault)
    assert row["placement_source"] != "measured"
    assert {name: row[name] for name in columns} == columns
    assert (reason in row["reason"]) if reason else row["reason"] is None
    assert placement_reason in config.get("placement", "")
    samples = log.load("samples", root=swept, where={"run_id": [row["run_id"]]})
    assert samples.empty == (row["status"] == "failed")
    assert row["status"] == "failed" or row["verdict"] == "GREEN"


def test_the_units_of_a_bundle_that_one_of_them_rejects(source, bundle):
    reference = replace(golden.make_golden(source, IDS), source=Checkpoint(source))
    name = "stand-in-load14"
    rows = units.validate_units(bundle, reference, runtime=name, Ts=[1])
    assert units.units_verdict(rows) == "DIED"
    assert set(rows["runtime"]) == {"portable", name}
    rows = rows.set_index("unit")
    assert rows.loc["CPU_AND_NE", "verdict"] == "DIED"
    assert "error code: -14" in rows.loc["CPU_AND_NE", "reason"]
    assert (rows.drop("CPU_AND_NE")["verdict"] == "GREEN").all()


# --- faults: messages and exit codes --------------------------------------------------------------


@pytest.mark.matrix(2, wide=1)
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"plan"}))
def test_a_shard_that_does_not_load_is_one_message_and_exit_code_2(
    name, bundle, source
):
    arguments = command_line(name, bundle, source, "stand-in-load14")
    ended = cli(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    words = "^workbench: shard layers_00_00: found .*error code: -14.*try other --compute-units.*$"
    assert re.fullmatch(words, ended.stderr.strip())
    assert cli(*arguments, "--compute-units", "CPU_ONLY").exit_code == 0


@pytest.mark.parametrize("where", ["stand-in-fallback", "portable"])
@pytest.mark.parametrize("name", ["generate", "plan"])
def test_compute_units_that_are_none_are_refused(name, where, bundle, source):
    arguments = command_line(name, bundle, source, where)
    ended = cli(*arguments, "--compute-units", "ANE")
    assert ended.exit_code == 2 and "--compute-units: found 'ANE'" in ended.output


def test_messages_of_the_compiler_stay_out_of_the_output(source, tmp_path, capfd):
    fresh = export(source, tmp_path / "fresh", **OPTIONS)
    ended = cli(*command_line("generate", fresh, source, "stand-in-chatter"), "--json")
    assert ended.exit_code == 0 and len(json.loads(ended.stdout)["tokens"]) == 2
    out, err = capfd.readouterr()
    assert not out and err.count("coremlcompiler: note") == 2  # two shards


@pytest.mark.parametrize("fault", ["", "fallback", "plan-raises", "plan-aborts"])
def test_residency_without_a_plan_predicts_and_says_why(fault, bundle, source):
    words = ROWS[fault][-1]
    ended = cli(*command_line("plan", bundle, source, runtime_with(fault)), "--json")
    result = json.loads(ended.stdout)
    assert ended.exit_code == 0
    assert result["source"] == ("predicted" if words else "simulated")
    if words:
        assert any("no plan" in fact and words in fact for fact in result["known"])
    else:
        assert [shard["ane"] for shard in result["shards"]] == [0, 0]


# --- placement and messages -----------------------------------------------------------------------


def test_a_plan_that_names_no_unit_makes_no_run_invalid():
    silent = placement.count_units("s", [coreml.PlacedOperation("conv", "y", None, ())])
    row = placement.placement_columns([silent], "CPU_AND_NE")
    assert "status" not in row and "ane_ops_share" not in row


MESSAGES = {  # a line → whether it is logged, whether it makes the run invalid
    "E5RT: ANECCompile() FAILED (11)": (True, True),
    "ANE inference operation failed": (True, True),
    "E5RT encountered an STL exception. msg = MILCompilerForANE error": (True, True),
    "E5RT: Error plan build: -14": (True, True),
    "MPSGraph assertion failed": (True, True),
    "Must re-compile the E5 bundle": (True, False),
    "[Espresso::handle_ex_plan] loading": (True, False),
    "a warning of Python about a plane": (False, False),
}


@pytest.mark.parametrize("line", MESSAGES)
def test_messages_of_core_ml_are_logged_and_some_invalidate(line):
    logged, invalid = MESSAGES[line]
    messages = core_ml_log.select_messages(["x", line, line])
    assert messages == [line] * logged
    refused = process.Outcome(lines=("x", *messages)).invalid_reason
    assert refused == (line if invalid else None)


def test_values_of_a_unit_that_fell_back_are_not_the_unit_s(
    source, bundle, monkeypatch
):
    *_, line = [line for line in MESSAGES if MESSAGES[line][1]]
    outcome = process.Outcome({"verdict": "GREEN"}, lines=(line,))
    monkeypatch.setattr(process, "call", lambda *_, **__: outcome)
    reference = golden.make_golden(source, IDS)
    rows = units.validate_units(bundle, reference, runtime="stand-in")
    assert set(rows["verdict"]) == {"RED"} and set(rows["reason"]) == {line}
    run = Runner("stand-in", "CPU_ONLY").run(bundle.root, None, [])
    assert run.values == [] and line in run.failure
    assert "--compute-units" in run.failure


@pytest.mark.matrix(1, wide=1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has")
@pytest.mark.parametrize("family", ["llama", "zaya"])
def test_a_loaded_shard_holds_its_weights_once(family, exports, tmp_path):
    """The file is mapped while it is read; what is left is what the calls take."""
    bundle = exports.bundle(family, compress="int8-tensor")
    # other tests may have the bundle itself open
    root = shutil.copytree(bundle.root, tmp_path / "bundle")
    decoder = Decoder(root, "stand-in")
    decoder.prefill([5])
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(root) in line and ".bin" in line]
