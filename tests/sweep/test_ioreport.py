"""Counters of the Neural Engine, read from a library that is played here: its figures, and a reason
for each that is not there."""

import signal
import sys
import types

import pytest

from workbench.sweep import ioreport

INT64_MIN = -(2**63)


class Library(types.SimpleNamespace):
    """IOReport and Core Foundation over Python objects: a handle is the index of an object.

    Args:
        groups: group → its channels, each {name, unit, value} or {subgroup, name, states}.
    """

    def __init__(self, groups: dict):
        self.objects, self.groups = [None], groups

        def function(call):
            def typed(*arguments):  # ctypes takes as many as are declared
                assert len(arguments) == len(typed.argtypes)
                return call(*arguments)

            return typed

        names = [
            name for name in vars(type(self)) if name.startswith(("IOReport", "CF"))
        ]
        super().__init__(**{name: function(getattr(self, name)) for name in names})

    def handle(self, value) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def CFStringCreateWithCString(self, allocator, text, encoding):
        assert encoding == 0x08000100
        return self.handle(text.decode())

    def CFStringGetCString(self, string, buffer, size, encoding):
        buffer.value = self.objects[string].encode()
        return True

    def CFDictionaryGetValue(self, dictionary, key):
        value = self.objects[dictionary].get(self.objects[key])
        return value and self.handle(value)

    def CFArrayGetCount(self, array):
        return len(self.objects[array])

    def CFArrayGetValueAtIndex(self, array, index):
        return self.handle(self.objects[array][index])

    def IOReportCopyChannelsInGroup(self, group, subgroup, a, b, c):
        channels = self.groups.get(self.objects[group])
        return self.handle(channels) if channels is not None else None

    def IOReportCreateSubscription(self, allocator, channels, subscribed, a, b):
        return self.handle("subscription")

    def IOReportCreateSamples(self, subscription, channels, a):
        assert self.objects[subscription] == "subscription"
        return channels

    def IOReportCreateSamplesDelta(self, before, after, a):
        return self.handle({"IOReportChannels": self.objects[after]})

    def IOReportChannelGetSubGroup(self, channel):
        return self.handle(self.objects[channel].get("subgroup", ""))

    def IOReportChannelGetChannelName(self, channel):
        return self.handle(self.objects[channel]["name"])

    def IOReportChannelGetUnitLabel(self, channel):
        return self.handle(self.objects[channel].get("unit", ""))

    def IOReportSimpleGetIntegerValue(self, channel, a):
        return self.objects[channel].get("value", INT64_MIN)

    def IOReportStateGetCount(self, channel):
        return len(self.objects[channel].get("states", {}))

    def IOReportStateGetNameForIndex(self, channel, index):
        return self.handle(list(self.objects[channel]["states"])[index])

    def IOReportStateGetResidency(self, channel, index):
        return list(self.objects[channel]["states"].values())[index]


CPU = {"name": "CPU Energy", "unit": "mJ      ", "value": 9000}
STATUS = {
    "subgroup": "IOP State",
    "name": "status",
    "states": {"Idle": 75, "Running": 25},
}
INTERRUPTS = {"subgroup": "Interrupts", "name": "status", "states": {"Running": 1}}


def reading(*energy, engine=(INTERRUPTS, STATUS), seconds=2.0) -> dict:
    """What a measurement of two seconds reads."""
    library = Library({ioreport.ENERGY: [CPU, *energy], ioreport.ENGINE: list(engine)})
    counters = ioreport.Counters(library, library)
    return ioreport.reading(counters, counters.samples(), counters.samples(), seconds)


@pytest.mark.parametrize(
    ("channels", "joules"),
    [
        ([{"name": "ANE", "unit": "mJ", "value": 1500}], 1.5),
        ([{"name": "ANE0", "unit": "uJ", "value": 250_000}], 0.25),
        (
            [{"name": f"ANE{die}_0", "unit": "nJ ", "value": 10**9} for die in (0, 1)],
            2.0,
        ),
    ],
)
def test_energy_is_that_of_the_engine_s_channels_in_their_units(channels, joules):
    result = reading(*channels)
    assert result == {
        "ane_joules": pytest.approx(joules),
        "ane_active_ms": 500,
        "reason": None,
    }


@pytest.mark.parametrize(
    ("channels", "why"),
    [
        ([], "no energy channel"),
        ([{"name": "ANE", "unit": "mJ", "value": 0}], "stayed at zero"),
        ([{"name": "ANE", "unit": "mJ", "value": INT64_MIN}], "went back"),
        ([{"name": "ANE", "unit": "events", "value": 7}], "unit 'events'"),
    ],
)
def test_energy_that_is_missing_or_zero_is_null_with_a_reason(channels, why):
    result = reading(*channels)
    assert result["ane_joules"] is None and why in result["reason"]
    assert result["ane_active_ms"] == 500


@pytest.mark.parametrize(
    "engine",
    [
        (),
        (INTERRUPTS,),
        (STATUS | {"states": {"Idle": 0, "Running": 0}},),
        (STATUS | {"states": {"Idle": 5}},),
        (STATUS | {"states": {"Idle": INT64_MIN, "Running": 3}},),
    ],
)
def test_active_time_that_nothing_says_is_null_with_a_reason(engine):
    result = reading({"name": "ANE", "unit": "mJ", "value": 10}, engine=engine)
    assert (result["ane_active_ms"], result["ane_joules"]) == (None, 0.01)
    assert "controller" in result["reason"]


def test_a_library_without_a_function_or_the_channels_says_which():
    library = Library({ioreport.ENERGY: [], ioreport.ENGINE: []})
    library.IOReportCreateSamples = None
    with pytest.raises(ioreport.Missing, match="IOReportCreateSamples"):
        ioreport.Counters(library, library)
    library = Library({})
    with pytest.raises(ioreport.Missing, match="Energy Model"):
        ioreport.Counters(library, library)


# --- the child ------------------------------------------------------------------------------------

REPLY = 'print("ready", flush=True); sys.stdin.read(); print(\'{"ane_joules": 2.5, "reason": null}\')'


@pytest.mark.parametrize(
    ("body", "joules", "why"),
    [
        (REPLY, 2.5, None),
        ("os.kill(os.getpid(), signal.SIGSEGV)", None, f"code {-signal.SIGSEGV}"),
        ('print("ready", flush=True); os.abort()', None, f"code {-signal.SIGABRT}"),
        ("time.sleep(60)", None, f"code {-signal.SIGKILL}"),
        ('print("ready", flush=True); time.sleep(60)', None, f"code {-signal.SIGKILL}"),
        ('print("ready\\n{"); sys.exit(4)', None, "code 4"),
    ],
)
def test_a_child_that_dies_hangs_or_babbles_costs_the_figure_alone(
    monkeypatch, body, joules, why
):
    monkeypatch.setattr(ioreport.sys, "platform", "darwin")
    monkeypatch.setattr(ioreport, "TIMEOUT_S", 1)
    command = [sys.executable, "-c", f"import os, signal, sys, time\n{body}"]
    with ioreport.metered(command) as result:
        pass
    assert result["ane_joules"] == joules
    assert result["reason"] is None if why is None else why in result["reason"]


def test_the_child_itself_says_what_this_system_lacks(monkeypatch):
    monkeypatch.setattr(ioreport.sys, "platform", "darwin")
    with ioreport.metered() as result:
        pass
    assert result["ane_joules"] is None and "libIOReport.dylib" in result["reason"]


def test_off_a_mac_no_process_is_started(monkeypatch):
    monkeypatch.setattr(ioreport.subprocess, "Popen", None)
    with ioreport.metered() as result:
        pass
    assert result == {
        "ane_joules": None,
        "ane_active_ms": None,
        "reason": result["reason"],
    }
    assert "IOReport" in result["reason"]
