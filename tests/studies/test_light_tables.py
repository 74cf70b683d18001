"""What notebook 36 says of a first light: each answer follows from its rows, and nothing but Core
ML settles anything."""

import pandas as pd
import pytest

from workbench.check import gates
from workbench.firstlight import rungs
from workbench.firstlight.ladder import ladder_cases
from workbench.studies import first_light
from workbench.studies.first_light import DECISIONS, Light

STATEFUL = [name for name, rung in rungs.ladder().items() if rung.kind == "layers"]
FLEXIBLE = [
    name for name, rung in rungs.ladder().items() if rung.options.get("t") == "range"
]


def rows() -> dict[tuple[str, str, str], dict]:
    """A ladder that goes well: every case of the stage, all of it on the Neural Engine."""
    good = {
        "status": "ok",
        "reason": None,
        "verdict": "GREEN",
        "as_shipped": True,
        "bytes": 1,
    }
    good |= {"ratio_t1": 0.5, "ratio_t": 0.5, "nan_comes_out": True, "finite": True}
    ms = {"CPU_ONLY": 4.0, "CPU_AND_NE": 2.0, "ALL": 2.0, "CPU_AND_GPU": 3.0}
    found = {}
    for case in ladder_cases():
        row = {"ops": 10, "ane": 9, "status": "ok"} if case["ask"] == "plan" else good
        if case["ask"] == "run":
            row = row | {"wall_ms": ms[case["units"]], "native_ms": ms[case["units"]]}
        found[case["rung"], case["units"], case["ask"]] = case | row
    return found


def light(ladder: dict, runtime: str = "coreml", **stage_rows: list[dict]) -> Light:
    timed = {
        "units": "CPU_AND_NE",
        "status": "ok",
        "ane_joules": 0.5,
        "energy_reason": None,
    }
    tables = {"ladder": list(ladder.values()), "timing": [timed]} | stage_rows
    frames = {stage: pd.DataFrame(found) for stage, found in tables.items()}
    ended = [
        (stage, "measured", None, 1.0, len(found)) for stage, found in tables.items()
    ]
    columns = ["stage", "status", "reason", "seconds", "rows"]
    table = pd.DataFrame(ended, columns=columns)
    return Light(table, frames, "Apple M9, Mac99,1", runtime, ":" in runtime, ["r"])


def reject(ladder: dict, *names: str) -> None:
    for name in names:
        row = ladder[name, "CPU_AND_NE", "run"]
        row |= {
            "status": "refused",
            "reason": "… with error code: -14.",
            "verdict": None,
        }


def off_engine(ladder: dict, *names: str) -> None:
    for name in names:
        ladder[name, "CPU_AND_NE", "plan"]["ane"] = 0
        row = ladder[name, "CPU_AND_NE", "run"]
        row["native_ms"] = ladder[name, "CPU_ONLY", "run"]["native_ms"]


def on(name: str, units: str = "CPU_AND_NE", **values):
    return lambda ladder: ladder[name, units, "run"].update(values)


PLANTED = {
    "CPU_ONLY fails too": on("state", "CPU_ONLY", verdict="RED"),
    "CPU_ONLY GREEN, -14 on the Neural Engine for range and fixed T": lambda ladder: (
        reject(ladder, *STATEFUL)
    ),
    "fixed T on the Neural Engine, range not": lambda ladder: off_engine(
        ladder, "range"
    ),
    "mask -14 and slice works, or the reverse": lambda ladder: reject(ladder, "slice"),
    "loads, 0 operations planned on the Neural Engine, as fast as CPU_ONLY": lambda ladder: (
        off_engine(ladder, "medium")
    ),
    "finite on the Neural Engine where portable is NaN": on(
        "state", nan_comes_out=False
    ),
    "GREEN at T = 1, RED at T > 1": on("functions", ratio_t=9.0, verdict="RED"),
}
OF_A_GOOD_ONE = "GREEN, planned on the Neural Engine, and energy used there"


def seen(ladder: dict, runtime: str = "coreml") -> dict[str, str]:
    table = first_light.decisions(light(ladder, runtime))
    return dict(zip(table["result"], table["seen"]))


def test_every_result_of_the_decision_table_is_planted_here():
    assert {result for result, *_ in DECISIONS} == {*PLANTED, OF_A_GOOD_ONE}


def test_where_all_goes_well_that_alone_is_seen():
    assert seen(rows()) == dict.fromkeys(PLANTED, "no") | {OF_A_GOOD_ONE: "yes"}


@pytest.mark.parametrize("result", PLANTED)
def test_a_result_is_seen_where_its_rows_say_it(result):
    ladder = rows()
    PLANTED[result](ladder)
    found = seen(ladder)
    assert found[result] == "yes"
    others = {name for name, word in found.items() if word == "yes"} - {
        result,
        OF_A_GOOD_ONE,
    }
    assert others <= {
        "loads, 0 operations planned on the Neural Engine, as fast as CPU_ONLY"
    }


def test_what_no_row_says_is_not_measured():
    plans_alone = {key: row for key, row in rows().items() if key[2] == "plan"}
    runs_alone = {key: row for key, row in rows().items() if key[2] == "run"}
    assert set(seen({}).values()) == {"not measured"}
    assert seen(plans_alone)["CPU_ONLY fails too"] == "not measured"
    assert seen(runs_alone)[OF_A_GOOD_ONE] == "not measured"
    assert seen(runs_alone)["fixed T on the Neural Engine, range not"] == "not measured"


@pytest.mark.parametrize(
    ("timed", "reason"),
    [
        ({"units": "CPU_AND_NE", "ane_joules": None}, "no energy channel"),
        ({"units": "CPU_ONLY", "ane_joules": 0.5}, "nothing was timed"),
        ({"units": "CPU_AND_NE", "status": "refused"}, "nothing was timed"),
    ],
)
def test_without_energy_a_good_one_is_not_measured_and_says_why(timed, reason):
    timed = {"status": "ok", "energy_reason": "no energy channel"} | timed
    table = first_light.decisions(light(rows(), timing=[timed])).set_index("result")
    row = table.loc[OF_A_GOOD_ONE]
    assert (row["seen"], row["where"]) == (
        "not measured",
        f"energy not measured: {reason}",
    )
    off = rows()
    off_engine(off, *rungs.ladder())
    row = (
        first_light.decisions(light(off, timing=[timed]))
        .set_index("result")
        .loc[OF_A_GOOD_ONE]
    )
    assert (row["seen"], row["where"]) == ("no", "")


def test_disputes_are_settled_by_core_ml_alone():
    ladder = rows()
    off_engine(ladder, *FLEXIBLE)
    reject(ladder, "width-30")
    answers = first_light.disputes(light(ladder)).set_index("rule")["answer"].to_dict()
    assert answers == {
        "C1": "settled: yes",
        "C2, K6": "settled: yes",
        "C3": "settled: no",
        "C4": "settled: yes",
        "K2": "settled: no",
    }
    reject(ladder, "state", "state-t4")
    answers = first_light.disputes(light(ladder)).set_index("rule")["answer"]
    assert answers["C2, K6"] == "settled: no"  # a slice runs there
    other = first_light.disputes(light(ladder, "stand-in:mac"))["answer"]
    assert other.str.startswith("open: not Core ML").all()
    assert first_light.disputes(light({}))["answer"].eq("open").all()


def test_the_line_through_one_two_and_four_layers_gives_the_price_of_a_call():
    timed = [
        {
            "units": "CPU_AND_NE",
            "T": 1,
            "layers": n,
            "status": "ok",
            "native_ms": 2.0 + 0.5 * n,
        }
        | {"wall_ms": 2.25 + 0.5 * n}
        for n in (1, 2, 4)
    ] + [
        {"units": "CPU_ONLY", "T": 1, "layers": 1, "status": "failed", "reason": "died"}
    ]
    found = light(rows(), timing=timed)
    line = first_light.dispatch(found)
    assert line["setting"].unique().tolist() == ["CPU_AND_NE, T = 1"]
    assert line["dispatch_ms"].iloc[0] == pytest.approx(2.0)
    assert line["layer_ms"].iloc[0] == pytest.approx(0.5)
    parts = first_light.host_and_device(found)
    assert parts[parts["part"] == "host"]["ms"].to_list() == pytest.approx([0.25] * 3)
    assert "2.00 ms a call and 0.50 ms a layer" in first_light.light_conclusion(found)


def test_gates_are_about_what_every_machine_must_compute():
    binding = [
        {"case": "state float16", "status": "ok", "accepted": False, "expected": False}
    ]
    golden = [{"units": "ALL", "status": "ok", "verdict": "GREEN", "reason": None}]
    found = first_light.light_gates(light(rows(), binding=binding, golden=golden))
    assert [g.name for g in found] == [
        "packages",
        "ladder_on_cpu",
        "binding",
        "golden ALL",
    ]
    assert gates.verdict(found) == "GREEN"
    ladder = rows()
    on("state", as_shipped=False)(ladder)
    on("range", "CPU_ONLY", status="refused", reason="no")(ladder)
    binding[0]["accepted"], golden[0]["verdict"] = True, "RED"
    found = first_light.light_gates(light(ladder, binding=binding, golden=golden))
    assert {g.verdict for g in found} == {"RED"}
    assert "state" in found[0].reason and "range" in found[1].reason


def test_a_rejected_rung_on_the_engine_alone_is_no_fault_of_the_export():
    ladder = rows()
    reject(ladder, "state")
    assert gates.verdict(first_light.light_gates(light(ladder))) == "GREEN"
    cells = first_light.Ladder(light(ladder)).cells().set_index(["rung", "column"])
    says = rungs.ladder()["state"].says
    assert cells.loc[(says, "CPU_AND_NE")].to_list() == ["−14", 0.0]
    assert cells.loc[(says, "CPU_ONLY")].to_list() == ["✓", 1.0]
    assert cells.loc[(says, "planned on the ANE")].to_list() == ["90%", 0.9]


def test_the_conclusion_of_a_simulated_mac_says_so():
    words = first_light.light_conclusion(light(rows(), "stand-in:mac"))
    assert "simulated Mac (Apple M9, Mac99,1)" in words
    assert "No figure here is Core ML's" in words and "settled:" not in words
