"""Supervised fine-tuning: the likelihood of given answers, on the batch, learner and store of `train`.

answers -> packed batch -> cross-entropy -> optimizer

In: answers, a model. Out: what `stage.tune` asks for. `sft_build` makes an `SftJob`; the command `gspo sft` tunes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gspo.algorithms.losses import Tally
from gspo.batch import Batch, Microbatch, answers_batch
from gspo.console import between
from gspo.engines.local import LocalEngine
from gspo.evaluate import measure
from gspo.journal import write_evaluations, writing
from gspo.machine import give_pages_back
from gspo.metrics import Metrics, evaluation_metrics
from gspo.rewards.runner import Pool
from gspo.rewards.score import Scorer
from gspo.stage_config import Sft
from gspo.stages.stage import Stage
from gspo.stats import UpdateStats
from gspo.tasks.answers import Answered
from gspo.tasks.sampler import Draw
from gspo.types import Group, Rollout, Segment
from gspo.types import Stop as Ending


def likelihood(logprob_N: Tensor, entropy_N: Tensor, batch: Batch, micro: Microbatch) -> tuple[Tensor, Tally]:
    """Cross-entropy, the mean over all the answer tokens of an update: an `Objective` of the learner."""
    del entropy_N, micro
    return -logprob_N.sum() / batch.tokens, Tally()


def grouped(drawn: Sequence[tuple[int, Answered]]) -> list[Group]:
    """(ordinal of the draw, answer) in, groups out: answers to equal prompts together, so that the prompt stands once."""
    together: dict[bytes, list[tuple[int, Answered]]] = {}
    for ordinal, each in drawn:
        together.setdefault(each.prompt.token_ids.tobytes(), []).append((ordinal, each))
    return [
        Group(
            prompt=part[0][1].prompt,
            ordinal=part[0][0],
            rollouts=tuple(_as_rollout(i, each) for i, (_, each) in enumerate(part)),
        )
        for part in together.values()
    ]


def _as_rollout(index: int, each: Answered) -> Rollout:
    segments = tuple(
        Segment(turn.ids, turn.learned, np.zeros(len(turn.ids), dtype=np.float32), turn.parent) for turn in each.turns
    )
    return Rollout(index, segments, each.answer, Ending.EOS, versions=(0, 0))


@dataclass(kw_only=True)
class SftJob(Stage):
    """A run of supervised fine-tuning."""

    run: Sft
    answers: Mapping[int, Answered]
    """By row of their prompt."""
    held_out: tuple[Answered, ...]
    reward: Scorer | None
    """How sampled answers to the held-out prompts are judged, if they are."""
    pool: Pool | None
    """The processes in which they are judged, if that needs any."""
    engine: LocalEngine | None
    binary: bool = True
    """Every answer that was sampled and judged so far is worth 0 or 1."""

    @property
    def gains(self) -> Mapping[str, tuple[str, str]]:
        return {
            "loss": ("held-out loss", ".4f"),
            "reward": ("held-out accuracy" if self.binary else "held-out reward", ".3f"),
        }

    def close(self) -> None:
        """End the processes of the reward functions too."""
        if self.pool is not None:
            self.pool.close()
        super().close()

    def batch(self, draws: Sequence[Draw]) -> Batch:
        return answers_batch(grouped([(draw.ordinal, self.answers[draw.prompt.row]) for draw in draws]), self.budget)

    def learn(self, batch: Batch) -> tuple[UpdateStats, Metrics]:
        stats = self.learner.update(batch, likelihood)
        return stats, {"loss/tokens": stats.tokens, "entropy": stats.entropy}

    def evaluate(self) -> Metrics:
        """Loss on the held-out answers and, with a reward, that of sampled ones, under `loss`, `reward`, ..."""
        batch = answers_batch(grouped(list(enumerate(self.held_out))), self.budget)
        logprob_N = self.learner.logprobs(self.learner.model, self.learner.placed(batch))
        found: Metrics = {"eval/loss": -float(logprob_N.double().mean()), "eval/tokens": batch.tokens}
        give_pages_back()
        if self.engine is not None and self.reward is not None:
            self.engine.load(self.learner.weights(), version=self.progress.step)
            prompts = [each.asked for each in self.held_out]
            evaluations = measure(self.engine, prompts, self.reward, self.run.eval)
            self.binary = self.binary and evaluations["eval"].binary
            rollouts = self.folder / "rollouts"
            with writing(rollouts, self.progress.step):
                rollouts.mkdir(exist_ok=True)
                write_evaluations(rollouts, self.progress.step, evaluations)
            for prefix, evaluation in evaluations.items():
                found |= evaluation_metrics(prefix, evaluation)
            for notice in self.reward.notices():
                self.console.say(f"note: {notice}")
        return found

    def shown(self, metrics: Metrics) -> str:
        m, reward = metrics, metrics.get("eval/reward")
        sampled = (
            "" if reward is None else f", reward {reward:.3f} {between(m['eval/reward_low'], m['eval/reward_high'])}"
        )
        return f"loss {m['eval/loss']:.4f}{sampled}"
