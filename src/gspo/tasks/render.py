"""What the model is shown: rows through the chat template, tokenised once.

In: `Rows`, a tokenizer (no weights) and `config.Data`. Out: `types.Prompt`s that keep text, ids and columns.
The job calls it before the model is loaded, so that a prompt that is too long costs no waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.config import Data
from gspo.errors import InputError
from gspo.tasks.data import Rows
from gspo.tasks.template import by_template, leaves_out
from gspo.tasks.tools import described
from gspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""{"role": ..., "content": ...}"""


@dataclass(frozen=True)
class Rendered:
    """Prompts ready for the engine."""

    prompts: tuple[Prompt, ...]
    """In the order of the rows, without those dropped; `prompt.row` is the row's number in its source."""
    notes: tuple[str, ...] = ()
    """What the user should be told once: rows that were dropped."""


def render(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data, tools: Sequence[Mapping[str, Any]] = ()
) -> Rendered:
    """Each row's prompt as text and ids, special tokens once: by the template, or by the tokenizer where there is none.

    `tools`: schemas of what the model may call; in a system message where the template has no place for them.

    Raises:
        InputError: `data.template=chat`, `data.system` or messages without a chat template; a message list that
            the template refuses, or whose last question it leaves out; prompts longer than `data.max_prompt_tokens` under `data.too_long=refuse`, or
            under `drop` when none is left; a prompt without tokens.
    """
    chat = uses_template(rows, tokenizer, data)
    if not chat:  # an empty system text is nothing there
        data, tools = data.model_copy(update={"system": None}), ()
    spoken = [_spoken(rows, i, tokenizer, data, tools) for i in range(len(rows))]
    if chat:
        places = {"tools": list(tools)} if tools and knows_tools(tokenizer) else {}
        texts = [_text(rows, i, messages, tokenizer, places) for i, messages in enumerate(spoken)]
        require_kept(rows, dict(enumerate(zip(map(_question, spoken), texts, strict=True))), "question")
    else:
        texts = [row[data.prompt] for row in rows.rows]
    ids = tokenizer(texts, add_special_tokens=not chat, truncation=False, padding=False, verbose=False)["input_ids"]
    lengths = [len(row_ids) for row_ids in ids]
    if bare := [i for i, length in enumerate(lengths) if length == 0]:
        raise InputError(f"{rows.name}: {rows.places(bare)}: the tokenizer makes no tokens of this prompt")
    notes = too_long(rows, lengths, data, what="prompts", key="max_prompt_tokens")
    prompts = (
        Prompt(
            row=i, text=texts[i], token_ids=np.asarray(ids[i], dtype=np.int64), columns=rows.rows[i], messages=spoken[i]
        )
        for i in range(len(rows))
        if lengths[i] <= data.max_prompt_tokens
    )
    return Rendered(tuple(prompts), notes)


def uses_template(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data) -> bool:
    """Whether prompts go through the chat template. Raises InputError if they must and cannot, or the other way round."""
    has = bool(tokenizer.chat_template)
    if data.template == "chat" and not has:
        raise InputError(
            "data.template=chat: this model's tokenizer has no chat template. Use data.template=none, or an instruct model"
        )
    if has and data.template != "none":
        return True
    why = "data.template=none" if data.template == "none" else "this model's tokenizer has no chat template"
    if data.system:
        raise InputError(f"data.system has no effect: {why}. Put it into the prompts, or leave it out")
    if messages := [i for i, row in enumerate(rows.rows) if not isinstance(row[data.prompt], str)]:
        raise InputError(f"{rows.name}: {rows.places(messages)}: chat messages need a chat template, and {why}")
    return False


def templated(
    rows: Rows, index: int, tokenizer: PreTrainedTokenizerBase, data: Data, turns: Sequence[Message] = ()
) -> str:
    """A row's prompt as the template writes it, and the `turns` that follow it; up to where the assistant begins, unless
    the last turn is its own.

    Raises InputError for messages that the template refuses.
    """
    answered = bool(turns) and turns[-1]["role"] == "assistant"
    messages = (*_spoken(rows, index, tokenizer, data, ()), *map(_said, turns))
    return _text(rows, index, messages, tokenizer, {"add_generation_prompt": not answered})


def require_assistant(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Raise InputError where the chat template writes nothing for the assistant: neither where its answer begins, nor of
    the answer. Such a policy would be asked without a sign that it is its turn, and could not be shown what it said."""
    if not uses_template(rows, tokenizer, data):
        return
    asked = templated(rows, 0, tokenizer, data)
    try:
        answered = templated(rows, 0, tokenizer, data, [{"role": "assistant", "content": "yes"}])
    except InputError:  # a template of single questions may refuse more
        return
    if asked == answered:
        raise InputError(
            f"{rows.name}: {rows.place(0)}: the chat template has no turn of the assistant: the prompt reads …{asked[-40:]!r}, with an answer "
            "or without. Use data.template=none, or give the tokenizer a template that has one"
        )


def require_kept(rows: Rows, written: Mapping[int, tuple[object, str]], what: str) -> None:
    """Raise InputError where the chat template leaves a content out of the text that it wrote of it, or a part of it:
    `written` has the two of each row. `what`: the content in a word."""
    lost = [i for i, (content, text) in written.items() if leaves_out(content, text)]
    if lost:
        content, text = written[lost[0]]
        raise InputError(
            f"{rows.name}: {rows.places(lost)}: the chat template leaves the {what} out, or a part of it: of {str(content)[:40]!r} it makes "
            f"…{text[-80:]!r}. Use data.template=none, or give the tokenizer a template that writes what is said"
        )


def knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template has a place for tools."""
    return "tools" in str(tokenizer.chat_template)


def _spoken(
    rows: Rows, index: int, tokenizer: PreTrainedTokenizerBase, data: Data, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], ...]:
    """A row's prompt as messages, with what is said before it."""
    messages: list[dict[str, Any]] = as_messages(rows.rows[index][data.prompt])
    where = f"{rows.name}: {rows.place(index)}"
    system = [messages[0]["content"]] if messages[0]["role"] == "system" else []
    if data.system is not None:
        if system:
            raise InputError(f"{where}: has a system message already, and data.system would be a second; leave one out")
        messages, system = [{}, *messages], [data.system]
    if tools and not knows_tools(tokenizer):
        messages, system = messages if system else [{}, *messages], [*filter(None, system), described(tools)]
    if system:
        messages = [{"role": "system", "content": "\n\n".join(system)}, *messages[1:]]
    return tuple(map(_said, messages))


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    # Parquet gives every message the keys of all messages; templates ask whether a key is there, not whether it is null.
    return {key: value for key, value in message.items() if value is not None}


def _text(
    rows: Rows, index: int, messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, keys: Mapping[str, Any]
) -> str:
    with at_row(rows, index):
        return by_template(tokenizer, messages, **{"add_generation_prompt": True, **keys})


@contextmanager
def at_row(rows: Rows, index: int) -> Iterator[None]:
    """Inside, an InputError is told with its row."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{rows.name}: {rows.place(index)}: {error}") from error


def _question(messages: Sequence[Message]) -> object:
    """What the user says last. A system's text, and earlier turns, a template may leave out."""
    return next((message.get("content") for message in reversed(messages) if message["role"] == "user"), None)


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """The messages of a prompt; text is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def too_long(rows: Rows, lengths: Sequence[int], data: Data, *, what: str, key: str) -> tuple[str, ...]:
    """Refuse rows with more tokens than `data.KEY`, or say which are dropped."""
    limit = getattr(data, key)
    long = [i for i, length in enumerate(lengths) if length > limit]
    if not long:
        return ()
    shown = ", ".join(f"{rows.place(i)} has {lengths[i]}" for i in long[:10])
    more = f" and {len(long) - 10} more" if len(long) > 10 else ""
    said = f"{rows.name}: {len(long)} of {len(lengths)} {what} are longer than data.{key}={limit}: {shown}{more}"
    if data.too_long == "refuse":
        raise InputError(f"{said}. Set data.{key}={max(lengths)}, or data.too_long=drop to leave them out")
    if len(long) == len(lengths):
        raise InputError(f"{said}. None is left: set data.{key}={max(lengths)}")
    return (f"{said}; dropped",)
