"""Programs as answers: the code in a completion, run against the tests of its row behind a wall.

In: a completion and tests. Out: 1.0 if all tests pass, else 0.0; a program that fails, hangs or leaves early is wrong, not
unjudged. `ready.py` names it `code`; it runs in the pool, which bounds it once more.

Tests are Python code that asserts (text, or a list of texts), or pairs of what the program is given on stdin and what it must
print: `[{"input": …, "output": …}, …]` or `{"inputs": […], "outputs": […]}`, as they are or as JSON text. Asserting tests
share a process with the program that they test: one written to deceive them can. Pairs are compared outside of it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.rewards.sandbox import Wall, run

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True)
class Tests:
    """What a program has to pass."""

    asserting: tuple[str, ...] = ()
    """Python code, run after the program."""
    pairs: tuple[tuple[str, str], ...] = ()
    """stdin, and what must be printed."""


def passes(completion: str, *, tests: Any, wall: Wall, seconds: float) -> float:
    """1 if the last block of Python in the completion (or all of it, if there is none) passes every test in `seconds`."""
    wanted = read_tests(tests)
    assert wanted is not None, "checked at the start"
    program, end = code_of(completion), time.monotonic() + seconds
    if wanted.asserting:
        return float(run(wall, [program, *wanted.asserting], seconds=seconds).complete)
    for given, expected in wanted.pairs:
        ended = run(wall, [program], seconds=max(0.01, end - time.monotonic()), stdin=given)
        if not ended.complete or _lines(ended.output) != _lines(expected):
            return 0.0
    return 1.0


def code_of(completion: str) -> str:
    """The last fenced block of Python; without any, the whole text."""
    blocks = [code for language, code in _FENCE.findall(completion) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else completion


def read_tests(tests: Any) -> Tests | None:
    """Tests in any of the forms; None if they are none."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            return read_tests(json.loads(tests))
        except ValueError:
            return None
    if isinstance(tests, str):
        return Tests(asserting=(tests,)) if _compiles(tests) else None
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            return None
        return _pairs(list(zip(inputs, outputs, strict=True)))
    if not isinstance(tests, Sequence) or not tests:
        return None
    if all(isinstance(test, str) for test in tests):
        return Tests(asserting=tuple(tests)) if all(_compiles(test) for test in tests) else None
    if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
        return _pairs([(test["input"], test["output"]) for test in tests])
    return None


def _pairs(found: list[tuple[Any, Any]]) -> Tests | None:
    texts = all(isinstance(side, str) for pair in found for side in pair)
    return Tests(pairs=tuple(found)) if found and texts else None


def _compiles(code: str) -> bool:
    try:
        compile(code, "tests", "exec")
    except (SyntaxError, ValueError):
        return False
    return code.strip() != ""


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines and of the whole."""
    return [line.rstrip() for line in text.strip().splitlines()]
