"""The abilities of this machine: versions, Core ML, memory, and notes on what a Mac
would add."""

import platform

from workbench import log, plugins, process, runtime
from workbench.log.machine import hardware
from workbench.runtime import selftest

UNITS = ("CPU_ONLY", "CPU_AND_NE")
TIMEOUT_S = 120


def examine(name: str | None = "auto") -> dict:
    """The JSON of `workbench doctor`; an unknown value is None.

    Core ML is tried in child processes: ``compute_devices`` lists its devices,
    ``stateful_predict`` has for each of `UNITS` ``ok`` if a model with a state ran,
    else the reason; `coreml_available` is whether it ran on the CPU.

    Args:
        name: the runtime to try: auto, or a stand-in for Core ML, which has no devices.
            None: no child process is started, and `coreml_available` depends on macOS'
            version alone.
    """
    machine = log.environment() | hardware()
    versions = machine["versions"]
    available = runtime.coreml_available()
    devices = None
    results = None
    if available and name:
        name = "coreml"
        test = selftest.compute_devices
        devices = process.call(test, timeout_s=TIMEOUT_S).value
    if name not in ("auto", None):
        results = {units: _try_units(name, units) for units in UNITS}
        available = results["CPU_ONLY"] == "ok"
    has_engine = platform.machine() == "arm64"
    if devices is not None:
        has_engine = "ane" in {device["kind"] for device in devices}
    return {
        "platform": machine["platform"],
        "python": versions["python"],
        "macos": platform.mac_ver()[0] or None,
        "chip": machine["chip"],
        "memory_bytes": machine["memory_bytes"],
        "coremltools": versions["coremltools"],
        "torch": versions["torch"],
        "plugins": _plugins(),
        "coreml_available": available,
        "ane_available": available and has_engine,
        "compute_devices": devices,
        "stateful_predict": results,
        "default_runtime": runtime.resolve(),
        "notes": _notes(available, results),
    }


def _try_units(name: str, units: str) -> str:
    """``ok``, or why a model with a state did not run on these units."""
    argument = {"runtime": name, "compute_units": units}
    test = selftest.stateful_predict
    outcome = process.call(test, argument, timeout_s=TIMEOUT_S)
    return outcome.failure or "ok"


def _plugins() -> dict[str, str]:
    """Name → version of every installed package that offers a target."""
    found = [entry.dist for entry in plugins.offered("targets").values()]
    return {package.name: package.version for package in found}


def _notes(available: bool, results: dict[str, str] | None) -> list[str]:
    if results and set(results.values()) != {"ok"}:
        notes = []
        for units, reason in results.items():
            if reason != "ok":
                notes.append(f"A model with a state did not run on {units}: {reason}")
        return [
            *notes,
            "Name compute units on which it ran with --compute-units, or take --runtime portable.",
        ]
    if available:
        return [
            "Core ML runs here: decode, sweep and validate use it unless told --runtime portable.",
            "Times are this Mac's. A plan is a preference; timing each T shows the actual unit.",
            "Write cool_down_s: 15 into a sweep's run: a warm chip is slower, and the Neural "
            "Engine is reported to need as long after a failed compilation.",
            "Exports, goldens and logs of other machines can be used here as they are.",
        ]
    system = platform.system()
    if mac := platform.mac_ver()[0]:
        system = f"macOS {mac}"
    return [
        f"No Core ML here ({system}; it needs macOS 15), so the portable runtime runs the "
        "packages.",
        "Works here: export, validate, explain, generate, sweep, report, all notebooks "
        "and tests.",
        "Its values validate the exported program itself; its times are this machine's, never the "
        "Neural Engine's.",
        "A Mac adds, from the same bundles and goldens: device values, placement on the Neural "
        "Engine, its tok/s.",
    ]
