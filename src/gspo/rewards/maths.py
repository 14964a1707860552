"""Answers in mathematics, compared by math-verify: `1/3`, `\\frac{1}{3}` and `0.333...` as what they mean.

In: a completion and its gold answer, or several forms of it. Out: 1.0 or 0.0. `ready.py` names it `math`; it runs in the
pool alone, since sympy computes whatever an answer says, and a tower of powers takes it for ever. math-verify's own time
limits are switched off: they are signals, which work in the main thread of a process only and do not stop C code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def equals(completion: str, *, answer: Any) -> float:
    r"""1 if the answer in the completion (the last `\boxed{...}`, else the last formula or number) equals a gold form."""
    import math_verify  # an extra

    found = math_verify.parse(completion, parsing_timeout=None)
    return float(any(math_verify.verify(list(gold), found, timeout_seconds=None) for gold in _golds(answer) if gold))


def parses(completion: str, *, answer: Any) -> float:
    """1 if every gold form is a mathematical expression: text that math-verify keeps only as text is none."""
    golds = _golds(answer)
    return float(bool(golds) and all(any(not isinstance(part, str) for part in gold) for gold in golds))


def _golds(answer: Any) -> list[tuple[Any, ...]]:
    forms = answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    return [_gold(str(form)) for form in forms]


@lru_cache(maxsize=4096)
def _gold(form: str) -> tuple[Any, ...]:
    """What math-verify reads in a gold form. LaTeX is looked for between dollars only, so they are put around it."""
    import math_verify

    delimited = any(mark in form for mark in ("$", r"\boxed", r"\(", r"\["))
    return tuple(math_verify.parse(form if delimited else f"${form}$", parsing_timeout=None))
