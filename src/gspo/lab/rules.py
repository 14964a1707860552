"""The rules that decide what an experiment has shown: pure functions of the arms' numbers, written before any run.

In: `Results`, every arm's outcomes by seed. Out: a `Verdict`: one of three words, and the numbers that led to it.
`table` gives each finding its rule; `command` calls it. No torch.

Arms are compared seed by seed: the same seed is the same prompts and the same random numbers. "Clearly" means by the
rule's margin in the median over seeds, and in the same direction for every seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gspo.lab.outcome import Outcome

Word = Literal["seen", "not seen at this scale", "the opposite"]
SEEN: Word = "seen"
NOT_SEEN: Word = "not seen at this scale"
OPPOSITE: Word = "the opposite"

Key = tuple[str, str]
"""(setting, arm)."""


class UndecidedError(Exception):
    """An arm that the rule needs has no outcome: it failed, or has not been run."""


@dataclass(frozen=True)
class Verdict:
    """What a rule decided."""

    word: Word
    numbers: str
    """For the line that an experiment ends with."""


@dataclass(frozen=True)
class Results:
    """Outcomes by arm and seed; an arm that failed under a seed is not there."""

    outcomes: Mapping[Key, Mapping[int, Outcome]]

    def of(self, key: Key) -> list[Outcome]:
        """Outcomes of an arm, by seed. Raises UndecidedError if there is none."""
        found = self.outcomes.get(key)
        if not found:
            raise UndecidedError(f"no outcome of {key[1]} ({key[0]})")
        return [found[seed] for seed in sorted(found)]

    def pairs(self, first: Key, second: Key) -> list[tuple[Outcome, Outcome]]:
        """Outcomes of two arms under the same seeds. Raises UndecidedError if no seed has both."""
        self.of(first), self.of(second)
        a, b = self.outcomes[first], self.outcomes[second]
        both = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
        if not both:
            raise UndecidedError(f"no seed under which both {first[1]} and {second[1]} ({first[0]}) ended")
        return both


def value(outcome: Outcome, measure: str) -> float:
    """A number of an outcome: one of its fields, or the mean of a measure. Raises UndecidedError if it has none."""
    if measure in ("start", "final", "area", "peak"):
        return float(getattr(outcome, measure))
    if measure not in outcome.means:
        raise UndecidedError(f"{measure} was not measured")
    return outcome.means[measure]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, and lowest and highest where there are several."""
    middle = format(median(values), form)
    return middle if len(values) == 1 else f"{middle} [{min(values):{form}}, {max(values):{form}}]"


def direction(differences: Sequence[float], margin: float) -> Word:
    """seen: clearly above 0; the opposite: clearly below it; else not seen."""
    middle = median(differences)
    if middle >= margin and min(differences) > 0:
        return SEEN
    if middle <= -margin and max(differences) < 0:
        return OPPOSITE
    return NOT_SEEN


def has_learned(outcomes: Sequence[Outcome], gain: float) -> bool:
    """The final reward is above the start by `gain`, in the median over seeds."""
    return median(o.final - o.start for o in outcomes) >= gain


@dataclass(frozen=True)
class Higher:
    """`better` is clearly higher than `worse` in a measure of the reward."""

    better: Key
    worse: Key
    margin: float
    measure: str = "final"

    def __call__(self, results: Results) -> Verdict:
        pairs = results.pairs(self.better, self.worse)
        a, b = ([value(o, self.measure) for o in side] for side in zip(*pairs, strict=True))
        word = direction([x - y for x, y in zip(a, b, strict=True)], self.margin)
        return Verdict(word, f"{self.better[1]} {spread(a)}, {self.worse[1]} {spread(b)}")


@dataclass(frozen=True)
class NotWorse:
    """`other` learns, and `one` reaches its final reward within a margin. The opposite: it stays clearly below, by twice that.

    Beside an arm that learned nothing there is nothing to be reached.
    """

    one: Key
    other: Key
    margin: float
    gain: float
    """What an arm has to gain over its start, in the median, to have learned."""

    def __call__(self, results: Results) -> Verdict:
        pairs = results.pairs(self.one, self.other)
        a, b = [x.final for x, _ in pairs], [y.final for _, y in pairs]
        differences = [x - y for x, y in zip(a, b, strict=True)]
        below = direction([-d for d in differences], 2 * self.margin) == SEEN
        learned = has_learned([y for _, y in pairs], self.gain)
        word = OPPOSITE if below else SEEN if learned and median(differences) > -self.margin else NOT_SEEN
        return Verdict(word, f"{self.one[1]} {spread(a)}, {self.other[1]} {spread(b)}")


@dataclass(frozen=True)
class Alike:
    """Both arms learn, and end within a margin of each other. The opposite: clearly apart by twice the margin."""

    one: Key
    other: Key
    margin: float
    gain: float
    """What an arm has to gain over its start, in the median, to have learned."""

    def __call__(self, results: Results) -> Verdict:
        pairs = results.pairs(self.one, self.other)
        differences = [a.final - b.final for a, b in pairs]
        learned = all(has_learned(side, self.gain) for side in zip(*pairs, strict=True))
        if direction(differences, 2 * self.margin) != NOT_SEEN:
            word = OPPOSITE
        else:
            word = SEEN if learned and abs(median(differences)) <= self.margin else NOT_SEEN
        a, b = ([o.final for o in side] for side in zip(*pairs, strict=True))
        return Verdict(word, f"{self.one[1]} {spread(a)}, {self.other[1]} {spread(b)}")


@dataclass(frozen=True)
class ClipsMoreAndLearns:
    """`more` loses `times` the share of tokens that `less` loses to the clip, learns, and ends within a margin of its reward.

    The opposite: it clips less, or it clips that much more and ends clearly below.
    """

    more: Key
    less: Key
    times: float
    margin: float
    gain: float

    def __call__(self, results: Results) -> Verdict:
        pairs = results.pairs(self.more, self.less)
        a, b = ([value(o, "clip_tokens") for o in side] for side in zip(*pairs, strict=True))
        ratio = median(a) / median(b) if median(b) else float("inf") if median(a) else 1.0
        reward = NotWorse(self.more, self.less, self.margin, self.gain)(results)
        if ratio < 1 or (ratio >= self.times and reward.word == OPPOSITE):
            word = OPPOSITE
        else:
            learned = has_learned([x for x, _ in pairs], self.gain)
            word = SEEN if learned and ratio >= self.times and reward.word == SEEN else NOT_SEEN
        times = "no token of the other arm clipped" if ratio == float("inf") else f"{ratio:.0f} times"
        clipped = f"tokens clipped: {self.more[1]} {spread(a, '.2%')}, {self.less[1]} {spread(b, '.3%')}, {times}"
        return Verdict(word, f"{clipped}; final reward {reward.numbers}")


@dataclass(frozen=True)
class Collapses:
    """The reward falls by half under every seed. The opposite: under no seed, and the arm ends above its start."""

    arm: Key

    def __call__(self, results: Results) -> Verdict:
        found = results.of(self.arm)
        fallen = sum(o.collapsed for o in found)
        learned = all(o.final > o.start for o in found)
        word = SEEN if fallen == len(found) else OPPOSITE if not fallen and learned else NOT_SEEN
        finals = spread([o.final for o in found])
        return Verdict(word, f"{self.arm[1]} {finals}, collapsed under {fallen} of {len(found)} seeds")


@dataclass(frozen=True)
class Shrinks:
    """A measure of `smaller` is at most `factor` times that of `larger`, under every seed.

    The opposite: it is larger by the same factor under every seed.
    """

    smaller: Key
    larger: Key
    measure: str
    factor: float

    def __call__(self, results: Results) -> Verdict:
        pairs = results.pairs(self.smaller, self.larger)
        a, b = ([value(o, self.measure) for o in side] for side in zip(*pairs, strict=True))
        less = all(x <= self.factor * y for x, y in zip(a, b, strict=True))
        more = all(y <= self.factor * x for x, y in zip(a, b, strict=True))
        word = SEEN if less and not more else OPPOSITE if more and not less else NOT_SEEN
        return Verdict(word, f"{self.smaller[1]} {spread(a, '.4f')}, {self.larger[1]} {spread(b, '.4f')}")


@dataclass(frozen=True)
class Reaches:
    """A measure of an arm is at least `size` in the median. The opposite: less than `size / 100`, all but nothing."""

    arm: Key
    measure: str
    size: float

    def __call__(self, results: Results) -> Verdict:
        found = [value(o, self.measure) for o in results.of(self.arm)]
        middle = median(found)
        word = SEEN if middle >= self.size else OPPOSITE if middle < self.size / 100 else NOT_SEEN
        return Verdict(word, f"{self.arm[1]} {spread(found, '.2%')}")


@dataclass(frozen=True)
class BestHigher:
    """Of two algorithms, each at its best variant, `better` is clearly higher in a measure.

    The best variant is that with the highest median: the same choice for both, on the same seeds that it is judged by.
    """

    better: tuple[Key, ...]
    worse: tuple[Key, ...]
    margin: float
    measure: str

    def __call__(self, results: Results) -> Verdict:
        a, b = (best(results, variants, self.measure) for variants in (self.better, self.worse))
        found = Higher(a, b, self.margin, self.measure)(results)
        return Verdict(found.word, f"{found.numbers}; best: {a[0]} and {b[0]}")


def best(results: Results, variants: Sequence[Key], measure: str) -> Key:
    """The variant with the highest median; of those that ran. Raises UndecidedError if none did."""
    ran = [key for key in variants if results.outcomes.get(key)]
    if not ran:
        raise UndecidedError(f"no outcome of {variants[0][1]}")
    return max(ran, key=lambda key: median(value(o, measure) for o in results.of(key)))


@dataclass(frozen=True)
class GapsVanish:
    """Distances between gradients, named with `prefix`, are at most `noise`, while the control's is not.

    The opposite: one of them is at least `real`. A control below `real` decides nothing: the comparison could not have failed.
    """

    arm: Key
    prefix: str
    control: str
    noise: float
    real: float

    def __call__(self, results: Results) -> Verdict:
        found = results.of(self.arm)
        gaps = [gap for o in found for name, gap in o.gaps.items() if name.startswith(self.prefix)]
        controls = [o.gaps[self.control] for o in found if self.control in o.gaps]
        if not gaps or not controls:
            raise UndecidedError(f"no gradients were compared ({self.prefix})")
        largest, control = max(gaps), min(controls)
        vanish = largest <= self.noise and control >= self.real
        word = SEEN if vanish else OPPOSITE if largest >= self.real else NOT_SEEN
        return Verdict(word, f"largest distance {largest:.0e}; of gradients that should differ {control:.0e}")
