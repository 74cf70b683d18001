"""The stand-in for Core ML: its verdicts are portable's without one illegal call, and each fault
that it plays ends in the row, the message and the exit code that a Mac's would."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager

import faulty_stand_ins
import in_process
import pytest
import tiny

from miltorch import shim
from miltorch.quiet import coremltools
from workbench import Decoder, log, process, runtime, sweep
from workbench.ane import placement
from workbench.check import golden, units
from workbench.cli.app import main
from workbench.errors import InputError
from workbench.export import export
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import coreml
from workbench.sweep.grid import Cell

pytestmark = pytest.mark.shim

IDS = [5, 17, 42, 3, 88, 9]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder, heads = tmp_path_factory.mktemp("standin"), "num_attention_heads"
    dims = {heads: 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return tiny.random(folder / "source", "llama", tie_word_embeddings=False, **dims)


def exported(source, name: str, batch: int = 1):
    options = {"max_seq_len": 16, "tokens": "1-2", "batch": batch}
    return export(source, source.parent / name, **options)


@pytest.fixture(scope="module")
def bundle(source):
    return exported(source, "bundle")


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs `workbench …` as its entry point does: (exit code, standard output, standard error)."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["workbench", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return (code, *capfd.readouterr())

    return run


# --- which runtime --------------------------------------------------------------------------------


def test_the_variable_says_what_auto_means(monkeypatch, bundle):
    assert runtime.resolve("stand-in-kill") == "stand-in-kill"
    for name, meant in (
        ("portable", "portable"),
        ("auto", "portable"),
        ("stand-in-flush", "stand-in-flush"),
    ):
        monkeypatch.setenv("WORKBENCH_RUNTIME", name)
        assert runtime.resolve() == runtime.resolve("auto") == meant
    assert Decoder(bundle).runtime == "stand-in-flush"
    assert Decoder(bundle, "portable").runtime == "portable"


@pytest.mark.parametrize("name", ["stand-in-no", "portable-kill", "core", "stand-in-"])
def test_names_that_are_no_runtime_are_refused(name, monkeypatch, bundle):
    monkeypatch.setenv("WORKBENCH_RUNTIME", name)
    for use in (
        lambda: runtime.resolve(name),
        runtime.resolve,
        lambda: Decoder(bundle, name),
    ):
        with pytest.raises(InputError, match="one of"):
            use()
    with pytest.raises(InputError, match="runtime"):
        sweep.make_grid({"checkpoint": "x", "run": {"runtime": [name]}})


def test_on_macos_the_stand_in_is_refused_with_one_message(monkeypatch, bundle):
    monkeypatch.setattr(runtime.platform, "system", lambda: "Darwin")
    for use in runtime.resolve, lambda name: Decoder(bundle, name):
        with pytest.raises(InputError, match="macOS, which has Core ML itself"):
            use("stand-in")


def test_the_stand_in_leaves_coremltools_as_it_was(bundle):
    Decoder(bundle, "stand-in-plan-none")
    model = coremltools().models.model
    assert model._MLModelProxy is None
    with pytest.raises(InputError, match="macOS 15"):
        runtime.resolve("coreml")
    shim.install()
    Decoder(bundle, "stand-in-plan-none")
    assert model._MLModelProxy is shim.Proxy and runtime.resolve("coreml") == "coreml"
    shim.uninstall()


# --- no fault: portable's verdicts, and no illegal call -------------------------------------------


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize("name", ["own", "validate", "generate", "plan"])
def test_commands_end_as_on_portable_without_an_illegal_call(
    name, source, bundle, command, monkeypatch
):
    refused, taken, reference = [], shim._taken, source.parent / "g.safetensors"

    def watched(value):
        try:
            return taken(value)
        except RuntimeError:
            refused.append(value)
            raise

    monkeypatch.setattr(shim, "_taken", watched)
    verb, *options = {
        "own": ["validate"],
        "validate": ["validate", "--golden", reference],
        "generate": ["generate", "--prompt-ids", "5,17,42", "--max-new", 4],
        "plan": ["plan"],
    }[name]
    golden.make_golden(Checkpoint(source), IDS).save(reference)
    results = []
    for where in ("stand-in", "portable"):
        how = "--runtime", where, "--json"
        code, out, err = command(verb, bundle.root, *options, *how)
        assert code == 0, err
        results.append(json.loads(out))
    assert refused == []
    ours, portable = results
    if verb == "validate":
        verdicts = (
            {g["name"]: g["verdict"] for g in each["gates"]} for each in results
        )
        # portable is what devices are compared with
        device = {"device": "GREEN"} if options else {}
        own, others = verdicts
        assert own == others | device and ours["verdict"] == portable["verdict"]
    if name == "generate":
        assert ours["tokens"] == portable["tokens"] and ours["runtime"] == "stand-in"
    if name == "plan":
        assert ours["source"] == "predicted" and "MLComputePlan" in ours["known"][0]
        assert ours["shards"] == portable["shards"]


def test_native_time_is_part_of_a_call_and_null_on_portable(bundle):
    found = []
    for name in ("portable", "stand-in"):
        decoder = Decoder(bundle, name)
        (model,) = decoder.layers
        assert model.last_native_ms is None
        decoder.prefill([5])
        found.append(model.last_native_ms)
    assert found[0] is None
    assert 0 < found[1] <= model.loading_ms["first_predict"]


# --- faults: rows ---------------------------------------------------------------------------------

DIED, PLANLESS = {"status": "failed"}, {"status": "ok", "placement_source": None}
ON_CPU = {"status": "invalid", "placement_source": "simulated", "ane_ops_share": 0.0}
ON_ENGINE = {"status": "ok", "placement_source": "simulated", "ane_ops_share": 1.0}
NOWHERE = "not on the Neural Engine: the plan puts 0 of "
ROWS = {  # fault → columns, and words of the reason, of the config's reason for no placement
    "": (PLANLESS, "", "MLComputePlan"),
    "load14-state": (DIED, "error code: -14", ""),
    "load14-range": (DIED, "error code: -14", ""),
    "load14-ne": (DIED, "error code: -14", ""),
    "fallback": (ON_CPU, NOWHERE, ""),
    "nan-hidden": (PLANLESS, "", "MLComputePlan"),
    "flush": (PLANLESS, "", "MLComputePlan"),
    "kill": (DIED, "killed by SIGKILL", ""),
    "chatter": (PLANLESS, "", "MLComputePlan"),
    "plan-raises": (PLANLESS, "", "Failed to load the compute plan"),
    "plan-none": (PLANLESS, "", "found None"),
    "plan-aborts": (PLANLESS, "", "killed by SIGABRT"),
    "batch-one": (DIED, "the batch of 2 collapsed to 1", ""),
    "mac": (ON_CPU, NOWHERE, ""),  # RangeDim is planned on the CPU
    "plan-ane": (ON_ENGINE, "", ""),
}


def name_of(fault: str) -> str:
    return f"stand-in-{fault}" if fault else "stand-in"


@contextmanager
def fewer_processes(python: str):
    """Within, the faults that end a process happen in children of `python`, the others here."""
    call = process.call

    def call_here(function, first, *more, **options) -> process.Outcome:
        """Of a cell, which `measure` takes first, or of a plan."""
        name = first.run["runtime"] if isinstance(first, Cell) else more[1]
        ends = name in map(name_of, ("kill", "plan-aborts"))
        start = call if ends else in_process.call
        return start(function, first, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "call", call_here)
        patch.setattr(sys, "executable", python)
        yield


@pytest.fixture(scope="module")
def swept(source, forks, tmp_path_factory):
    """(log folder, counts, counts of the second time) of one cell for each fault."""
    folder, counts = tmp_path_factory.mktemp("faults"), []
    alone = ("batch-one",)
    again = "fallback", "plan-none", "load14-ne"  # what failed is measured again
    for batch, faults in (2, alone), (1, ROWS.keys() - alone), (1, again):
        grid = {"checkpoint": str(source), "validate_ids": IDS}
        sizes = {"max_seq_len": [16], "tokens": ["1-2"], "batch": [batch]}
        run = {"runtime": sorted(map(name_of, faults)), "n_gen": 2, "repetitions": 1}
        made = sweep.make_grid(grid | {"export": sizes, "run": run})
        where = {"root": folder / "log", "bundles": folder / "bundles"}
        with fewer_processes(forks):
            counts.append(sweep.sweep(made, progress=False, **where))
    return folder / "log", counts


@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_ends_in_its_row(swept, fault):
    columns, reason, planless = ROWS[fault]
    rows = log.load("runs", root=swept[0])
    configs = [json.loads(text) for text in rows["config"]]
    at = next(i for i, c in enumerate(configs) if c["run"]["runtime"] == name_of(fault))
    row = {n: None if v != v else v for n, v in rows.iloc[at].to_dict().items()}
    assert row["runtime"] == name_of(fault) and row["placement_source"] != "measured"
    assert {name: row[name] for name in columns} == columns
    assert (reason in row["reason"]) if reason else row["reason"] is None
    assert planless in configs[at].get("placement", "")
    samples = log.load("samples", root=swept[0], where={"run_id": [row["run_id"]]})
    assert samples.empty == (row["status"] == "failed")
    assert row["status"] == "failed" or row["verdict"] == "GREEN"


def test_invalid_cells_are_done_and_failed_ones_are_not(swept):
    assert set(faulty_stand_ins.FAULTS) == set(ROWS) - {""}
    _, first, again = swept[1]
    assert (first["invalid"], first["failed"]) == (2, 4)
    assert first["done"] == first["cells"] - 4
    names = "resumed", "done", "failed", "invalid"
    assert [again[name] for name in names] == [2, 0, 1, 0]


def test_the_units_of_a_bundle_that_one_of_them_rejects(source, bundle, monkeypatch):
    reference, name = golden.make_golden(source, IDS), "stand-in-load14-ne"
    monkeypatch.setattr(process, "call", in_process.call)
    found = units.validate_units(bundle, reference, runtime=name, Ts=[1])
    assert units.units_verdict(found) == "RED"
    assert set(found["runtime"]) == {"portable", name}
    found = found.set_index("unit")
    assert found.loc["CPU_AND_NE", "verdict"] == "DIED"
    assert "error code: -14" in found.loc["CPU_AND_NE", "reason"]
    assert (found.drop("CPU_AND_NE")["verdict"] == "GREEN").all()


# --- faults: messages and exit codes --------------------------------------------------------------

COMMANDS = {
    "own": ["validate"],
    "validate": ["validate", "--prompt-ids", "5,17", "--checkpoint"],
    "generate": ["generate", "--prompt-ids", "5", "--max-new", 2],
}


def of(name: str, bundle, source) -> list:
    """The arguments of a command."""
    verb, *options = COMMANDS[name]
    if name == "validate":
        options.append(source)
    return [verb, bundle.root, *options, "--runtime"]


@pytest.mark.matrix(3, wide=6)
@pytest.mark.parametrize("fault", ["load14-state", "load14-range", "load14-ne"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_shard_that_does_not_load_is_one_message_and_exit_code_2(
    fault, name, bundle, source, command
):
    arguments = [*of(name, bundle, source), name_of(fault)]
    code, out, err = command(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("workbench: shard layers_00_00: found ")
    assert "error code: -14." in err and "try other --compute-units" in err
    if fault == "load14-ne":
        assert command(*arguments, "--compute-units", "CPU_ONLY")[0] == 0


@pytest.mark.parametrize("name", ["generate", "plan"])
def test_compute_units_that_are_none_are_refused(name, bundle, source, command):
    arguments = of("generate", bundle, source)
    if name == "plan":
        arguments = ["plan", bundle.root, "--runtime"]
    code, _, err = command(*arguments, "stand-in-fallback", "--compute-units", "ANE")
    assert code == 2 and "compute units: found 'ANE'" in err


def test_a_process_that_is_killed_says_so_by_its_exit_code(bundle, source, forks):
    for name in COMMANDS:
        arguments = map(str, [*of(name, bundle, source), "stand-in-kill"])
        done = subprocess.run([forks, "-m", "workbench.cli", *arguments])
        assert done.returncode == -9


def test_messages_of_the_compiler_stay_out_of_the_output(source, command):
    arguments = of("generate", exported(source, "fresh"), source)
    code, out, err = command(*arguments, "stand-in-chatter", "--json")
    assert code == 0 and len(json.loads(out)["tokens"]) == 2
    assert err.count("coremlcompiler: note") == 2  # two shards


def test_a_batch_that_collapses_is_refused_by_name(source, command):
    of_two = exported(source, "of_two", 2)
    code, out, err = command(*of("own", of_two, source), "stand-in-batch-one")
    assert (code, out) == (2, "")
    (message,) = [line for line in err.splitlines() if line.startswith("workbench: ")]
    assert "output 'hidden' of shard layers_00_00" in message
    assert "the batch of 2 collapsed to 1; needs [2, 64, 1, 1]" in message


@pytest.mark.parametrize("fault", ["nan-hidden", "flush", ""])
def test_what_a_device_does_to_nan_and_subnormals_is_no_verdict(
    fault, bundle, source, command
):
    code, out, _ = command(*of("own", bundle, source), name_of(fault), "--json")
    gates = {gate["name"]: gate["verdict"] for gate in json.loads(out)["gates"]}
    assert (code, gates["stale_rows"], gates["write_address"]) == (0, "GREEN", "GREEN")


@pytest.mark.parametrize("fault", [f for f, row in ROWS.items() if row[0] is not DIED])
def test_residency_without_a_plan_predicts_and_says_why(fault, bundle, command, forks):
    columns, _, words = ROWS[fault]
    with fewer_processes(forks):
        how = "--runtime", name_of(fault), "--json"
        code, out, _ = command("plan", bundle.root, *how)
    found = json.loads(out)
    assert (code, found["source"]) == (0, "predicted" if words else "simulated")
    told = [fact for fact in found["known"] if words in fact and "no plan" in fact]
    assert bool(told) == bool(words)
    if not words:
        share = columns["ane_ops_share"]
        assert all(s["ane"] == share * s["ops"] > -1 for s in found["shards"])


# --- placement and messages -----------------------------------------------------------------------


def test_a_plan_that_names_no_unit_makes_no_run_invalid():
    silent = placement.count_units("s", [coreml.Placed("conv", "y", None, ())])
    row = placement.columns([silent], "CPU_AND_NE")
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
    found = process._messages(["x", line, line])
    assert found == [line] * logged
    assert process.invalidating(found) == [line] * invalid


@pytest.mark.matrix(1, wide=1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has")
@pytest.mark.parametrize("family", ["llama", "zaya"])
def test_a_loaded_shard_holds_its_weights_once(family, exports, tmp_path):
    """The file is mapped while it is read; what is left is what the calls take."""
    bundle = exports.bundle(exports.checkpoint(family), compress="int8-tensor")
    # other tests may have the bundle itself open
    own = shutil.copytree(bundle.root, tmp_path / "bundle")
    decoder = Decoder(own, "stand-in")
    decoder.prefill([5])
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(own) in line and ".bin" in line]
