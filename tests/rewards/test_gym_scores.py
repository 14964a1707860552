"""Answers to reasoning-gym's tasks go to the task's own scorer, in a worker, and no text of a model is run as code."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from judging import judge, scorer, values

from gspo import InputError
from gspo.rewards import gym as scores
from gspo.tasks import gym
from gspo.types import Status

pytest.importorskip("reasoning_gym")


def rows(words: str, count: int = 3) -> list[dict[str, Any]]:
    return gym.parse(words).rows("train", limit=count)[0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        (" 7\n", "7"),
        ("It is <answer> 7 </answer>.", "7"),
        ("<answer>5</answer> no, <answer>7</answer>", "7"),
        ("<think>5? <b></think>\n7", "7"),
        ("<answer>7", "<answer>7"),
        ("</answer>7<answer>", "</answer>7<answer>"),
        ("", ""),
    ],
)
def test_the_answer_is_what_stands_in_the_last_tag_or_all_of_it(completion: str, answer: str) -> None:
    assert scores.answer_in(completion) == answer


def test_right_wrong_and_nearly_right_of_several_tasks() -> None:
    given = [
        *rows("chain_sum", 1),
        *rows("spiral_matrix", 1),
        *rows("countdown", 1),
        *rows("polynomial_multiplication", 1),
    ]
    with scorer(["reasoning-gym"], given) as opened:
        for row in given:
            gold, tagged, wrong = values(judge(opened, row, row["answer"], f"so <answer>{row['answer']}</answer>", "?"))
            assert (gold, tagged) == (1.0, 1.0), row["task"]
            assert wrong is not None
            assert wrong < 0.1
        (near,) = values(judge(opened, given[0], f"The answer is {given[0]['answer']}"))
        assert near is not None
        assert 0 < near < 1, "the package gives a little for an answer that holds the right one"


@pytest.mark.parametrize(
    "words", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "puzzle24", "countdown",
              "simple_integration", "intermediate_integration", "polynomial_multiplication"],
)  # fmt: skip
def test_no_scorer_runs_what_the_model_wrote(words: str, tmp_path: Path) -> None:
    (row,) = rows(words, 1)
    witness = tmp_path / "written"
    attacks = [
        f"__import__('pathlib').Path({str(witness)!r}).write_text('x')",
        f"[open({str(witness)!r}, 'w')]",
        f"().__class__.__base__.__subclasses__() or open({str(witness)!r}, 'w')",
        f"preview(x, output='png', filename={str(witness)!r}, viewer='file')",
    ]
    with scorer(["reasoning-gym"], [row]) as opened:
        judged = judge(opened, row, *attacks, row["answer"])
    assert not witness.exists()
    assert [r.reward.status["reasoning-gym"] for r in judged.rollouts if r.reward] == [Status.OK] * 5
    assert all(value is not None and value < 0.5 for value in values(judged)[:4])
    assert values(judged)[4] == 1.0


def test_the_package_calls_eval_nowhere_else() -> None:
    """A new version with another such scorer is to be looked at before it is used."""
    found = set()
    root = Path(str(resources.files("reasoning_gym")))
    for path in root.rglob("*.py"):
        if "contrib" not in path.parts and re.search(
            r"\b(eval|(?<!def )parse_expr|sympify)\((user_)?answer\b", path.read_text()
        ):
            found.add(".".join(path.relative_to(root).with_suffix("").parts))
    assert found == {*scores._EVAL, *scores._PARSE}


def test_an_answer_that_takes_for_ever_costs_itself_alone() -> None:
    (row,) = rows("countdown", 1)
    with scorer(["reasoning-gym"], [row], timeout=2) as opened:
        late, right = judge(opened, row, "9**9**9**9", row["answer"]).rollouts
    assert late.reward is not None
    assert late.reward.status["reasoning-gym"] in (Status.TIMEOUT, Status.CRASHED, Status.OK)
    assert late.reward.value is None or late.reward.value < 0.1
    assert right.reward is not None
    assert right.reward.value == 1.0


def test_a_scorer_that_fails_on_a_text_finds_no_answer_in_it() -> None:
    """boxnet's scorer raises AttributeError for a list, where it expects a mapping."""
    (row,) = rows("boxnet", 1)
    with pytest.raises(AttributeError):
        scores._score("[[1,2],[3]]", **{k: row[k] for k in ("prompt", "answer", "metadata", "task")})
    with scorer(["reasoning-gym"], [row]) as opened:
        assert values(judge(opened, row, "[[1,2],[3]]")) == [0.0]


def test_other_rows_are_refused() -> None:
    with (
        pytest.raises(InputError, match="judges the rows of data=reasoning-gym:NAME"),
        scorer(["reasoning-gym"], [{"prompt": "x", "answer": "1"}]),
    ):
        pass
