"""Answers in mathematics, compared by math-verify: `1/3`, `\\frac{1}{3}` and `0.333...` as what they mean.

In: a completion and its gold answer, or several forms of it. Out: 1.0 or 0.0. `ready.py` names it `math`; it runs in the
pool alone, since sympy computes whatever an answer says, and a tower of powers takes it for ever. math-verify's own time
limits are switched off: they are signals, which work in the main thread of a process only and do not stop C code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gspo.rewards.rules import last_boxed


def prepare() -> None:
    """Import math-verify and let it build its parser, which takes a second."""
    import math_verify

    math_verify.parse(r"$\frac{1}{2}$", parsing_timeout=None)


def equals(completion: str, *, answer: Any) -> float:
    r"""1 if the answer in the completion equals a gold form: the last `\boxed{...}`, or without any, the last formula or number."""
    import math_verify  # an extra

    box = last_boxed(completion)
    # Several boxes would be read as one list of answers.
    found = math_verify.parse(completion if box is None else rf"\boxed{{{box}}}", parsing_timeout=None)
    return float(any(math_verify.verify(list(gold), found, timeout_seconds=None) for gold in _golds(answer) if gold))


def comparable(completion: str, *, answer: Any) -> float:
    """1 if every gold form is a mathematical expression that can be compared: text that is kept as text alone is none."""
    import math_verify

    golds = _golds(answer)
    if not golds or not all(any(not isinstance(part, str) for part in gold) for gold in golds):
        return 0.0
    for gold in golds:  # one that takes for ever to compare is found out here
        math_verify.verify(list(gold), math_verify.parse("$0.3$", parsing_timeout=None), timeout_seconds=None)
    return 1.0


def _golds(answer: Any) -> list[tuple[Any, ...]]:
    forms = answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    return [_gold(str(form)) for form in forms]


@lru_cache(maxsize=4096)
def _gold(form: str) -> tuple[Any, ...]:
    """What math-verify reads in a gold form. LaTeX is looked for between dollars only, so they are put around it."""
    import math_verify

    delimited = any(mark in form for mark in ("$", r"\boxed", r"\(", r"\["))
    return tuple(math_verify.parse(form if delimited else f"${form}$", parsing_timeout=None))
