"""Ids of conversations: what was sampled stays as it was, what is put between turns is what the template writes there."""

from __future__ import annotations

import numpy as np
import pytest
from voices import (
    CHATML,
    END,
    HERMES,
    LAST_ONLY,
    OPENING,
    OPENING_THOUGHTLESS,
    STRICT,
    THOUGHTLESS,
    voice,
)

from gspo.conversations.sources import rehearse
from gspo.conversations.transcript import Transcript, UnspeakableError, Voice
from gspo.errors import InputError
from gspo.types import Prompt


def begun(found: Voice, question: str = "hello") -> Transcript:
    messages = ({"role": "user", "content": question},)
    text = found.text(messages) if found.template else question
    return Transcript(Prompt(0, text, np.array(found.ids(text)), {}, messages), found)


def say(talk: Transcript, text: str, stop: str = END) -> list[int]:
    """The policy writes `text`, one token a byte: `a` and `b` apart, which a tokenizer would write as `ab`."""
    one = [i for c in text for i in talk.voice.ids(c)]
    ids = [*one, *talk.voice.ids(stop)]
    talk.wrote(np.array(ids))
    return ids


def hear(talk: Transcript, text: str, role: str = "user") -> tuple[int, str]:
    keep, ids = talk.heard([{"role": role, "content": text}])
    return keep, talk.voice.written(ids)


def whole(talk: Transcript) -> str:
    return talk.prompt.text + talk.voice.written(talk.line)


def test_sampled_ids_are_never_tokenised_again() -> None:
    """P26: ids [a, b] decode to text that encodes to [ab]."""
    talk = begun(voice(CHATML))
    first = say(talk, "cab")
    assert talk.voice.ids("cab") != first[:-1]
    keep, added = hear(talk, "abc")
    assert (keep, added) == (len(first), "\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n")
    second = say(talk, "ab")
    hear(talk, "more")
    line = talk.line.tolist()
    assert line[: len(first)] == first
    at = len(first) + len(talk.voice.ids(added))
    assert line[at : at + len(second)] == second
    assert whole(talk) == talk.voice.text(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "cab"},
            {"role": "user", "content": "abc"},
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "more"},
        ]
    )


def test_a_turn_that_ended_by_another_stop_token_stays_and_is_closed() -> None:
    talk = begun(voice(CHATML))
    say(talk, "hi", stop="<|endoftext|>")
    _, added = hear(talk, "x")
    assert added.startswith("<|im_end|>\n<|im_start|>user")


def test_white_space_that_a_template_trims_is_no_rewriting() -> None:
    trimming = CHATML.replace("m['content'] +", "(m['content'] | trim) +")
    talk = begun(voice(trimming))
    first = say(talk, " hi \n")
    assert hear(talk, "x")[0] == len(first)
    assert talk.line.tolist()[: len(first)] == first


def test_thoughts_that_are_left_out_make_a_branch() -> None:
    """P26: two turns with ids [5, 6, 7] and [8, 9]; the template keeps thoughts in the last turn alone."""
    talk = begun(voice(THOUGHTLESS))
    say(talk, "<think>ab</think>4")
    keep, added = hear(talk, "no")
    assert (keep, added) == (0, "4<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")
    say(talk, "ab")  # without thoughts: nothing to rewrite
    before = len(talk.line)
    keep, added = hear(talk, "yes")
    assert keep == before
    assert whole(talk).count("ab") == 1
    third = say(talk, "<think>c</think>ab")
    keep, _ = hear(talk, "so?")
    assert keep == before + len(talk.voice.ids(added)), "what comes before the third turn is shared"
    assert talk.line.tolist()[:keep] + third != talk.line.tolist()
    assert "<think>" not in whole(talk)


def test_verbatim_keeps_what_was_written() -> None:
    for template in (THOUGHTLESS, OPENING_THOUGHTLESS):
        talk = begun(voice(template, rewrites=False))
        first = say(talk, "<think>ab</think>4")
        keep, added = hear(talk, "no")
        assert keep == len(first)
        assert added.startswith("\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")


def test_a_think_tag_that_the_template_opens_belongs_to_the_prompt() -> None:
    talk = begun(voice(OPENING))
    assert talk.prompt.text.endswith("<think>")
    first = say(talk, "ab</think>4")
    keep, added = hear(talk, "no")
    assert keep == len(first)
    assert added.endswith("assistant\n<think>")
    second = say(talk, "c</think>5")
    assert hear(talk, "so?")[0] == len(first) + len(talk.voice.ids(added)) + len(second)
    assert whole(talk).count("<think>") == 3


def test_without_a_template_messages_are_put_end_to_end() -> None:
    talk = begun(voice(None), "1+1=")
    first = say(talk, "ab")
    assert hear(talk, " no;") == (len(first), " no;")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (OPENING_THOUGHTLESS, "begins an answer with '<think>' and leaves that out"),
        (LAST_ONLY, "leaves turn 1 of 1 out"),
    ],
)
def test_templates_that_cannot_be_followed_are_refused_at_the_start_with_a_remedy(template: str, part: str) -> None:
    found = voice(template)
    with pytest.raises(InputError, match=part) as caught:
        rehearse(found, begun(found).prompt)
    assert "conversation.history=verbatim" in str(caught.value)


def test_the_start_names_a_template_that_rewrites_and_no_other() -> None:
    for template in (CHATML, HERMES, OPENING, None):
        found = voice(template)
        assert rehearse(found, begun(found).prompt) is None
    found = voice(THOUGHTLESS)
    assert "rewrites earlier turns" in str(rehearse(found, begun(found).prompt))


def test_a_role_that_the_template_refuses_is_told() -> None:
    talk = begun(voice(STRICT))
    say(talk, "hi")
    with pytest.raises(UnspeakableError, match="no tools here"):
        hear(talk, "x", role="tool")
