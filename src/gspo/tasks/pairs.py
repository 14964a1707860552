"""Preferences: a prompt, the answer that was chosen, the answer that was not; read, checked, and as ids.

In: rows with `prompt`, `chosen` and `rejected`, as text or as chat messages, or with conversations that share their
beginning. Out: `Preferred`s. The stage `reward_model` learns from them; `rewards/classifier.py` writes what it judges
with the same `judged_ids`, so that a reward model is shown answers as it learned them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.errors import InputError
from gspo.stage_config import Preferences
from gspo.tasks.data import Check, Rows, checked_column, checked_prompts, message_fault, unwritable
from gspo.tasks.render import Message, as_messages, at_row, render, require_kept, too_long, uses_template
from gspo.tasks.template import by_template
from gspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preferred:
    """A pair of answers to a prompt."""

    prompt: Prompt
    chosen: np.ndarray
    """[tokens] int64 of the prompt and the better answer, as the reward model is shown them."""
    rejected: np.ndarray
    """[tokens] int64 of the prompt and the worse answer."""
    margin: float = 0.0


@dataclass(frozen=True)
class PreferredRows:
    """What there is to learn."""

    rows: tuple[Preferred, ...]
    """In the order of the data, without rows dropped."""
    notes: tuple[str, ...] = ()
    """What the user should be told once."""


def judged_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], answer: str | list[Message], system: str | None
) -> list[int]:
    """A prompt with an answer as a reward model is shown them: by its chat template, else apart by an empty line.

    Raises InputError if the template refuses them.
    """
    text = judged_text(tokenizer, prompt, answer, system)
    # A template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=tokenizer.chat_template is None, verbose=False)["input_ids"])


def judged_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], answer: str | list[Message], system: str | None
) -> str:
    """The text of `judged_ids`. Raises InputError if the template refuses it."""
    messages = as_messages(prompt)
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    messages += [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages)
    return by_template(tokenizer, messages)


# ------------------------------------------------------------------------------ rows


def checked_preferences(data: Preferences) -> Check:
    """Every row has a prompt and two answers that differ. Conversations are taken apart into what they share and the rest."""

    def check(found: Rows) -> Rows:
        for key in ("chosen", "rejected"):
            checked_column(found, getattr(data, key), f"data.{key}", _answer_fault)
        if data.margin is not None:
            checked_column(found, data.margin, "data.margin", _margin_fault)
        _refuse(found, lambda row: _pair_fault(row, data))
        rows = tuple(_parted(row, data) for row in found.rows)
        return checked_prompts(data)(
            replace(found, rows=rows, columns=tuple(dict.fromkeys((*found.columns, data.prompt))))
        )

    return check


def _answer_fault(answer: Any) -> str | None:
    if answer is None:
        return "the answer is null"
    if isinstance(answer, str):
        return unwritable(answer) or (None if answer.strip() else "the answer is empty")
    if not isinstance(answer, list):
        return f"an answer is text or a list of messages, not {type(answer).__name__}"
    if not answer:
        return "the answer is an empty list of messages"
    if fault := next(filter(None, map(message_fault, answer)), None):
        return fault
    if answer[-1]["role"] != "assistant":
        return "the messages have no assistant's turn at their end"
    return None if answer[-1]["content"].strip() else "the answer is empty"


def _margin_fault(margin: Any) -> str | None:
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        return "a margin is a number"
    return "a margin below 0 would prefer the rejected answer" if margin < 0 else None


def _pair_fault(row: Mapping[str, Any], data: Preferences) -> str | None:
    """What is wrong with the prompt and the two answers together, each of which has been found sound."""
    prompt, chosen, rejected = row.get(data.prompt), row[data.chosen], row[data.rejected]
    if isinstance(chosen, str) != isinstance(rejected, str):
        return "one answer is text and the other a list of messages"
    if chosen == rejected:
        return "chosen and rejected are identical"
    whole = _shared(chosen, rejected)
    if prompt is None and not whole:
        return f"the prompt is missing: there is none in column {data.prompt!r}, and chosen and rejected share no messages before the answer"
    if isinstance(chosen, list) and not whole and any(a[0]["role"] != "assistant" for a in (chosen, rejected)):
        return "chosen and rejected are conversations that begin differently: they have no prompt in common"
    if prompt is not None and whole and not _stands_in(prompt, whole):
        return f"the messages that chosen and rejected share are not those of the prompt in column {data.prompt!r}"
    return None


def _shared(chosen: Any, rejected: Any) -> list[Message]:
    """The messages that two whole conversations have in common, up to the first of the assistant's that differs.

    Answers alone, which begin with the assistant's turn, share none.
    """
    if isinstance(chosen, str) or chosen[0]["role"] == "assistant":
        return []
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], both)]


def _stands_in(prompt: Any, messages: list[Message]) -> bool:
    said = [message["content"] for message in messages]
    return all(message["content"] in said for message in as_messages(prompt))


def _parted(row: Mapping[str, Any], data: Preferences) -> dict[str, Any]:
    shared = _shared(row[data.chosen], row[data.rejected])
    if not shared:
        return dict(row)
    n = len(shared)
    return {**row, data.prompt: shared, data.chosen: row[data.chosen][n:], data.rejected: row[data.rejected][n:]}


def _refuse(found: Rows, fault: Callable[[Mapping[str, Any]], str | None]) -> None:
    """Raise InputError with the rows at fault."""
    faults: dict[str, list[int]] = {}
    for i, row in enumerate(found.rows):
        if said := fault(row):
            faults.setdefault(said, []).append(i)
    if faults:
        each = "; ".join(f"{found.places(where)}: {said}" for said, where in faults.items())
        raise InputError(f"{found.name}: {each}. Rows are counted from 0")


# ------------------------------------------------------------------------------ ids


def render_preferences(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Preferences) -> PreferredRows:
    """Each pair as the ids of two whole conversations.

    Without a template (`data.template=none`) the tokenizer must have none either: it is saved with the model, and what
    is judged is written by it.

    Raises:
        InputError: as `render`; two conversations of a pair that are the same after template and tokenizer, or that
            have no beginning in common; answers longer than `data.max_answer_tokens`.
    """
    rendered = render(rows, tokenizer, data)
    chat = uses_template(rows, tokenizer, data)
    assert chat == bool(tokenizer.chat_template)
    if not chat and (messages := [i for i, row in enumerate(rows.rows) if not isinstance(row[data.chosen], str)]):
        raise InputError(f"{rows.name}: {rows.places(messages)}: chat messages need a chat template, and there is none")
    pairs = {p.row: _pair(rows, p, tokenizer, data) for p in rendered.prompts}
    if same := [i for i, pair in pairs.items() if np.array_equal(pair.chosen, pair.rejected)]:
        raise InputError(
            f"{rows.name}: {rows.places(same)}: chosen and rejected are the same after the chat template and the tokenizer: the template has no turn "
            "of the assistant, or leaves out what they differ in"
        )
    for column in (data.chosen, data.rejected) if chat else ():
        require_kept(rows, {i: _written(rows, i, column, tokenizer, data) for i in pairs}, "answer")
    if apart := [i for i, pair in pairs.items() if pair.chosen[0] != pair.rejected[0]]:
        raise InputError(
            f"{rows.name}: {rows.places(apart)}: the chat template begins with the answer, so the two conversations have nothing in common"
        )
    longest = {i: max(len(p.chosen), len(p.rejected)) - len(p.prompt.token_ids) for i, p in pairs.items()}
    notes = too_long(rows, [longest.get(i, 0) for i in range(len(rows))], data, what="answers", key="max_answer_tokens")
    kept = tuple(pair for i, pair in pairs.items() if longest[i] <= data.max_answer_tokens)
    if not kept:
        raise InputError(f"{rows.name}: no row is left: each has a prompt or an answer that is too long")
    return PreferredRows(kept, (*rendered.notes, *notes))


def _pair(rows: Rows, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, data: Preferences) -> Preferred:
    row = rows.rows[prompt.row]
    with at_row(rows, prompt.row):
        chosen, rejected = (
            np.asarray(judged_ids(tokenizer, row[data.prompt], row[column], data.system), dtype=np.int64)
            for column in (data.chosen, data.rejected)
        )
    return Preferred(prompt, chosen, rejected, 0.0 if data.margin is None else float(row[data.margin]))


def _written(
    rows: Rows, index: int, column: str, tokenizer: PreTrainedTokenizerBase, data: Preferences
) -> tuple[object, str]:
    """An answer's last turn, and the whole text that it stands in."""
    row = rows.rows[index]
    answer = row[column]
    text = judged_text(tokenizer, row[data.prompt], answer, data.system)
    return (answer if isinstance(answer, str) else answer[-1]["content"]), text
