"""A phase that lasts is named; one that does not, is not."""

from __future__ import annotations

import time

from gspo.heartbeat import SECONDS, Heartbeat


def test_a_phase_that_lasts_is_named_again_and_again() -> None:
    said: list[str] = []
    heart = Heartbeat(said.append, seconds=0.2)
    with heart.at("the first"):
        time.sleep(0.7)
        with heart.at("the second"):
            time.sleep(0.5)
    heart.close()
    assert 2 <= sum("the first" in line for line in said) <= 3
    assert 1 <= sum("the second" in line for line in said) <= 2
    assert said[0].startswith("    still at it after 0 s")
    assert SECONDS <= 60


def test_short_phases_and_what_lies_between_them_say_nothing() -> None:
    said: list[str] = []
    heart = Heartbeat(said.append, seconds=0.3)
    for _ in range(6):
        with heart.at("short"):
            time.sleep(0.1)
    time.sleep(0.5)
    heart.close()
    assert said == []
