"""Prompts with the answers that a model is to learn: read, checked, and as ids.

In: rows with a prompt and an answer column, or with conversations that the assistant ends. Out: `Answered`s: what is
trained on are their answer ids, which are known as such from the start and never looked for in a text. The stages call
it, all of it before a weight is read but for `ended`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.config import Pairs
from gspo.errors import InputError
from gspo.tasks.data import Check, Rows, checked_column, checked_prompts, message_fault, unwritable
from gspo.tasks.render import render, templated, too_long, uses_template
from gspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answered:
    """A prompt and an answer to it."""

    prompt: Prompt
    answer: str
    answer_ids: np.ndarray
    """[answer tokens] int64, what follows the ids of the prompt."""


@dataclass(frozen=True)
class AnsweredRows:
    """What there is to learn."""

    rows: tuple[Answered, ...]
    """In the order of the data, without rows dropped."""
    notes: tuple[str, ...] = ()
    """What the user should be told once."""


# ------------------------------------------------------------------------------ rows


def checked_pairs(data: Pairs) -> Check:
    """Every row has a prompt and an answer with text in it. Conversations are taken apart into the two columns."""

    def check(found: Rows) -> Rows:
        parted = found if data.messages is None else _parted(found, data, data.messages)
        both = checked_prompts(data)(parted)
        return checked_column(both, data.answer, "data.answer", _answer_fault)

    return check


def _answer_fault(answer: Any) -> str | None:
    if answer is None:
        return "the answer is null"
    if not isinstance(answer, str):
        return f"an answer is text, not {type(answer).__name__}"
    return unwritable(answer) or (None if answer.strip() else "the answer is empty")


def _parted(found: Rows, data: Pairs, column: str) -> Rows:
    checked_column(found, column, "data.messages", _conversation_fault)
    earlier = sum(any(m["role"] == "assistant" for m in row[column][:-1]) for row in found.rows)
    note = (
        f"{found.name}: {earlier} of {len(found)} conversations have earlier turns of the assistant: they are context, "
        "and the loss is on the last one"
    )
    rows = tuple(
        {**row, data.prompt: list(row[column][:-1]), data.answer: row[column][-1]["content"]} for row in found.rows
    )
    columns = tuple(dict.fromkeys((*found.columns, data.prompt, data.answer)))
    return replace(found, rows=rows, columns=columns, notes=(*found.notes, *([note] if earlier else [])))


def _conversation_fault(messages: Any) -> str | None:
    if not isinstance(messages, list) or len(messages) < 2:
        return "a conversation is a list of at least two messages, a prompt and the assistant's answer"
    if fault := next(filter(None, map(message_fault, messages)), None):
        return fault
    return None if messages[-1]["role"] == "assistant" else "the conversation has no assistant's turn at its end"


# ------------------------------------------------------------------------------ ids


def render_answers(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Pairs) -> AnsweredRows:
    """Prompts rendered as for a rollout, and the ids of what the assistant is to write after them.

    With a chat template, that is what the template puts after the prompt once the answer is there; without one, the
    answer. Both are tokenised apart from the prompt, as a model writes them: no token spans the two.

    Raises:
        InputError: as `render`; a template that does not go on from the prompt to the answer; answers longer than
            `data.max_answer_tokens`; an answer without tokens.
    """
    rendered = render(rows, tokenizer, data)
    texts = {p.row: str(rows.rows[p.row][data.answer]) for p in rendered.prompts}
    written = (
        {p.row: _continuation(rows, p, texts[p.row], tokenizer, data) for p in rendered.prompts}
        if uses_template(rows, tokenizer, data)
        else texts
    )
    ids = tokenizer(list(written.values()), add_special_tokens=False, truncation=False, padding=False, verbose=False)
    ids_of = dict(zip(written, ids["input_ids"], strict=True))
    if bare := [i for i in ids_of if not ids_of[i]]:
        raise InputError(f"{rows.name}: {rows.places(bare)}: the tokenizer makes no tokens of this answer")
    lengths = [len(ids_of.get(i, ())) for i in range(len(rows))]
    notes = too_long(rows, lengths, data, what="answers", key="max_answer_tokens")
    answered = tuple(
        Answered(p, texts[p.row], np.asarray(ids_of[p.row], dtype=np.int64))
        for p in rendered.prompts
        if lengths[p.row] <= data.max_answer_tokens
    )
    if not answered:
        raise InputError(f"{rows.name}: no row is left: each has a prompt or an answer that is too long")
    return AnsweredRows(answered, (*rendered.notes, *notes))


def _continuation(rows: Rows, prompt: Prompt, answer: str, tokenizer: PreTrainedTokenizerBase, data: Pairs) -> str:
    whole = templated(rows, prompt.row, tokenizer, data, answer)
    if not whole.startswith(prompt.text) or not whole.removeprefix(prompt.text).strip():
        raise InputError(
            f"{rows.name}: {rows.place(prompt.row)}: the chat template has no turn of the assistant that goes on from the prompt, so the answer cannot "
            f"be told from it: after the prompt …{prompt.text[-40:]!r} the whole reads …{whole[-80:]!r}. Use data.template=none"
        )
    return whole.removeprefix(prompt.text)


def ended(
    answered: Sequence[Answered], stop_ids: Collection[int], end: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[Answered, ...]:
    """Each answer up to and with its end token: the first of `stop_ids` that the template wrote, else `end`.

    Raises InputError for an answer that has an end token before its end.
    """
    return tuple(replace(each, answer_ids=_ended(each, stop_ids, end, tokenizer)) for each in answered)


def _ended(each: Answered, stop_ids: Collection[int], end: int, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    stops = np.flatnonzero(np.isin(each.answer_ids, list(stop_ids)))
    if len(stops) == 0:
        return np.append(each.answer_ids, end)
    first = int(stops[0])
    after = str(tokenizer.decode(each.answer_ids[first + 1 :], skip_special_tokens=True))
    if first == 0 or after.strip():
        raise InputError(
            f"row {each.prompt.row}: the answer has the end token {tokenizer.decode([int(each.answer_ids[first])])!r} before its end: "
            "take it out of the text"
        )
    return each.answer_ids[: first + 1]
