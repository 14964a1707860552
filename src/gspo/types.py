"""The nouns: a prompt is answered by a group of rollouts, each judged by a reward.

Numpy only, so that data, rewards and tests need no torch. Every class is frozen and checks its
invariants once, when it is made; nothing downstream checks them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

Version = int
"""Number of times that the engine has been given new weights; the start is 0."""


class Stop(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"  # the policy wrote one of the stop ids
    LENGTH = "length"  # it was cut, at a `Limit`
    ENVIRONMENT = "environment"  # the task said that the conversation is over
    ERROR = "error"  # the task or a tool failed; the rollout is data, not a crash


class Limit(StrEnum):
    """Which limit cut a rollout, by the key that sets it."""

    REPLY = "sampling.max_new_tokens"
    TURNS = "conversation.max_turns"
    TOKENS = "conversation.max_tokens"


class Status(StrEnum):
    """What became of one reward function on one answer."""

    OK = "ok"
    NO_VERDICT = "no_verdict"  # it returned None: not zero, but "I cannot tell"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Prompt:
    """One row of the data, rendered and tokenised once."""

    row: int
    """Index of the row in its source: the identity of the prompt. Equal texts stay different prompts."""
    text: str
    """What the model is shown, chat template applied."""
    token_ids: np.ndarray
    """[prompt tokens] int64, never re-tokenised."""
    columns: Mapping[str, Any]
    """All columns of the row, as reward functions get them."""
    messages: tuple[Mapping[str, str], ...] = ()
    """What `text` was made of, the system message among it: a conversation goes on from there."""

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"row {self.row}: the rendered prompt has no tokens")


@dataclass(frozen=True)
class Segment:
    """A run of tokens that follows the prompt, or another segment of the same rollout."""

    token_ids: np.ndarray
    """[tokens] int64, exactly as sampled or inserted."""
    policy_mask: np.ndarray
    """[tokens] bool: true where the policy sampled the token, false for tools and templates."""
    logprobs: np.ndarray
    """[tokens] float32: log-probability under the distribution that was really sampled, after
    temperature and truncation; 0 where `policy_mask` is false."""
    parent: int | None = None
    """Index of the segment that this one continues; None: the prompt."""
    routes: np.ndarray | None = None
    """[tokens, L, K] uint8, or int16 above 256 experts: the K experts that each of L layers used for every token that
    the engine computed. That is all of them, or, where an answer ends, all but the last, which has no row. None: not
    recorded."""

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        if not tokens == len(self.policy_mask) == len(self.logprobs):
            raise ValueError(
                f"segment fields differ in length: {tokens} ids, "
                f"{len(self.policy_mask)} mask, {len(self.logprobs)} log-probabilities"
            )
        if self.routes is not None and not max(0, tokens - 1) <= len(self.routes) <= tokens:
            raise ValueError(
                f"a segment of {tokens} tokens has routes of {len(self.routes)}: {tokens} are needed, or one less where an answer ends"
            )


@dataclass(frozen=True)
class Reward:
    """The judgement of one rollout."""

    value: float | None
    """The number that is optimised; None if any function gave no verdict."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Value per reward function."""
    status: Mapping[str, Status] = field(default_factory=dict)
    """Status per reward function."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time that each reward function took."""
    error: str | None = None
    """Traceback of the first function that crashed, or what is known of its end; None if all came to a verdict."""


@dataclass(frozen=True)
class Rollout:
    """One answer: a *sequence* of the maths."""

    index: int
    """Place in its group, 0-based; part of the key of its random numbers."""
    segments: tuple[Segment, ...]
    text: str
    """The policy's tokens decoded, special tokens left out: what rewards read. Of a conversation, its last reply."""
    stop: Stop
    versions: tuple[Version, Version]
    """First and last weights that wrote a token of it."""
    reward: Reward | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    """What followed the prompt in a conversation, replies and what was said to them; empty for a single answer."""
    earned: float | None = None
    """What the environment gave for all of it; None: it gave nothing, or there is none."""
    error: str | None = None
    """Under `Stop.ERROR`: the traceback, or what is known of the end."""
    limit: Limit | None = None
    """Under `Stop.LENGTH`: what cut it."""

    @property
    def judged(self) -> bool:
        return self.reward is not None and self.reward.value is not None

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy sampled, the stop token included."""
        return int(sum(segment.policy_mask.sum() for segment in self.segments))


@dataclass(frozen=True)
class Group:
    """The rollouts of one draw of one prompt: the unit of baselines and of compute."""

    prompt: Prompt
    ordinal: int
    """Number of this draw since the start of the run; part of the key of its random numbers."""
    rollouts: tuple[Rollout, ...]
    prompt_routes: np.ndarray | None = None
    """[prompt tokens, L, K], as `Segment.routes`: once, for a prompt is computed once for all its answers."""

    def __post_init__(self) -> None:
        tokens = len(self.prompt.token_ids)
        if self.prompt_routes is not None and len(self.prompt_routes) != tokens:
            raise ValueError(
                f"row {self.prompt.row}: a prompt of {tokens} tokens has routes of {len(self.prompt_routes)}"
            )

    def with_rewards(self, rewards: list[Reward]) -> Group:
        """The same group, judged; `rewards` in the order of `rollouts`."""
        judged = tuple(replace(r, reward=w) for r, w in zip(self.rollouts, rewards, strict=True))
        return replace(self, rollouts=judged)

    @property
    def judged(self) -> tuple[Rollout, ...]:
        return tuple(r for r in self.rollouts if r.judged)
