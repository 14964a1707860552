"""What an engine is: prompts in, answers out, new weights when the learner has made them.

In: `Request`s. Out: `gspo.types.Group`s, unjudged. The rollout stage and the evaluation call it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gspo.types import Group, Limit, Prompt, Stop

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    """Answers wanted for one draw of a prompt."""

    prompt: Prompt
    ordinal: int
    """Number of this draw; with `stream`, the index in the group and the run's seed the key of its random numbers."""
    count: int
    """Answers: indices 0 to count - 1 of the group."""
    stream: int = 0
    """0: training; 1: evaluation."""
    greedy: bool = False
    """The likeliest token each time, instead of a draw."""
    partner: Partner | None = None
    """Whom each answer is the first turn of a conversation with; None: an answer is all."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"row {self.prompt.row}: {self.count} answers asked for, at least 1 needed")


@dataclass(frozen=True)
class Turn:
    """A turn that the policy has ended."""

    key: Hashable
    """Which conversation it is of."""
    prompt: Prompt
    token_ids: np.ndarray
    """[tokens] int64 of this turn, its stop token included, as sampled."""
    cut: bool
    """It was cut at a length, and has no stop token."""


@dataclass(frozen=True)
class Next:
    """How a conversation goes on: what stands between the turn that has ended and the one to be written."""

    key: Hashable
    keep: int
    """Tokens after the prompt that stay; fewer than there are if the chat template has rewritten what came after them."""
    token_ids: np.ndarray
    """[tokens] int64 that follow them, at least one; not the policy's."""


@dataclass(frozen=True)
class Over:
    """The end of a conversation: what its rollout says beside its tokens."""

    key: Hashable
    stop: Stop
    text: str
    messages: tuple[Mapping[str, str], ...]
    earned: float | None
    error: str | None = None
    limit: Limit | None = None


class Partner(Protocol):
    """The other side of conversations."""

    def take(self, turn: Turn) -> None:
        """Begin to answer a turn; does not wait."""
        ...

    def replies(self, wait: bool) -> list[Next | Over]:
        """What has become of the turns taken, each once; with `wait`, at least one if any is still open."""
        ...


class Engine(Protocol):
    """Anything that turns prompts into answers."""

    version: int
    """Number of times that new weights arrived; written into every rollout."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InputError for a prompt that the model cannot take."""
        ...

    def collect(self) -> Iterator[Group]:
        """Every submitted group, whole, in the order in which they are finished.

        Raises:
            RunError: the weights cannot be sampled from.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Answer with these weights (names as in a checkpoint) from now on. Raises RunError while answers are being written."""
        ...

    def describe(self) -> dict[str, Any]:
        """The sampling values in effect, for the console and for run.yaml."""
        ...
