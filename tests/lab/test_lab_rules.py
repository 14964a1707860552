"""Rules are pure functions of numbers: each of the three words can be reached, and thresholds hold on both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from gspo.lab.experiment import Finding
from gspo.lab.outcome import CONTROL, ON_POLICY, Outcome
from gspo.lab.rules import (
    NOT_SEEN,
    OPPOSITE,
    SEEN,
    Alike,
    BestHigher,
    ClipsMoreAndLearns,
    Collapses,
    GapsVanish,
    Higher,
    NotWorse,
    Reaches,
    Results,
    Shrinks,
    UndecidedError,
    Verdict,
)
from gspo.lab.table import EXPERIMENTS

A, B, C = ("setting", "a"), ("setting", "b"), ("other", "b")


def outcome(final: float, *, start: float = 0.3, peak: float | None = None, **means: float) -> Outcome:
    area = means.pop("area", final)
    return Outcome(50, start, final, area, final if peak is None else peak, means)


def results(**arms: Sequence[Outcome] | Mapping[int, Outcome]) -> Results:
    keys = {"a": A, "b": B, "c": C}
    return Results(
        {keys[n]: dict(found) if isinstance(found, Mapping) else dict(enumerate(found)) for n, found in arms.items()}
    )


def finals(*values: float, **more: float) -> list[Outcome]:
    return [outcome(value, **more) for value in values]


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ((0.75,), (0.625,), SEEN),  # the margin itself, in numbers that floats hold
        ((0.75,), (0.626,), NOT_SEEN),
        ((0.625,), (0.75,), OPPOSITE),
        ((0.7, 0.9, 0.9), (0.71, 0.5, 0.5), NOT_SEEN),  # one seed the other way
        ((0.72, 0.9, 0.9), (0.71, 0.5, 0.5), SEEN),
        ((0.5, 0.5, 0.71), (0.9, 0.9, 0.7), NOT_SEEN),
        ((0.5, 0.5, 0.7), (0.9, 0.9, 0.71), OPPOSITE),
    ],
)
def test_higher_needs_the_margin_and_every_seed(a: tuple[float, ...], b: tuple[float, ...], word: str) -> None:
    assert Higher(A, B, 0.125)(results(a=finals(*a), b=finals(*b))).word == word


def test_arms_are_compared_seed_by_seed() -> None:
    """Medians over all seeds would say .8 against .5; the one seed that both have says the opposite."""
    found = results(a={0: outcome(0.4), 1: outcome(0.8), 2: outcome(0.9)}, b={0: outcome(0.5)})
    assert Higher(A, B, 0.05)(found).word == OPPOSITE


def test_an_arm_without_an_outcome_decides_nothing() -> None:
    with pytest.raises(UndecidedError, match="b"):
        Higher(A, B, 0.1)(results(a=finals(0.5)))
    with pytest.raises(UndecidedError, match="no seed"):
        Higher(A, B, 0.1)(results(a={0: outcome(0.5)}, b={1: outcome(0.5)}))


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        (0.5, 0.62, SEEN),
        (0.5, 0.625, NOT_SEEN),
        (0.5, 0.75, OPPOSITE),
        (0.9, 0.5, SEEN),
        (0.1, 0.74, OPPOSITE),
        (0.39, 0.39, NOT_SEEN),  # the other gained .09 and has not learned
    ],
)
def test_not_worse(a: float, b: float, word: str) -> None:
    assert NotWorse(A, B, 0.125, 0.1)(results(a=finals(a), b=finals(b))).word == word


def test_not_worse_is_open_where_seeds_disagree() -> None:
    found = results(a=finals(0.2, 0.2, 0.8), b=finals(0.7, 0.7, 0.7))
    assert NotWorse(A, B, 0.05, 0.1)(found).word == NOT_SEEN


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        (0.77, 0.72, SEEN),
        (0.77, 0.71, NOT_SEEN),  # 0.06: neither alike nor clearly apart
        (0.87, 0.71, OPPOSITE),
        (0.45, 0.46, NOT_SEEN),  # alike, but nothing learned
    ],
)
def test_alike_asks_that_both_have_learned(a: float, b: float, word: str) -> None:
    rule = Alike(A, B, margin=0.0501, gain=0.2)
    assert rule(results(a=finals(a), b=finals(b))).word == word


@pytest.mark.parametrize(
    ("a_clip", "b_clip", "a", "b", "word"),
    [
        (0.28, 0.0028, 0.78, 0.78, SEEN),
        (0.27, 0.0028, 0.78, 0.78, NOT_SEEN),  # 96 times
        (0.28, 0.0, 0.78, 0.78, SEEN),
        (0.28, 0.0, 0.35, 0.35, NOT_SEEN),  # and does not learn
        (0.0, 0.0, 0.78, 0.78, NOT_SEEN),
        (0.28, 0.0005, 0.70, 0.78, NOT_SEEN),  # learns, but not as well
        (0.28, 0.0005, 0.60, 0.78, OPPOSITE),  # clips, and does not learn as well
        (0.001, 0.01, 0.78, 0.78, OPPOSITE),
    ],
)
def test_clipping_more_and_learning(a_clip: float, b_clip: float, a: float, b: float, word: str) -> None:
    found = results(a=finals(a, clip_tokens=a_clip), b=finals(b, clip_tokens=b_clip))
    assert ClipsMoreAndLearns(A, B, times=100, margin=0.05, gain=0.1)(found).word == word


def test_a_collapse_is_the_final_reward_below_half_of_peak_or_start() -> None:
    fallen, kept, flat = outcome(0.39, peak=0.8), outcome(0.41, peak=0.8), outcome(0.14, start=0.3, peak=0.14)
    assert [o.collapsed for o in (fallen, kept, flat)] == [True, False, True]
    rule = Collapses(A)
    assert rule(results(a=[fallen, flat])).word == SEEN
    assert rule(results(a=[fallen, kept])).word == NOT_SEEN
    assert rule(results(a=[kept, kept])).word == OPPOSITE
    assert rule(results(a=[outcome(0.25, start=0.3, peak=0.3)])).word == NOT_SEEN, "no collapse, nothing learned"


@pytest.mark.parametrize(("small", "word"), [((0.04, 0.05), SEEN), ((0.04, 0.06), NOT_SEEN), ((0.1, 0.1), OPPOSITE)])
def test_shrinks_under_every_seed(small: tuple[float, float], word: str) -> None:
    found = results(a=[outcome(0.5, ratio_tokens=s) for s in small], b=[outcome(0.5, ratio_tokens=0.07)] * 2)
    assert Shrinks(A, B, "ratio_tokens", 0.8)(found).word == word


@pytest.mark.parametrize(("share", "word"), [(0.1, SEEN), (0.09, NOT_SEEN), (0.0009, OPPOSITE)])
def test_reaches(share: float, word: str) -> None:
    assert Reaches(A, "experts_update", 0.1)(results(a=finals(0.5, experts_update=share))).word == word


def test_a_measure_that_was_not_taken_decides_nothing() -> None:
    with pytest.raises(UndecidedError, match="experts_update"):
        Reaches(A, "experts_update", 0.1)(results(a=finals(0.5)))


def test_each_algorithm_stands_at_its_best_variant() -> None:
    found = results(a=finals(0.6), b=finals(0.5), c=finals(0.7))
    assert BestHigher((A,), (B,), 0.03, "area")(found).word == SEEN
    assert BestHigher((A,), (B, C), 0.03, "area")(found).word == OPPOSITE, "the best of the other, not its first"
    assert BestHigher((A,), (B, ("missing", "x")), 0.03, "area")(found).word == SEEN


@pytest.mark.parametrize(
    ("gap", "control", "word"),
    [(1e-7, 0.5, SEEN), (1e-5, 0.5, NOT_SEEN), (0.2, 0.5, OPPOSITE), (1e-7, 1e-7, NOT_SEEN)],
)
def test_gradients_are_equal_only_where_they_could_have_differed(gap: float, control: float, word: str) -> None:
    gaps = {f"{ON_POLICY}grpo": gap, f"{ON_POLICY}dapo": 0.0, CONTROL: control}
    found = results(a=[Outcome(2, 0.3, 0.3, 0.3, 0.3, {}, gaps)])
    assert GapsVanish(A, ON_POLICY, CONTROL, noise=1e-6, real=1e-2)(found).word == word


FINDINGS = [(e.name, f) for e in EXPERIMENTS.values() for f in e.findings]


@pytest.mark.parametrize(("name", "finding"), FINDINGS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(FINDINGS)])
def test_every_finding_of_the_table_can_come_out_in_each_way(name: str, finding: Finding) -> None:
    """Over a grid of numbers for its arms, each word is reached; and its arms are in the protocol that it belongs to."""
    experiment = EXPERIMENTS[name]
    assert all(finding in experiment.findings_at(scale) or finding.full_only for scale in ("quick", "full"))
    for scale in ("quick", "full") if not finding.full_only else ("full",):
        keys = {t.key for t in experiment.protocol(scale).arms}
        words = {_verdict(finding.rule, keys, side).word for side in range(4)}
        assert words == {SEEN, NOT_SEEN, OPPOSITE}, (scale, words)


def _verdict(rule: Callable[[Results], Verdict], keys: set[tuple[str, str]], side: int) -> Verdict:
    """Numbers that favour the rule's first arm, none, the others; and, last, a first arm that stands still."""
    first = next(v for k, v in vars(rule).items() if k in ("better", "one", "more", "arm", "smaller"))
    ours = set(first) if isinstance(first[0], tuple) else {first}
    found = {key: {0: _outcome(side, key in ours)} for key in keys}
    return rule(Results(found))


def _outcome(side: int, ours: bool) -> Outcome:
    good, bad = [(0.9, 0.5), (0.6, 0.6), (0.4, 0.9), (0.26, 0.33)][side]
    final = good if ours else bad
    high = [0.5, 0.05, 1e-4, 0.05][side]
    gap, control = [(1e-9, 0.5), (1e-4, 0.5), (0.5, 0.5), (1e-9, 1e-9)][side]
    clip = [(0.5, 0.001), (0.01, 0.001), (0.0005, 0.001), (0.01, 0.001)][side][0 if ours else 1]
    ratio = [(0.01, 0.1), (0.1, 0.1), (0.1, 0.01), (0.1, 0.1)][side][0 if ours else 1]
    means = {"clip_tokens": clip, "ratio_tokens": ratio, "experts_update": high}
    gaps = {CONTROL: control, f"{ON_POLICY}x": gap, "gspo_token": gap}
    return Outcome(50, 0.3, final, final, 0.9 if side == 2 else final, means, gaps)
