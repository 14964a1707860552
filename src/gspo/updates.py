"""Groups in, updates of the weights out: the part of a step between rewards and new weights.

`job` holds one `Updates` and calls `learn` once a step. What memory, a steered KL term and a sized band have come to is kept
here from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from gspo.algorithms.bands import sized
from gspo.algorithms.values import next_kl_coefficient
from gspo.batch import Batch, Batches, make_batches
from gspo.config import Run
from gspo.console import Console
from gspo.credit import answer_kl
from gspo.critic import Critic
from gspo.errors import DivergedError, OutOfMemoryError, RunError
from gspo.learner import Learner
from gspo.objectives import Objective, policy_objective
from gspo.presets import Algorithm
from gspo.rescue import Rescue
from gspo.stats import Parity, UpdateStats, rollout_log_ratio
from gspo.types import Group


@dataclass
class Updates:
    """The updates of a run's steps."""

    run: Run
    learner: Learner
    critic: Critic | None
    rescue: Rescue | None
    console: Console
    timed: Callable[[str], AbstractContextManager[None]]
    """By name of the phase."""
    max_tokens: int | None
    """What memory has left of the configured budget of a micro-batch; None: all of it."""
    next_kl: float | None
    """KL coefficient of the next step, if it is steered; None: the configured one."""
    skipped: int = 0
    """Updates of the step at hand that had nothing to learn from."""
    row: Algorithm = field(init=False)
    """The run's row, its band and KL coefficient those of the step at hand."""
    _kl_coefficient: float | None = field(init=False)
    """Of the step at hand."""
    objective: Objective = field(init=False)
    _oversize: int = 0

    def __post_init__(self) -> None:
        self.row = self.run.algorithm
        self.objective = policy_objective(self.row)

    def learn(self, groups: Sequence[Group]) -> tuple[list[Batch], list[UpdateStats]]:
        """Annotate, then update with every batch, `algorithm.epochs` times over; so a critic of its own, afterwards.

        Out of memory, it is tried again with smaller micro-batches. Their size changes no result but by rounding: updates
        after the first keep the old log-probabilities of the larger ones. Raises RunError if a single answer does not fit.
        """
        self._kl_coefficient = self.next_kl
        batches: list[Batch] | None = None
        done: list[UpdateStats] = []
        while batches is None or len(done) < len(batches) * self.run.algorithm.epochs:
            try:
                if batches is None:
                    batches = self._annotate(groups)
                else:
                    again, i = divmod(len(done), len(batches))
                    stats = self._update(batches[i])
                    done.append(
                        replace(stats, parity=Parity()) if again else stats
                    )  # it was measured in the first pass
            except DivergedError as error:
                self._rescued_from(error)
                return batches or [], done
            except OutOfMemoryError as error:
                self._halve(groups, str(error))
                # Until the first update the old pass can be done again, in the pieces of the training pass.
                batches = self.learner.recut(self._batches(groups), batches) if done and batches else None
        try:
            return self._learn_values(groups, batches, done)
        except DivergedError as error:
            self._rescued_from(error)
            return batches, done

    def _rescued_from(self, error: DivergedError) -> None:
        if self.rescue is None or not self.rescue.repairs:
            raise error
        self.rescue.after_divergence(error)

    def _learn_values(
        self, groups: Sequence[Group], batches: list[Batch], done: list[UpdateStats]
    ) -> tuple[list[Batch], list[UpdateStats]]:
        """The same updates of a critic of its own: returns are those of before the step, so its order with the policy's is no matter."""
        if self.critic is None or self.critic.own is None:
            return batches, done
        learned: list[UpdateStats] = []
        while len(learned) < len(done):
            try:
                with self.timed("critic"):
                    learned.append(self.critic.learn(batches[len(learned) % len(batches)]))
            except OutOfMemoryError as error:
                self._halve(groups, str(error))
                batches = self.learner.recut(self._batches(groups), batches)
        return batches, [replace(stats, critic=own) for stats, own in zip(done, learned, strict=True)]

    def _batches(self, groups: Sequence[Group]) -> Batches:
        batches = make_batches(groups, self.run.algorithm, self.budget)
        if batches.largest > max(self.budget, self._oversize):
            self._oversize = batches.largest
            self.console.say(
                f"note: an answer makes {batches.largest} tokens with its prompt, more than a micro-batch's {self.budget}; it runs alone"
            )
        return batches

    def _annotate(self, groups: Sequence[Group]) -> list[Batch]:
        with self.timed("old"):
            batches = self._batches(groups)
            self.skipped = batches.skipped * self.run.algorithm.epochs
            self._set_kl_coefficient()
            annotated = self.learner.annotate(batches)
            self._steer_kl(annotated)
            if self.row.sizes_band:
                self.row = sized(self.row, rollout_log_ratio(annotated))
                self.objective = policy_objective(self.row)
            return annotated

    def _set_kl_coefficient(self) -> None:
        """The row as it is configured, but for a KL coefficient that earlier steps have steered elsewhere."""
        self.row = self.run.algorithm
        if self._kl_coefficient is not None:
            self.row = self.row.model_copy(update={"kl_coefficient": self._kl_coefficient})
            self.learner.row = self.row

    def _steer_kl(self, batches: Sequence[Batch]) -> None:
        target = None if self.run.critic is None else self.run.critic.kl_target
        if target is not None:
            kl = [answer for b in batches if (kl_S := answer_kl(b, self.row)) is not None for answer in kl_S.tolist()]
            self.next_kl = next_kl_coefficient(self.row.kl_coefficient, kl, target)

    def _update(self, batch: Batch) -> UpdateStats:
        with self.timed("update"):
            return self.learner.update(batch, self.objective)

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch."""
        return self.max_tokens or self.run.max_tokens_per_microbatch

    def _halve(self, groups: Sequence[Group], words: str) -> None:
        batches = make_batches(groups, self.run.algorithm, self.budget)
        if not batches.divisible:
            raise too_large(batches, words)
        budget = max(1, min(self.budget, batches.largest) // 2)
        self.max_tokens = budget
        self.console.say(
            f"out of memory ({words}) with micro-batches of up to {batches.largest} tokens: trying again with {budget}, from here on. "
            f"To start so: max_tokens_per_microbatch={budget}"
        )


def too_large(batches: Batches, words: str) -> RunError:
    """Of a batch that cannot be cut further and was out of memory with `words`."""
    return RunError(
        f"out of memory ({words}) with one answer at a time, of up to {batches.largest} tokens with its prompt: "
        "set model.gradient_checkpointing=true, shorten sampling.max_new_tokens, or use a machine with more memory"
    )
