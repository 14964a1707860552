"""A rollout's random numbers are a function of what the rollout is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.engines.streams import uniforms

KEY = dict(stream=0, ordinal=5, index=3, turn=0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63), st.integers(0, 300))
def test_a_longer_stream_begins_with_the_shorter_one(seed: int, ordinal: int, count: int) -> None:
    key = dict(stream=1, ordinal=ordinal, index=2, turn=1)
    long = uniforms(seed, **key, count=count + 7)
    assert np.array_equal(uniforms(seed, **key, count=count), long[:count])
    assert ((long >= 0) & (long < 1)).all()


def test_each_part_of_the_key_gives_other_numbers() -> None:
    keys = [(0, KEY), (1, KEY), *((0, {**KEY, name: value + 1}) for name, value in KEY.items())]
    drawn = np.stack([uniforms(seed, **key, count=64) for seed, key in keys])
    assert len(np.unique(drawn)) == drawn.size


def test_numbers_are_pinned() -> None:
    """Runs resume, and compare, across versions by them."""
    assert uniforms(7, **KEY, count=3) == pytest.approx(PINNED, abs=1e-15)


def test_a_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        uniforms(-1, **KEY, count=1)


PINNED = [0.30343418712118975, 0.16320400630844822, 0.6794376192210024]
