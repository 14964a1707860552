"""The guard at work in a run: what it decides is carried out here.

In: the metrics of a step, or the learner's failure. Out: the journal's keys of what was decided, and weights put back.
`job` holds one `Rescue`, and none with guard=off. Time never goes back: steps, versions, draws and the schedule go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gspo import guard, store
from gspo.config import Model, Run
from gspo.critic import Critic, open_critic
from gspo.errors import InputError, RunError
from gspo.guard import Decision, State
from gspo.learner import Learner
from gspo.models.load import load_policy


@dataclass
class Rescue:
    """The guard of a run, its state and its last decision."""

    run: Run
    folder: Path
    learner: Learner
    critic: Critic | None
    mode: Literal["warn", "rollback"]
    state: State
    say: Callable[[str], None]
    decision: Decision = guard.NOTHING
    diverged: bool = False
    """The learner failed in the step at hand, and the weights are put back already."""

    returned: bool = False
    """The weights of the step at hand are not those that it came to."""

    def __post_init__(self) -> None:
        self._set_step_size()
        self._forget_missing()

    def _set_step_size(self) -> None:
        self.learner.step_size = self.state.step_size
        if self.critic is not None and self.critic.own is not None:
            self.critic.own.step_size = self.state.step_size

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"{step:08d}"

    def _forget_missing(self) -> None:
        """Of a run that goes on: a checkpoint that is remembered may have been removed by hand, or in a part of the run that was."""
        if self.state.waiting is not None and not self._checkpoint(self.state.waiting).is_dir():
            self.state = replace(self.state, waiting=None)
        if self.state.target is not None and not self._checkpoint(self.state.target).is_dir():
            self._next_target("it is not there")

    def _next_target(self, why: str) -> None:
        """Give the target up, aloud, for the newest checkpoint before it that was one too, or the start."""
        lost = self.state.target
        assert lost is not None
        named = []
        for checkpoint in (self.folder / "checkpoints").glob("[0-9]" * 8):
            try:
                then = store.read_progress(checkpoint).guard
            except InputError:  # it is not gone back to, and what it says is not needed
                continue
            if then is not None and then.target is not None and then.target < lost:
                named.append(then.target)
        there = [step for step in named if self._checkpoint(step).is_dir()]
        self.state = replace(self.state, target=max(there, default=None))
        self.say(
            f"warning: the guard cannot go back to checkpoint {lost}: {why}. At an alarm it goes back to {self._where}"
        )

    def _target(self) -> store.Saved | None:
        """The checkpoint to go back to, found whole; None: the start."""
        while self.state.target is not None:
            try:
                return store.read_checkpoint(self._checkpoint(self.state.target), self.folder)
            except InputError as error:
                there = self._checkpoint(self.state.target).is_dir()
                self._next_target(str(error) if there else "it is not there")
        return None

    @property
    def _where(self) -> str:
        """What the guard goes back to."""
        return "the start" if self.state.target is None else f"checkpoint {self.state.target}"

    @property
    def repairs(self) -> bool:
        return self.mode == "rollback"

    def watch(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Decide on a step, and give the keys that say so in its line of the journal."""
        self.returned, self.diverged = self.diverged, False
        if not self.returned:
            self.state, self.decision = guard.watch(self.state, metrics)
            if not self.repairs and self.decision.action in ("rollback", "stop"):
                # Said when it begins; the rule goes on holding.
                first = self.state.strikes.get(self.decision.rule or "", 0) in (1, guard.ACT_AFTER)
                self.decision = Decision("warn", self.decision.rule, self.decision.text) if first else guard.NOTHING
        acts = self.decision.action in ("rollback", "stop")
        to_come = acts and not self.returned
        if to_come:
            self._target()  # which the journal names: it may have to be another
        return {
            "guard/action": self.decision.action,
            "guard/rule": self.decision.rule,
            "guard/text": self.decision.text or None,
            "guard/target": (self.state.target or 0) if acts else None,
            "guard/rollbacks": self.state.rollbacks + to_come,
            "guard/step_size": self.state.step_size * (guard.SMALLER if to_come else 1.0),
        }

    def after_divergence(self, error: RunError) -> None:
        """The learner met a number that is not finite: an alarm at once. Puts the weights back."""
        self.decision = guard.alarm(self.state, "non-finite", str(error))
        self.put_back()
        self.diverged = True

    def put_back(self) -> None:
        """Weights and moments of the target, and what was remembered there; the learning rate is made smaller."""
        saved = self._target()
        if saved is None:
            model, moments, then = self.run.model, {}, State()
        else:
            model, moments = Model(**{**dict(self.run.model), **saved.model}), saved.moments
            then = saved.progress.guard or State()
        policy = load_policy(model, seed=self.run.seed)
        if saved is None:
            self._require_same(policy.source.sha256)
        weights = dict(policy.model.named_parameters())
        if self.critic is not None:
            then_critic = open_critic(self.run, policy, saved)
            assert then_critic is not None
            weights |= self.critic.put_back(then_critic)
        self.learner.put_back(weights, moments)
        self.state = guard.rolled_back(self.state, then)
        self._set_step_size()
        self.returned = True

    def at_save(self, step: int) -> State:
        """The state as it goes into the checkpoint of `step`."""
        if self.repairs:  # else nothing is gone back to, and nothing has to be kept for it
            self.state = guard.saved(self.state, step)
        return self.state

    def _require_same(self, sha256: str | None) -> None:
        before = store.read_about(self.folder).get("weights", {}).get("sha256")
        if before != sha256:
            raise RunError(
                f"the guard cannot roll back to the start: model={self.run.model.name} is not what the run was started with"
            )

    def words(self) -> str:
        """What was decided, for the console."""
        said, decision = self.state, self.decision
        if decision.action == "warn":
            return f"guard: {decision.text}"
        return (
            f"guard: {decision.text}. Rolled back to the weights and the optimizer of {self._where}, rollback {said.rollbacks} of at most "
            f"{guard.MAX_ROLLBACKS}; the learning rate is {said.step_size:g} of what it was set to from here on"
        )

    def diagnosis(self, step: int) -> str:
        """Why the run ends."""
        return (
            f"the guard stopped the run after step {step}, when {guard.MAX_ROLLBACKS} rollbacks had not mended it: {self.decision.text}. "
            f"The weights of the last calm moment are saved as checkpoint {step}. Lower optimizer.learning_rate (it was down to "
            f"{self.state.step_size / guard.SMALLER:g} of {self.run.optimizer.learning_rate:g}), make fewer updates a step, or read docs/guard.md"
        )
