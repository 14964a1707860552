"""Rules that need no library: pure functions of an answer's text, or of its length.

In: a completion and what the right answer is. Out: a number; never an exception, whatever the text, in time linear
in its length, but for patterns of the user's, which are bounded by nothing. `ready.py` lists them by name.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from gspo.tasks.preferences import shared_places


def exact(completion: str, *, answer: Any) -> float:
    """1 if the completion is the answer, white space around either left out."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, *, answer: Any) -> float:
    """1 if the last number in the completion equals the answer as a number: `1,234` is 1234, `3.0` is 3.

    See `last_number` for what counts as a number.
    """
    gold = as_number(answer)
    return float(gold is not None and last_number(completion) == gold)


def boxed(completion: str, *, answer: Any) -> float:
    r"""1 if the last `\boxed{...}` holds the answer: as a number if both are numbers, else as text.

    White space and `$` are left out. An answer that has a `\boxed{...}` itself, as a worked solution, means its content.
    """
    found, gold = last_boxed(completion), gold_of_box(answer)
    if found is None:
        return 0.0
    numbers = as_number(found), as_number(gold)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return float(bare(found) == bare(gold))


def regex(completion: str, *, pattern: str) -> float:
    """1 if the pattern occurs in the completion."""
    return float(re.search(pattern, completion) is not None)


def format(completion: str, *, pattern: str | None = None, rendered_prompt: str = "") -> float:
    """1 if the whole completion matches the pattern; without one: `<think>...</think>`, then an answer.

    Many chat templates end the prompt with an open `<think>`, which the completion then does not repeat
    (huggingface/trl#6966): the rule does not ask for it again, but takes it.
    """
    opened = rendered_prompt.rstrip().endswith("<think>")
    if pattern is None:
        return float(_is_thought_then_answer(completion, opened=opened))
    candidates = (
        [completion, rendered_prompt[rendered_prompt.rindex("<think>") :] + completion] if opened else [completion]
    )
    return float(any(re.fullmatch(pattern, text) for text in candidates))


def _is_thought_then_answer(completion: str, *, opened: bool) -> bool:
    text = completion.strip()
    if not opened and not text.startswith("<think>"):
        return False
    thought, closed, answer = text.removeprefix("<think>").partition("</think>")
    tags = "<think>" in thought or "<think>" in answer or "</think>" in answer
    return bool(closed and answer.strip() and not tags)


def sorted_list(completion: str, *, answer: Any) -> float:
    """1 if the completion ends with the list that the answer ends with, as the task `sort` writes it: `...:abc;`.

    What comes before the last list is not looked at.
    """
    found = last_list(completion)
    return float(found is not None and found == last_list(str(answer)))


def last_list(text: str) -> str | None:
    """The list that the text ends with, between its last `:` and the `;` at its end, or None."""
    _, colon, found = text.strip().rpartition(":")
    return found[:-1] if colon and found.endswith(";") and ";" not in found[:-1] else None


def matching(completion: str, *, answer: Any) -> float:
    """Share of the places that hold the right character, of the places of the longer text: 1 for the answer itself."""
    return shared_places(completion, str(answer))


def overlong(completion: str, *, completion_tokens: int, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then falling in a line to -1 at `limit`.

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13); the stop token counts.
    """
    return -min(1.0, max(0, completion_tokens - (limit - buffer)) / buffer)


def repetition(completion: str, *, length: int) -> float:
    """Minus the share of runs of `length` words that occurred before: 0 for a text without any, towards -1 for one word for ever.

    The penalty of Yeo et al., arXiv 2502.03373, as open-r1 scales it: 1 - distinct / all.
    """
    words = completion.lower().split()
    runs = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


# ------------------------------------------------------------------------------ numbers

_RUN = re.compile(r"[0-9.,]+(?:[eE][-+]?[0-9]+)?")
_WHOLE = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z0-9_]")


def environment(completion: str, *, earned: float | None) -> float | None:
    """What the environment gave for the conversation."""
    return earned


def as_number(answer: Any) -> Decimal | None:
    """The number that the whole of `answer` is (int, float, or text such as `-1,234.50` or `$7$`), or None."""
    if isinstance(answer, int):
        return None if isinstance(answer, bool) else Decimal(answer)
    text = str(answer).replace("$", "").strip().replace("−", "-").removesuffix(".")
    return _decimal(text[1:] if text[:1] in ("-", "+") else text, negative=text.startswith("-"))


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None.

    Digits with an optional sign, thousands separators, decimals and exponent. A full stop or comma at the end is
    not part of it; `1,2,3` is a list, whose last number is 3. A minus is a sign unless something stands before it that it
    could be subtracted from (`5-3` ends with 3). Digits that follow a letter or underscore are part of a word (`x2`,
    `GPT4`, `v1.5`); a unit may follow (`7km`). A version (`1.2.3`) is no number, and of a fraction (`1/2`) only the
    last number is read.
    """
    for run in reversed(list(_RUN.finditer(text))):
        found = _from_run(text, run.start(), run.group())
        if found is not None:
            return found
    return None


def _from_run(text: str, start: int, run: str) -> Decimal | None:
    digits = run.rstrip(".,")
    body = digits.lstrip(".,")
    punctuation = digits[: len(digits) - len(body)]
    in_word = _WORD.match(text[start - 1 : start]) is not None
    if punctuation == "." and not in_word:
        body, punctuation = digits, ""
    if in_word and not punctuation:
        return None
    negative = not punctuation and _negative(text, start)
    whole = _decimal(body, negative=negative)
    return whole if whole is not None else _decimal(body.rpartition(",")[2], negative=False)


def _negative(text: str, start: int) -> bool:
    before = text[max(start - 3, 0) : start].removesuffix("$").replace("−", "-")
    left = before[-2:-1]
    return before.endswith("-") and not (left and (_WORD.match(left) or left in ")]}.-"))


def _decimal(text: str, *, negative: bool) -> Decimal | None:
    if not _WHOLE.fullmatch(text):
        return None
    try:
        value = Decimal(text.replace(",", ""))
    except InvalidOperation:  # an exponent of more than 18 digits
        return None
    return value.copy_negate() if negative else value


# ------------------------------------------------------------------------------ boxes

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{...}` with balanced braces that opens last, or None."""
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []
    for brace in _BRACES.finditer(text):
        if brace.group()[-1] == "{" and brace.group() != r"\{":
            open_braces.append((brace.end(), len(brace.group()) > 1))
        elif brace.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = start, brace.start()
    return text[last[0] : last[1]] if last else None


def gold_of_box(answer: Any) -> str:
    r"""What an answer means: the content of its box if it has one."""
    content = last_boxed(str(answer))
    return str(answer) if content is None else content


def bare(text: str) -> str:
    """Without white space and `$`."""
    return "".join(text.split()).replace("$", "")
