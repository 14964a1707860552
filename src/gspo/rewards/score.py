"""Groups in, judged groups out.

In: a `RewardFunction` and `Group`s fresh from the engine. Out: the same groups with a `Reward` on every rollout.
`rollout.py` and `evaluate.py` call `score`.
"""

from __future__ import annotations

import traceback

from gspo.rewards.load import RewardFunction
from gspo.types import Group, Prompt, Reward, Rollout, Status


def score(function: RewardFunction, group: Group) -> Group:
    """The group with every rollout judged, in order.

    A function that returns None gave no verdict, and one that raises, or returns what is no number, crashed: the value
    is None in both cases, never 0. KeyboardInterrupt passes through.
    """
    return group.with_rewards([judge(function, group.prompt, rollout) for rollout in group.rollouts])


def judge(function: RewardFunction, prompt: Prompt, rollout: Rollout) -> Reward:
    """One answer's reward, computed in this process."""
    name = function.name
    try:
        value = function.call(rollout.text, prompt.columns, prompt.text)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a judge that calls sys.exit, or was cancelled, is a judge that crashed
        return Reward(None, {name: None}, {name: Status.CRASHED}, error="".join(traceback.format_exception(error)))
    return Reward(value, {name: value}, {name: Status.NO_VERDICT if value is None else Status.OK})
