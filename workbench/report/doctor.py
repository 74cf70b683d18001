"""What this machine can do: versions, Core ML, memory, and in words what a Mac would add."""

import platform

from workbench import log, runtime


def examine() -> dict:
    """The JSON of `workbench doctor`; what cannot be seen is None."""
    from importlib.metadata import version

    import psutil

    machine = log.environment()
    available = runtime.coreml_available()
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "macos": platform.mac_ver()[0] or None,
        "chip": machine["chip"],
        "memory_bytes": psutil.virtual_memory().total,
        "coremltools": version("coremltools"),
        "torch": version("torch"),
        "coreml_available": available,
        "ane_available": available and platform.machine() == "arm64",
        "default_runtime": runtime.resolve(),
        "notes": _notes(available),
    }


def _notes(available: bool) -> list[str]:
    if available:
        return [
            "Core ML runs here: decode, sweep and validate use it unless told --runtime portable.",
            "Times are this Mac's; a plan says what is preferred, timing each T says what happens.",
            "Exports, goldens and logs of other machines can be used here as they are.",
        ]
    mac = platform.mac_ver()[0]
    return [
        f"No Core ML here ({f'macOS {mac}' if mac else platform.system()}; it needs macOS 15), so the portable runtime runs the packages.",
        "Works here: export, check, validate, error, trace, decode, sweep, report, all notebooks and tests.",
        "Its values validate the exported program itself; its times are this machine's, never the Neural Engine's.",
        "A Mac adds, from the same bundles and goldens: device values, placement on the Neural Engine, its tok/s.",
    ]
