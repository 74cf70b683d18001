"""Energy and active time of the Neural Engine between two moments, from macOS' IOReport
counters.

IOReport is no public interface (mactop and macmon use it), so it is called in a child
process, and a value that is missing, zero or of another form is None with a reason. The
counters are of the whole machine. Energy is macOS' estimate; active time is that of the
engine's controller, not of its arithmetic. Nothing here has run on a Mac. Imports
nothing but Python's own modules."""

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

IOREPORT = "/usr/lib/libIOReport.dylib"
CORE_FOUNDATION = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
UTF8 = 0x08000100  # kCFStringEncodingUTF8
ENERGY, ENGINE = "Energy Model", "ANE"  # groups of channels
CONTROLLER = ("IOP State", "status", "Running")  # subgroup, channel, state
JOULES = {"J": 1.0, "mJ": 1e-3, "uJ": 1e-6, "nJ": 1e-9}
TIMEOUT_S = 10
_P = ctypes.c_void_p
_LONG = ctypes.c_int64
_INT = ctypes.c_int32
_U64 = ctypes.c_uint64
SIGNATURES = {  # function → type of its result, types of its arguments
    "IOReportCopyChannelsInGroup": (_P, [_P, _P, _U64, _U64, _U64]),
    "IOReportCreateSubscription": (_P, [_P, _P, ctypes.POINTER(_P), _U64, _P]),
    "IOReportCreateSamples": (_P, [_P, _P, _P]),
    "IOReportCreateSamplesDelta": (_P, [_P, _P, _P]),
    "IOReportChannelGetSubGroup": (_P, [_P]),
    "IOReportChannelGetChannelName": (_P, [_P]),
    "IOReportChannelGetUnitLabel": (_P, [_P]),
    "IOReportSimpleGetIntegerValue": (_LONG, [_P, _INT]),
    "IOReportStateGetCount": (_INT, [_P]),
    "IOReportStateGetNameForIndex": (_P, [_P, _INT]),
    "IOReportStateGetResidency": (_LONG, [_P, _INT]),
    "CFStringCreateWithCString": (_P, [_P, ctypes.c_char_p, ctypes.c_uint32]),
    "CFStringGetCString": (
        ctypes.c_bool,
        [_P, ctypes.c_char_p, _LONG, ctypes.c_uint32],
    ),
    "CFDictionaryGetValue": (_P, [_P, _P]),
    "CFArrayGetCount": (_LONG, [_P]),
    "CFArrayGetValueAtIndex": (_P, [_P, _LONG]),
}


class Missing(Exception):
    """A function, channel or value that the counters lack."""


@contextmanager
def metered(
    command: Sequence[str] = (sys.executable, "-P", __file__),
) -> Iterator[dict]:
    """Reads the counters before and after the block in a child process.

    After the block the yielded dict has ``ane_joules``, ``ane_active_ms`` (None: not
    measured) and ``reason`` (None: both are there)."""
    reading = {
        "ane_joules": None,
        "ane_active_ms": None,
        "reason": "no macOS, so no IOReport",
    }
    if sys.platform != "darwin":
        yield reading
        return
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    clock = threading.Timer(TIMEOUT_S, child.kill)
    clock.start()
    child.stdout.readline()  # the first samples are taken
    clock.cancel()
    try:
        yield reading
    finally:
        reply = ""
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            reply, _ = child.communicate(timeout=TIMEOUT_S)
        child.kill()
        child.communicate()
        reading["reason"] = (
            f"the process that reads IOReport ended with code {child.returncode}"
        )
        with suppress(ValueError):
            reading.update(json.loads(reply))


class Counters:
    """The channels of both groups, subscribed.

    Args:
        ioreport, core_foundation: the libraries, as ctypes loads them.

    Raises:
        Missing: a function or the channels of energy are not there.
    """

    def __init__(self, ioreport, core_foundation):
        self.functions = {}
        for name, (result, arguments) in SIGNATURES.items():
            if name.startswith("IOReport"):
                library = ioreport
            else:
                library = core_foundation
            function = getattr(library, name, None)
            if function is None:
                raise Missing(f"no function {name}")
            function.restype = result
            function.argtypes = arguments
            self.functions[name] = function
        self.groups = {group: self._subscription(group) for group in (ENERGY, ENGINE)}
        if self.groups[ENERGY] is None:
            raise Missing(f"no channels of the group {ENERGY}")

    def call(self, name: str, *arguments):
        return self.functions[name](*arguments)

    def _subscription(self, group: str) -> tuple | None:
        """(subscription, channels) of a group; None where there is none."""
        channels = self.call(
            "IOReportCopyChannelsInGroup", self._string(group), None, 0, 0, 0
        )
        subscribed = _P()
        subscription = channels and self.call(
            "IOReportCreateSubscription",
            None,
            channels,
            ctypes.byref(subscribed),
            0,
            None,
        )
        return (subscription, channels) if subscription else None

    def samples(self) -> dict:
        """Group → its sample now."""
        return {
            group: self.call("IOReportCreateSamples", *pair, None)
            for group, pair in self.groups.items()
            if pair
        }

    def channels(self, before: dict, after: dict, group: str) -> Iterator:
        """Each channel of a group, with what it counted between two `samples`."""
        if not (before.get(group) and after.get(group)):
            return
        delta = self.call(
            "IOReportCreateSamplesDelta", before[group], after[group], None
        )
        array = delta and self.call(
            "CFDictionaryGetValue", delta, self._string("IOReportChannels")
        )
        for index in range(self.call("CFArrayGetCount", array) if array else 0):
            yield self.call("CFArrayGetValueAtIndex", array, index)

    def joules(self, before: dict, after: dict) -> float:
        """Energy of the Neural Engine between two `samples`; a Mac of several dies has
        one each."""
        values = []
        for channel in self.channels(before, after, ENERGY):
            if self.text("IOReportChannelGetChannelName", channel).startswith("ANE"):
                unit = self.text("IOReportChannelGetUnitLabel", channel)
                if unit not in JOULES:
                    raise Missing(f"energy in the unit {unit!r}")
                value = self.call("IOReportSimpleGetIntegerValue", channel, 0)
                values.append(value * JOULES[unit])
        if not values:
            raise Missing("no energy channel of the Neural Engine")
        if min(values) < 0 or not sum(values):
            raise Missing(
                "the energy counter of the Neural Engine stayed at zero or went back"
            )
        return sum(values)

    def active_share(self, before: dict, after: dict) -> float:
        """Share of the time between two `samples` in which the engine's controller
        ran."""
        *controller, running = CONTROLLER
        for channel in self.channels(before, after, ENGINE):
            subgroup = self.text("IOReportChannelGetSubGroup", channel)
            name = self.text("IOReportChannelGetChannelName", channel)
            if [subgroup, name] != controller:
                continue
            times = {}
            for index in range(self.call("IOReportStateGetCount", channel)):
                state = self.text("IOReportStateGetNameForIndex", channel, index)
                times[state] = self.call("IOReportStateGetResidency", channel, index)
            if running in times and min(times.values()) >= 0 < sum(times.values()):
                return times[running] / sum(times.values())
        raise Missing("no time in states of the Neural Engine's controller")

    def _string(self, text: str):
        return self.call("CFStringCreateWithCString", None, text.encode(), UTF8)

    def text(self, name: str, *arguments) -> str:
        """The text that a function gives; "" where it gives none."""
        string = self.call(name, *arguments)
        buffer = ctypes.create_string_buffer(256)
        if not string or not self.call("CFStringGetCString", string, buffer, 256, UTF8):
            return ""
        return buffer.value.decode(errors="replace").strip()


def reading(counters: Counters, before: dict, after: dict, seconds: float) -> dict:
    """``ane_joules`` and ``ane_active_ms`` between two `samples` that many seconds
    apart, and the ``reason`` why one of them is None."""
    values = {"ane_joules": None, "ane_active_ms": None}
    reasons = []
    for name, value in (
        ("ane_joules", lambda: counters.joules(before, after)),
        ("ane_active_ms", lambda: 1e3 * seconds * counters.active_share(before, after)),
    ):
        try:
            values[name] = value()
        except Missing as problem:
            reasons.append(str(problem))
    return values | {"reason": "; ".join(reasons) or None}


def main() -> None:
    """The child: takes samples, waits for the end of stdin, takes others and prints
    `reading`."""
    try:
        counters = Counters(ctypes.CDLL(IOREPORT), ctypes.CDLL(CORE_FOUNDATION))
        before = counters.samples()
        start = time.monotonic()
        print("ready", flush=True)
        sys.stdin.read()
        result = reading(counters, before, counters.samples(), time.monotonic() - start)
    except (OSError, Missing) as problem:
        print("ready", flush=True)
        sys.stdin.read()
        result = {"reason": str(problem)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
