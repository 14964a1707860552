"""What an engine is: prompts in, answers out, new weights when the learner has made them.

In: `Request`s. Out: `gspo.types.Group`s, unjudged. The rollout stage and the evaluation call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gspo.types import Group, Prompt

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

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"row {self.prompt.row}: {self.count} answers asked for, at least 1 needed")


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
