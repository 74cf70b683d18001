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
        "platform": platform.platform(), "python": platform.python_version(), "macos": platform.mac_ver()[0] or None,
        "chip": machine["chip"], "memory_bytes": psutil.virtual_memory().total, "coremltools": version("coremltools"),
        "torch": version("torch"), "coreml_available": available,
        "ane_available": available and platform.machine() == "arm64", "default_runtime": runtime.resolve(),
        "notes": _notes(available),
    }  # fmt: skip


def _notes(available: bool) -> list[str]:
    if available:
        return ["Core ML runs here: decode, sweep and validate use it unless told --runtime portable.",
                "Times are this Mac's; the plan says what is preferred, timing each T says what happens."]  # fmt: skip
    return [
        "No Core ML here (it needs macOS 15): exports, checks, validation and decoding run on the portable runtime.",
        "Its values judge the exported program itself; its times are this machine's, never the Neural Engine's.",
        "On a Mac, with the same bundles: device values (the runtime part of the error), placement, tok/s on the ANE.",
    ]
