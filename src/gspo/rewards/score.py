"""Groups in, judged groups out: every function on every answer, and their weighted sum.

In: `Judge`s and `Group`s fresh from the engine. Out: the same groups with a `Reward` on every rollout. `rollout.py` gives
a `Judging` each group as it is sampled, so that the workers judge while the engine goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from traceback import format_exception
from typing import Any, Protocol

from gspo.errors import RunError
from gspo.rewards.call import Call, Item
from gspo.rewards.runner import Outcome, Pool
from gspo.types import Group, Reward, Rollout, Status, Stop

FAILED = (Status.TIMEOUT, Status.CRASHED)
CONSTANT_AFTER = 64
"""Verdicts after which a function that has given only one value is named."""


class Place(Protocol):
    """Where a function runs."""

    def submit(self, items: Sequence[Item]) -> Sequence[Any]:
        """Begin to judge; something for each item, which `results` takes."""

    def results(self, begun: Sequence[Any]) -> list[Outcome]:
        """An outcome for each, in order."""


@dataclass(frozen=True)
class InPool:
    """In a worker that can be killed: whatever is not known to come to an end."""

    pool: Pool
    function: int

    def submit(self, items: Sequence[Item]) -> list[int]:
        return self.pool.submit(self.function, items)

    def results(self, begun: Sequence[int]) -> list[Outcome]:
        return self.pool.results(begun)


@dataclass(frozen=True)
class Here:
    """In this process: rules that end after a time linear in the answer, whatever it is, where a worker would cost more."""

    call: Call

    def submit(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._judge(item) for item in items]

    def results(self, begun: Sequence[Outcome]) -> list[Outcome]:
        return list(begun)

    def _judge(self, item: Item) -> Outcome:
        start, nothing = time.perf_counter(), (None,) * len(item.completions)
        try:
            values = self.call(item)
        except Exception as error:
            return Outcome(nothing, Status.CRASHED, time.perf_counter() - start, "".join(format_exception(error)))
        status = Status.NO_VERDICT if values == nothing else Status.OK
        return Outcome(values, status, time.perf_counter() - start)


class Service(Protocol):
    """What judges many answers at once and keeps its own time: a reward model, an endpoint."""

    def judge(self, items: Sequence[Item]) -> list[Outcome]:
        """An outcome for each item, in order; a failure is an outcome."""


@dataclass(frozen=True)
class AtOnce:
    """A service, asked once for all answers of a step."""

    service: Service

    def submit(self, items: Sequence[Item]) -> Sequence[Item]:
        return items

    def results(self, begun: Sequence[Item]) -> list[Outcome]:
        return self.service.judge(begun)


@dataclass(frozen=True)
class Judge:
    """A reward function, its part in the sum, and where it runs."""

    name: str
    """Key of `Reward.parts` and of the journal."""
    weight: float
    place: Place
    group: bool = False
    """It takes all answers to a prompt in one call."""
    conversation: bool = False
    """It reads all messages."""


@dataclass
class Scorer:
    """The judges of a run."""

    judges: Sequence[Judge]
    max_failed: float = 1.0
    """Share of failed judgements of a function above which `Judging.finish` raises."""
    _constant: dict[str, tuple[float | None, int]] = field(default_factory=dict)
    _notices: list[str] = field(default_factory=list)

    def begin(self) -> Judging:
        """A step's judging."""
        return Judging(self)

    def notices(self) -> list[str]:
        """What the user should know, each once."""
        said, self._notices = self._notices, []
        return said

    def watch(self, name: str, values: Sequence[float | None]) -> None:
        """Notice a function that has given one value alone (huggingface/trl#6966: a format reward of 0 for ever)."""
        for value in values:
            only, count = self._constant.get(name, (None, 0))
            if value is None or count < 0:
                continue
            if count and value != only:
                self._constant[name] = value, -1  # it varies: not looked at again
                continue
            self._constant[name] = value, count + 1
            if count + 1 == CONSTANT_AFTER:
                self._notices.append(
                    f"reward function {name} gave {value:g} to each of the first {CONSTANT_AFTER} answers, so it tells none from another: "
                    "look at the answers in rollouts/ beside what it expects"
                )
                self._constant[name] = value, -1


@dataclass
class Judging:
    """The groups of one step on their way through the judges."""

    scorer: Scorer
    _groups: list[Group] = field(default_factory=list)
    _begun: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        """Begin to judge a group."""
        self._groups.append(group)
        for judge in self.scorer.judges:
            self._begun.setdefault(judge.name, []).extend(judge.place.submit(_items(group, judge)))

    def finish(self) -> list[Group]:
        """The groups, judged, in the order in which they were added.

        An answer that a function gave no verdict on, or failed on, has the value None, never 0, if that function has
        any weight.

        Raises:
            RunError: a function failed on more than `max_failed` of the answers: the evidence is in the message.
        """
        outcomes: dict[str, list[Outcome]] = {}
        # Workers go on while the others are waited for.
        for judge in sorted(self.scorer.judges, key=lambda judge: isinstance(judge.place, InPool)):
            outcomes[judge.name] = judge.place.results(self._begun.get(judge.name, []))
        answers = [rollout for group in self._groups for rollout in group.rollouts]
        found = {judge.name: _by_answer(outcomes[judge.name]) for judge in self.scorer.judges}
        for name, judgements in found.items():
            _require_verdicts(name, judgements, answers, self.scorer.max_failed)
            self.scorer.watch(name, [judgement.value for judgement in judgements])
        _require_conversations(answers, self.scorer.max_failed)
        rewards = [
            _reward(self.scorer.judges, {name: judgements[i] for name, judgements in found.items()}, answer)
            for i, answer in enumerate(answers)
        ]
        judged = []
        for group in self._groups:
            judged.append(group.with_rewards(rewards[: len(group.rollouts)]))
            rewards = rewards[len(group.rollouts) :]
        return judged


@dataclass(frozen=True)
class _Judgement:
    """What one function made of one answer."""

    value: float | None
    status: Status
    seconds: float
    error: str | None


def _items(group: Group, judge: Judge) -> list[Item]:
    rollouts, prompt = group.rollouts, group.prompt
    return [
        Item(
            tuple(r.text for r in some),
            tuple(r.policy_tokens for r in some),
            prompt.columns,
            prompt.text,
            tuple(_conversation(group, r) for r in some) if judge.conversation else (),
            tuple(r.earned for r in some),
        )
        for some in ([rollouts] if judge.group else [(rollout,) for rollout in rollouts])
    ]


def _conversation(group: Group, rollout: Rollout) -> tuple[Mapping[str, str], ...]:
    followed = rollout.messages or ({"role": "assistant", "content": rollout.text},)
    return (*group.prompt.messages, *followed)


def _by_answer(outcomes: Sequence[Outcome]) -> list[_Judgement]:
    """One judgement for each answer; of a group's function, each has its share of the time."""
    return [
        _Judgement(
            value,
            Status.NO_VERDICT if value is None and outcome.status is Status.OK else outcome.status,
            outcome.seconds / len(outcome.values),
            outcome.error,
        )
        for outcome in outcomes
        for value in outcome.values
    ]


def _reward(judges: Sequence[Judge], judgements: Mapping[str, _Judgement], answer: Rollout) -> Reward:
    """Of a conversation that failed there is no verdict, whatever the functions made of its last reply."""
    weighted = [(judge.weight, judgements[judge.name].value) for judge in judges if judge.weight]
    values = [weight * value for weight, value in weighted if value is not None]
    return Reward(
        sum(values) if len(values) == len(weighted) and answer.stop is not Stop.ERROR else None,
        parts={name: judgement.value for name, judgement in judgements.items()},
        status={name: judgement.status for name, judgement in judgements.items()},
        seconds={name: judgement.seconds for name, judgement in judgements.items()},
        error=answer.error or next((judgement.error for judgement in judgements.values() if judgement.error), None),
    )


def _require_conversations(answers: Sequence[Rollout], max_failed: float) -> None:
    failed = [answer for answer in answers if answer.stop is Stop.ERROR]
    if len(failed) <= max_failed * len(answers):
        return
    raise RunError(
        f"{len(failed)} of {len(answers)} conversations failed, more than judging.max_failed={max_failed:g} allows: mend the environment, "
        f"or raise conversation.timeout or judging.max_failed.\nThe first, after {failed[0].text[:300]!r}:\n{(failed[0].error or '').strip()}"
    )


def _require_verdicts(
    name: str, judgements: Sequence[_Judgement], answers: Sequence[Rollout], max_failed: float
) -> None:
    failed = [i for i, judgement in enumerate(judgements) if judgement.status in FAILED]
    if len(failed) <= max_failed * len(judgements):
        return
    first = failed[0]
    late = sum(judgements[i].status is Status.TIMEOUT for i in failed)
    raise RunError(
        f"reward function {name} failed on {len(failed)} of {len(judgements)} answers ({len(failed) - late} crashed, {late} timed out), "
        f"more than judging.max_failed={max_failed:g} allows: what is left to train on is chance. Mend the function, "
        "or raise judging.timeout or judging.max_failed.\n"
        f"The first such answer: {answers[first].text[:300]!r}\n{(judgements[first].error or '').strip()}"
    )
