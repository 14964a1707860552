"""What the tests of the losses share: the recorded cases, and one way to run a padded batch through `policy_loss`.

The cases of loss-vectors.json were made in numpy alone; each closed-form gradient was checked by finite differences.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.algorithms.advantages import token_weights
from gspo.algorithms.losses import PolicyInputs, Tally, policy_loss
from gspo.presets import PRESETS, Algorithm

LOSSES = (
    "gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "gmpo", "sapo", "ppo", "luspo", "minirl", "vespo", "dppo_tv",
)  # fmt: skip


@cache
def recorded() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "loss-vectors.json").read_text())


def case_names() -> list[str]:
    return [case["name"] for case in recorded()["vectors"]]


def case(name: str) -> dict[str, Any]:
    return next(c for c in recorded()["vectors"] if c["name"] == name)


def variant(preset: str, /, **keys: Any) -> Algorithm:
    """A preset with keys laid over it, validated again."""
    return Algorithm(**(PRESETS[preset].model_dump() | keys))


def row_of(loss: str, inputs: dict[str, Any]) -> Algorithm:
    """The row that a recorded loss stands for, with the numbers of its own case."""
    band = {key: {"clip_low": low, "clip_high": high} for key, (low, high) in inputs["eps"].items()}
    tau_positive, tau_negative = inputs["sapo_tau"]
    keys: dict[str, dict[str, Any]] = {
        "gspo": band["gspo"],
        "gspo_token": band["gspo"],
        "grpo": band["grpo"],
        "dr_grpo": dict(band["grpo"], length_constant=int(inputs["L_max"])),
        "dapo": band["dapo"],
        "cispo": band["cispo"],
        "gmpo": band["gmpo"],
        "sapo": {"soft_positive": (tau_positive,), "soft_negative": (tau_negative,)},
        "ppo": dict(band["ppo"], weight_cap=inputs["dual_clip"]),
        "luspo": band["luspo"],
        "minirl": dict(band["minirl"], weight_cap=inputs["minirl_C"]),
        "vespo": {},
        "dppo_tv": dict(band["dppo"], anchor="old", weight_cap=None),
    }
    return variant(loss.removesuffix("_tv"), **keys[loss])


@dataclass(frozen=True)
class Padded:
    """A batch as rows and columns; what lies outside the mask must not matter."""

    logprob: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor | None
    advantage: Tensor
    mask: Tensor

    def with_rows(self, rows: list[int]) -> Padded:
        reference = None if self.reference is None else self.reference[rows]
        return replace(
            self, logprob=self.logprob[rows], old=self.old[rows], rollout=self.rollout[rows], reference=reference,
            advantage=self.advantage[rows], mask=self.mask[rows],
        )  # fmt: skip


def padded_case(loss: str, inputs: dict[str, Any], dtype: torch.dtype = torch.float64) -> Padded:
    """A recorded case, with the advantages that the loss is recorded with."""

    def tensor(key: str) -> Tensor:
        return torch.tensor(inputs[key], dtype=dtype)

    mask = torch.tensor(inputs["mask"]) > 0
    per_row = {
        "gspo": "adv",
        "luspo": "adv",
        "gmpo": "adv",
        "vespo": "adv",
        "dr_grpo": "adv_mean",
        "minirl": "adv_mean",
    }
    advantage = tensor(per_row[loss])[:, None].expand(mask.shape) if loss in per_row else tensor("adv_tok")
    rollout = "logp_old" if inputs["logp_rollout"] is None else "logp_rollout"
    return Padded(tensor("logp_new"), tensor("logp_old"), tensor(rollout), None, advantage, mask)


@dataclass(frozen=True)
class Outcome:
    loss: float
    grad: Tensor
    """Shaped as the batch, 0 outside its mask."""
    tally: Tally


def evaluate(
    batch: Padded, row: Algorithm, *, parts: list[list[int]] | None = None, shuffle: int | None = None, limit: int = 16
) -> Outcome:
    """Loss and gradient of a batch, as the sum over `parts` (lists of rows, each packed in the order given).

    `shuffle` seeds an order of the tokens of each pack, so that rows interleave. Weights come from the whole batch.
    """
    parts = [list(range(len(batch.mask)))] if parts is None else parts
    length_S = batch.mask.sum(1)
    sequences, tokens = int((length_S > 0).sum()), int(length_S.sum())
    leaf = batch.logprob.clone().requires_grad_()
    total, measured = 0.0, Tally()
    for part in parts:
        here = batch.with_rows(part)
        sequence_N, column_N = here.mask.nonzero(as_tuple=True)
        if shuffle is not None:
            order = torch.randperm(len(sequence_N), generator=torch.Generator().manual_seed(shuffle))
            sequence_N, column_N = sequence_N[order], column_N[order]
        place = (sequence_N, column_N)
        weight_N = token_weights(
            row, length_S=length_S[part], sequence_N=sequence_N, sequences=sequences, tokens=tokens, max_new_tokens=limit
        )  # fmt: skip
        inputs = PolicyInputs(
            logprob_N=leaf[part][place],
            old_logprob_N=here.old[place],
            rollout_logprob_N=here.rollout[place],
            reference_logprob_N=None if here.reference is None else here.reference[place],
            advantage_N=here.advantage[place],
            weight_N=weight_N,
            sequence_N=sequence_N,
            sequences=len(part),
        )
        loss, tally = policy_loss(inputs, row)
        loss.backward()
        total, measured = total + loss.item(), measured + tally
    return Outcome(total, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, measured)


def random_batch(lengths: list[int], seed: int, *, drift: float = 0.2, per_token: bool = False) -> Padded:
    """Rows of these lengths with holes in their masks, policies `drift` apart, advantages of both signs and one 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = max(lengths) + 2
    old = -normal(len(lengths), width).abs() - 0.1
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for s, length in enumerate(lengths):
        mask[s, torch.randperm(width, generator=generator)[:length]] = True
    advantage = normal(len(lengths), width) if per_token else normal(len(lengths), 1).expand(-1, width).clone()
    if len(lengths) > 2:
        advantage[1] = 0.0
    policies = [old + drift * normal(*old.shape) for _ in range(3)]
    return Padded(policies[0], old, policies[1], policies[2], advantage, mask)
