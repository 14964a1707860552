"""Collapse recognised while it happens, by stated rules on the journal's numbers, and what is to be done about it.

In: what the guard remembers (`State`) and the metrics of a step. Out: what it remembers then, and a `Decision`. Pure: the
same journal gives the same decisions. `job` calls `watch`; `rescue` carries out what it decides; docs/guard.md explains
the thresholds. No torch.

Rewards have no scale of their own: they are measured in their spread, the largest standard deviation between the answers
of a step that the run has shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal

Action = Literal["none", "warn", "rollback", "stop"]
Interval = tuple[float, float, float]
"""An evaluation's reward, and the ends of its interval."""

WINDOW = 8
"""Steps over which rewards are averaged."""
LEAST = 4
"""Steps from which there is an average."""
FIRST = 5
"""Steps at the start that the run's own normal is taken from."""
WARN_AFTER, ACT_AFTER = 2, 4
"""Steps in a row on which a rule has to hold before the guard warns, and before it acts."""
MAX_ROLLBACKS = 3
"""Rollbacks of a run; at the next alarm it stops."""
SMALLER = 0.5
"""Factor on the learning rate at each rollback."""
FALL = 0.5
"""Spreads by which the reward, averaged, lies below its best: a collapse."""
HALF, SURE = 0.5, 3.0
"""Part of its best that the reward has left, and standard errors by which it lies below it: a collapse too, of a reward that never was high."""
DOWN = 0.25
"""Spreads below its best from which other symptoms count as a collapse."""
SILENT = 0.5
"""Share of groups with signal that there has to have been before their end is a symptom."""
ENTROPY_LOW, ENTROPY_HIGH, ENTROPY_RISE = 0.02, 3.0, 0.5
"""Entropy over that of the first steps; and nats a token that it has to have risen by."""
GRADIENT, GRADIENTS = 20.0, 20
"""Gradient norm over its median of so many calm steps before."""
TRUNCATED = 0.9
"""Share of answers cut at the limit, where it was below a half at first."""
REPEATED = 0.5
"""By how much the share of answers that go round in a loop has risen."""
KL_TO_START = 0.5
"""Nats a token, at an evaluation."""


@dataclass(frozen=True)
class State:
    """What the guard remembers: all of it numbers, kept in every checkpoint."""

    rewards: tuple[float, ...] = ()
    """Mean rewards of the last `WINDOW` steps."""
    best: float | None = None
    """Highest average of them."""
    spread: float = 0.0
    """Largest standard deviation of the rewards of a step."""
    signals: tuple[float, ...] = ()
    """Shares of groups with signal of the last `WINDOW` steps."""
    signal: float = 0.0
    """Highest average of them."""
    first: tuple[float, float] | None = None
    """Averages of both when there first was one: what is known of weights from before, the start's among them."""
    entropies: tuple[float, ...] = ()
    """Of the first `FIRST` steps; so are the next two."""
    truncated: tuple[float, ...] = ()
    repeated: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    """Of the last calm steps."""
    start_eval: Interval | None = None
    best_eval: Interval | None = None
    last_eval: Interval | None = None
    """Rewards of the first, of the best and of the latest evaluation."""
    chosen: bool = False
    """Prompts have been passed over for their difficulty: since then the reward of a step is that of the prompts that were
    left, which falls while the policy gets better, and is not compared."""
    kl: float | None = None
    """At the last evaluation."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """Steps in a row on which each rule has held."""

    proven: bool = False
    """The step at hand was evaluated, and its reward is the best so far: its weights are good for sure."""
    waiting: int | None = None
    """Step of a checkpoint that was saved in a calm moment. Rewards are averaged, so that a collapse may have begun by then."""
    waited: int = 0
    """Steps with a reward since then, all of them calm."""
    target: int | None = None
    """Step of the newest checkpoint that is known to be good; None: the start."""
    rollbacks: int = 0
    step_size: float = 1.0
    """Factor on the learning rate."""

    @property
    def reward(self) -> float | None:
        """The reward, averaged."""
        return fmean(self.rewards) if len(self.rewards) >= LEAST else None

    @property
    def fallen(self) -> float:
        """Spreads by which the reward lies below its best; 0 as long as there is nothing to compare."""
        if self.reward is None or self.best is None or self.spread == 0:
            return 0.0
        return (self.best - self.reward) / self.spread

    @property
    def down(self) -> bool:
        """The reward is low enough that other symptoms count: that of the steps, or of evaluations where prompts are chosen."""
        if not self.chosen:
            return self.fallen >= DOWN
        return self.last_eval is not None and self.best_eval is not None and self.last_eval[2] < self.best_eval[1]

    @property
    def calm(self) -> bool:
        """Nothing holds, so that what is saved now is worth going back to."""
        return not self.strikes and not self.down


@dataclass(frozen=True)
class Decision:
    """What is to be done after a step."""

    action: Action = "none"
    rule: str | None = None
    text: str = ""


def read_state(plain: Mapping[str, Any] | None) -> State | None:
    """The state that `dataclasses.asdict` and JSON made plain. Raises TypeError for what is none."""
    if plain is None:
        return None
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    return State(**values)


# ------------------------------------------------------------------------------ rules


def _reward_fell(s: State, m: Mapping[str, Any]) -> str | None:
    if s.chosen or s.reward is None or s.best is None or (s.fallen <= FALL and not _halved(s, m)):
        return None
    return f"the reward, {s.reward:.3f} on average of {len(s.rewards)} steps, lies {s.fallen:.1f} spreads ({s.spread:.2g}) below its best, {s.best:.3f}"


def _halved(s: State, m: Mapping[str, Any]) -> bool:
    """Less than half of its best, of which only what is above 0 has halves, and not by chance.

    The difference of two averages of n steps has the standard error spread / sqrt(n groups), where half of the spread's
    square is between prompts.
    """
    assert s.reward is not None
    assert s.best is not None
    error = s.fallen * math.sqrt(m["groups/total"] * len(s.rewards))
    return s.best > 0 and s.reward < HALF * s.best and error > SURE


def _silent(s: State, m: Mapping[str, Any]) -> str | None:
    now, before = s.reward, s.best
    right = m["groups/all_right"]
    # Chosen prompts may be what is left to be looked at again: the solved beside the hopeless.
    solved = right > 0 if s.chosen else right * 2 > m["groups/total"]
    if m["groups/signal"] or solved or s.signal < SILENT:
        return None
    if now is None or before is None or now >= before:
        return None
    return (
        f"no group carries signal any more, where {s.signal:.0%} of them did, and few are all right: reward {now:.3f}"
    )


def _evaluation_fell(s: State, m: Mapping[str, Any]) -> str | None:
    found = _evaluation(m, "eval")
    if found is None or s.best_eval is None:
        return None
    (now, _, high), (best, low, top) = found, s.best_eval
    gained = best - s.start_eval[0] if s.start_eval is not None else 0.0
    # Intervals apart, and half of what there was or was gained is lost: a large evaluation sees small falls too.
    if high >= low or best - now <= max(gained, abs(best)) / 2:
        return None
    return f"the held-out reward fell from {best:.3f} ({low:.2f}-{top:.2f}) to {now:.3f}"


def _entropy(s: State, m: Mapping[str, Any]) -> str | None:
    now = m.get("entropy")
    if now is None or len(s.entropies) < FIRST:
        return None
    first = fmean(s.entropies)
    if now > ENTROPY_HIGH * first and now > first + ENTROPY_RISE:
        return f"the entropy rose from {first:.2g} to {now:.2g} nats a token"
    return f"the entropy fell from {first:.2g} to {now:.2g} nats a token" if now < ENTROPY_LOW * first else None


def _gradient(s: State, m: Mapping[str, Any]) -> str | None:
    now = m.get("grad_norm")
    if now is None or len(s.gradients) < FIRST:
        return None
    usual = median(s.gradients)
    return f"the gradient norm is {now:.2g}, where {usual:.2g} was usual" if now > GRADIENT * usual else None


def _truncation(s: State, m: Mapping[str, Any]) -> str | None:
    now = m.get("truncated/share")
    if now is None or len(s.truncated) < FIRST or now < TRUNCATED or (first := fmean(s.truncated)) >= 0.5:
        return None
    return f"{now:.0%} of the answers are cut at the length limit, where {first:.0%} were"


def _repetition(s: State, m: Mapping[str, Any]) -> str | None:
    now = m.get("repetition/share")
    if now is None or len(s.repeated) < FIRST or now < (first := fmean(s.repeated)) + REPEATED:
        return None
    return f"{now:.0%} of the answers go round in a loop, where {first:.0%} did"


def _kl(s: State, m: Mapping[str, Any]) -> str | None:
    if s.kl is None or s.kl <= KL_TO_START:
        return None
    return f"at the last evaluation the policy was {s.kl:.1f} nats a token away from the start (KL on the start's own held-out answers)"


@dataclass(frozen=True)
class Rule:
    """What is looked for."""

    holds: Callable[[State, Mapping[str, Any]], str | None]
    """A sentence, if it does."""
    alone: bool = False
    """It is an alarm whatever the reward does; the others are one only while the reward is down."""
    at_once: bool = False
    """It need not hold on several steps: it is an average already."""


RULES: Mapping[str, Rule] = {
    "evaluation": Rule(_evaluation_fell, alone=True, at_once=True),
    "reward": Rule(_reward_fell, alone=True),
    "silence": Rule(_silent, alone=True),
    "entropy": Rule(_entropy),
    "gradient": Rule(_gradient),
    "truncation": Rule(_truncation),
    "repetition": Rule(_repetition),
    "kl": Rule(_kl),
}


# ------------------------------------------------------------------------------ a step


def watch(state: State, metrics: Mapping[str, Any]) -> tuple[State, Decision]:
    """The state after a step, and what to do: the gravest of the rules that hold."""
    seen = _seen(state, metrics)
    found = {name: text for name, rule in RULES.items() if (text := rule.holds(seen, metrics))}
    strikes = {name: state.strikes.get(name, 0) + 1 for name in found}
    seen = _tried(replace(_learned(seen, metrics, calm=not found), strikes=strikes), metrics)
    for name, text in found.items():
        rule = RULES[name]
        if (rule.at_once or strikes[name] >= ACT_AFTER) and (rule.alone or seen.down):
            return seen, alarm(seen, name, text)
    # Said once: at the step at which it has held long enough.
    idle = "" if seen.down else "; the reward is not down, so nothing is done"
    said = [
        (n, t if RULES[n].alone else t + idle)
        for n, t in found.items()
        if strikes[n] == (1 if RULES[n].at_once else WARN_AFTER)
    ]
    return seen, Decision("warn", *said[0]) if said else Decision()


def saved(state: State, step: int) -> State:
    """After a checkpoint of `step`: it is the target if it is known to be good, else it waits to be, if none does already."""
    if not state.calm:
        return state
    if state.proven:
        return replace(state, target=step, waiting=None)
    return replace(state, waiting=step, waited=0) if state.waiting is None else state


def alarm(state: State, rule: str, text: str) -> Decision:
    """Roll back, or stop once there were too many rollbacks."""
    return Decision("rollback" if state.rollbacks < MAX_ROLLBACKS else "stop", rule, text)


def rolled_back(state: State, then: State) -> State:
    """After the weights have returned to where the guard remembered `then`: so does what it remembers of rewards, but time goes on.

    Where nothing was remembered yet, rewards are measured by the first ones that were seen, which are the nearest to those
    weights, or the guard would not see that they have fallen. Not by the best: weights from before it need not reach it.
    """
    first = state.first
    if first is None and state.rewards:
        first = fmean(state.rewards), fmean(state.signals)
    if then.best is None and first is not None:
        then = replace(then, best=first[0], signal=first[1])
    return replace(
        then,
        first=first,
        rewards=(),
        signals=(),
        spread=max(state.spread, then.spread),
        start_eval=state.start_eval,
        best_eval=then.best_eval or state.start_eval,
        last_eval=None,
        chosen=state.chosen,
        kl=None,
        strikes={},
        proven=False,
        waiting=None,
        target=state.target,
        rollbacks=state.rollbacks + 1,
        step_size=state.step_size * SMALLER,
    )


def _seen(s: State, m: Mapping[str, Any]) -> State:
    """With the step's numbers that the rules compare."""
    rewards, signals = s.rewards, s.signals
    if m["reward/mean"] is not None:
        rewards = (*rewards, m["reward/mean"])[-WINDOW:]
        signals = (*signals, m["groups/signal"] / m["groups/total"])[-WINDOW:]
    s = replace(s, rewards=rewards, signals=signals, spread=max(s.spread, m["reward/std"] or 0.0))
    if (now := s.reward) is not None:
        signal = fmean(signals)
        best = now if s.best is None else max(s.best, now)
        s = replace(
            s,
            best=best,
            signal=max(s.signal, signal),
            first=s.first if s.best is not None else s.first or (now, signal),
        )
    if (start := _evaluation(m, "eval/start")) is not None:
        s = replace(s, start_eval=start, best_eval=start)
    s = replace(s, last_eval=_evaluation(m, "eval") or s.last_eval, chosen=s.chosen or bool(m.get("prompts/skipped")))
    return replace(s, kl=m["eval/kl_start"]) if m.get("eval/kl_start") is not None else s


def _learned(s: State, m: Mapping[str, Any], *, calm: bool) -> State:
    """With what later steps are compared to."""
    gradient = m.get("grad_norm")
    if calm and gradient is not None:
        s = replace(s, gradients=(*s.gradients, gradient)[-GRADIENTS:])
    s = replace(
        s,
        entropies=_first(s.entropies, m.get("entropy")),
        truncated=_first(s.truncated, m.get("truncated/share")),
        repeated=_first(s.repeated, m.get("repetition/share")),
    )
    return replace(s, best_eval=_better(s.best_eval, _evaluation(m, "eval")))


def _tried(s: State, m: Mapping[str, Any]) -> State:
    """With what the step says of the checkpoint that waits. It is good once nothing has held until the average is of answers
    after it alone, or, where prompts are chosen and steps say nothing, until an evaluation."""
    found = _evaluation(m, "eval")
    s = replace(s, proven=found is not None and found == s.best_eval)
    if s.waiting is None:
        return s
    if not s.calm:
        return replace(s, waiting=None)
    s = replace(s, waited=s.waited + (m["reward/mean"] is not None))
    good = found is not None if s.chosen and s.best_eval is not None else s.waited >= WINDOW
    return replace(s, target=s.waiting, waiting=None) if good else s


def _evaluation(m: Mapping[str, Any], prefix: str) -> Interval | None:
    """Reward and interval of an evaluation; None if there was none, or none of its answers was judged."""
    reward, low, high = (m.get(f"{prefix}/{key}") for key in ("reward", "reward_low", "reward_high"))
    if reward is None or low is None or high is None or not math.isfinite(reward + low + high):
        return None
    return reward, low, high


def _better(one: Interval | None, other: Interval | None) -> Interval | None:
    return max((found for found in (one, other) if found is not None), key=lambda found: found[0], default=None)


def _first(values: tuple[float, ...], value: float | None) -> tuple[float, ...]:
    return values if value is None or len(values) == FIRST else (*values, value)


NOTHING = Decision()
