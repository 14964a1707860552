"""An algorithm is a value: one frozen row of independent choices, each named in the table below.

In: a name and the keys a user sets. Out: an `Algorithm`. `config.py` calls `resolve`;
`algorithms/` reads the row and nothing else. No torch.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gspo.errors import InputError

Edge = Annotated[float, Field(ge=0)] | Literal["auto"] | None


class Algorithm(BaseModel):
    """A policy-gradient algorithm: ratio x gate x aggregation x advantage, and what is added to them.

    Pass one to `gspo.train(algorithm=...)` to run a row of your own:

        Algorithm(name="gspo-sum", ratio="sequence", gate="clip", clip_low=2e-3, clip_high=2.5e-3,
                  aggregation="sequence_sum", advantage="leave_one_out")

    Raises pydantic's ValidationError (a ValueError) for a row that makes no sense.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: str = "custom"
    """Name of the row; a preset's name means the preset's definition."""
    ratio: Literal["token", "sequence", "sequence_token", "sequence_product"]
    """Importance ratio: per token; length-normalised per sequence (GSPO eq. 7); its value per sequence with
    the gradient of each token (GSPO eq. 14); or the plain product over the sequence."""
    gate: Literal["clip", "cispo", "sapo", "gmpo", "minirl", "vespo", "dppo", "none"]
    """What stands between the ratio and the gradient."""
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "constant"]
    """Weight of a token: 1/(S n), 1/N, 1/S or 1/(S L)."""
    advantage: Literal["group_mean_std", "group_mean", "leave_one_out", "batch_mean_std", "group_mean_batch_std", "gae"]
    """Baseline and scale of the reward."""

    clip_low: Edge = None
    """Lower edge of the gate, as a distance from 1 (gates clip, cispo, minirl), in log-ratio (gmpo) or in probability (dppo). auto: both edges from each step's distance between engine and trainer, with anchor=rollout, a clipped sequence ratio and max_staleness=0."""
    clip_high: Edge = None
    """Upper edge of the gate, in the units of `clip_low`; auto with it."""
    weight_cap: float | None = Field(default=None, gt=0)
    """Gates minirl and dppo: cap on the importance weight; its gradient goes on, scaled by the cap. Gate clip: bound above 1 on the ratio where the advantage is negative (dual clip, arXiv 1912.09729); off unless set."""
    soft_positive: tuple[float, ...] | None = None
    """Gate sapo: (temperature,) where the advantage is positive; gate vespo: (k, lambda)."""
    soft_negative: tuple[float, ...] | None = None
    """The same where the advantage is negative."""

    length_constant: int | None = Field(default=None, gt=0)
    """Aggregation constant: L of 1/(S L); by default `sampling.max_new_tokens`."""
    advantage_ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the standard deviation."""
    advantage_epsilon: float = Field(default=0.0, ge=0)
    """Added to the standard deviation; groups without variance are exactly 0 with or without it."""
    mask_truncated: bool = False
    """Leave answers cut at the length limit out of the loss and its denominators (DAPO's overlong filter); they stay in the baseline."""

    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the starting policy; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3_corrected"
    """k3_corrected (k3 times the token ratio) and k2 have the gradient of the reverse KL, k3 that of the forward KL, k1 none in expectation."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term stands: a term of the loss, or taken off each answer's reward before the baseline."""

    anchor: Literal["old", "rollout"] = "old"
    """Denominator of the ratio: old, the policy before the step as the trainer computes it; or rollout, the policy that wrote the answer as the engine computed it. With max_staleness these are different weights."""
    correction: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_geometric_mask",
        "sequence_product_truncate",
        "sequence_product_mask",
    ] = "none"
    """Weight for the mismatch rho = old/rollout: rho up to a cap, or rho inside a band and 0 outside, per token or for
    the product over the sequence; sequence_geometric_mask keeps (weight 1) or drops whole sequences by the geometric mean."""
    correction_band: tuple[PositiveFloat] | tuple[NonNegativeFloat, PositiveFloat] | None = None
    """Band of the correction, [low, high]; or [cap] where it only caps."""

    routing: Literal["off", "old", "rollout"] = "off"
    """Experts of a mixture-of-experts model in every pass of the trainer but the reference's. off: its own choice; old:
    that of the policy before the step (Routing Replay, arXiv 2507.18071 section 5.3; R2); rollout: the engine's (R3, arXiv 2510.11370)."""
    load_balance: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of a mixture-of-experts model, over every token of an update; 0 is off, whatever the checkpoint says."""
    resample: int = Field(default=0, ge=0)
    """Rounds, at most, in which prompts whose answers carry no signal are replaced by new ones before a step is trained on (DAPO's dynamic sampling); 0 is off."""
    updates_per_step: int = Field(default=4, ge=1)
    """Optimizer updates that the rollouts of one step are split into, by whole groups."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts of one step: the same updates again, in the same order, against the same old policy."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name != "mask_truncated":
            raise ValueError(f"expected a value, found {str(value).lower()}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_name(self)
        _check_gate(self)
        _check_auto(self)
        _check_kl(self)
        _check_correction(self)
        if self.needs_critic and self.ratio not in ("token", "sequence_token"):
            raise ValueError(
                f"ratio={self.ratio} has one advantage an answer, and advantage=gae gives one a token: use ratio=token, or sequence_token"
            )
        if self.resample and self.advantage in ("batch_mean_std", "gae"):
            raise ValueError(
                f"resample looks for groups whose rewards differ, and with advantage={self.advantage} one whose rewards agree has a gradient too: leave it out"
            )
        if self.length_constant is not None and self.aggregation != "constant":
            raise ValueError(f"length_constant has no effect with aggregation={self.aggregation}")
        if (self.advantage_ddof, self.advantage_epsilon) != (1, 0.0) and not self.advantage.endswith("std"):
            raise ValueError(
                f"advantage_ddof and advantage_epsilon have no effect with advantage={self.advantage}, which divides by no deviation"
            )
        return self

    @property
    def source(self) -> str:
        """Paper and equation of a preset; empty for a row of one's own."""
        return _SOURCES.get(self.name, "")

    @property
    def sizes_band(self) -> bool:
        """True if the band is sized at each step, from the distance between engine and trainer before any update."""
        return self.clip_low == "auto"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def needs_critic(self) -> bool:
        """True if the advantages come from a critic's values, token by token, and no answer is compared with others."""
        return self.advantage == "gae"

    @property
    def needs_signal(self) -> bool:
        """True if a group whose rewards all agree has no gradient, so that it need not be computed."""
        return not self.needs_reference and self.advantage in (
            "group_mean_std",
            "group_mean",
            "leave_one_out",
            "group_mean_batch_std",
        )


# What each gate reads: (required, optional). A parameter outside both has no effect and is refused.
_GATE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "clip": (("clip_low", "clip_high"), ("weight_cap",)),
    "cispo": (("clip_low", "clip_high"), ()),
    "sapo": (("soft_positive", "soft_negative"), ()),
    "gmpo": (("clip_low", "clip_high"), ()),
    "minirl": (("clip_low", "clip_high", "weight_cap"), ()),
    "vespo": (("soft_positive", "soft_negative"), ()),
    "dppo": (("clip_low", "clip_high"), ("weight_cap",)),
    "none": ((), ()),
}
_ALL_GATE_KEYS = ("clip_low", "clip_high", "weight_cap", "soft_positive", "soft_negative")
_GATE_RATIOS = {"gmpo": "token", "minirl": "token", "dppo": "token", "vespo": "sequence_product"}
_SOFT_NUMBERS = {"sapo": 1, "vespo": 2}


def _check_gate(row: Algorithm) -> None:
    required, optional = _GATE_KEYS[row.gate]
    for key in required:
        if getattr(row, key) is None:
            raise ValueError(f"gate={row.gate} needs {key}")
    for key in _ALL_GATE_KEYS:
        if getattr(row, key) is not None and key not in (*required, *optional):
            raise ValueError(
                f"{key} has no effect with gate={row.gate}, which reads {', '.join((*required, *optional)) or 'nothing'}"
            )
    ratio = _GATE_RATIOS.get(row.gate, row.ratio)
    if row.ratio != ratio:
        raise ValueError(f"gate={row.gate} is defined on ratio={ratio}, not on ratio={row.ratio}")
    numbers = _SOFT_NUMBERS.get(row.gate)
    if numbers and not len(row.soft_positive or ()) == len(row.soft_negative or ()) == numbers:
        raise ValueError(f"gate={row.gate} needs {numbers} number(s) in each of soft_positive and soft_negative")
    if row.gate == "clip" and row.weight_cap is not None and row.weight_cap <= 1:
        raise ValueError(
            f"weight_cap={row.weight_cap:g} with gate=clip bounds the ratio of answers that were worse than the others, "
            "which it has to let pass at 1: give it more than 1"
        )


def _check_auto(row: Algorithm) -> None:
    edges = (row.clip_low, row.clip_high)
    if "auto" not in edges:
        return
    if edges != ("auto", "auto"):
        raise ValueError("clip_low=auto and clip_high=auto go together: one measurement sizes both")
    if row.gate != "clip" or row.ratio not in ("sequence", "sequence_token"):
        raise ValueError(
            f"clip_low=auto sizes the band of a clipped sequence ratio, not that of gate={row.gate} with ratio={row.ratio}: give it numbers"
        )
    if row.anchor == "old":
        raise ValueError(
            "clip_low=auto sizes the band from the distance between engine and trainer, which anchor=old keeps out of the ratio: "
            "give it numbers, or set anchor=rollout"
        )


def _check_kl(row: Algorithm) -> None:
    if not row.kl_coefficient:
        if (row.kl_estimator, row.kl_in) != ("k3_corrected", "loss"):
            raise ValueError("kl_estimator and kl_in have no effect with kl_coefficient=0")
        return
    if row.kl_in == "loss" and row.kl_estimator == "k1":
        raise ValueError(
            "kl_estimator=k1 in the loss has zero expected gradient: it changes the loss but not the policy. "
            "Use kl_in=reward, or kl_estimator=k3_corrected"
        )
    if row.kl_in == "reward" and row.kl_estimator == "k3_corrected":
        raise ValueError(
            "kl_estimator=k3_corrected corrects a gradient, and a reward has none: use kl_estimator=k1 with kl_in=reward"
        )


def _check_correction(row: Algorithm) -> None:
    band = row.correction_band
    if row.correction == "none":
        if band is not None:
            raise ValueError("correction_band has no effect with correction=none")
        return
    if row.anchor == "rollout":
        raise ValueError(
            f"correction={row.correction} weighs old/rollout, and with anchor=rollout the ratio holds that factor already: set anchor=old"
        )
    if row.gate == "minirl":
        raise ValueError(
            f"correction={row.correction} weighs old/rollout, and gate=minirl weighs by pi/rollout already: set correction=none"
        )
    wanted = "[cap]" if row.correction.endswith("_truncate") else "[low, high]"
    if band is None or len(band) != wanted.count(",") + 1:
        raise ValueError(f"correction={row.correction} needs correction_band={wanted}")
    if list(band) != sorted(set(band)):
        raise ValueError(f"correction_band={list(band)}: two ratios, the smaller first")


# ------------------------------------------------------------------------------ the table
# A row is its paper, so experts are replayed by default where the paper did so: the baseline of the GSPO paper, and MiniRL.

_PPO_CLIP: dict[str, Any] = dict(ratio="token", gate="clip", clip_low=0.2, clip_high=0.2)

_ROWS: dict[str, dict[str, Any]] = {
    "gspo": dict(
        source="GSPO, arXiv 2507.18071 eq. 5-7; bands of section 5.1",
        ratio="sequence", gate="clip", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean", advantage="group_mean_std",
    ),
    "gspo_token": dict(
        source="GSPO-token, arXiv 2507.18071 eq. 13-17",
        ratio="sequence_token", gate="clip", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean", advantage="group_mean_std",
    ),
    "grpo": dict(
        source="GRPO, arXiv 2402.03300 eq. 3, without its KL; bands and routing of the GSPO paper's baseline (2507.18071 section 5)",
        ratio="token", gate="clip", clip_low=0.2, clip_high=0.27, aggregation="sequence_mean", advantage="group_mean_std", routing="old",
    ),
    "ppo": dict(
        source="PPO, arXiv 1707.06347 eq. 7, with its critic (eq. 9, 11-12); GAE, arXiv 1506.02438 eq. 16",
        **_PPO_CLIP, aggregation="token_mean", advantage="gae",
    ),
    "dr_grpo": dict(source="Dr. GRPO, arXiv 2503.20783 section 3.2", **_PPO_CLIP, aggregation="constant", advantage="group_mean"),
    "dapo": dict(
        source="DAPO, arXiv 2503.14476 eq. 8, whose constraint on groups (dynamic sampling, section 3.2) is given up after nine rounds",
        ratio="token", gate="clip", clip_low=0.2, clip_high=0.28, aggregation="token_mean", advantage="group_mean_std", mask_truncated=True,
        resample=9,
    ),
    "rloo": dict(
        source="RLOO, arXiv 2402.14740 eq. 8; on-policy, where its gradient is that of REINFORCE on the whole answer",
        ratio="token", gate="none", aggregation="sequence_sum", advantage="leave_one_out", updates_per_step=1,
    ),
    "cispo": dict(
        source="CISPO, arXiv 2506.13585 eq. 4-5; cap 1 + 4 from ScaleRL, arXiv 2510.13786",
        ratio="token", gate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token_mean", advantage="group_mean_std",
    ),
    "gmpo": dict(
        source="GMPO, arXiv 2507.20673 eq. 4",
        ratio="token", gate="gmpo", clip_low=0.4, clip_high=0.4, aggregation="sequence_mean", advantage="group_mean_std",
    ),
    "sapo": dict(
        source="SAPO, arXiv 2511.20347 eq. 5-6",
        ratio="token", gate="sapo", soft_positive=(1.0,), soft_negative=(1.05,), aggregation="sequence_mean", advantage="group_mean_std",
    ),
    "luspo": dict(
        source="LUSPO, arXiv 2602.05261",
        ratio="sequence", gate="clip", clip_low=2e-3, clip_high=2.5e-3, aggregation="sequence_sum", advantage="group_mean_std",
    ),
    "minirl": dict(
        source="MiniRL, arXiv 2512.01374 eq. 7, and its finding that the engine's experts serve best from four updates on",
        ratio="token", gate="minirl", clip_low=0.2, clip_high=0.27, weight_cap=5.0, aggregation="sequence_sum", advantage="group_mean",
        routing="rollout",
    ),
    "vespo": dict(
        source="VESPO, arXiv 2602.10693",
        ratio="sequence_product", gate="vespo", soft_positive=(2.0, 3.0), soft_negative=(3.0, 2.0), aggregation="token_mean", advantage="group_mean_std",
    ),
    "dppo": dict(
        source="DPPO, arXiv 2602.04879, total variation on the sampled token",
        ratio="token", gate="dppo", clip_low=0.2, clip_high=0.2, weight_cap=20.0, aggregation="token_mean", advantage="group_mean_std", anchor="rollout",
    ),
}  # fmt: skip

_DEFINING = ("ratio", "gate", "aggregation", "advantage")
_WHY = {
    "ratio": "the level of the importance ratio decides what is clipped and how noisy it is",
    "gate": "the gate decides which answers keep their gradient",
    "aggregation": "the aggregation decides how much a long answer counts beside a short one",
    "advantage": "the advantage decides what an answer is compared with",
}


def _check_name(row: Algorithm) -> None:
    """One word is the paper: a preset's name cannot carry another definition."""
    definition = _ROWS.get(row.name)
    if definition is None:
        return
    for key in _DEFINING:
        value = getattr(row, key)
        if value != definition[key]:
            same = next((n for n, d in _ROWS.items() if all(getattr(row, k) == d[k] for k in _DEFINING)), None)
            instead = (
                f"algorithm={same} is exactly that"
                if same
                else "give the row a name of its own, with all of " + ", ".join(_DEFINING)
            )
            raise ValueError(
                f"{row.name} is defined by {key}={definition[key]} ({row.source}), and {_WHY[key]}. For {key}={value}: {instead}"
            )


_SOURCES: dict[str, str] = {
    name: row.pop("source") for name, row in _ROWS.items()
}  # said of a row, and no setting of it

PRESETS: dict[str, Algorithm] = {name: Algorithm(name=name, **row) for name, row in _ROWS.items()}


def resolve(name: str, adjustments: dict[str, Any]) -> Algorithm:
    """The row called `name` with the user's keys laid over it; or a new row, if the defining keys are all given.

    Raises:
        InputError: unknown name. pydantic.ValidationError: a key that does not exist, has the
            wrong type, has no effect in this row, or contradicts its definition.
    """
    if name in _ROWS:
        return Algorithm(name=name, **{**_ROWS[name], **adjustments})
    if all(key in adjustments for key in _DEFINING):
        return Algorithm(name=name, **adjustments)
    near = get_close_matches(name, _ROWS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"algorithm={name}: no such algorithm; {hint}There are {', '.join(_ROWS)}. A row of your own needs {', '.join(_DEFINING)}."
    )


def advice(row: Algorithm) -> list[str]:
    """What is legal but unwise in this row, each in a sentence to be said once at the start of a run."""
    said = []
    sequence = row.ratio in ("sequence", "sequence_token")
    if row.updates_per_step == row.epochs == 1 and row.gate != "none" and row.anchor == "old":
        said.append(
            "updates_per_step=1: each answer is used once, before the weights change, so every importance ratio is exactly 1, "
            "clipping is inactive, and GSPO equals GRPO."
        )
    edges = [edge for edge in (row.clip_low, row.clip_high) if isinstance(edge, float)]
    if sequence and row.gate == "clip" and max(edges, default=0) >= 0.1:
        said.append(
            f"clip {row.clip_low:g}/{row.clip_high:g} on a sequence ratio practically never binds: the ratio is a geometric mean over the answer, "
            "and the paper's band is 0.0003/0.0004. Expect a clip share near 0 and no trust region."
        )
    if sequence and row.gate == "clip" and row.anchor == "rollout" and not row.sizes_band:
        said.append(
            "anchor=rollout: the mismatch between engine and trainer enters the ratio; if parity/signed exceeds a third of the clip band, "
            "answers with a negative advantage are clipped before any update. anchor=old avoids it."
        )
    if row.kl_coefficient and row.kl_in == "loss" and row.kl_estimator == "k3":
        said.append(
            "kl_estimator=k3 in the loss has the gradient of the forward KL; k3_corrected has that of the reverse KL."
        )
    return said
