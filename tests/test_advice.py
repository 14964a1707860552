"""What is said once at the start."""

from __future__ import annotations

import pytest

from gspo import settings
from gspo.advice import advice
from gspo.inputs import read_inputs


@pytest.mark.parametrize(("rows", "said"), [(1, "the 1 row to"), (3, "the 3 rows to"), (4, None), (9, None)])
def test_a_step_that_is_larger_than_the_data_is_said(rows: int, said: str | None) -> None:
    run = settings.load("tiny", ["prompts_per_step=4", "data=python", "reward=repetition:1", "eval.every=0"])
    inputs = read_inputs(run, rows=[{"prompt": f"say {i}"} for i in range(rows)])
    inputs.close()
    found = [note for note in advice(run, inputs) if "prompts_per_step" in note]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm=gspo", "algorithm.routing=old", "algorithm.updates_per_step=1"], True),
        (["algorithm=gspo", "algorithm.routing=old", "algorithm.updates_per_step=1", "algorithm.epochs=2"], False),
        (["algorithm=gspo", "algorithm.routing=old", "algorithm.updates_per_step=2"], False),
        (["algorithm=gspo", "algorithm.routing=rollout", "algorithm.updates_per_step=1"], False),
        (["algorithm=grpo", "algorithm.updates_per_step=1"], False),
    ],
)
def test_a_replay_of_nothing_is_said_where_it_was_asked_for(words: list[str], said: bool) -> None:
    run = settings.load("tiny", [*words, "prompts_per_step=4", "eval.every=0"])
    inputs = read_inputs(run)
    inputs.close()
    assert any("routing=old replays nothing" in note for note in advice(run, inputs)) == said
