"""The lines that Core ML writes on stderr while a call goes on: which are logged, and
which say that a run is invalid. Imports no other module of this package."""

import re

# lines of Core ML and its parts; seen in issue 3702 of whisper.cpp and in issues 2247 and 2688
# of coremltools
CORE_ML_MESSAGE = re.compile(
    r"E5RT|E5 bundle|\bANE|ForANE|Espresso|MPSGraph|Error plan build|Error compiling model"
    r"|Error Domain=com\.apple"
)
# a model was not compiled, or not run, for the named compute unit
INVALIDATING = re.compile(
    r"ANECCompile\(\) FAILED|MILCompilerForANE error|Error compiling model|Error Domain=com\.apple"
    r"|ANE inference operation failed|E5RT encountered an STL exception|Error plan build"
    r"|MPSGraph.* failed"
)
MAX_MESSAGES = 100  # of a call


def select_messages(lines: list[str]) -> list[str]:
    """Core ML's lines, each once, at most `MAX_MESSAGES`; those that invalidate a run come
    first."""
    messages = list(dict.fromkeys(filter(CORE_ML_MESSAGE.search, lines)))
    messages.sort(key=lambda line: INVALIDATING.search(line) is None)
    return messages[:MAX_MESSAGES]


def is_invalidating(line: str) -> bool:
    """Whether a line says that the named compute unit was not used. Core ML reports a
    failed compilation and goes on."""
    return INVALIDATING.search(line) is not None
