"""A built-in task and a built-in tool: products of two whole numbers, and a calculator.

In: `calculator:LOW-HIGH`, the smallest and largest factor. Out: rows with prompt (a question after two that were
answered with the calculator), answer, a and b, to be used with `conversation.tools=calculator` and `reward=number`.
`tasks/builtin.py` calls `parse`, `conversations/sources.py` finds the tool.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from gspo.tasks import addition

_LARGEST = 10**40


def _asked(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def _example(a: int, b: int) -> list[dict[str, str]]:
    call = {"role": "assistant", "content": f"<tool_call>calculator({a} * {b})</tool_call>"}
    told, answer = {"role": "user", "content": f"Result: {a * b}"}, {"role": "assistant", "content": f"{a * b}"}
    return [_asked(a, b), call, told, answer]


_EXAMPLES = [*_example(12, 17), *_example(35, 81)]
"""A small model calls a tool only if it has seen it done."""
_OPERATORS: dict[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass(frozen=True)
class Products(addition.Addition):
    """Products of factors in [low, high]."""

    low: int = 10
    high: int = 99

    name: ClassVar[str] = "calculator"
    what: ClassVar[str] = "products"

    def row(self, a: int, b: int) -> dict[str, Any]:
        return {"prompt": [*_EXAMPLES, _asked(a, b)], "answer": str(a * b), "a": a, "b": b}


def parse(arguments: str) -> Products:
    """The task that `LOW-HIGH` describes; nothing stands for 10-99. Raises InputError for anything else."""
    return addition.parse_as(Products, arguments)


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression.

    Args:
        expression: numbers with + - * / and brackets, as in (3+4)*5
    """
    value = _worked_out(ast.parse(str(expression).strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _worked_out(node: ast.expr) -> int | float:
    """No powers and no numbers beyond 10^40: whatever the expression is, it takes time linear in its length."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value: int | float = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_worked_out(node.left), _worked_out(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_worked_out(node.operand))
    else:
        raise ValueError(f"cannot work out {ast.unparse(node)!r}: there are numbers, + - * / and brackets")
    if not abs(value) < _LARGEST:
        raise ValueError("the number is too large")
    return value
