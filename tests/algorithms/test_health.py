"""A verdict says which of several causes a loss of 0.0 has (huggingface/trl#3452, #3857)."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.algorithms.health import verdict

HEALTHY: dict[str, Any] = {
    "rollouts/total": 64,
    "rollouts/judged": 64,
    "rollouts/crashed": 0,
    "rollouts/no_verdict": 0,
    "rollouts/timeout": 0,
    "groups/total": 8,
    "groups/signal": 6,
    "groups/all_right": 1,
    "groups/all_wrong": 1,
    "groups/all_equal": 0,
    "groups/unjudged": 0,
    "groups/steps_without_signal": 0,
    "groups/replaced": 0,
    "updates/done": 4,
    "truncated/share": 0.0,
    "max_new_tokens": 24,
    "parity/signed": -1e-5,
    "clip/band": 3e-4,
    "clip/rows": 0.4,
    "clip/tokens": 0.01,
    "anchor": "old",
    "ratio": "sequence",
    "advantage": "group_mean_std",
    "value/explained_variance": None,
    "weights/relative": 1e-4,
}
SILENT = {"groups/signal": 0, "groups/all_right": 2, "groups/all_wrong": 5, "groups/unjudged": 1, "updates/done": 0}
LONG_SILENT = {**SILENT, "groups/unjudged": 0, "groups/steps_without_signal": 3}


@pytest.mark.parametrize(
    ("changes", "kind", "warning", "words"),
    [
        (
            {},
            "learning",
            False,
            ["6 of 8 groups", "1 all right, 1 all wrong", "40% of the answers clipped", "by design"],
        ),
        ({"ratio": "token"}, "learning", False, ["1.0% of the tokens clipped"]),
        (SILENT, "no_signal", False, ["0 of 8", "2 all right, 5 all wrong, 1 too few judged", "no update"]),
        ({**SILENT, "groups/steps_without_signal": 3}, "no_signal", True, ["3 steps in a row"]),
        ({**SILENT, "updates/done": 4}, "no_signal", False, ["KL term"]),
        ({"updates/done": 0, "truncated/share": 0.9}, "left_out", True, ["mask_truncated", "90%"]),
        (
            {"updates/done": 0, "truncated/share": 0.9, "truncated/limit": "conversation.max_tokens"},
            "left_out",
            True,
            ["Raise conversation.max_tokens"],
        ),
        ({"truncated/share": 0.9}, "truncated", True, ["sampling.max_new_tokens=24", "raise sampling.max_new_tokens"]),
        (
            {"truncated/share": 0.9, "truncated/limit": "conversation.max_turns"},
            "truncated",
            True,
            ["at conversation.max_turns, and", "raise conversation.max_turns"],
        ),
        (
            {**SILENT, "rollouts/judged": 0, "rollouts/crashed": 60, "rollouts/no_verdict": 4},
            "unjudged",
            True,
            ["none of the 64", "crashed on 60", "no verdict on 4"],
        ),
        (
            {**SILENT, "updates/done": 4, "advantage": "gae", "value/explained_variance": 0.42, "ratio": "token"},
            "learning",
            False,
            ["64 of 64 answers were judged", "the critic knew 42%", "1.0% of the tokens clipped"],
        ),
        (
            {**SILENT, "updates/done": 0, "advantage": "gae", "truncated/share": 1.0},
            "left_out",
            True,
            ["64 of 64 answers were judged", "mask_truncated"],
        ),
        ({**SILENT, "groups/all_cut": 4}, "no_signal", False, ["1 all wrong, 4 all cut at the length limit and wrong"]),
        (
            {"weights/changed": 0.0, "grad_norm": 0.0, "learning_rate": 1e-9},
            "unmoved",
            True,
            ["changed no trainable weight", "1.0e-09"],
        ),
        ({"weights/changed": 0.0, "updates/done": 0, **SILENT}, "no_signal", False, ["0 of 8"]),
        (
            {**LONG_SILENT, "groups/all_right": 8, "groups/all_wrong": 0},
            "no_signal",
            True,
            ["in a row: the task is solved. "],
        ),
        ({**LONG_SILENT, "groups/all_right": 7, "groups/all_wrong": 1}, "no_signal", True, ["solved, too hard, or"]),
        (
            {"updates/done": 4, "advantage": "gae", "value/explained_variance": -0.001, "ratio": "token"},
            "learning",
            False,
            ["the critic knew 0% of"],
        ),
        (
            {"weights/changed": 0.0, "guard/action": "rollback", "guard/rule": "non-finite"},
            "put_back",
            True,
            ["puts the weights back (rule non-finite)"],
        ),
        ({"updates/done": 0, "guard/action": "stop", "guard/rule": "non-finite"}, "put_back", True, ["8 groups carry"]),
        ({"guard/action": "warn", "guard/rule": "kl"}, "learning", False, []),
        ({"parity/mean": 0.2}, "apart", True, ["0.2", "do not compute the same model"]),
        ({"parity/mean": 0.03}, "learning", False, []),
        ({"repetition/share": 0.6}, "repeating", True, ["60%", "loop"]),
        (
            {"clip/rows": 0.97, "ratio/std_over_band": 12.0},
            "silenced",
            True,
            ["97% of the answers", "12 times the band"],
        ),
        ({"clip/rows": 0.97, "ratio": "token"}, "learning", False, ["1.0% of the tokens"]),
        ({"clip/tokens": 0.97, "ratio": "token"}, "silenced", True, ["97% of the tokens"]),
        ({"staleness/max": 9}, "stale", True, ["9 versions"]),
        ({"staleness/max": 2, "entropy": 0.21}, "learning", False, ["2 versions old", "entropy 0.21"]),
        ({"length/mean": 17.6, "truncated/share": 0.25}, "learning", False, ["18 tokens an answer, 25% of them cut"]),
        ({"truncated/share": 0.6}, "truncated", True, ["60%", "max_new_tokens=24"]),
        (
            {"anchor": "rollout", "parity/signed": -1.5e-4},
            "mismatch",
            True,
            ["-1.5e-04", "third of the clip band", "anchor=old"],
        ),
    ],
)
def test_each_state_has_its_own_sentence(changes: dict[str, Any], kind: str, warning: bool, words: list[str]) -> None:
    said = verdict({**HEALTHY, **changes})
    assert (said.kind, said.warning) == (kind, warning)
    assert all(word in said.text for word in words), said.text


def test_a_mismatch_matters_only_where_it_enters_the_ratio() -> None:
    assert verdict({**HEALTHY, "parity/signed": -1.0}).kind == "learning"
    assert verdict({**HEALTHY, "anchor": "rollout", "parity/signed": -9e-5}).kind == "learning"


def test_a_loss_of_zero_has_three_causes_and_three_sentences() -> None:
    """huggingface/trl#3452, #3857; Goekdeniz-Guelmez/mlx-lm-lora#55: healthy runs were stopped, and dead ones left to run."""
    on_policy = verdict({**HEALTHY, "loss": 3e-9, "grad_norm": 0.4, "weights/changed": 0.9})
    dead = verdict({**HEALTHY, "loss": 0.0, "grad_norm": 0.0, "weights/changed": 0.0})
    silent = verdict({**HEALTHY, **SILENT, "loss": None, "grad_norm": None, "weights/changed": 0.0})
    assert [said.kind for said in (on_policy, dead, silent)] == ["learning", "unmoved", "no_signal"]
    assert "the loss is 0 on policy" in on_policy.text
    assert "changed no trainable weight" in dead.text
    assert "no signal" in silent.text
