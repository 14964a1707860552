"""A reward model from preferences: the answer that was chosen is to have the higher score.

pairs -> packed batch, both answers on what they share -> Bradley-Terry -> optimizer

In: pairs, a model with one output. Out: what `stage.tune` asks for; checkpoints that transformers loads as sequence
classifiers and that `reward=reward_model:DIR` uses. `reward_build` makes a `RewardJob`; the command `gspo reward` tunes it.

Letters: T tokens, N trained positions (here one a sequence: its last token), P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gspo.algorithms.losses import Tally
from gspo.algorithms.preferences import preference_loss
from gspo.batch import Batch, Microbatch, answers_batch
from gspo.learner import Learner
from gspo.machine import give_pages_back
from gspo.metrics import Metrics
from gspo.models.attention import Packed
from gspo.models.routing import Routed, Routing
from gspo.models.scorer import trained_scores
from gspo.objectives import Objective, Read
from gspo.stage_config import RewardRun
from gspo.stages.calibration import reliability, write_calibration
from gspo.stages.stage import Stage
from gspo.stats import UpdateStats
from gspo.tasks.pairs import Preferred
from gspo.tasks.sampler import Draw
from gspo.types import Group, Rollout, Segment
from gspo.types import Stop as Ending

_VERDICT = 0
"""The token in whose place the score stands, after the last of a sequence. The model never sees it."""


def preference(margin_P: Tensor, centring: float, seen: list[Tensor]) -> Objective:
    """Mean over the pairs of an update of `preference_loss`; the scores of each micro-batch [2 P] are added to `seen`.

    Sequences come in pairs, the chosen one first.
    """

    def objective(score_N: Tensor, entropy_N: Tensor, batch: Batch, micro: Microbatch) -> tuple[Tensor, Tally]:
        del entropy_N
        seen.append(score_N.detach())
        chosen_P, rejected_P = score_N.view(-1, 2).unbind(1)
        margins = margin_P[micro.sequence.start // 2 : micro.sequence.stop // 2].to(score_N)
        return preference_loss(chosen_P, rejected_P, margins, centring).sum() / (batch.sequences // 2), Tally()

    return objective


class ScoreLearner(Learner):
    """A learner of a classifier's weights: what is read off is a score, which has no entropy."""

    noun = "score"

    def _read(self, model: nn.Module, batch: Batch, micro: Microbatch, routing: Routing | None) -> Read:
        packed = Packed(micro.lengths, batch.tokens_T.device, parents=micro.parents, kernels=self.kernels)
        score_N = trained_scores(
            model,
            tokens_T=batch.tokens_T[micro.token],
            position_T=batch.position_T[micro.token],
            layout=packed if routing is None else Routed(packed, routing),
            source_N=batch.source_N[micro.trained] - micro.token.start,
        )
        return Read(score_N, torch.zeros_like(score_N))


@dataclass(frozen=True)
class Planted:
    """Pairs as trees."""

    groups: tuple[Group, ...]
    """Pairs with the same prompt together: what all of them begin with stands once."""
    margin_P: Tensor
    """In the order of the groups."""


def planted(drawn: Sequence[tuple[int, Preferred]]) -> Planted:
    """(ordinal of the draw, pair) in, trees out: what the sequences share is found by their ids, so nothing is approximate."""
    together: dict[str, list[tuple[int, Preferred]]] = {}
    for ordinal, each in drawn:
        together.setdefault(each.prompt.text, []).append((ordinal, each))
    groups, margins = [], []
    for part in together.values():
        sequences = [ids for _, each in part for ids in (each.chosen, each.rejected)]
        shared = _shared(sequences)
        ordinal, first = part[0]
        groups.append(
            Group(
                prompt=replace(first.prompt, token_ids=sequences[0][:shared]),
                ordinal=ordinal,
                rollouts=tuple(_as_rollout(i, ids[shared:]) for i, ids in enumerate(sequences)),
            )
        )
        margins += [each.margin for _, each in part]
    return Planted(tuple(groups), torch.tensor(margins, dtype=torch.float64))


def _shared(sequences: Sequence[np.ndarray]) -> int:
    """Tokens with which all begin."""
    shortest = min(len(ids) for ids in sequences)
    same = np.all([ids[:shortest] == sequences[0][:shortest] for ids in sequences], axis=0)
    return shortest if same.all() else int(np.argmin(same))


def _as_rollout(index: int, rest: np.ndarray) -> Rollout:
    ids = np.append(rest, _VERDICT)
    segment = Segment(ids, np.arange(len(ids)) == len(rest), np.zeros(len(ids), dtype=np.float32))
    return Rollout(index, (segment,), "", Ending.EOS, versions=(0, 0))


@dataclass(kw_only=True)
class RewardJob(Stage):
    """A run that makes a reward model."""

    @property
    def gains(self) -> Mapping[str, tuple[str, str]]:
        return {"loss": ("held-out loss", ".4f"), "accuracy": ("held-out accuracy", ".3f")}

    together: ClassVar = 2
    run: RewardRun
    pairs: Mapping[int, Preferred]
    """By row of their prompt."""
    held_out: tuple[Preferred, ...]
    _margin_P: Tensor = field(default_factory=lambda: torch.zeros(0))

    def batch(self, draws: Sequence[Draw]) -> Batch:
        found = planted([(draw.ordinal, self.pairs[draw.prompt.row]) for draw in draws])
        self._margin_P = found.margin_P
        return answers_batch(found.groups, self.budget, self.together)

    def learn(self, batch: Batch) -> tuple[UpdateStats, Metrics]:
        seen: list[Tensor] = []
        stats = self.learner.update(batch, preference(self._margin_P, self.run.centring, seen))
        chosen_P, rejected_P = torch.cat(seen).view(-1, 2).double().unbind(1)
        return stats, {
            "loss/pairs": len(chosen_P),
            "accuracy": float(((chosen_P > rejected_P) + 0.5 * (chosen_P == rejected_P)).mean()),
            "score/chosen": float(chosen_P.mean()),
            "score/rejected": float(rejected_P.mean()),
        }

    def evaluate(self) -> Metrics:
        """Loss, accuracy and calibration on the held-out pairs; the table and its curve go to the folder of the run."""
        found = planted(list(enumerate(self.held_out)))
        batch = answers_batch(found.groups, self.budget, self.together)
        score_N = self.learner.logprobs(self.learner.model, self.learner.placed(batch)).double().cpu()
        give_pages_back()
        chosen_P, rejected_P = score_N.view(-1, 2).unbind(1)
        judged = reliability(chosen_P.numpy(), rejected_P.numpy())
        write_calibration(self.folder, judged)
        return {
            "eval/loss": float(preference_loss(chosen_P, rejected_P, found.margin_P, self.run.centring).mean()),
            "eval/accuracy": judged.accuracy.value,
            "eval/accuracy_low": judged.accuracy.low,
            "eval/accuracy_high": judged.accuracy.high,
            "eval/calibration_error": judged.error,
            "eval/pairs": len(chosen_P),
            "eval/score_mean": float(score_N.mean()),
            "eval/score_std": float(score_N.std(correction=0)),
        }

    def shown(self, metrics: Metrics) -> str:
        m = metrics
        interval = f"({m['eval/accuracy_low']:.3f}-{m['eval/accuracy_high']:.3f})"
        return f"loss {m['eval/loss']:.4f}, accuracy {m['eval/accuracy']:.3f} {interval}, calibration error {m['eval/calibration_error']:.3f}"
