"""DAPO's dynamic sampling: a step is filled up, nothing with signal is lost, and it ends whatever the rewards are.

What others report of it: loops without end on a solved task, groups with signal thrown away because a round had too many
of them, a batch of 64 that trains on 36 (verl-project/verl#5228, PrimeIntellect-ai/prime-rl#3463, OpenRLHF/OpenRLHF#1272).
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import gspo
from gspo import settings
from gspo.drawing import Drawn, draw, teaches
from gspo.tasks.sampler import Draw, Sampler
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop
from processes import killed_while_judging

DAPO = gspo.PRESETS["dapo"]
Line = dict[str, Any]


def row(resample: int) -> gspo.Algorithm:
    return gspo.PRESETS["grpo"].model_copy(update={"resample": resample})


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row=i, text="", token_ids=np.array([1]), columns={}) for i in range(count)]


def group(drawn: Draw, rewards: Sequence[float | None], stop: Stop = Stop.EOS) -> Group:
    segment = Segment(np.array([3]), np.array([True]), np.zeros(1, np.float32))
    answers = tuple(Rollout(i, (segment,), "", stop, (0, 0), Reward(value)) for i, value in enumerate(rewards))
    return Group(drawn.prompt, drawn.ordinal, answers)


class Answers:
    """Judged answers by rule; remembers what it was asked."""

    def __init__(self, rule: Callable[[Draw], Sequence[float | None]]) -> None:
        self.rule = rule
        self.rounds: list[list[Draw]] = []

    def __call__(self, draws: Sequence[Draw]) -> list[Group]:
        self.rounds.append(list(draws))
        return [group(each, self.rule(each)) for each in draws]

    @property
    def ordinals(self) -> list[int]:
        return [each.ordinal for some in self.rounds for each in some]


def drawn_by(rule: Callable[[Draw], Sequence[float | None]], resample: int, count: int = 4) -> tuple[Drawn, Answers]:
    answers = Answers(rule)
    return draw(Sampler(prompts(7), 0), answers, row(resample), prompts=count, solved=1.0), answers


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.integers(1, 8), st.integers(0, 6))
def test_nothing_with_signal_is_lost_and_the_step_is_always_whole(signal: list[bool], count: int, rounds: int) -> None:
    drawn, answers = drawn_by(lambda d: [0, 1] if signal[d.ordinal] else [1, 1], rounds, count)
    kept = [g.ordinal for g in drawn.groups]
    assert len(kept) == count
    assert sorted(kept + [g.ordinal for g in drawn.replaced]) == answers.ordinals == list(range(len(answers.ordinals)))
    assert {g.ordinal for g in drawn.groups} >= {i for i in answers.ordinals if signal[i]}, "no leftovers"
    assert not any(teaches(g, row(rounds)) for g in drawn.replaced)
    assert len(answers.rounds) <= 1 + rounds
    if len(answers.rounds) < 1 + rounds:
        assert all(signal[i] for i in kept)


@pytest.mark.parametrize("rewards", [[1, 1], [0, 0], [0.5, 0.5], [None, None], [None, 1]])
def test_a_task_without_signal_ends_at_the_bound(rewards: list[float | None]) -> None:
    drawn, answers = drawn_by(lambda d: rewards, resample=3)
    assert [len(some) for some in answers.rounds] == [4, 4, 4, 4]
    assert [g.ordinal for g in drawn.replaced] == list(range(12))
    assert [g.ordinal for g in drawn.groups] == [12, 13, 14, 15]


def test_a_round_asks_for_no_more_than_is_missing() -> None:
    drawn, answers = drawn_by(lambda d: [0, 1] if d.ordinal in (1, 3, 4) else [0, 0], resample=2)
    assert [[d.ordinal for d in some] for some in answers.rounds] == [[0, 1, 2, 3], [4, 5], [6]]
    assert [g.ordinal for g in drawn.groups] == [4, 1, 6, 3], "in the place of what they replace"


def test_off_it_is_one_round() -> None:
    drawn, answers = drawn_by(lambda d: [1, 1], resample=0)
    assert (len(answers.rounds), drawn.replaced) == (1, ())


def test_answers_that_were_all_cut_teach_nothing_where_cut_ones_are_left_out() -> None:
    cut = group(Draw(0, prompts(1)[0]), [0, 1], Stop.LENGTH)
    assert not teaches(cut, DAPO)
    assert teaches(cut, row(1))
    assert teaches(replace(cut, rollouts=(cut.rollouts[0], replace(cut.rollouts[1], stop=Stop.EOS))), DAPO)


def test_the_sampler_hears_of_every_group() -> None:
    sampler = Sampler(prompts(3), 0, band=(0.0, 1.0))
    shares = {0: [1, 1, 0, None], 1: [1, 0.9, 0, 0], 2: [0, 0]}
    draw(sampler, Answers(lambda d: shares[d.prompt.row]), row(0), prompts=3, solved=1.0)
    assert {each.row: each.solved for each in sampler.seen} == {0: 2 / 3, 1: 1 / 4, 2: 0.0}


def test_rows_for_which_it_makes_no_sense_refuse_it() -> None:
    with pytest.raises(gspo.InputError, match="resample looks for groups whose rewards differ"):
        settings.load("tiny", ["algorithm.name=own", "algorithm.ratio=token", "algorithm.gate=none",
                               "algorithm.aggregation=token_mean", "algorithm.advantage=batch_mean_std", "algorithm.resample=2"])  # fmt: skip


# ------------------------------------------------------------------------------ in runs

SCRIPT = killed_while_judging("seldom", "float(sum(map(ord, completion)) % 7 == 0)")
SHORT: dict[str, Any] = {
    "steps": 6,
    "prompts_per_step": 4,
    "group_size": 4,
    "threads": 1,
    "judging.workers": 1,
    "algorithm.resample": 2,
    "data.difficulty": [0.05, 0.6],
    "data.limit": 9,
    "eval.every": 0,
    "checkpoint.every": 2,
    "optimizer.learning_rate": 3e-3,
    "model.dtype": "float32",
}


def seldom(completion: str) -> float:
    return float(sum(map(ord, completion)) % 7 == 0)


def tiny(folder: Path, reward: Callable[[str], float] = seldom, **keys: Any) -> Path:
    return gspo.train("tiny", dir=folder, reward=reward, **{**SHORT, **keys}).folder


def journal(folder: Path) -> list[Line]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def rollouts(folder: Path, step: int) -> list[Line]:
    with gzip.open(folder / "rollouts" / f"{step:08d}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def same_end(a: Path, b: Path, step: int) -> bool:
    files = ("model.safetensors", "optimizer.safetensors")
    pairs = [[load_file(folder / "checkpoints" / f"{step:08d}" / name) for folder in (a, b)] for name in files]
    return all(x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in pairs)


def test_what_was_replaced_is_journalled_and_counts_nowhere_else(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", **{"data.difficulty": None})
    lines = journal(folder)
    assert sum(line["groups/replaced"] for line in lines) > 4
    for line in lines:
        written = rollouts(folder, line["step"])
        replaced = [r for r in written if r["replaced"]]
        assert (line["groups/total"], line["groups/drawn"]) == (4, 4 + line["groups/replaced"])
        assert len(replaced) == 4 * line["groups/replaced"]
        assert {r["advantage"] for r in replaced} <= {0.0}
        reasons = ("all_right", "all_wrong", "all_equal", "unjudged", "cut")
        assert sum(line[f"groups/replaced_{reason}"] for reason in reasons) == line["groups/replaced"]
        # S and N: the four groups that are left, whether they carry signal or not.
        kept = {r["ordinal"] for r in written if not r["replaced"]}
        assert len(kept) == 4
        if line["updates/done"] == 4:
            assert line["loss/sequences"] == 16
            assert line["loss/tokens"] == sum(sum(r["mask"]) for r in written if not r["replaced"])
        assert line["rollouts/total"] == len(written), "the reward's mean is over all answers, not over chosen ones"
        assert line["reward/mean"] == pytest.approx(np.mean([r["reward"] for r in written]))
    drawn = sorted(r["ordinal"] for n in range(1, 7) for r in rollouts(folder, n))
    assert drawn == sorted(4 * list(range(sum(line["groups/drawn"] for line in lines)))), "each draw once, in its step"


def test_a_solved_task_ends_its_step_and_changes_nothing(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", reward=lambda completion: 1.0, steps=2, **{"data.difficulty": None})
    for line in journal(folder):
        assert (line["groups/drawn"], line["groups/replaced_all_right"], line["updates/done"]) == (12, 8, 0)
        assert "8 others had been replaced" in line["verdict"]


def test_evaluation_is_as_it_was(tmp_path: Path) -> None:
    on, off = (
        journal(tiny(tmp_path / str(n), steps=1, **{"algorithm.resample": n, "eval.every": 1, "eval.limit": 6}))[0]
        for n in (2, 0)
    )
    keys = [key for key in on if key.startswith("eval/start")]
    assert keys
    assert [on[key] for key in keys] == [off[key] for key in keys]
    assert on["eval/rows"] == 6


def test_a_resumed_run_is_bit_for_bit_the_whole_one(tmp_path: Path) -> None:
    whole, cut = tiny(tmp_path / "whole"), tiny(tmp_path / "cut", steps=3)
    state = json.loads((cut / "checkpoints" / "00000003" / "state.json").read_text())
    assert state["seen"], "the difficulty of prompts is in the checkpoint"
    gspo.train(resume=cut, reward=seldom, steps=6)
    assert journal(cut) == journal(whole)
    assert sum(line["prompts/skipped"] for line in journal(whole)[3:]) > 0
    assert sum(line["groups/replaced"] for line in journal(whole)[3:]) > 0
    assert [rollouts(cut, n) for n in range(1, 7)] == [rollouts(whole, n) for n in range(1, 7)]
    assert same_end(whole, cut, 6)


def test_a_killed_run_with_answers_ahead_goes_on_bit_for_bit(tmp_path: Path) -> None:
    keys = {"max_staleness": 2, "steps": 7}
    cut = tmp_path / "cut"
    words = [sys.executable, "-c", SCRIPT, str(cut), "170", json.dumps({**SHORT, **keys})]
    assert (
        subprocess.run(words, timeout=120, capture_output=True, env={**os.environ}, check=False).returncode
        == -signal.SIGKILL
    )
    reached = journal(cut)[-1]["step"]
    assert 2 <= reached < 7
    whole = tiny(tmp_path / "whole", **keys)
    gspo.train(resume=cut, reward=seldom)
    assert journal(cut) == journal(whole)
    assert sum(line["groups/replaced"] for line in journal(whole)) > 0
    assert [rollouts(cut, n) for n in range(1, 8)] == [rollouts(whole, n) for n in range(1, 8)]
    assert same_end(whole, cut, 7)
