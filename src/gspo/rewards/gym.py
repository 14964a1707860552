"""Answers to tasks of reasoning-gym, judged by the task's own scorer.

In: a completion and its row, as `tasks/gym.py` made it. Out: what the scorer says, from 0 to 1, often with a little for an
answer that is nearly right. `ready.py` names it `reasoning-gym`; it runs in the pool alone, since scorers compute what an
answer says. Four of them call `eval` on it, five sympy's `parse_expr`, which does the same: in a worker, these read
literals and arithmetic, and run nothing (`_disarm`).
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from typing import Any

from gspo.tasks import gym

_OPEN, _CLOSE = "<answer>", "</answer>"
_EVAL = ("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix", "games.n_queens")
"""Modules of the package that call `eval` on an answer."""
_PARSE = {
    "games.puzzle24": None,
    "games.countdown": None,
    "algebra.simple_integration": "sympy",
    "algebra.intermediate_integration": "sympy",
    "algebra.polynomial_multiplication": "sp",
}
"""Modules that call `parse_expr` on an answer, and the name by which they have sympy where it is `sympy.parse_expr`."""
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "asinh", "acosh",
     "atanh", "exp", "log", "ln", "sqrt", "Abs", "sign", "erf"}
)  # fmt: skip
"""Functions that an answer may call."""
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.expr_context, ast.Call,
)  # fmt: skip


def prepare() -> None:
    """Import the package, which takes a second or two, and take the power to run code from its scorers."""
    import reasoning_gym  # noqa: F401 - an extra

    _disarm()


def score(completion: str, *, prompt: str, answer: Any, metadata: Any, task: str) -> float:
    """The scorer's verdict on the answer in the completion (`answer_in`).

    A scorer that fails on a text has not found an answer in it: 0. That it works on the row's own answer is checked at
    the start (`judges`).
    """
    try:
        return _score(answer_in(completion), prompt=prompt, answer=answer, metadata=metadata, task=task)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return 0.0


def judges(completion: str, *, prompt: str, answer: Any, metadata: Any, task: str) -> float:
    """1 if the task's scorer comes to a verdict on the row's own answer. Raises whatever it raises."""
    _score(answer, prompt=prompt, answer=answer, metadata=metadata, task=task)
    return 1.0


def answer_in(completion: str) -> str:
    """What stands in the last `<answer>...</answer>`, as the package asks for it; without one, all that follows the thoughts."""
    end = completion.rfind(_CLOSE)
    start = completion.rfind(_OPEN, 0, max(end, 0))
    if start >= 0:
        return completion[start + len(_OPEN) : end].strip()
    return completion.rpartition("</think>")[2].strip()


def _score(text: Any, *, prompt: str, answer: Any, metadata: Any, task: str) -> float:
    entry = {"question": prompt, "answer": answer, "metadata": metadata}
    return float(_scorer(task).score_answer(text, entry))


@lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    return gym.parse(task).data_set(0)


# ------------------------------------------------------------------------------ no code is run


def _disarm() -> None:
    for name in _EVAL:
        vars(sys.modules[f"reasoning_gym.{name}"])["eval"] = ast.literal_eval
    for name, sympy in _PARSE.items():
        names = vars(sys.modules[f"reasoning_gym.{name}"])
        if sympy is None:
            names["parse_expr"] = _arithmetic
        else:
            names[sympy] = _Sympy(names[sympy])


class _Sympy:
    """sympy, for a module that calls `sympy.parse_expr`."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy

    def __getattr__(self, name: str) -> Any:
        return _arithmetic if name == "parse_expr" else getattr(self._sympy, name)


def _arithmetic(text: str, *arguments: Any, **keys: Any) -> Any:
    """sympy's `parse_expr` of numbers, names, operators and elementary functions. Raises ValueError for all else."""
    from sympy.parsing.sympy_parser import parse_expr

    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        called = isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        )
        if (
            called
            or not isinstance(node, _ARITHMETIC)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        ):
            raise ValueError(f"not arithmetic: {type(node).__name__}")
    return parse_expr(text, *arguments, **keys)
