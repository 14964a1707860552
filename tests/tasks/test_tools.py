"""Tools: what the model is told, what is read in its replies, and what a call comes to."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.errors import InputError
from gspo.tasks.calculator import calculator, parse
from gspo.tasks.tools import ToolCall, ToolUse, calls, described, schema


def add(a: int, b: int = 1) -> int:
    """
    Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def broken(text: str) -> str:
    """
    Fails.

    Args:
        text: anything
    """
    raise KeyError(text)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            'I think.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            ToolCall("add", (), {"a": 1, "b": 2}),
        ),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ToolCall("add", (), {"a": 1})),
        ("<tool_call>add(1, b=2)</tool_call>", ToolCall("add", (1,), {"b": 2})),
        ("<tool_call>calculator(3*4)</tool_call>", ToolCall("calculator", ("3*4",), {})),
        ("<tool_call>calculator('3*4')</tool_call>", ToolCall("calculator", ("3*4",), {})),
        ("<tool_call>calculator(3 x 4)</tool_call>", ToolCall("calculator", ("3 x 4",), {})),
        ("<tool_call>now()</tool_call>", ToolCall("now", (), {})),
    ],
)
def test_calls_are_read_in_both_manners(reply: str, expected: ToolCall) -> None:
    assert calls(reply) == [expected]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{1}", "not valid JSON"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "f", "arguments": [1]}', '"name"'),
        ("3*4", "name("),
    ],
)
def test_what_is_no_call_is_told_to_the_model(text: str, fault: str) -> None:
    (found,) = calls(f"<tool_call>{text}</tool_call>")
    assert found.fault is not None
    assert fault in found.fault


def test_replies_without_a_closed_call_have_none() -> None:
    assert calls("4") == calls("<tool_call>add(1)") == []
    assert calls("(" * 200_000) == []


def test_a_turn_for_each_reply_that_calls_and_an_end_for_one_that_does_not() -> None:
    use = ToolUse({"add": add, "broken": broken})
    assert use.reset(0) is None

    def said(reply: str) -> list[Any]:
        step = use.step(reply)
        assert (step.reward, step.done) == (None, False)
        assert all(m["role"] == "tool" for m in step.messages)
        return [m["content"] for m in step.messages]

    assert said("<tool_call>add(1)</tool_call> and <tool_call>add(1, 5)</tool_call>") == ["2", "6"]
    assert said("<tool_call>broken(x)</tool_call>") == ["error: KeyError: 'x'"]
    assert said("<tool_call>sub(1)</tool_call>") == ["error: there is no tool 'sub', but add, broken"]
    assert "missing a required argument" in said("<tool_call>add()</tool_call>")[0]
    assert "not valid JSON" in said("<tool_call>{</tool_call>")[0]
    assert use.step("it is 2") == (None, None, True)


def test_where_the_template_has_no_tools_the_user_tells_results() -> None:
    (message,) = ToolUse({"add": add}, "user").step("<tool_call>add(1)</tool_call>").messages
    assert (message["role"], message["content"]) == ("user", "Result: 2")


def test_the_description_says_how_a_call_is_written() -> None:
    text = described([schema(calculator, "tools=calculator")])
    assert "<tool_call>calculator(expression)</tool_call>" in text
    assert "Works out an arithmetic expression." in text
    assert "as in (3+4)*5" in text


def untold(a):  # type: ignore[no-untyped-def]
    """
    Says nothing of its types.

    Args:
        a: something
    """


def unwritten(a: int) -> int:
    return a


class Odd:
    pass


def odd(a: Odd) -> int:
    """
    Takes what JSON has not.

    Args:
        a: an object
    """
    return 0


@pytest.mark.parametrize("tool", [untold, unwritten, odd])
def test_a_tool_that_cannot_be_described_is_refused(tool: Any) -> None:
    with pytest.raises(InputError, match=r"conversation.tools=t.py:f: cannot be described[\s\S]*type hint"):
        schema(tool, "conversation.tools=t.py:f")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3*4", "12"), ("(3+4)*5", "35"), ("-7/2", "-3.5"), ("1/3", "0.3333333333"), ("10**2", None), ("__import__('os')", None), ("9" * 41, None), ("1/0", None), ("", None)],
)  # fmt: skip
def test_the_calculator(expression: str, value: str | None) -> None:
    if value is not None:
        assert calculator(expression) == value
        return
    with pytest.raises((ValueError, ZeroDivisionError, SyntaxError)):
        calculator(expression)


def test_products_are_split_by_pair_and_none_is_on_both_sides() -> None:
    task = parse("2-9")
    train, _ = task.rows("train", limit=None)
    test, _ = task.rows("held_out", limit=None)
    assert len(train) + len(test) == 64
    assert all(row["answer"] == str(row["a"] * row["b"]) for row in train)
    pairs = [{frozenset((row["a"], row["b"])) for row in side} for side in (train, test)]
    assert not pairs[0] & pairs[1]
    with pytest.raises(InputError, match="calculator:LOW-HIGH"):
        parse("x")
