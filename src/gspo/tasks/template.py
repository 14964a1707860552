"""The chat template, at work: messages to text, and whether the text has what was said.

In: a tokenizer with a chat template, messages. Out: text, or an InputError in the template's words. Prompts (`render`),
answers, pairs, conversations and the checks before a run all come here: a template is a program of the model's author.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SWITCHES = re.compile(r"</?think>|/no_think|/think|\s")
"""What templates add, trim or take as a command; it says nothing of whether a content is there."""
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def by_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **keys: Any) -> str:
    """The messages as the chat template writes them. `keys`: what it is given beside them.

    Raises InputError for whatever goes wrong in the template, with its words; where that was, the caller knows.
    """
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **keys))
    except Exception as error:  # a template can fail in any way that an expression of Python can
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(f"the chat template refuses its messages ({roles}): {said}") from error


def leaves_out(content: object, text: str) -> bool:
    """Whether a message's content does not stand in a text that a template wrote of it.

    Blanks, capitals, thoughts and the switches for them are free, and so is writing it as JSON. What is no text is not
    looked for.
    """
    if not isinstance(content, str):
        return False
    forms = (
        content,
        content.rpartition("</think>")[2],
        _THOUGHT.sub("", content),
        json.dumps(content, ensure_ascii=False)[1:-1],
    )
    there = _bare(text)
    return all(_bare(form) not in there for form in forms)


def _bare(text: str) -> str:
    return _SWITCHES.sub("", text).casefold()
