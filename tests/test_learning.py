"""The one test that matters most: the reward rises, over seeds, and falls if the advantage is turned round."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import gspo
from gspo import credit

SEEDS = (0, 1, 2)
MARGIN = 0.25
"""Rise of the mean reward from the first three steps to the last three."""


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def rise(folder: Path, seed: int, algorithm: Any, steps: int = 12) -> float:
    keys: dict[str, Any] = dict(
        reward=digits,
        steps=steps,
        seed=seed,
        threads=1,
        model={"name": "random-dense", "dtype": "float32"},
        optimizer={"learning_rate": 3e-3},
        eval={"every": 0},
    )
    run = gspo.train("tiny", dir=str(folder / f"seed-{seed}"), algorithm=algorithm, **keys)
    rewards = [json.loads(line)["reward/mean"] for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    return fmean(rewards[-3:]) - fmean(rewards[:3])


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_the_reward_rises_over_seeds(algorithm: str, tmp_path: Path) -> None:
    assert min(rise(tmp_path, seed, algorithm) for seed in SEEDS) > MARGIN


def test_the_reward_falls_when_the_advantage_is_turned_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = credit.advantages
    monkeypatch.setattr(credit, "advantages", lambda *arguments: -right(*arguments))
    assert max(rise(tmp_path, seed, "gspo") for seed in SEEDS) < 0


@pytest.mark.parametrize("algorithm", sorted(set(gspo.PRESETS) - {"gspo", "grpo"}))
def test_every_other_row_of_the_table_learns(algorithm: str, tmp_path: Path) -> None:
    # A random model seldom ends an answer, so that leaving cut answers out (dapo) would leave nothing.
    assert rise(tmp_path, 0, gspo.PRESETS[algorithm].model_copy(update={"mask_truncated": False})) > 0.05


def test_a_higher_kl_coefficient_keeps_the_policy_nearer(tmp_path: Path) -> None:
    """OpenRLHF/OpenRLHF#1309: a larger beta that gave a larger KL."""
    kls = []
    for beta in (0.01, 3.0):
        row = gspo.PRESETS["grpo"].model_copy(update={"kl_coefficient": beta})
        rise(tmp_path / str(beta), 0, row, steps=6)
        (journal,) = (tmp_path / str(beta)).glob("*/journal.jsonl")
        kls.append(json.loads(journal.read_text().splitlines()[-1])["kl/mean"])
    assert kls[1] < 0.5 * kls[0]
