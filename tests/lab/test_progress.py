"""Time left, from measured step times."""

from __future__ import annotations

import io

import pytest
import small
from rich.console import Console

from gspo.lab.arms import Record
from gspo.lab.experiment import Arm, Trial
from gspo.lab.outcome import Outcome
from gspo.lab.progress import Board, duration

SLOW = Arm("slow", "slow", ("steps=10",), recipe="tiny")
FAST = small.arm("fast", steps=10)


def ended(board: Board, trial: Trial, seconds: float, steps: int) -> None:
    outcome = Outcome(steps, 0.1, 0.2, 0.2, 0.2, {})
    record = Record(
        trial.id, trial.arm.setting, trial.arm.name, trial.seed, "", "", "finished", None, "", seconds, outcome, None
    )
    board.ended(record, steps)


def test_time_left_is_steps_left_at_the_speed_of_their_setting() -> None:
    out = io.StringIO()
    board = Board(Console(file=out))
    board.begin(0, 4)
    assert board.left([], [Trial(SLOW, 0)], jobs=1) is None, "nothing was measured"
    ended(board, Trial(FAST, 0), seconds=10.0, steps=10)
    assert board.left([], [Trial(FAST, 1), Trial(FAST, 2)], jobs=1) == pytest.approx(20.0)
    assert board.left([], [Trial(FAST, 1), Trial(FAST, 2)], jobs=2) == pytest.approx(10.0)
    assert board.left([], [Trial(SLOW, 0)], jobs=1) == pytest.approx(10.0), "for want of better, as the others"
    running = [(Trial(SLOW, 0), 2, 10.0, 3)]  # 2 steps in 10 seconds, after 3 that were done before
    assert board.left(running, [], jobs=1) == pytest.approx(5 * 5.0)
    assert "reward 0.100 -> 0.200" in out.getvalue()


def test_durations_in_words() -> None:
    assert [duration(s) for s in (5, 89, 90, 3600, 7200)] == ["5 s", "89 s", "2 min", "60 min", "2.0 h"]
