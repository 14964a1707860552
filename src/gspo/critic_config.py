"""The section `critic`: which model says what is still to come, how it learns, and what its values are used for.

In: the user's keys. Out: a `Critic`, or the reason why there can be none. `config.py` has it as a section. No torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gspo.presets import Algorithm
from gspo.sections import Section

VALUE_COEFFICIENT = 0.1
"""`critic.value_coefficient` where it is null, as in the code of arXiv 1909.08593."""


class Critic(Section):
    """The value model of an algorithm whose advantages come from a critic, and what its values are used for."""

    shorthand = "backbone"
    backbone: Literal["separate", "shared"] = "separate"
    """separate: a model of its own, with its own optimizer; shared: one more output of the policy, whose layers then learn both."""
    model: str | None = Field(default=None, min_length=1)
    """Separate: what it starts from, named as model.name is, with the policy's vocabulary; null: what the policy starts from."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Separate: its step size after warm-up; null: ten times optimizer.learning_rate (beside an adapter, ten times the rate of all weights that this one belongs to), whose other keys it shares."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Weight of later steps in an advantage: 1 takes the rewards as they came, 0 trusts the next value."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a step; a step is a token that the policy wrote."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move in a step before its gradient ends, in units of the reward; null is off."""
    value_coefficient: float | None = Field(default=None, gt=0)
    """Shared: weight of the value loss beside the policy's; null: 0.1."""
    whiten: bool = True
    """Give the advantages of a step the mean 0 and the deviation 1, over all its tokens."""
    end_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of an answer that was cut at sampling.max_new_tokens, once, at its last token."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL from the starting policy that algorithm.kl_coefficient is steered to, nats an answer; null: the coefficient is fixed."""

    @property
    def coefficient(self) -> float:
        """Weight of the value loss of a shared critic."""
        return VALUE_COEFFICIENT if self.value_coefficient is None else self.value_coefficient

    @model_validator(mode="after")
    def _check(self) -> Critic:
        idle = {"separate": ("value_coefficient",), "shared": ("model", "learning_rate")}[self.backbone]
        for key in idle:
            if getattr(self, key) is not None:
                raise ValueError(f"{key} has no effect with backbone={self.backbone}: leave it out")
        return self


def check_critic(critic: Critic | None, row: Algorithm) -> None:
    """Raise ValueError for a key that has no effect with the algorithm's row."""
    if critic is None:
        return
    if critic.kl_target is not None and not (row.needs_reference and row.kl_in == "reward"):
        raise ValueError(
            "critic.kl_target steers the KL term of the reward, and there is none: set algorithm.kl_coefficient (where it starts), "
            "algorithm.kl_in=reward and algorithm.kl_estimator=k1"
        )
    if critic.end_penalty and row.mask_truncated:
        raise ValueError(
            "critic.end_penalty has no effect with algorithm.mask_truncated=true, which leaves such answers out: set one of them"
        )
