"""Tools: Python functions that the model may call in the course of an answer, and the environment that calls them.

In: functions with type hints and a docstring; replies of the model. Out: what the model is told of them, the calls in a
reply, and their results as messages. `conversations/sources.py` describes tools at the start; `ToolUse` runs in workers.
The standard library alone is imported here, but for `schema`.

A call stands between tags, as Hermes and Qwen models write it or as Python would:

    <tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>
    <tool_call>calculator(3*4)</tool_call>
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import InputError
from gspo.tasks.environment import Step

Tool = Callable[..., Any]
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_PLAIN = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)


# ------------------------------------------------------------------------------ what the model is told


def schema(tool: Tool, where: str) -> dict[str, Any]:
    """The JSON schema of a tool, as chat templates take it.

    Raises InputError for a function whose signature or docstring says too little, or has what JSON has not.
    """
    from transformers.utils import get_json_schema  # type: ignore[attr-defined]

    try:
        found: dict[str, Any] = get_json_schema(tool)
        json.dumps(found)
    except Exception as error:  # transformers and json raise several kinds, none with a name that says more
        raise InputError(
            f"{where}: cannot be described to a model: {error} A tool has a type hint for each parameter, of what JSON has "
            "(str, int, float, bool, list, dict), and a docstring with a line for each under `Args:`"
        ) from error
    return found


def described(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The tools in plain words, for a model whose chat template has no place for them."""
    lines = [
        "You can use tools. To use one, write a call between tags and nothing after it, as in "
        f"{_example(schemas[0]['function'])}. The result is then given to you.",
    ]
    for function in (each["function"] for each in schemas):
        parameters = function["parameters"]["properties"]
        lines += ["", f"{function['name']}({', '.join(parameters)}): {function['description']}"]
        lines += [f"- {name}: {about.get('description', about.get('type', ''))}" for name, about in parameters.items()]
    return "\n".join(lines)


def _example(function: Mapping[str, Any]) -> str:
    return f"<tool_call>{function['name']}({', '.join(function['parameters']['properties'])})</tool_call>"


# ------------------------------------------------------------------------------ what the model wrote


@dataclass(frozen=True)
class ToolCall:
    """One call in a reply."""

    name: str
    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] | None = None
    fault: str | None = None
    """Why it is no call; the other fields then say nothing."""


def calls(reply: str) -> list[ToolCall]:
    """The calls between tags, in order."""
    return [_read(found.strip()) for found in _CALL.findall(reply)]


def _read(text: str) -> ToolCall:
    return _of_json(text) if text.startswith("{") else _of_python(text)


def _of_json(text: str) -> ToolCall:
    try:
        found = json.loads(text)
        arguments = found.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return ToolCall("", fault=f"the call is not valid JSON: {error}")
    name = found.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", fault='a call is {"name": ..., "arguments": {...}}')
    return ToolCall(name, named=arguments)


def _of_python(text: str) -> ToolCall:
    """`name(...)`: what is no literal is taken as the text that it is, so that `calculator(3*4)` needs no quotes."""
    found = _PLAIN.fullmatch(text)
    if found is None:
        return ToolCall("", fault="a call is written name(argument)")
    try:
        call = ast.parse(text.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        positional = tuple(_value(text.strip(), node) for node in call.args)
        return ToolCall(found[1], positional, {key.arg or "": _value(text.strip(), key.value) for key in call.keywords})
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return ToolCall(found[1], (found[2].strip(),) if found[2].strip() else (), {})


def _value(text: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return ast.get_source_segment(text, node)


# ------------------------------------------------------------------------------ the environment


class ToolUse:
    """The row's prompt, and a turn for each reply that calls tools; a reply without a call ends the conversation.

    What a tool raises, and a call that is none, is told to the model. There is no reward: the reward functions judge the
    last reply. `role`: of the messages with results; `tool` where the chat template knows it.
    """

    def __init__(self, tools: Mapping[str, Tool], role: str = "tool") -> None:
        self._tools, self._role = tools, role

    def reset(self, seed: int) -> None:
        return None

    def step(self, reply: str) -> Step:
        found = calls(reply)
        return Step(list(self._results(found))) if found else Step(None, done=True)

    def _results(self, found: Sequence[ToolCall]) -> Iterator[dict[str, str]]:
        for call in found:
            text = self._result(call)
            shown = text if self._role == "tool" else f"Result: {text}"
            yield {"role": self._role, "name": call.name, "content": shown}

    def _result(self, call: ToolCall) -> str:
        if call.fault is not None:
            return f"error: {call.fault}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}, but {', '.join(self._tools)}"
        try:
            bound = inspect.signature(tool).bind(*call.positional, **(call.named or {}))
            value = tool(*bound.args, **bound.kwargs)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else json.dumps(value, default=str)
