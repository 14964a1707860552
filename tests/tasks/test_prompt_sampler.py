"""The order of prompts: each once an epoch, and a position that is the whole state."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.tasks.sampler import LOOK_AGAIN, Sampler, Seen
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


# ------------------------------------------------------------------------------ difficulty


def easy(draw):
    """Some policy's share of solved answers: another at each draw of a prompt."""
    return ((7 * draw.prompt.row + 3 * draw.ordinal) % 5) / 4


def taught(sampler, n):
    """Draws, each followed by what its answers were worth."""
    found = []
    for _ in range(n):
        (draw,) = sampler.take(1)
        sampler.learn(draw.prompt.row, easy(draw))
        found.append((draw.ordinal, draw.prompt.row))
    return found


@given(
    count=st.integers(1, 12), seed=st.integers(0, 2**32), pieces=st.lists(st.integers(0, 30), max_size=4),
    band=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)  # fmt: skip
def test_a_resumed_sampler_skips_as_the_whole_one_does(count, seed, pieces, band):
    whole = Sampler(prompts(count), seed, band=tuple(band))
    expected, found, position, seen = taught(whole, sum(pieces)), [], 0, ()
    for n in pieces:
        sampler = Sampler(prompts(count), seed, position, band=tuple(band), seen=seen)
        found += taught(sampler, n)
        state = json.loads(json.dumps([sampler.position, [asdict(each) for each in sampler.seen]]))
        position, seen = state[0], tuple(Seen(**each) for each in state[1])
    assert found == expected
    assert seen == (whole.seen if pieces else ())


def test_what_is_outside_is_looked_at_again_every_fourth_epoch():
    sampler = Sampler(prompts(5), 0, band=(0.1, 0.9))
    solved = {0: 1.0, 1: 0.0, 2: 0.1, 3: 0.9, 4: 0.5}
    epochs = {row: [] for row in solved}
    while sampler.position < 5 * 10:
        (draw,) = sampler.take(1)
        sampler.learn(draw.prompt.row, solved[draw.prompt.row])
        epochs[draw.prompt.row].append(draw.ordinal // 5)
    assert epochs[0][:3] == epochs[1][:3] == [0, 4, 8]
    assert all(epochs[row][:10] == list(range(10)) for row in (2, 3, 4)), "the band's ends are inside"
    assert sampler.skipped == sampler.position - sum(map(len, epochs.values()))


@given(count=st.integers(1, 9), n=st.integers(1, 60))
def test_prompts_that_are_all_outside_do_not_stop_the_stream(count, n):
    sampler = Sampler(prompts(count), 0, band=(0.4, 0.6))
    for _ in range(n):
        (draw,) = sampler.take(1)
        sampler.learn(draw.prompt.row, 1.0)
    assert sampler.position <= LOOK_AGAIN * (n + count)


def test_the_share_is_running():
    sampler = Sampler(prompts(2), 0, band=(0.0, 1.0))
    for solved in (1.0, 0.0, 1.0):
        sampler.learn(1, solved)
    assert sampler.seen == (Seen(1, 0.75),)


def test_without_a_band_nothing_is_kept():
    sampler = Sampler(prompts(2), 0)
    sampler.learn(0, 1.0)
    assert sampler.seen == ()
    assert drawn(sampler, 4) == drawn(Sampler(prompts(2), 0), 4)
