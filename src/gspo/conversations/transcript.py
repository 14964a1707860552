"""A conversation as ids: what stands between two turns, without ever tokenising again what the policy wrote.

In: the prompt, the ids of the turns, the messages that followed them. Out: which tokens stay, and the ids of what comes
before the next turn. `partner.py` calls it.

The template is asked for the whole conversation twice: with marks in the place of the turns, which shows what it writes
around them, and with the turns themselves, which shows what it has made of them. A turn that it left as it is keeps the
ids that were sampled; only what is around it is tokenised. Where it has rewritten one (thoughts left out of all but the
last turn, say), the conversation goes on from a branch: what stands before the change is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.errors import InputError
from gspo.tasks.template import by_template
from gspo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
_MARK = "turn{}ofgspo"


class UnspeakableError(Exception):
    """The chat template cannot go on with a conversation; the message says why, and what to do."""


@dataclass(frozen=True)
class Voice:
    """How messages become text."""

    tokenizer: PreTrainedTokenizerBase
    template: bool
    """By the chat template; else messages are the text that they hold, put end to end."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas, for a template that has a place for them."""
    rewrites: bool = True
    """What the template makes of earlier turns is what the model sees; else earlier turns stay as they were written."""

    def text(self, messages: Messages) -> str:
        """All messages, up to where the assistant begins. Raises UnspeakableError."""
        keys: dict[str, Any] = {"tools": list(self.tools)} if self.tools else {}
        try:
            return by_template(self.tokenizer, messages, add_generation_prompt=True, **keys)
        except InputError as error:
            raise UnspeakableError(str(error)) from error

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def ids_after(self, last: int, text: str) -> list[int]:
        """The ids of `text` as it stands behind a token: some tokenizers write a space before what begins a text."""
        before = self.written([last])
        joint = self.ids(before + text)
        return joint[1:] if joint[:1] == [last] else self.ids(text)

    def written(self, ids: Sequence[int] | np.ndarray) -> str:
        """What ids stand for, special tokens too."""
        return str(self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))


@dataclass
class _Turn:
    ids: np.ndarray
    body: str
    """What the policy wrote before its stop token."""
    stop: str
    """Its stop token."""
    said: tuple[Mapping[str, str], ...] = ()
    """What followed."""


@dataclass
class Transcript:
    """One conversation."""

    prompt: Prompt
    voice: Voice
    _turns: list[_Turn] = field(default_factory=list)
    _line: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """What stands after the prompt."""

    @property
    def line(self) -> np.ndarray:
        """All that stands after the prompt."""
        return self._line

    def wrote(self, ids: np.ndarray) -> None:
        """The policy's turn, its stop token last."""
        self._turns.append(_Turn(ids, self.voice.written(ids[:-1]), self.voice.written(ids[-1:])))
        self._line = np.concatenate([self._line, ids])

    def heard(self, messages: Messages) -> tuple[int, np.ndarray]:
        """What is said to it: the tokens after the prompt that stay, and those that come after them.

        Raises UnspeakableError.
        """
        self._turns[-1].said = tuple(messages)
        if not self.voice.template:
            text = "".join(message["content"] for message in messages)
            line = [*self._line, *self.voice.ids_after(int(self._line[-1]), text)]
        elif self.voice.rewrites:
            line = self._as_written()
        else:
            line = [*self._line, *self._after(self._turns[-1], self._around()[-1])]
        new = np.array(line, dtype=np.int64)
        same = min(len(new), len(self._line))
        differ = np.flatnonzero(new[:same] != self._line[:same])
        keep = int(differ[0]) if len(differ) else same
        if keep == len(new):
            raise UnspeakableError("the chat template writes nothing between two turns")
        self._line = new
        return keep, new[keep:]

    def _messages(self, contents: Sequence[str]) -> list[Mapping[str, str]]:
        found = list(self.prompt.messages)
        for turn, content in zip(self._turns, contents, strict=True):
            found += [{"role": "assistant", "content": content}, *turn.said]
        return found

    def _around(self) -> list[str]:
        """What the template writes before the first turn, between the turns, and after the last."""
        marks = [_MARK.format(i) for i in range(len(self._turns))]
        rest = self.voice.text(self._messages(marks))
        parts = []
        for i, mark in enumerate(marks):
            part, found, rest = rest.partition(mark)
            if not found:
                raise UnspeakableError(
                    f"the chat template leaves turn {i + 1} of {len(marks)} out of the conversation: set conversation.history=verbatim, "
                    "or use a template that keeps the turns"
                )
            parts.append(part)
        return [*parts, rest]

    def _as_written(self) -> list[int]:
        """The ids behind the prompt of the whole conversation as the template writes it."""
        before, *after = self._around()
        opening = self._opening(before)
        bodies = self._bodies(opening, before, after)
        if not bodies[0].startswith(opening):
            raise UnspeakableError(
                f"the chat template begins an answer with {opening!r} and leaves that out of earlier turns: the prompt itself would "
                "change. Set conversation.history=verbatim"
            )
        opened = [body.startswith(opening) for body in bodies]
        line: list[int] = []
        for i, (turn, body, between) in enumerate(zip(self._turns, bodies, after, strict=True)):
            # The opening of the next turn stands before it, as the model saw it when it wrote that turn.
            text = between + (opening if i + 1 < len(bodies) and opened[i + 1] else "")
            written = body.removeprefix(opening)
            if opened[i] and _bare(written) == _bare(turn.body):
                line += [*turn.ids.tolist(), *self._after(turn, text)]
            else:
                line += self.voice.ids(written + text)
        return line

    def _bodies(self, opening: str, before: str, after: Sequence[str]) -> list[str]:
        """What the template makes of each turn, by what it writes around it."""
        rest = self.voice.text(self._messages([opening + turn.body for turn in self._turns]))
        if not rest.startswith(before):
            raise UnspeakableError(
                "the chat template begins a conversation in more ways than one: set conversation.history=verbatim"
            )
        rest = rest.removeprefix(before)
        bodies = []
        for i, (turn, between) in enumerate(zip(self._turns, after, strict=True)):
            whole = opening + turn.body
            last = i + 1 == len(after)
            body = whole if rest.startswith(whole + between) else rest[: _end(rest, between, last=last)]
            bodies.append(body)
            rest = rest[len(body) + len(between) :]
        return bodies

    def _opening(self, before: str) -> str:
        """What the template writes for the model at the beginning of an answer, `<think>` say."""
        if not self.prompt.text.startswith(before):
            raise UnspeakableError(
                f"the chat template rewrites the prompt once the conversation goes on: it reads …{before[-60:]!r} and read "
                f"…{self.prompt.text[-60:]!r}. Set conversation.history=verbatim"
            )
        return self.prompt.text.removeprefix(before)

    def _after(self, turn: _Turn, text: str) -> list[int]:
        """The ids of what the template writes after a turn, but for the stop token, which the policy has written."""
        return self.voice.ids_after(int(turn.ids[-1]), text.removeprefix(turn.stop))


def _end(rest: str, between: str, last: bool) -> int:
    """Where a turn ends, by what stands after it."""
    place = len(rest) - len(between) if last and rest.endswith(between) else rest.find(between)
    if place < 0:
        raise UnspeakableError(
            "what the chat template writes after a turn depends on the turn: set conversation.history=verbatim"
        )
    return place


def _bare(text: str) -> str:
    """Without white space, which templates set as they like."""
    return "".join(text.split())
