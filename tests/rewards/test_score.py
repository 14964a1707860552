"""Judging groups: no verdict and crashes are states, never zeros."""

import numpy as np
import pytest

from gspo.config import Data, RewardRule
from gspo.rewards.load import load_reward
from gspo.rewards.score import score
from gspo.tasks.data import read_rows
from gspo.types import Group, Prompt, Rollout, Segment, Status, Stop

ROW = {"prompt": "3 + 4", "answer": "7"}


def group(*texts):
    segment = Segment(np.array([1]), np.array([True]), np.zeros(1, np.float32))
    prompt = Prompt(row=0, text="Q<think>", token_ids=np.array([1, 2]), columns=ROW)
    rollouts = tuple(Rollout(i, (segment,), text, Stop.EOS, (0, 0)) for i, text in enumerate(texts))
    return Group(prompt, ordinal=5, rollouts=rollouts)


def judged(function, *texts):
    return score(load_reward(RewardRule(function=function), read_rows(Data(), rows=[ROW])), group(*texts))


def misbehave(completion, answer):
    """Behaves for the trial call; then does what the completion says."""
    if completion == "raise":
        raise ZeroDivisionError("by hand")
    if completion == "exit":
        raise SystemExit(3)
    if completion == "interrupt":
        raise KeyboardInterrupt
    return {"none": None, "nan": float("nan"), "text": "1.0", "huge": 10**400}.get(
        completion, float(completion == answer)
    )


def test_each_rollout_is_judged_in_order():
    result = judged("number", "7", "8", "so 7")
    assert [r.reward.value for r in result.rollouts] == [1.0, 0.0, 1.0]
    assert result.rollouts[0].reward.parts == {"number": 1.0}
    assert result.rollouts[0].reward.status == {"number": Status.OK}
    assert (result.ordinal, [r.text for r in result.rollouts]) == (5, ["7", "8", "so 7"])


def test_rules_see_the_rendered_prompt():
    assert [r.reward.value for r in judged("format", "x</think>7", "7").rollouts] == [1.0, 0.0]


def test_failures_are_states_and_the_others_are_still_judged():
    texts = ["none", "raise", "exit", "nan", "text", "huge", "7", "8"]
    rewards = [r.reward for r in judged(misbehave, *texts).rollouts]
    crashed = Status.CRASHED
    assert [r.status["misbehave"] for r in rewards] == [
        Status.NO_VERDICT,
        crashed,
        crashed,
        crashed,
        crashed,
        crashed,
        Status.OK,
        Status.OK,
    ]
    assert [r.value for r in rewards] == [None] * 6 + [1.0, 0.0]
    assert [r.parts["misbehave"] for r in rewards] == [r.value for r in rewards]
    parts = [None, "ZeroDivisionError: by hand", "SystemExit: 3", "nan", "str '1.0'", "OverflowError", None, None]
    assert [r.error is None if part is None else part in r.error for r, part in zip(rewards, parts, strict=True)] == [
        True
    ] * 8
    assert [r.text for r in judged(misbehave, *texts).judged] == ["7", "8"]


def test_ctrl_c_stops_the_run():
    with pytest.raises(KeyboardInterrupt):
        judged(misbehave, "interrupt")
