"""reasoning-gym's tasks by name: the real package's rows, split so that nothing moves a prompt to the other side."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gspo import config, settings
from gspo.errors import InputError
from gspo.tasks import builtin, gym, listing
from gspo.tasks.task import HELD_OUT

pytest.importorskip("reasoning_gym")


def both(words: str, train: int = 150, held_out: int = 50) -> tuple[list[str], list[str]]:
    task = gym.parse(words)
    sides = (task.rows("train", limit=train)[0], task.rows("held_out", limit=held_out)[0])
    return tuple([row["prompt"] for row in rows] for rows in sides)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "words",
    [
        "chain_sum",
        "chain_sum,max_terms=2,max_digits=1",  # 180 prompts in all: independent seeds would repeat most of them
        "pool_matrix",  # draws from numpy's own generator
        "acre",  # makes all rows of a data set before it gives one
        "word_sorting",
    ],
)
def test_no_prompt_is_on_both_sides_or_twice(words: str) -> None:
    train, held_out = both(words)
    assert len(train) > 40
    assert len(held_out) > 10
    assert len({*train, *held_out}) == len(train) + len(held_out)


def test_another_seed_leaves_each_prompt_on_its_side() -> None:
    """Row i of seed s is row i - 1 of seed s + 1 in most tasks, so that a split by seed alone would leak."""
    train, held_out = both("chain_sum,max_terms=2,max_digits=1")
    other_train, other_held_out = both("chain_sum,max_terms=2,max_digits=1,seed=1")
    assert set(train) & set(other_train)
    assert not set(train) & set(other_held_out)
    assert not set(held_out) & set(other_train)


def test_a_quarter_is_held_out() -> None:
    sides = [gym._side(f"prompt {i}") for i in range(4000)]
    assert sides.count("held_out") / 4000 == pytest.approx(HELD_OUT, abs=0.03)
    # Pinned: a split that moved would train on what an older run held out.
    assert [i for i in range(10) if sides[i] == "held_out"][:1] == [3]


def test_a_small_task_ends_and_says_so() -> None:
    rows, notes = gym.parse("chain_sum,max_terms=2,max_digits=1").rows("train", limit=5000)
    assert 100 < len(rows) < 400
    assert "seem to be all that there are" in notes[0]


def test_a_limit_is_a_prefix_and_the_default_is_said() -> None:
    task = gym.parse("gcd")
    rows, notes = task.rows("train", limit=None)
    assert (len(rows), notes) == (1024, ("reasoning-gym:gcd: 1024 train prompts; data.limit sets how many",))
    assert task.rows("train", limit=7) == (rows[:7], ())


@pytest.mark.parametrize("words", ["pool_matrix", "list_functions", "gsm_symbolic"])
def test_rows_are_the_same_in_another_process_and_leave_no_trace(words: str) -> None:
    code = f"from gspo.tasks import gym; print([r['prompt'] for r in gym.parse({words!r}).rows('train', limit=20)[0]])"
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.random())
    random.seed(5)
    np.random.seed(5)
    rows, _ = gym.parse(words).rows("train", limit=20)
    assert (random.random(), np.random.random()) == expected
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str([row["prompt"] for row in rows])


def test_settings_reach_the_task() -> None:
    task = gym.parse("chain_sum,min_terms=2,max_terms=2,allow_negation=true")
    assert task.settings == (("min_terms", 2), ("max_terms", 2), ("allow_negation", True))
    rows, _ = task.rows("train", limit=30)
    assert {row["metadata"]["num_terms"] for row in rows} == {2}
    assert gym.parse("spiral_matrix,min_n=3").choices()["min_n"] == 3


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("chain_smu", "did you mean reasoning-gym:chain_sum"),
        ("", "no such task"),
        ("composite", "no such task"),
        ("chain_sum,min_term=2", "did you mean min_terms"),
        ("chain_sum,size=3", r"data\.limit"),
        ("chain_sum,min_terms=2,min_terms=3", "set twice"),
        ("chain_sum,min_terms=9", "refuses its settings"),
        ("chain_sum,min_terms=two", "refuses its settings"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_name(words: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        gym.parse(words)


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "installed", lambda: False)
    with pytest.raises(InputError, match=r"pip install 'gspo\[reasoning-gym\]'"):
        builtin.find("reasoning-gym:chain_sum")
    assert "pip install" in "\n".join(listing.tasks())


# ------------------------------------------------------------------------------ by name


def test_every_named_task_has_a_rule() -> None:
    assert set(config.RULES_OF_TASKS) == set(builtin.TASKS)


def test_a_task_is_a_recipe(tmp_path: Path) -> None:
    run = settings.load("reasoning-gym:chain_sum,min_terms=2", ["model=smollm2-135m"])
    assert run.data.source == "reasoning-gym:chain_sum,min_terms=2"
    assert run.dir == "runs/reasoning-gym-chain_sum-min_terms-2"
    assert run.reward == (config.RewardRule(function="reasoning-gym"),)
    assert settings.load("sort:5").reward == (config.RewardRule(function="sorted"),)
    assert settings.load("sort").steps == 60, "a built-in recipe comes before a task of its name"
    assert settings.load("reasoning-gym:gcd", ["reward=number"]).reward == (config.RewardRule(function="number"),)
    with pytest.raises(InputError, match="Did you mean 'reasoning-gym:gcd'"):
        settings.load("reasoning_gym:gcd")


def test_the_list_names_every_task_and_how_to_use_it() -> None:
    lines = list(listing.tasks())
    for name in builtin.TASKS:
        assert any(line.startswith(f"{name}:") for line in lines), name
    assert "gspo train TASK" in lines[0]
    named = {line.split()[0] for line in lines if line.startswith("  ")}
    assert named == set(gym.names())
    assert len(named) > 100
    assert all(len(line.split()) > 2 for line in lines if line.startswith("  "))


@pytest.mark.parametrize("words", ["reasoning-gym:chain_sum", "addition:1-9", "sort:4"])
def test_rows_are_shown_with_their_answers(words: str) -> None:
    task = builtin.find(words)
    assert task is not None
    rows, _ = task.rows("train", limit=2)
    shown = "\n".join(listing.shown(words, 2))
    assert all(row["prompt"] in shown and f"answer: {row['answer']}" in shown for row in rows)
    assert f"gspo train {words}" in shown


@pytest.mark.parametrize(
    ("words", "part"),
    [("chain_sum", "reasoning-gym:chain_sum"), ("additoin:1-3", "addition:1-3"), ("xyz", "gspo tasks")],
)
def test_an_unknown_name_is_refused(words: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        list(listing.shown(words, 2))
