"""The built-in task: traces that really sort, in random order; rows that depend on the task and their number alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo import config
from gspo.errors import InputError
from gspo.models.load import load_tokenizer
from gspo.rewards.call import Call, Item
from gspo.rewards.load import load
from gspo.rewards.ready import Around
from gspo.rewards.rules import sorted_list
from gspo.tasks.data import Rows, read_rows
from gspo.tasks.sort import LETTERS, Sort, parse


def letters(row):
    return row["prompt"].removesuffix("=")


def check_trace(row):
    """Every step inserts one letter of the prompt into the sorted list before it; all letters are used."""
    before, taken = "", []
    assert row["answer"].endswith(";")
    for step in row["answer"][:-1].split(";"):
        letter, after = step.split(":")
        assert after == "".join(sorted(before + letter))
        before = after
        taken.append(letter)
    assert Counter(taken) == Counter(letters(row))
    return taken


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 12), side=st.sampled_from(["train", "held_out"]))
def test_answers_are_insertion_sorts_of_their_prompts(n, side):
    for row in Sort((n,)).rows(side, limit=20)[0]:
        assert len(letters(row)) == n
        assert set(letters(row)) <= set(LETTERS)
        check_trace(row)


def test_letters_are_taken_in_every_order():
    rows, _ = Sort((3,)).rows("train", limit=2000)
    distinct = [row for row in rows if len(set(letters(row))) == 3]
    orders = Counter(tuple(letters(row).index(letter) for letter in check_trace(row)) for row in distinct)
    assert len(orders) == 6
    expected = len(distinct) / 6
    assert all(abs(count - expected) < 5 * expected**0.5 for count in orders.values())


def test_symbols_are_equally_frequent():
    rows, _ = Sort((8,)).rows("train", limit=2000)
    seen = Counter("".join(letters(row) for row in rows))
    assert all(abs(seen[letter] - 800) < 5 * 800**0.5 for letter in LETTERS)


def test_the_split_covers_all_prompts_once():
    task = Sort((2,))
    train, held_out = ([row["prompt"] for row in task.rows(side, limit=10**6)[0]] for side in ("train", "held_out"))
    assert len(train) + len(held_out) == len({*train, *held_out}) == 400
    assert len(held_out) == 100


def test_rows_are_pinned_and_a_limit_is_a_prefix():
    # A row that moved between versions would train on what an older run held out.
    rows, notes = Sort((8,)).rows("held_out", limit=None)
    assert rows[0] == PINNED
    assert len(rows) == 512
    assert notes == ("sort:8: 512 of 6400000000 held-out prompts; eval.limit sets how many",)
    assert Sort((8,)).rows("held_out", limit=5) == (rows[:5], ())


PINNED = {"prompt": "rhnobqdd=", "answer": "h:h;n:hn;b:bhn;d:bdhn;o:bdhno;r:bdhnor;q:bdhnoqr;d:bddhnoqr;"}


def test_lengths_come_in_turn_and_each_prompt_once():
    rows, _ = parse("1,3,3").rows("train", limit=9)
    assert [len(letters(row)) for row in rows] == [1, 3, 3] * 3
    longer = [row for row in rows if len(letters(row)) == 3]
    assert longer == Sort((3,)).rows("train", limit=6)[0], "the same rows as of that length alone"
    all_rows, _ = parse("1,3,3").rows("train", limit=10**6)
    assert len(all_rows) == 45, "the rows end with the 15 prompts of one letter"


@pytest.mark.parametrize("arguments", ["x", "0", "8,", "8-9", "41", "8, 9"])
def test_other_words_are_refused_with_what_is_allowed(arguments):
    with pytest.raises(InputError, match=r"sort:N, with 1 to 40 letters.*sort:5,8,10"):
        parse(arguments)


@pytest.mark.parametrize(("n", "tokens"), [(5, 31), (8, 61), (10, 86)])
def test_one_character_is_one_token(n, tokens):
    tokenizer = load_tokenizer(config.Model(name="tiny-dense-untrained"))
    row = Sort((n,)).rows("train", limit=1)[0][0]
    assert len(tokenizer(row["prompt"])["input_ids"]) == n + 1
    assert len(tokenizer(row["answer"])["input_ids"]) + 1 == tokens
    assert tokenizer.decode(tokenizer(row["answer"])["input_ids"]) == row["answer"]


ANSWER = "b:b;a:ab;"


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (ANSWER, 1.0),
        ("a:a;b:ab;", 1.0),
        (":ab;", 1.0),  # what comes before is not looked at
        ("x:zz;b:ab; \n", 1.0),
        ("b:b;a:ba;", 0.0),
        ("b:b;a:ab", 0.0),
        ("b:b;a:ab;b", 0.0),
        ("b:b;a:ab;;", 0.0),
        ("ab;", 0.0),
        ("", 0.0),
        (":;", 0.0),
    ],
)
def test_the_rule_judges_the_last_list_alone(completion, right):
    assert sorted_list(completion, answer=ANSWER) == right


def test_the_rule_is_found_by_name_and_wants_a_list():
    def sorted_of(source: str) -> tuple[Rows, Call | None]:
        rows = read_rows(config.Data(source=source))
        (found,) = load([config.RewardRule(function="sorted")], Around(rows, "prompt", None, 31, config.Judging()))
        return rows, found.ready.call

    rows, call = sorted_of("sort:4")
    assert call is not None
    judged = [call(Item((row["answer"],), (1,), rows.rows[0], "")) for row in rows.rows[:2]]
    assert judged == [(1.0,), (0.0,)]
    with pytest.raises(InputError, match="must be text that ends with"):
        sorted_of("addition")
