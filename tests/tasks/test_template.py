"""What a chat template may make of a content, and what is no longer that content."""

from __future__ import annotations

import pytest

from gspo.tasks.template import leaves_out


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("  what is\n2 + 2? \n", "<user>what is 2 + 2?<bot>"),
        ("<think>two and two</think>\n\nfour", "<bot>four<end>"),
        ("<think>two and two</think>four", "<bot><think>\n\ntwo and two\n</think>\n\nfour<end>"),
        ("two and two</think>four", "<bot><think>two and two</think>four"),
        ("<think>all of it</think>", "<bot>"),
        ("what is 2? /no_think", "<user>what is 2?<bot><think></think>"),
        ("say <think> first", "begin with <think> <user>say <think> first</think>"),
        ('say "no"\nloudly', '{"user": "say \\"no\\"\\nloudly"}'),
        ("Which?", "USER: WHICH?"),
        (None, ""),
        ([{"type": "text", "text": "a"}], ""),
    ],
)
def test_what_sane_templates_do_leaves_nothing_out(content: object, text: str) -> None:
    assert not leaves_out(content, text)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("which one", "hello a: "),
        ("which one", "user: w"),
        ("which one", "user: which on"),
        ("<think>why</think>four", "<think>why</think>f"),
    ],
)
def test_a_content_that_is_cut_or_dropped_is_missed(content: str, text: str) -> None:
    assert leaves_out(content, text)
