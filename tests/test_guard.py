"""The guard's rules: each holds where it should, on made-up steps, on recorded collapses, and not on healthy runs."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gspo import guard
from gspo.guard import (
    ACT_AFTER,
    FIRST,
    MAX_ROLLBACKS,
    WARN_AFTER,
    WINDOW,
    Decision,
    State,
    read_state,
    rolled_back,
    saved,
    watch,
)

RECORDED = Path(__file__).parent / "data" / "journals"
CALM: dict[str, Any] = {
    "reward/mean": 0.6,
    "reward/std": 0.4,
    "groups/signal": 6,
    "groups/total": 8,
    "groups/all_right": 1,
    "entropy": 0.3,
    "grad_norm": 0.5,
    "truncated/share": 0.1,
    "repetition/share": 0.0,
}


def after(steps: list[dict[str, Any]], state: State | None = None) -> tuple[State, list[Decision]]:
    state, decisions = state or State(), []
    for step in steps:
        state, decision = watch(state, {**CALM, **step})
        decisions.append(decision)
    return state, decisions


def actions(decisions: list[Decision]) -> list[tuple[str, str | None]]:
    return [(d.action, d.rule) for d in decisions if d.action != "none"]


def evaluated(reward: float, half: float = 0.05, prefix: str = "eval") -> dict[str, Any]:
    return {f"{prefix}/reward": reward, f"{prefix}/reward_low": reward - half, f"{prefix}/reward_high": reward + half}


def test_a_steady_run_is_left_alone() -> None:
    state, decisions = after([{}] * 40)
    assert actions(decisions) == []
    assert state.calm


def test_a_reward_that_falls_is_warned_of_and_then_rolled_back() -> None:
    state, decisions = after([{}] * 10 + [{"reward/mean": 0.0}] * 12)
    kinds = actions(decisions)
    assert kinds[0] == ("warn", "reward")
    assert kinds[1] == ("rollback", "reward")
    first = next(i for i, d in enumerate(decisions) if d.action == "warn")
    assert decisions[first + ACT_AFTER - WARN_AFTER].action == "rollback"
    assert "below its best, 0.600" in decisions[first].text
    assert not state.calm


def test_rewards_are_measured_in_their_own_spread() -> None:
    """A reward of any scale, negative too: the same course, a thousand times as large and shifted, is judged alike."""
    course = [0.6] * 10 + [0.35] * 12
    _, small = after([{"reward/mean": r, "reward/std": 0.4} for r in course])
    _, large = after([{"reward/mean": 1000 * r - 5000, "reward/std": 400.0} for r in course])
    assert actions(small) == actions(large) != []


def test_a_small_fall_is_no_collapse() -> None:
    assert actions(after([{}] * 10 + [{"reward/mean": 0.45}] * 30)[1]) == []


DOWN = {"reward/mean": 0.46}
"""Low enough, on average, that a symptom is an alarm, and not enough to be one alone."""


@pytest.mark.parametrize(
    ("rule", "symptom"),
    [
        ("entropy", {"entropy": 0.001}),
        ("entropy", {"entropy": 2.0}),
        ("gradient", {"grad_norm": 50.0}),
        ("truncation", {"truncated/share": 0.95}),
        ("repetition", {"repetition/share": 0.7}),
        ("kl", {"eval/kl_start": 1.5, **evaluated(0.6)}),
    ],
)
def test_a_symptom_warns_and_is_an_alarm_only_while_the_reward_is_down(rule: str, symptom: dict[str, Any]) -> None:
    state, _ = after([{}] * 10)
    _, alone = after([symptom] * 8, state)
    assert actions(alone) == [("warn", rule)], "said once"
    (said,) = [decision.text for decision in alone if decision.action == "warn"]
    assert said.endswith("; the reward is not down, so nothing is done")
    fallen, before = after([DOWN] * 8, state)
    assert actions(before) == []
    _, both = after([{**symptom, **DOWN}] * ACT_AFTER, fallen)
    assert actions(both) == [("warn", rule), ("rollback", rule)]
    assert not any("nothing is done" in decision.text for decision in both)


@pytest.mark.parametrize(
    "symptom",
    [{"entropy": 0.1}, {"grad_norm": 5.0}, {"truncated/share": 0.8}, {"repetition/share": 0.3}, {"eval/kl_start": 0.3}],
)
def test_what_healthy_runs_show_is_no_symptom(symptom: dict[str, Any]) -> None:
    fallen, _ = after([{}] * 10 + [DOWN] * 8)
    assert actions(after([{**symptom, **DOWN}] * 8, fallen)[1]) == []


def test_an_end_of_all_signal_is_an_alarm_unless_the_task_is_solved() -> None:
    low = {"reward/mean": 0.1, "reward/std": 0.3}
    silent = {**low, "reward/mean": 0.06, "groups/signal": 0, "groups/all_right": 0}
    state, _ = after([low] * 10)
    assert actions(after([silent] * ACT_AFTER, state)[1])[-1] == ("rollback", "silence")
    solved = {"reward/mean": 1.0, "groups/signal": 0, "groups/all_right": 8, "reward/std": 0.0}
    assert actions(after([solved] * 20, state)[1]) == []
    never, _ = after([{**low, "groups/signal": 1}] * 10)
    assert actions(after([silent] * 20, never)[1]) == [], "a task with little signal is not a collapse"


CHOSEN = {"prompts/skipped": 3}


def test_where_prompts_are_chosen_a_step_says_nothing_of_the_policy() -> None:
    """data.difficulty: the solved are passed over, and what is left is hard. The reward of the steps falls, the policy does not."""
    course: list[dict[str, Any]] = [{}] * 10 + [{**CHOSEN, "reward/mean": 0.1}] * 20
    state, decisions = after(course)
    assert actions(decisions) == []
    assert state.calm
    assert actions(after([{**step, "prompts/skipped": 0} for step in course])[1]), "of all prompts it is a collapse"
    # A step in which none happens to be passed over is not of all prompts either.
    assert actions(after([{"reward/mean": 0.1}] * 8, state)[1]) == []


def test_where_prompts_are_chosen_evaluations_say_whether_the_reward_is_down() -> None:
    state, _ = after([{**CHOSEN, **evaluated(0.6)}] * 10)
    long = {**CHOSEN, "truncated/share": 0.95}
    assert actions(after([long] * 8, state)[1]) == [("warn", "truncation")]
    level, _ = after([{**CHOSEN, **evaluated(0.55)}], state)
    assert actions(after([long] * 8, level)[1]) == [("warn", "truncation")], "within the interval"
    fallen, before = after([{**CHOSEN, **evaluated(0.45)}], state)
    assert actions(before) == []
    assert not fallen.calm
    assert actions(after([long] * ACT_AFTER, fallen)[1])[-1] == ("rollback", "truncation")
    assert rolled_back(fallen, State()).chosen
    assert not rolled_back(fallen, State()).down, "the weights that were measured have gone"


def test_where_prompts_are_chosen_silence_is_an_alarm_only_if_no_group_is_all_right() -> None:
    """What is passed over is looked at again now and then: the solved beside the hopeless, and no signal."""
    state, _ = after([CHOSEN] * 10)
    silent = {**CHOSEN, "reward/mean": 0.2, "groups/signal": 0}
    assert actions(after([{**silent, "groups/all_right": 2}] * 8, state)[1]) == []
    assert actions(after([{**silent, "groups/all_right": 0}] * ACT_AFTER, state)[1])[-1] == ("rollback", "silence")


def test_an_evaluation_that_falls_is_an_alarm_at_once() -> None:
    start = {**evaluated(0.3, prefix="eval/start"), **evaluated(0.32)}
    state, _ = after([start, *[{}] * 8, evaluated(0.8)])
    assert actions(after([evaluated(0.6)], state)[1]) == [], "significant, and small"
    assert actions(after([evaluated(0.25, half=0.9)], state)[1]) == [], "large, and not significant"
    assert actions(after([evaluated(0.25)], state)[1]) == [("rollback", "evaluation")]
    assert actions(after([{**evaluated(float("nan"))}], state)[1]) == []


def test_the_start_counts_as_an_evaluation() -> None:
    assert actions(after([{**evaluated(0.5, prefix="eval/start"), **evaluated(0.05)}])[1]) == [
        ("rollback", "evaluation")
    ]


def test_a_checkpoint_is_gone_back_to_once_the_average_is_of_answers_after_it() -> None:
    state = saved(after([{}] * 10)[0], 10)
    assert after([{}] * (WINDOW - 1), state)[0].target is None
    assert after([{"reward/mean": None}] * 20, state)[0].target is None, "a step without a reward says nothing"
    good, _ = after([{}] * WINDOW, state)
    assert (good.target, good.waiting) == (10, None)
    # One waits at a time, so that no more than two are kept; a later one when it is known to be good.
    assert saved(after([{}] * 3, state)[0], 13).waiting == 10
    assert saved(good, 18).waiting == 18
    assert saved(good, 18).target == 10


def test_a_checkpoint_from_within_a_collapse_is_never_gone_back_to() -> None:
    """Saved when the average did not show it yet: the run would be put back into the hole, three times, and end there."""
    state, _ = after([{}] * 10 + [{"reward/mean": 0.0}])
    assert state.calm
    state, decisions = after([{"reward/mean": 0.0}] * 8, saved(state, 11))
    assert actions(decisions)[-1] == ("rollback", "reward")
    assert (state.target, state.waiting) == (None, None)
    assert saved(state, 19) == state, "it is not calm"


def test_a_checkpoint_whose_own_evaluation_is_the_best_is_good_at_once() -> None:
    state, _ = after([{**evaluated(0.5, prefix="eval/start")}] + [{}] * 8 + [evaluated(0.6)])
    assert saved(state, 10).target == 10
    assert saved(after([{}], state)[0], 11).target is None, "it was measured a step before"
    assert saved(after([evaluated(0.55)], state)[0], 11).target is None, "not the best"
    assert not rolled_back(state, state).proven, "what was measured are not the weights of this step"


def test_where_prompts_are_chosen_an_evaluation_says_which_checkpoint_is_good() -> None:
    state = saved(after([{**CHOSEN, **evaluated(0.6)}] * 10 + [CHOSEN])[0], 11)
    assert after([CHOSEN] * 20, state)[0].target is None
    assert after([{**CHOSEN, **evaluated(0.55)}], state)[0].target == 11, "within the interval"
    assert after([{**CHOSEN, **evaluated(0.45)}], state)[0].waiting is None
    blind = saved(after([CHOSEN] * 10)[0], 10)
    assert after([CHOSEN] * WINDOW, blind)[0].target == 10, "without evaluations there is nothing to wait for"


def test_rollbacks_are_bounded_and_time_goes_on() -> None:
    state, _ = after([{}] * 10)
    then = replace(state, target=7)
    for rollback in range(1, MAX_ROLLBACKS + 1):
        assert guard.alarm(state, "reward", "").action == "rollback"
        state = rolled_back(replace(state, target=7), then)
        assert (state.rollbacks, state.step_size, state.target) == (rollback, 0.5**rollback, 7)
    assert guard.alarm(state, "reward", "").action == "stop"
    assert state.rewards == ()
    assert state.best == then.best


DEAD: dict[str, Any] = {"reward/mean": 0.0, "reward/std": 0.0, "groups/signal": 0, "groups/all_right": 0}


@pytest.mark.parametrize("before", [1, 3, 4, 12])
def test_a_rollback_to_where_nothing_was_known_forgets_nothing(before: int) -> None:
    """A policy that is dead from then on is an alarm, and its checkpoint is never gone back to."""
    state = rolled_back(after([{}] * before)[0], State())
    assert (state.best, state.signal) == (pytest.approx(0.6), 0.75)
    dead, decisions = after([DEAD] * 3, state)
    dead, more = after([DEAD] * 12, saved(dead, before + 3))
    assert "rollback" in {decision.action for decision in [*decisions, *more]}
    assert dead.target is None
    again = rolled_back(dead, State())
    assert (again.best, again.signal) == (state.best, state.signal), "nor does the next one"
    assert read_state(json.loads(json.dumps(asdict(again)))) == again


def test_weights_of_before_the_best_are_not_measured_by_it() -> None:
    """The reward rose from 0.1 to 0.8 and fell: the start has 0.1 again, which is no collapse."""
    rise = [{"reward/mean": 0.1 + 0.05 * n} for n in range(15)]
    state = rolled_back(after(rise)[0], State())
    assert state.best == pytest.approx(0.175), "of the first four steps"
    assert actions(after(rise, state)[1]) == []
    then, _ = after(rise[:8])
    assert rolled_back(after(rise)[0], then).best == then.best, "and where something was known, by that"


def test_numbers_that_are_missing_are_not_judged() -> None:
    """A step without an update has no entropy and no gradient; one without a verdict no reward."""
    holes = dict.fromkeys(("reward/mean", "reward/std", "entropy", "grad_norm"))
    old = {key: value for key, value in CALM.items() if key not in ("repetition/share", "truncated/share")}
    state, decision = State(), Decision()
    for step in [CALM, {**CALM, **holes, "groups/signal": 0}, old] * 5:
        state, decision = watch(state, step)
        assert decision.action == "none"
    assert len(state.entropies) == FIRST


def test_what_the_guard_remembers_survives_a_checkpoint() -> None:
    state, _ = after([{}] * 10 + [{"grad_norm": 50.0, **evaluated(0.6), "eval/kl_start": 0.1}] * 2)
    assert state.strikes
    assert read_state(json.loads(json.dumps(asdict(state)))) == state
    assert read_state(None) is None


# ------------------------------------------------------------------------------ recorded runs


def recorded(name: str) -> list[dict[str, Any]]:
    with gzip.open(RECORDED / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def watched(name: str) -> list[tuple[int, str, str | None]]:
    """What the guard would have said of each step, as if nothing were done about it."""
    state, said = State(), []
    for line in recorded(name):
        state, decision = watch(state, line)
        if decision.action != "none":
            said.append((line["step"], decision.action, decision.rule))
    return said


@pytest.mark.parametrize(
    ("name", "rule", "latest"),
    [
        ("collapse-learning-rate", "evaluation", 10),
        ("collapse-unclipped", "reward", 13),
        ("collapse-fp8", "reward", 28),
    ],
)
def test_real_collapses_are_recognised(name: str, rule: str, latest: int) -> None:
    """Runs of the product on tiny-dense; docs/guard.md has their settings."""
    step, _, found = next(each for each in watched(name) if each[1] == "rollback")
    assert found == rule
    assert step <= latest
    assert step < len(recorded(name)) - 10, "early enough to be of use"


@pytest.mark.parametrize(("every", "target"), [(1, 1), (2, None), (5, None)])
def test_a_real_collapse_goes_back_to_before_it(every: int, target: int | None) -> None:
    """GRPO without its clip: the weights of its first step still get 0.20, those of the second 0.02, and the average shows it
    at the tenth."""
    state = State()
    for line in recorded("collapse-unclipped"):
        state, decision = watch(state, line)
        if decision.action == "rollback":
            break
        state = saved(state, line["step"]) if line["step"] % every == 0 else state
    assert line["step"] == 13
    assert state.target == target


def test_a_collapse_is_recognised_without_evaluations_too() -> None:
    state, alarms = State(), []
    for line in recorded("collapse-learning-rate"):
        state, decision = watch(state, {k: v for k, v in line.items() if not k.startswith("eval")})
        alarms += [(line["step"], decision.rule)] if decision.action == "rollback" else []
    assert alarms[0] == (13, "reward")


HEALTHY = sorted(path.name.removesuffix(".jsonl.gz") for path in RECORDED.glob("healthy-*.gz"))


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_left_alone(name: str) -> None:
    assert watched(name) == []


def test_there_are_healthy_runs_to_be_left_alone() -> None:
    assert len(HEALTHY) >= 8
    assert sum(len(recorded(name)) for name in HEALTHY) >= 300
