"""One plain sentence a step on whether the policy learns, from the journal's numbers alone.

In: the flat metrics of a step. Out: a `Verdict`. `journal` calls `verdict` and writes its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 3
"""Steps without signal in a row after which the verdict becomes a warning."""
TRUNCATED = 0.5
"""Share of answers cut at the length limit above which the verdict becomes a warning."""
BAND_SHARE = 1 / 3
"""Part of the clip band that the engine's mismatch may take before it is said."""


@dataclass(frozen=True)
class Verdict:
    """What a step says about the run."""

    kind: str
    """unjudged, no_signal, left_out, mismatch, truncated or learning."""
    text: str
    warning: bool = False


def verdict(metrics: Mapping[str, Any]) -> Verdict:
    """Read a step's metrics, gravest cause first."""
    for judge in (_unjudged, _no_signal, _left_out, _mismatch, _truncated):
        found = judge(metrics)
        if found is not None:
            return found
    return _learning(metrics)


def _unjudged(m: Mapping[str, Any]) -> Verdict | None:
    if m["rollouts/judged"]:
        return None
    return Verdict(
        "unjudged",
        f"none of the {m['rollouts/total']} answers was judged: the reward function crashed on {m['rollouts/crashed']}, was timed out on "
        f"{m['rollouts/timeout']} and gave no verdict on {m['rollouts/no_verdict']}. Its errors are in rollouts/",
        warning=True,
    )


def _by_critic(m: Mapping[str, Any]) -> bool:
    """True if an answer is measured by a critic's values: groups that agree then have a gradient like any other."""
    return m.get("advantage") == "gae"


def _no_signal(m: Mapping[str, Any]) -> Verdict | None:
    if m["groups/signal"] or _by_critic(m):
        return None
    causes = {
        "all right": m["groups/all_right"],
        "all wrong": m["groups/all_wrong"],
        "all equal": m["groups/all_equal"],
        "too few judged": m["groups/unjudged"],
    }
    why = ", ".join(f"{count} {cause}" for cause, count in causes.items() if count)
    text = f"no signal: 0 of {m['groups/total']} groups carry any ({why})"
    if m["groups/replaced"]:
        text += f", although {m['groups/replaced']} others had been replaced before"
    if m["updates/done"]:
        return Verdict("no_signal", f"{text}; the updates made follow the KL term or the batch baseline alone")
    text += "; no update was made"
    if m["groups/steps_without_signal"] < PATIENCE:
        return Verdict("no_signal", text)
    return Verdict(
        "no_signal",
        f"{text}, for {m['groups/steps_without_signal']} steps in a row: the task is solved, too hard, or the reward never differs. "
        "Change the difficulty of the prompts, raise group_size, or look at rollouts/ to see what the reward reads",
        warning=True,
    )


def _left_out(m: Mapping[str, Any]) -> Verdict | None:
    if m["updates/done"]:
        return None
    return Verdict(
        "left_out",
        f"no update was made although {_with_signal(m)}: algorithm.mask_truncated leaves out answers "
        f"that were cut, and {m['truncated/share']:.0%} were. Raise sampling.max_new_tokens",
        warning=True,
    )


def _mismatch(m: Mapping[str, Any]) -> Verdict | None:
    signed, band = m["parity/signed"], m["clip/band"]
    if m["anchor"] != "rollout" or signed is None or band is None or abs(signed) <= BAND_SHARE * band:
        return None
    return Verdict(
        "mismatch",
        f"the engine's log-probabilities differ from the trainer's by {signed:+.1e} a token, more than a third of the clip band {band:g}: "
        "answers are clipped before any update. Set algorithm.anchor=old, or widen algorithm.clip_low",
        warning=True,
    )


def _truncated(m: Mapping[str, Any]) -> Verdict | None:
    if m["truncated/share"] <= TRUNCATED:
        return None
    return Verdict(
        "truncated",
        f"{m['truncated/share']:.0%} of the answers were cut at sampling.max_new_tokens={m['max_new_tokens']} and cannot show what they would have reached: "
        "raise sampling.max_new_tokens",
        warning=True,
    )


def _with_signal(m: Mapping[str, Any]) -> str:
    if not _by_critic(m):
        return f"{m['groups/signal']} of {m['groups/total']} groups carry signal"
    explained = m["value/explained_variance"]
    said = "" if explained is None else f", and the critic knew {explained:.0%} of how their rewards differ"
    return f"{m['rollouts/judged']} of {m['rollouts/total']} answers were judged{said}"


def _learning(m: Mapping[str, Any]) -> Verdict:
    silent = {
        "all right": m["groups/all_right"],
        "all wrong": m["groups/all_wrong"],
        "all equal": m["groups/all_equal"],
        "too few judged": m["groups/unjudged"],
    }
    why = ", ".join(f"{count} {cause}" for cause, count in silent.items() if count)
    text = _with_signal(m) + (f" ({why})" if why and not _by_critic(m) else "")
    text += f"; weights moved by {m['weights/relative']:.1e} in {m['updates/done']} updates"
    if m["clip/band"] is None or m["updates/done"] < 2:
        return Verdict("learning", text)
    if m["ratio"].startswith("sequence"):
        return Verdict(
            "learning",
            f"{text}; {m['clip/rows']:.0%} of the answers clipped, which for a sequence ratio is by design far more than for a token ratio",
        )
    return Verdict("learning", f"{text}; {m['clip/tokens']:.1%} of the tokens clipped")
