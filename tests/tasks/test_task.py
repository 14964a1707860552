"""The shuffle that built-in tasks share."""

from hypothesis import given
from hypothesis import strategies as st

from gspo.tasks.task import shuffled


@given(count=st.integers(1, 400))
def test_shuffle_is_a_permutation(count):
    assert sorted(shuffled(place, count, b"test") for place in range(count)) == list(range(count))


def test_streams_are_shuffled_apart():
    orders = [[shuffled(place, 100, stream) for place in range(100)] for stream in (b"one", b"two")]
    assert orders[0] != orders[1]
