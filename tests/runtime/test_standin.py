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
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import coreml
from workbench.sweep.grid import Cell

pytestmark = pytest.mark.shim

IDS = [5, 17, 42, 3, 88, 9]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.random(
        tmp_path_factory.mktemp("standin") / "source",
        "llama",
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )


def export(source, name: str, **options):
    from workbench.export import export

    options = {"max_seq_len": 16, "tokens": "1-2"} | options
    return export(source, source.parent / name, **options)


@pytest.fixture(scope="module")
def bundle(source):
    return export(source, "bundle")


@pytest.fixture(scope="module")
def of_two(source):
    return export(source, "of_two", batch=2)


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


@pytest.fixture
def illegal(monkeypatch) -> list:
    """What reaches the native layer and is refused there, as it comes."""
    refused, taken = [], shim._taken

    def count(value):
        try:
            return taken(value)
        except RuntimeError:
            refused.append(value)
            raise

    monkeypatch.setattr(shim, "_taken", count)
    return refused


# --- which runtime --------------------------------------------------------------------------------


def test_the_variable_says_what_auto_means(monkeypatch, bundle):
    assert runtime.resolve("stand-in-kill") == "stand-in-kill"
    for name, meant in (("portable", "portable"), ("stand-in-flush", "stand-in-flush")):
        monkeypatch.setenv("WORKBENCH_RUNTIME", name)
        assert runtime.resolve() == runtime.resolve("auto") == meant
    assert Decoder(bundle).runtime == "stand-in-flush"
    assert Decoder(bundle, "portable").runtime == "portable"
    monkeypatch.setenv("WORKBENCH_RUNTIME", "auto")
    assert runtime.resolve() == "portable"


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
    for use in (
        lambda: runtime.resolve("stand-in"),
        lambda: Decoder(bundle, "stand-in"),
    ):
        with pytest.raises(InputError, match="macOS, which has Core ML itself"):
            use()


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


def verdicts(result: dict) -> dict:
    """The verdicts of a command's JSON, of all its gates or cells."""
    keys = ("batch", "cache", "context", "format")
    return {"": result.get("verdict")} | {
        row["name"] if "name" in row else tuple(row[key] for key in keys): row[
            "verdict"
        ]
        for row in (*result.get("gates", ()), *result.get("cells", ()))
    }


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize("name", ["own", "validate", "generate", "plan"])
def test_commands_end_as_on_portable_without_an_illegal_call(
    name, source, bundle, of_two, command, illegal, capfd
):
    path = golden.make_golden(Checkpoint(source), IDS).save(
        source.parent / "golden.safetensors"
    )
    options = {
        "own": [],
        "validate": ["--golden", path],
        "generate": ["--prompt-ids", "5,17,42", "--max-new", 4],
        "plan": [],
    }[name]
    verb = "validate" if name == "own" else name
    results = {}
    for where in ("stand-in", "portable"):
        code, out, err = command(
            verb, bundle.root, *options, "--runtime", where, "--json"
        )
        assert code == 0, err
        results[where] = json.loads(out)
    assert illegal == []
    ours, portable = results["stand-in"], results["portable"]
    # portable is what devices are compared with
    device = {"device": "GREEN"} if name == "validate" else {}
    assert verdicts(ours) == verdicts(portable) | device
    if name == "generate":
        assert ours["tokens"] == portable["tokens"] and ours["runtime"] == "stand-in"
    if name == "plan":
        assert ours["source"] == "predicted" and "MLComputePlan" in ours["known"][0]
        assert ours["shards"] == portable["shards"]


def test_native_time_is_part_of_a_call_and_null_on_portable(bundle):
    decoders = {name: Decoder(bundle, name) for name in ("stand-in", "portable")}
    for decoder in decoders.values():
        assert decoder.layers[0].last_native_ms is None
        decoder.prefill([5])
    (portable,) = decoders["portable"].layers
    assert portable.last_native_ms is None
    (model,) = decoders["stand-in"].layers
    assert 0 < model.last_native_ms <= model.loading_ms["first_predict"]


# --- faults: rows ---------------------------------------------------------------------------------

DIED, PLANLESS = {"status": "failed"}, {"status": "ok", "placement_source": None}
ROWS = {  # fault → columns, and words of the reason, of the config's reason for no placement
    "": (PLANLESS, "", "MLComputePlan"),
    "load14-state": (DIED, "error code: -14", ""),
    "load14-range": (DIED, "error code: -14", ""),
    "load14-ne": (DIED, "error code: -14", ""),
    "fallback": (
        {"status": "invalid", "placement_source": "simulated", "ane_ops_share": 0.0},
        "not on the Neural Engine: the plan puts 0 of ",
        "",
    ),
    "nan-hidden": (PLANLESS, "", "MLComputePlan"),
    "flush": (PLANLESS, "", "MLComputePlan"),
    "kill": (DIED, "killed by SIGKILL", ""),
    "chatter": (PLANLESS, "", "MLComputePlan"),
    "plan-raises": (PLANLESS, "", "Failed to load the compute plan"),
    "plan-none": (PLANLESS, "", "found None"),
    "plan-aborts": (PLANLESS, "", "killed by SIGABRT"),
    "batch-one": (DIED, "the batch of 2 collapsed to 1", ""),
    "mac": (  # RangeDim is planned on the CPU
        {"status": "invalid", "placement_source": "simulated", "ane_ops_share": 0.0},
        "not on the Neural Engine: the plan puts 0 of ",
        "",
    ),
    "plan-ane": (
        {"status": "ok", "placement_source": "simulated", "ane_ops_share": 1.0},
        "",
        "",
    ),
}


def name_of(fault: str) -> str:
    return f"stand-in-{fault}" if fault else "stand-in"


# for the others, starting a process is all that it adds
IN_PROCESSES = ("kill", "plan-aborts")


@contextmanager
def fewer_processes(python: str):
    """Within, calls for other faults than `IN_PROCESSES` happen here, and theirs in children
    of `python`."""
    call = process.call

    def call_here(function, first, *more, **options) -> process.Outcome:
        """Of a cell, which `measure` takes first, or of a plan."""
        name = first.run["runtime"] if isinstance(first, Cell) else more[1]
        alone = name in map(name_of, IN_PROCESSES)
        start = call if alone else in_process.call
        return start(function, first, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "call", call_here)
        patch.setattr(sys, "executable", python)
        yield


@pytest.fixture(scope="module")
def swept(source, forks, tmp_path_factory):
    """(log folder, counts, counts of the second time) of one cell for each fault."""
    folder, counts = tmp_path_factory.mktemp("faults"), []
    grids = [
        {
            "export": {"max_seq_len": [16], "tokens": ["1-2"], "batch": [batch]},
            "run": {"runtime": names},
        }
        for batch, names in (
            (1, [name_of(fault) for fault in ROWS if fault != "batch-one"]),
            (2, ["stand-in-batch-one"]),
        )
    ]
    for grid in grids[::-1] + grids[:1]:
        grid["run"] |= {"n_gen": 2, "repetitions": 1}
        made = sweep.make_grid({"checkpoint": str(source), "validate_ids": IDS} | grid)
        if counts[1:]:  # what failed would be measured again
            made.run.runtime = [
                name_of(fault) for fault in ("fallback", "plan-none", "load14-ne")
            ]
        with fewer_processes(forks):
            counts.append(
                sweep.sweep(
                    made,
                    root=folder / "log",
                    bundles=folder / "bundles",
                    progress=False,
                )
            )
    return folder / "log", counts


def test_every_fault_has_a_row_here():
    assert set(faulty_stand_ins.FAULTS) == set(ROWS) - {""}


@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_ends_in_its_row(swept, fault):
    columns, reason, planless = ROWS[fault]
    rows = log.load("runs", root=swept[0])
    configs = [json.loads(text) for text in rows["config"]]
    at = next(i for i, c in enumerate(configs) if c["run"]["runtime"] == name_of(fault))
    row, config = rows.iloc[at].to_dict(), configs[at]
    row |= {
        name: None for name, value in row.items() if value is None or value != value
    }
    assert row["runtime"] == name_of(fault) and row["placement_source"] != "measured"
    assert {name: row[name] for name in columns} == columns
    assert (reason in row["reason"]) if reason else row["reason"] is None
    assert planless in config.get("placement", "")
    samples = log.load("samples", root=swept[0], where={"run_id": [row["run_id"]]})
    assert samples.empty == (row["status"] == "failed")
    if row["status"] != "failed":
        assert row["verdict"] == "GREEN"


def test_invalid_cells_are_done_and_failed_ones_are_not(swept):
    _, first, again = swept[1]
    assert (first["invalid"], first["failed"]) == (2, 4) and first["done"] == first[
        "cells"
    ] - 4
    assert (again["resumed"], again["done"], again["failed"], again["invalid"]) == (
        2,
        0,
        1,
        0,
    )


def test_the_units_of_a_bundle_that_one_of_them_rejects(source, bundle, monkeypatch):
    reference = golden.make_golden(source, IDS)
    monkeypatch.setattr(process, "call", in_process.call)
    found = units.validate_units(
        bundle, reference, runtime="stand-in-load14-ne", Ts=[1]
    ).set_index("unit")
    assert found.loc["CPU_AND_NE", "verdict"] == "DIED"
    assert "error code: -14" in found.loc["CPU_AND_NE", "reason"]
    assert (found.drop("CPU_AND_NE")["verdict"] == "GREEN").all()
    assert set(found["runtime"]) == {"portable", "stand-in-load14-ne"}
    assert units.units_verdict(found.reset_index()) == "RED"


# --- faults: messages and exit codes --------------------------------------------------------------


@pytest.mark.matrix(3, wide=6)
@pytest.mark.parametrize("fault", ["load14-state", "load14-range", "load14-ne"])
@pytest.mark.parametrize("name", ["own", "generate", "validate"])
def test_a_shard_that_does_not_load_is_one_message_and_exit_code_2(
    fault, name, bundle, source, command
):
    options = {
        "generate": ["--prompt-ids", "5"],
        "validate": ["--checkpoint", source],
    }.get(name, [])
    name = "validate" if name == "own" else name
    code, out, err = command(name, bundle.root, *options, "--runtime", name_of(fault))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert (
        err.startswith("workbench: shard layers_00_00: found ")
        and "error code: -14." in err
    )


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("name", ["own", "generate", "validate"])
def test_other_compute_units_are_the_next_step_that_the_message_names(
    name, bundle, source, command
):
    options = {
        "generate": ["--prompt-ids", "5", "--max-new", 2],
        "validate": ["--checkpoint", source, "--prompt-ids", "5,17"],
    }.get(name, [])
    arguments = [
        "validate" if name == "own" else name,
        bundle.root,
        *options,
        "--runtime",
        "stand-in-load14-ne",
    ]
    code, _, err = command(*arguments)
    assert code == 2 and "try other --compute-units" in err
    assert command(*arguments, "--compute-units", "CPU_ONLY")[0] == 0
    code, _, err = command(*arguments, "--compute-units", "ANE")
    assert code == 2 and "compute units: found 'ANE'" in err


def test_a_process_that_is_killed_says_so_by_its_exit_code(bundle, source, forks):
    commands = [
        ["generate", bundle.root, "--prompt-ids", "5", "--max-new", 2],
        ["validate", bundle.root, "--checkpoint", source, "--prompt-ids", "5,17"],
        ["validate", bundle.root],
    ]
    for arguments in commands:
        command = [forks, "-m", "workbench.cli", *map(str, arguments)]
        done = subprocess.run([*command, "--runtime", "stand-in-kill"])
        assert done.returncode == -9


def test_messages_of_the_compiler_stay_out_of_the_output(source, command):
    fresh = export(source, "fresh")
    arguments = ["generate", fresh.root, "--prompt-ids", "5", "--max-new", 2]
    code, out, err = command(*arguments, "--runtime", "stand-in-chatter", "--json")
    assert code == 0 and len(json.loads(out)["tokens"]) == 2
    assert err.count("coremlcompiler: note") == 2  # two shards


def test_a_batch_that_collapses_is_refused_by_name(of_two, command):
    code, out, err = command("validate", of_two.root, "--runtime", "stand-in-batch-one")
    assert (code, out) == (2, "")
    (message,) = [line for line in err.splitlines() if line.startswith("workbench: ")]
    assert "output 'hidden' of shard layers_00_00" in message
    assert "the batch of 2 collapsed to 1; needs [2, 64, 1, 1]" in message


@pytest.mark.parametrize("fault", ["nan-hidden", "flush", ""])
def test_what_a_device_does_to_nan_and_subnormals_is_no_verdict(fault, bundle, command):
    code, out, _ = command(
        "validate", bundle.root, "--runtime", name_of(fault), "--json"
    )
    checks = {g["name"]: g["verdict"] for g in json.loads(out)["gates"]}
    assert (code, checks["stale_rows"], checks["write_address"]) == (
        0,
        "GREEN",
        "GREEN",
    )


@pytest.mark.parametrize(
    ("fault", "source_", "words"),
    [
        ("plan-raises", "predicted", "Failed to load the compute plan."),
        ("plan-none", "predicted", "found None"),
        ("plan-aborts", "predicted", "killed by SIGABRT"),
        ("fallback", "simulated", ""),
        ("plan-ane", "simulated", ""),
        ("mac", "simulated", ""),
    ],
)
def test_residency_without_a_plan_predicts_and_says_why(
    fault, source_, words, bundle, command, forks
):
    with fewer_processes(forks):
        code, out, _ = command(
            "plan", bundle.root, "--runtime", name_of(fault), "--json"
        )
    found = json.loads(out)
    assert (code, found["source"]) == (0, source_)
    assert any(words in fact and "no plan" in fact for fact in found["known"]) == bool(
        words
    )
    if source_ == "simulated":
        # RangeDim, on a simulated Mac
        share = {"fallback": 0, "plan-ane": 1, "mac": 0}[fault]
        assert all(s["ane"] == share * s["ops"] > -1 for s in found["shards"])


def test_compute_units_that_are_none_are_refused(bundle, command):
    code, _, err = command(
        "plan", bundle.root, "--runtime", "stand-in-fallback", "--compute-units", "ANE"
    )
    assert code == 2 and "compute units: found 'ANE'" in err


# --- placement and messages -----------------------------------------------------------------------


def test_a_plan_that_names_no_unit_makes_no_run_invalid():
    silent = placement.count_units("s", [coreml.Placed("conv", "y", None, (), None)])
    row = placement.columns([silent], "CPU_AND_NE")
    assert "status" not in row and "ane_ops_share" not in row


@pytest.mark.parametrize(
    ("line", "logged", "invalid"),
    [
        ("E5RT: ANECCompile() FAILED (11)", True, True),
        ("ANE inference operation failed", True, True),
        (
            "E5RT encountered an STL exception. msg = MILCompilerForANE error",
            True,
            True,
        ),
        ("E5RT: Error plan build: -14", True, True),
        ("MPSGraph assertion failed", True, True),
        ("Must re-compile the E5 bundle", True, False),
        ("[Espresso::handle_ex_plan] loading", True, False),
        ("a warning of Python about a plane", False, False),
    ],
)
def test_messages_of_core_ml_are_logged_and_some_invalidate(line, logged, invalid):
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
