"""Packing: what is trained, what is dropped, and that nothing depends on how it is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo import PRESETS, RunError
from gspo.batch import Batch, has_signal, make_batches
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop

GSPO = PRESETS["gspo"]


def segment(ids: list[int], mask: list[int] | None = None, parent: int | None = None) -> Segment:
    policy = np.array(mask if mask is not None else [1] * len(ids), dtype=bool)
    logprobs = np.where(policy, -np.arange(1, len(ids) + 1) / 8, 0).astype(np.float32)
    return Segment(np.array(ids), policy, logprobs, parent)


def rollout(index: int, reward: float | None, ids: list[int], stop: Stop = Stop.EOS) -> Rollout:
    judged = None if reward is None else Reward(reward)
    return Rollout(index, (segment(ids),), "", stop, (0, 0), judged)


def group(ordinal: int, answers: list[tuple[float | None, list[int]]], prompt: list[int] | None = None) -> Group:
    rollouts = tuple(rollout(i, reward, ids) for i, (reward, ids) in enumerate(answers))
    return Group(Prompt(ordinal, "", np.array(prompt or [90, 91, 92]), {}), ordinal, rollouts)


def only(groups: list[Group], row: object = GSPO, budget: int = 1000) -> Batch:
    row = row.model_copy(update={"updates_per_step": 1})  # type: ignore[attr-defined]
    (batch,) = make_batches(groups, row, budget)
    return batch


def test_a_group_is_a_tree_with_its_prompt_once() -> None:
    batch = only([group(0, [(1.0, [5, 6]), (0.0, [7, 8, 9])])])
    assert batch.tokens_T.tolist() == [90, 91, 92, 5, 7, 8], "the last token of an answer predicts nothing"
    assert batch.position_T.tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.target_N.tolist() == [5, 6, 7, 8, 9], "every sampled token once"
    assert batch.source_N.tolist() == [2, 3, 2, 4, 5], "the prompt's last token predicts both first ones"
    assert batch.sequence_N.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(batch.rollout_logprob_N, np.array([-1, -2, -1, -2, -3]) / 8)
    (micro,) = batch.plan
    assert (micro.lengths, micro.parents) == ((3, 1, 2), (None, 0, 0))


def test_answers_of_one_token_need_only_the_prompt() -> None:
    batch = only([group(0, [(1.0, [5]), (0.0, [7])])])
    assert batch.tokens_T.tolist() == [90, 91, 92]
    assert (batch.source_N.tolist(), batch.target_N.tolist()) == ([2, 2], [5, 7])


def test_tokens_that_the_policy_did_not_write_are_seen_and_not_trained() -> None:
    tool = Rollout(
        0, (segment([5, 6]), segment([7, 8], [0, 0], 0), segment([9], None, 1)), "", Stop.EOS, (0, 0), Reward(1.0)
    )
    batch = only([Group(Prompt(0, "", np.array([90]), {}), 0, (tool, rollout(1, 0.0, [4])))])
    assert batch.tokens_T.tolist() == [90, 5, 6, 7, 8]
    assert batch.target_N.tolist() == [5, 6, 9, 4]
    assert batch.source_N.tolist() == [0, 1, 4, 0]
    assert batch.length_S.tolist() == [3, 1]
    assert batch.tokens == 4


def test_a_rewritten_history_branches_and_each_sampled_token_counts_once() -> None:
    """Turn 1 (5, 6) is followed by a tool (7); then the history is rewritten: (8) follows turn 1, and (9, 10) that."""
    segments = (
        segment([5, 6]),
        segment([7], [0], 0),
        segment([11], None, 1),
        segment([8], [0], 0),
        segment([9, 10], None, 3),
    )
    branching = Rollout(0, segments, "", Stop.EOS, (0, 0), Reward(1.0))
    batch = only([Group(Prompt(3, "", np.array([90]), {}), 3, (branching, rollout(1, 0.0, [4])))])
    assert batch.tokens_T.tolist() == [90, 5, 6, 7, 8, 9]
    assert batch.position_T.tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.target_N.tolist() == [5, 6, 11, 9, 10, 4]
    assert batch.source_N.tolist() == [0, 1, 3, 4, 5, 0]
    assert (batch.plan[0].lengths, batch.plan[0].parents) == ((1, 2, 1, 2), (None, 0, 1, 1))
    assert batch.length_S.tolist() == [5, 1]


def test_segments_without_tokens_and_without_training_below_leave_no_trace() -> None:
    idle = (segment([]), segment([5, 6], None, 0), segment([7, 8], [0, 0], 1), segment([3], [0], None))
    batch = only(
        [
            Group(
                Prompt(0, "", np.array([90]), {}),
                0,
                (Rollout(0, idle, "", Stop.EOS, (0, 0), Reward(1.0)), rollout(1, 0.0, [4, 4])),
            )
        ]
    )
    assert batch.tokens_T.tolist() == [90, 5, 4]
    assert batch.target_N.tolist() == [5, 6, 4, 4]
    assert batch.source_N.tolist() == [0, 1, 0, 2]


def test_a_segment_that_continues_a_later_one_is_refused_by_row() -> None:
    wrong = Rollout(0, (segment([5], None, 1), segment([6])), "", Stop.EOS, (0, 0), Reward(1.0))
    with pytest.raises(RunError, match="row 3, answer 0: segment 0 continues segment 1"):
        only([Group(Prompt(3, "", np.array([90]), {}), 3, (wrong, rollout(1, 0.0, [4])))])


def test_groups_without_signal_are_dropped_and_stay_in_the_denominators() -> None:
    """NVIDIA-NeMo/RL#4158, OpenPipe/ART#336."""
    silent, alive = group(0, [(1.0, [5]), (0.7 + 0.2 + 0.1, [6, 7])]), group(1, [(1.0, [5]), (0.0, [6])])
    batch = only([silent, alive])
    assert not has_signal(silent)
    assert [batch.key_R[i][0] for i in batch.rollout_S.tolist()] == [1, 1]
    assert (batch.sequences, batch.tokens) == (4, 5)


def test_a_step_without_signal_makes_no_update() -> None:
    batches = make_batches([group(i, [(1.0, [5]), (1.0, [6])]) for i in range(4)], GSPO, 100)
    assert (len(batches), batches.skipped) == (0, 4)


def test_an_answer_without_a_verdict_is_in_no_baseline_and_no_denominator() -> None:
    batch = only([group(0, [(1.0, [5]), (None, [6, 6]), (0.0, [7])])])
    assert batch.reward_R.tolist() == [1.0, 0.0]
    assert (batch.sequences, batch.tokens) == (2, 2)
    assert 6 not in batch.tokens_T.tolist()


def test_a_group_with_one_verdict_is_dropped() -> None:
    assert len(make_batches([group(0, [(1.0, [5]), (None, [6])])], GSPO, 100)) == 0


def test_updates_are_cut_by_whole_groups() -> None:
    groups = [group(i, [(1.0, [5]), (0.0, [6])]) for i in range(8)]
    batches = make_batches(groups, GSPO, 100)
    assert [sorted(set(b.group_R.tolist())) for b in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_truncated_answers_may_be_left_out_of_the_loss_and_its_denominators() -> None:
    """huggingface/trl#6439: masked tokens left in the normaliser."""
    cut = rollout(2, 0.0, [7, 7, 7], Stop.LENGTH)
    g = Group(Prompt(0, "", np.array([90]), {}), 0, (rollout(0, 1.0, [5]), rollout(1, 0.0, [6]), cut))
    batch = only([g], PRESETS["dapo"])
    assert batch.reward_R.tolist() == [1.0, 0.0, 0.0], "the baseline keeps it"
    assert batch.target_N.tolist() == [5, 6]
    assert (batch.sequences, batch.tokens) == (2, 2)
    assert only([g]).tokens == 5


def test_micro_batches_take_any_number_of_answers() -> None:
    """huggingface/trl#2858: 3 prompts x 5 answers need no divisibility; 15 answers go 4, 4, 4, 3."""
    groups = [group(i, [(float(j % 2), [5, 6]) for j in range(5)]) for i in range(3)]
    batch = only(groups, budget=8)
    assert [m.sequences for m in batch.plan] == [5, 5, 5]
    batch = only(groups, budget=7)
    assert [m.sequences for m in batch.plan] == [4, 1, 4, 1, 4, 1], (
        "a tree over the budget is split, its prompt repeated"
    )
    batch = only(groups, budget=12)
    assert [(m.sequences, m.parents.count(None)) for m in batch.plan] == [(5, 1), (5, 1), (5, 1)]
    batch = only(groups, budget=16)
    assert [(m.sequences, m.parents.count(None)) for m in batch.plan] == [(10, 2), (5, 1)]


def test_an_answer_over_the_budget_runs_alone() -> None:
    batches = make_batches([group(0, [(1.0, list(range(50))), (0.0, [6, 7])])], GSPO, 10)
    assert [m.lengths for m in batches.updates[0].plan] == [(3, 49), (3, 1)]
    assert batches.largest == 52


@settings(max_examples=50, deadline=None)
@given(
    answers=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 6)), min_size=2, max_size=5),
        min_size=1,
        max_size=5,
    ),
    budget=st.integers(1, 40),
)
def test_the_plan_covers_every_sequence_once(answers: list[list[tuple[float, int]]], budget: int) -> None:
    groups = [group(i, [(r, list(range(n))) for r, n in part]) for i, part in enumerate(answers)]
    row = GSPO.model_copy(update={"updates_per_step": 1})
    for batch in make_batches(groups, row, budget):
        for of, total in (
            ("token", len(batch.tokens_T)),
            ("trained", len(batch.target_N)),
            ("sequence", len(batch.length_S)),
        ):
            slices = [getattr(m, of) for m in batch.plan]
            assert slices[0].start == 0
            assert slices[-1].stop == total
            assert all(a.stop == b.start for a, b in pairwise(slices))
        assert all(sum(m.lengths) <= budget or m.sequences == 1 for m in batch.plan)
        uncut = only(groups, budget=10_000)
        assert batch.target_N.tolist() == uncut.target_N.tolist(), "the order does not depend on the budget"
        assert batch.tokens_T[batch.source_N].tolist() == uncut.tokens_T[uncut.source_N].tolist()
        assert batch.position_T[batch.source_N].tolist() == uncut.position_T[uncut.source_N].tolist()
