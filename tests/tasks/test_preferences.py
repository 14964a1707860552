"""The built-in preferences: made by a rule that can be asked, of answers that depend on their row alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import InputError
from gspo.rewards.rules import matching
from gspo.tasks.preferences import Preferences, parse, shared_places
from gspo.tasks.sort import LETTERS


@settings(deadline=None, max_examples=20)
@given(n=st.integers(3, 12), side=st.sampled_from(["train", "held_out"]))
def test_the_rule_prefers_the_chosen_answer(n, side):
    for row in Preferences(n).rows(side, limit=20)[0]:
        letters = row["prompt"].removesuffix("=")
        assert len(letters) == n
        assert row["answer"] == "".join(sorted(letters)) + ";"
        better, worse = (matching(row[key], answer=row["answer"]) for key in ("chosen", "rejected"))
        assert better > worse
        assert row["gap"] == better - worse
        assert all(row[key].endswith(";") and set(row[key][:-1]) <= set(LETTERS) for key in ("chosen", "demonstration"))


@pytest.mark.parametrize(
    ("text", "right", "share"),
    [
        ("abc;", "abc;", 1.0),
        ("acb;", "abc;", 0.5),
        ("abbc;", "abc;", 0.4),
        ("", "abc;", 0.0),
        ("abc;abc;", "abc;", 0.5),
    ],
)
def test_the_rule_counts_places_of_the_longer_text(text, right, share):
    assert shared_places(text, right) == shared_places(right, text) == pytest.approx(share)


def test_rows_depend_on_the_task_and_their_number_alone_and_no_prompt_is_on_both_sides():
    rows, notes = Preferences(3).rows("train", limit=None)
    assert rows[:50] == Preferences(3).rows("train", limit=50)[0]
    assert "4096 of 6000 train prompts; data.limit" in notes[0]
    test, _ = Preferences(3).rows("held_out", limit=2000)
    assert len(test) == 2000 == len({row["prompt"] for row in test})
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in test}
    # frozen: another order or other slips would make other runs of the same words
    assert [rows[0][key] for key in ("prompt", "demonstration", "chosen", "rejected")] == FIRST


FIRST = ["ikr=", "ikr;", "kkr;", "ijj;"]


def test_demonstrations_are_of_all_qualities():
    rows, _ = Preferences(5).rows("train", limit=2000)
    seen = Counter(round(matching(row["demonstration"], answer=row["answer"]), 1) for row in rows)
    assert 0.2 < seen[1.0] / 2000 < 0.4
    assert min(seen) < 0.3


@pytest.mark.parametrize("words", ["x", "2", "13", "5-6"])
def test_other_words_are_refused(words):
    with pytest.raises(InputError, match="preferences:N"):
        parse(words)
