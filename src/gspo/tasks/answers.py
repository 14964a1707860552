"""Prompts with the answers that a model is to learn: read, checked, and as ids.

In: rows with a prompt and an answer column, or with conversations that the assistant ends. Out: `Answered`s: what is
trained on are their answer ids, which are known as such from the start and never looked for in a text. The stages call
it, all of it before a weight is read but for `ended`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.errors import InputError
from gspo.stage_config import Pairs
from gspo.tasks.data import Check, Rows, checked_column, checked_prompts, message_fault, unwritable
from gspo.tasks.render import Message, render, require_kept, templated, too_long, uses_template
from gspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Turn:
    """A run of tokens after the prompt."""

    ids: np.ndarray
    """[tokens] int64."""
    learned: np.ndarray
    """[tokens] bool: true where the assistant wrote the token."""
    parent: int | None
    """Index of the turn that this one continues; None: the prompt."""


@dataclass(frozen=True)
class Answered:
    """A prompt and an answer to it; of a conversation, what stands before the first turn that is learned, and the rest."""

    prompt: Prompt
    answer: str
    """The last turn's text."""
    turns: tuple[Turn, ...]
    """What follows the ids of the prompt: of an answer one turn, of a conversation those of both sides."""
    asked: Prompt
    """What the last turn answers: the prompt and all turns before it."""

    @property
    def tokens(self) -> int:
        """Of the prompt and all that follows it."""
        return len(self.prompt.token_ids) + sum(len(turn.ids) for turn in self.turns)

    @property
    def answer_ids(self) -> np.ndarray:
        """[tokens] int64 of all that is learned."""
        return np.concatenate([turn.ids[turn.learned] for turn in self.turns])


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
    """Conversations as the messages before the first turn that is learned, the last answer, and what is in between."""
    checked_column(found, column, "data.messages", partial(_conversation_fault, all_turns=data.turns == "all"))
    earlier = sum(any(m["role"] == "assistant" for m in row[column][:-1]) for row in found.rows)
    note = (
        f"{found.name}: {earlier} of {len(found)} conversations have earlier turns of the assistant: they are context, "
        "and the loss is on the last one (data.turns=last)"
    )
    rows = tuple(
        {**row, data.prompt: row[column][: _first(row[column], data)], data.answer: row[column][-1]["content"]}
        for row in found.rows
    )
    columns = tuple(dict.fromkeys((*found.columns, data.prompt, data.answer)))
    said = [note] if earlier and data.turns == "last" else []
    return replace(found, rows=rows, columns=columns, notes=(*found.notes, *said))


def _first(messages: list[Message], data: Pairs) -> int:
    """Index of the first turn that is learned. A greeting, with nothing before it, is context."""
    answers = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    return answers[-1 if data.turns == "last" else 0]


def _conversation_fault(messages: Any, *, all_turns: bool) -> str | None:
    if not isinstance(messages, list) or len(messages) < 2:
        return "a conversation is a list of at least two messages, a prompt and the assistant's answer"
    if fault := next(filter(None, map(message_fault, messages)), None):
        return fault
    if messages[-1]["role"] != "assistant":
        return "the conversation has no assistant's turn at its end"
    if not all_turns:
        return None
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        return "a turn of the assistant is empty"
    twice = any(a["role"] == b["role"] == "assistant" for a, b in pairwise(messages))
    return "two turns of the assistant follow each other" if twice else None


# ------------------------------------------------------------------------------ ids


def render_answers(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Pairs) -> AnsweredRows:
    """Prompts rendered as for a rollout, and the ids of what the assistant is to write after them.

    With a chat template, that is what the template puts after the prompt once the answer is there; without one, the
    answer. Both are tokenised apart from the prompt, as a model writes them: no token spans the two. So is every turn of
    a conversation.

    Raises:
        InputError: as `render`; a template that does not go on from the prompt to the answer, leaves it out, or writes a turn
            otherwise when others follow; answers longer than `data.max_answer_tokens`; an answer without tokens.
    """
    rendered = render(rows, tokenizer, data)
    chat = uses_template(rows, tokenizer, data)
    parts = {
        p.row: _parts(rows, p, tokenizer, data) if chat else [str(rows.rows[p.row][data.answer])]
        for p in rendered.prompts
    }
    ids = _tokenised(parts, tokenizer)
    if bare := [i for i, of in ids.items() if any(len(part) == 0 for part in of[::2])]:
        raise InputError(f"{rows.name}: {rows.places(bare)}: the tokenizer makes no tokens of this answer")
    lengths = [sum(map(len, ids.get(i, ()))) for i in range(len(rows))]
    notes = too_long(rows, lengths, data, what="answers", key="max_answer_tokens")
    answered = tuple(
        _answered(rows, p, parts[p.row], ids[p.row], data)
        for p in rendered.prompts
        if lengths[p.row] <= data.max_answer_tokens
    )
    if not answered:
        raise InputError(f"{rows.name}: no row is left: each has a prompt or an answer that is too long")
    return AnsweredRows(answered, (*rendered.notes, *notes))


def _tokenised(parts: dict[int, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[int, list[np.ndarray]]:
    """Every part on its own."""
    texts = [text for of in parts.values() for text in of]
    found = iter(
        tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)["input_ids"]
    )
    return {row: [np.asarray(next(found), dtype=np.int64) for _ in of] for row, of in parts.items()}


def _answered(rows: Rows, prompt: Prompt, parts: list[str], ids: list[np.ndarray], data: Pairs) -> Answered:
    """`parts` are in turn the assistant's and what stands between two of its turns."""
    turns = tuple(Turn(part, np.full(len(part), i % 2 == 0), None if i == 0 else i - 1) for i, part in enumerate(ids))
    row = rows.rows[prompt.row]
    asked = prompt
    if len(parts) > 1:
        text, before = prompt.text + "".join(parts[:-1]), np.concatenate([prompt.token_ids, *ids[:-1]])
        assert data.messages is not None
        asked = Prompt(prompt.row, text, before, {**row, data.prompt: row[data.messages][:-1]})
    return Answered(prompt, str(row[data.answer]), turns, asked)


def _parts(rows: Rows, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, data: Pairs) -> list[str]:
    """What the template puts after the prompt, turn by turn: in turn the assistant's, and what stands between two of them."""
    row = rows.rows[prompt.row]
    rest: list[Message] = [{"role": "assistant", "content": row[data.answer]}]
    if data.messages is not None:
        rest = list(row[data.messages][_first(row[data.messages], data) :])
    where = f"{rows.name}: {rows.place(prompt.row)}"
    parts: list[str] = []
    seen = prompt.text
    for k in [k for k, message in enumerate(rest) if message["role"] == "assistant"]:
        if k:
            asked = templated(rows, prompt.row, tokenizer, data, rest[:k])
            if not asked.startswith(seen):
                raise InputError(
                    f"{where}: the chat template writes a turn of the assistant otherwise when others follow it, so not every turn can be learned as it "
                    f"is written: alone it ends in …{seen[-80:]!r}. data.turns=last learns the last one"
                )
            parts.append(asked.removeprefix(seen))
            seen = asked
        whole = templated(rows, prompt.row, tokenizer, data, rest[: k + 1])
        if not whole.startswith(seen) or not whole.removeprefix(seen).strip():
            raise InputError(
                f"{where}: the chat template has no turn of the assistant that goes on from the prompt, so the answer cannot "
                f"be told from it: after the prompt …{seen[-40:]!r} the whole reads …{whole[-80:]!r}. Use data.template=none"
            )
        parts.append(whole.removeprefix(seen))
        require_kept(rows, {prompt.row: (rest[k]["content"], parts[-1])}, "answer")
        seen = whole
    return parts


def ended(
    answered: Sequence[Answered], stop_ids: Collection[int], end: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[Answered, ...]:
    """Each turn of the assistant learned up to and with its end token: the first of `stop_ids` that the template wrote, else
    `end`.

    Where other turns follow, the model sees what the template wrote and no more: an `end` that it did not write is
    learned from the turn's last token, and what comes next goes on from there too.

    Raises InputError for an answer that has an end token before its end.
    """
    return tuple(replace(each, turns=_ended(each, stop_ids, end, tokenizer)) for each in answered)


def _ended(each: Answered, stop_ids: Collection[int], end: int, tokenizer: PreTrainedTokenizerBase) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    before: int | None = None
    for i, turn in enumerate(each.turns):
        last = i == len(each.turns) - 1
        ids, learned = turn.ids, turn.learned
        stop = _stop(each, turn, stop_ids, tokenizer) if learned.any() else None
        if learned.any() and stop is None and last:
            ids, learned = np.append(ids, end), np.append(learned, True)
        if stop is not None:
            learned = np.arange(len(ids)) <= stop
            ids, learned = (ids[: stop + 1], learned[: stop + 1]) if last else (ids, learned)
        turns.append(Turn(ids, learned, before))
        before = len(turns) - 1
        if turn.learned.any() and stop is None and not last:
            turns.append(Turn(np.array([end]), np.array([True]), before))
    return tuple(turns)


def _stop(each: Answered, turn: Turn, stop_ids: Collection[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Place of the turn's end token, if the template wrote one."""
    stops = np.flatnonzero(np.isin(turn.ids, list(stop_ids)))
    if len(stops) == 0:
        return None
    first = int(stops[0])
    after = str(tokenizer.decode(turn.ids[first + 1 :], skip_special_tokens=True))
    if first == 0 or after.strip():
        raise InputError(
            f"row {each.prompt.row}: the answer has the end token {tokenizer.decode([int(turn.ids[first])])!r} before its end: "
            "take it out of the text"
        )
    return first
