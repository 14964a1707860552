"""The built-in task: right sums, and a split that no seed and no limit can move."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import InputError
from gspo.tasks.addition import Addition, _pair, parse
from gspo.tasks.builtin import find


def pairs(rows):
    return [(row["a"], row["b"]) for row in rows]


@settings(deadline=None, max_examples=60)
@given(low=st.integers(-30, 30), width=st.integers(2, 25), share=st.floats(0.01, 0.99))
def test_split_covers_all_pairs_once_and_keeps_mirrors_together(low, width, share):
    task = Addition(low=low, high=low + width - 1, held_out=share)
    train, held_out = (pairs(task.rows(side, limit=10**6)[0]) for side in ("train", "held_out"))
    operands = range(low, low + width)
    assert sorted(train + held_out) == [(a, b) for a in operands for b in operands]
    assert train
    assert held_out
    assert {tuple(sorted(pair)) for pair in train}.isdisjoint(tuple(sorted(pair)) for pair in held_out)
    unordered = width * (width + 1) // 2
    assert abs(len({tuple(sorted(pair)) for pair in held_out}) - share * unordered) <= 1


def test_rows_are_sums():
    rows, _ = parse("").rows("train", limit=None)
    first = rows[0]
    assert first == {
        "prompt": f"What is {first['a']} + {first['b']}? Answer with just the number.",
        "answer": str(first["a"] + first["b"]),
        "a": first["a"],
        "b": first["b"],
    }
    assert all(int(row["answer"]) == row["a"] + row["b"] for row in rows)


def test_the_split_is_pinned():
    # A split that moved between versions would train on what an older run held out.
    rows, notes = Addition(low=1, high=4, held_out=0.3).rows("held_out", limit=None)
    assert pairs(rows) == [(2, 4), (4, 2), (4, 4), (2, 3), (3, 2)]
    assert notes == ()


def test_large_ranges_are_sampled_without_building_them():
    task = Addition(low=10, high=10**9)
    train, notes = task.rows("train", limit=None)
    held_out, _ = task.rows("held_out", limit=None)
    assert (len(train), len(held_out)) == (4096, 512)
    assert len(set(pairs(train)) | set(pairs(held_out))) == 4608
    assert all(10 <= operand <= 10**9 for pair in pairs(train) for operand in pair)
    assert "4096" in notes[0]
    mean = sum(a for a, _ in pairs(train)) / 4096
    assert 0.47e9 < mean < 0.53e9


def test_a_limit_is_a_prefix():
    task = Addition(low=10, high=999)
    assert task.rows("train", limit=7) == (task.rows("train", limit=None)[0][:7], ())


@given(index=st.integers(0, 10**30))
def test_pair_and_its_index_are_inverse(index):
    a, b = _pair(index)
    assert 0 <= a <= b
    assert b * (b + 1) // 2 + a == index


def test_the_range_is_written_in_the_source():
    assert parse("") == Addition(1, 20)
    assert parse("10-99") == Addition(10, 99)
    assert parse("-9--3") == Addition(-9, -3)


@pytest.mark.parametrize(
    ("arguments", "part"), [("5-4", "larger than"), ("3-3", "widen"), ("9", "LOW-HIGH"), ("1-9 ", "LOW-HIGH")]
)
def test_other_words_are_refused_with_what_is_allowed(arguments, part):
    with pytest.raises(InputError, match=part):
        parse(arguments)


def test_a_range_of_any_size_is_drawn_from():
    for side in ("train", "held_out"):
        rows, (note,) = parse("0-99999999999").rows(side, limit=None)
        assert all(int(row["answer"]) == row["a"] + row["b"] for row in rows)
        assert len({row["prompt"] for row in rows}) == len(rows)
        assert "of about" in note


@pytest.mark.parametrize(
    "task", ["addition:0-" + "9" * 19, "addition:0-" + "9" * 5000, "sort:" + "9" * 5000, "preferences:" + "9" * 5000]
)
def test_numbers_without_end_are_refused(task):
    with pytest.raises(InputError, match="the task is written"):
        find(task)
