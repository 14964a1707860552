"""Judging groups: no verdict and crashes are states, never zeros."""

import judging
import pytest
from judging import values

from gspo.config import RewardRule
from gspo.errors import RunError
from gspo.types import Status

ROW = {"prompt": "3 + 4", "answer": "7"}


def judged(rules, *texts, **keys):
    with judging.scorer(rules, [ROW], **keys) as opened:
        return judging.judge(opened, ROW, *texts, prompt="Q<think>")


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
    result = judged(["number"], "7", "8", "so 7")
    assert [r.reward.value for r in result.rollouts] == [1.0, 0.0, 1.0]
    assert result.rollouts[0].reward.parts == {"number": 1.0}
    assert result.rollouts[0].reward.status == {"number": Status.OK}
    assert (result.ordinal, [r.text for r in result.rollouts]) == (5, ["7", "8", "so 7"])


def test_rules_see_the_rendered_prompt():
    assert values(judged(["format"], "x</think>7", "7")) == [1.0, 0.0]


def test_p19_a_think_tag_that_the_template_opened():
    """huggingface/trl#6966: a format reward of 0 for every completion."""
    texts = ["2+2=4</think>4", "<think>x</think>4", "4"]
    assert values(judged(["format"], *texts)) == [1.0, 1.0, 0.0]


def test_failures_are_states_and_the_others_are_still_judged():
    texts = ["none", "raise", "exit", "nan", "text", "huge", "interrupt", "7", "8"]
    rewards = [r.reward for r in judged([misbehave], *texts).rollouts]
    assert [r.status["misbehave"] for r in rewards] == [
        Status.NO_VERDICT, *[Status.CRASHED] * 6, Status.OK, Status.OK,
    ]  # fmt: skip
    assert [r.value for r in rewards] == [None] * 7 + [1.0, 0.0]
    assert [r.parts["misbehave"] for r in rewards] == [r.value for r in rewards]
    parts = [None, "ZeroDivisionError: by hand", "SystemExit: 3", "nan", "str '1.0'", "within 1e", "KeyboardInterrupt", None, None]  # fmt: skip
    assert [r.error is None if part is None else part in r.error for r, part in zip(rewards, parts, strict=True)] == [
        True
    ] * 9


def test_weights_add_up_and_none_is_never_zero():
    rules = [
        "number",
        RewardRule(function=misbehave, weight=0.5),
        RewardRule(function=lambda completion: None, weight=0),
    ]
    rewards = [r.reward for r in judged(rules, "7", "8", "none").rollouts]
    assert [r.value for r in rewards] == [1.5, 0.0, None]
    assert rewards[2].parts == {"number": 0.0, "misbehave": None, "<lambda>": None}
    assert rewards[0].status["<lambda>"] is Status.NO_VERDICT


def test_a_function_over_a_group_judges_it_whole():
    def best(completions, completion_tokens):
        if completions[0] == "":  # the trial call
            return [0, 0]
        return [len(c) == max(map(len, completions)) if c != "skip" else None for c in completions]

    rewards = [r.reward for r in judged([best], "long", "longer", "skip").rollouts]
    assert [r.value for r in rewards] == [0.0, 1.0, None]
    assert rewards[2].status["best"] is Status.NO_VERDICT


def test_failures_above_the_limit_stop_the_run_with_the_evidence():
    texts = ["raise", "raise", "exit", "7"]
    with pytest.raises(RunError) as caught:
        judged([misbehave], *texts, max_failed=0.5)
    words = ["misbehave failed on 3 of 4", "3 crashed, 0 timed out", "judging.max_failed=0.5", "'raise'", "by hand"]
    assert [part for part in words if part not in str(caught.value)] == []
    assert judged([misbehave], *texts, max_failed=0.75).rollouts[3].reward.value == 1.0


@pytest.mark.parametrize(("last", "said"), [("8", 1), ("7", 0)])
def test_a_function_that_gives_one_value_is_named_once(last, said):
    notices = []
    with judging.scorer(["number"], [ROW]) as opened:
        for texts in (["8"] * 63, [last], ["8"] * 64):
            judging.judge(opened, ROW, *texts)
            notices.append(opened.notices())
    assert [len(each) for each in notices] == [0, said, 0]
    assert said == 0 or "number gave 0 to each of the first 64 answers" in notices[1][0]
