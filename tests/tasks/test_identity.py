"""The sum of a run's data: it changes with every column, and with nothing else."""

import os
import subprocess
import sys
from datetime import datetime

import numpy as np
import pytest

from gspo.tasks.identity import data_sha256, other_sides
from gspo.types import Prompt


def prompt(row=0, text="3 + 4", **columns):
    return Prompt(row, text, np.array([1]), columns)


def sums(*train, held_out=()):
    return data_sha256(train, held_out)


FIRST = {"answer": "7", "hints": ["a", {"b": 1}], "when": datetime(2024, 1, 2), "raw": b"\x00", "at": {(1, 2): 3}}


@pytest.mark.parametrize(
    "other",
    [
        {**FIRST, "answer": "8"},
        {**FIRST, "answer": 7},
        {**FIRST, "hints": ["a", {"b": 2}]},
        {**FIRST, "when": datetime(2024, 1, 3)},
        {**FIRST, "raw": b"\x01"},
        {**FIRST, "at": {(1, 2): 4}},
        {**FIRST, "more": None},
        {key: value for key, value in FIRST.items() if key != "raw"},
    ],
)
def test_every_column_counts_on_both_sides(other):
    same, changed = prompt(**FIRST), prompt(**other)
    now = sums(same, held_out=[same])
    assert other_sides(sums(same, held_out=[prompt(**FIRST)]), now) == []
    assert other_sides(sums(changed, held_out=[same]), now) == ["the rows to train on"]
    assert other_sides(sums(same, held_out=[changed]), now) == ["the held-out rows"]


def test_number_text_and_order_of_rows_count():
    a, b = prompt(0, "a"), prompt(1, "b")
    assert len({sums(*rows)["train"] for rows in ([a, b], [b, a], [a], [prompt(0, "b"), prompt(1, "a")], [])}) == 5


def test_a_run_without_sums_is_of_other_data():
    for then in (None, "0" * 64):
        assert len(other_sides(then, sums(prompt()))) == 2


def test_sums_are_the_same_in_every_process():
    code = (
        "import numpy as np; from gspo.tasks.identity import data_sha256; from gspo.types import Prompt\n"
        "class Thing: pass\n"
        "row = {'s': {'a', 'b', 'c', 'd'}, 't': Thing(), 'n': np.arange(3), 'u': {1: Thing(), (2, 3): 'x'}, 'h': '\\ud800'}\n"
        "print(data_sha256([Prompt(0, 'x', np.array([1]), row)], [])['train'])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
