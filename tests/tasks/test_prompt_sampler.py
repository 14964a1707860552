"""The order of prompts: each once an epoch, and a position that is the whole state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.tasks.sampler import Sampler
from gspo.types import Prompt


def prompts(count):
    return [Prompt(row=i, text="", token_ids=np.array([1]), columns={}) for i in range(count)]


def drawn(sampler, n):
    return [(draw.ordinal, draw.prompt.row) for draw in sampler.take(n)]


@given(count=st.integers(1, 12), seed=st.integers(0, 2**70), takes=st.lists(st.integers(0, 30), max_size=6))
def test_any_cut_into_takes_and_any_resume_gives_the_same_stream(count, seed, takes):
    whole = drawn(Sampler(prompts(count), seed), sum(takes))
    pieces, position = [], 0
    for n in takes:
        sampler = Sampler(prompts(count), seed, position)
        pieces += drawn(sampler, n)
        position = sampler.position
    assert pieces == whole
    assert [ordinal for ordinal, _ in whole] == list(range(sum(takes)))


@given(count=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_each_epoch_has_every_prompt_once(count, seed):
    rows = [row for _, row in drawn(Sampler(prompts(count), seed), 3 * count)]
    assert [sorted(rows[i : i + count]) for i in range(0, 3 * count, count)] == [list(range(count))] * 3


def test_epochs_and_seeds_differ():
    orders = [
        tuple(row for _, row in drawn(Sampler(prompts(50), seed, 50 * epoch), 50))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert tuple(range(50)) not in orders


def test_the_order_is_pinned():
    # A resumed run must draw on in the same order after an upgrade of numpy.
    assert [row for _, row in drawn(Sampler(prompts(8), 0), 16)] == [6, 4, 2, 1, 3, 5, 0, 7, 4, 5, 0, 3, 2, 7, 6, 1]


def test_no_prompts():
    with pytest.raises(ValueError, match="at least one"):
        Sampler([], 0)
