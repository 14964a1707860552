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
ROUNDED = 0.1
"""Nats a token between engine and trainer, on average, beyond what any rounding of weights explains (bfloat16: 0.01 to 0.03)."""
REPEATED = 0.5
"""Share of answers that go round in a loop above which the verdict becomes a warning."""
SILENCED = 0.95
"""Share of what carries a gradient that the gate may take before it is said."""
STALE = 8
"""Versions by which answers may be old before it is said."""
_REPLY = "sampling.max_new_tokens"
NOTHING = 1e-6
"""A loss that is called 0."""


@dataclass(frozen=True)
class Verdict:
    """What a step says about the run."""

    kind: str
    """unjudged, no_signal, put_back, left_out, unmoved, apart, mismatch, truncated, repeating, silenced, stale or learning."""
    text: str
    warning: bool = False


def verdict(metrics: Mapping[str, Any]) -> Verdict:
    """Read a step's metrics, gravest cause first. Keys that an older journal lacks are not judged."""
    causes = (
        _unjudged, _no_signal, _put_back, _left_out, _unmoved, _apart, _mismatch, _truncated, _repeating, _silenced, _stale,
    )  # fmt: skip
    for judge in causes:
        found = judge(metrics)
        if found is not None:
            return found
    return _learning(metrics)


def _why_silent(m: Mapping[str, Any]) -> str:
    """Why groups carry no signal, by cause; empty if all do."""
    cut = m.get("groups/all_cut", 0)
    causes = {
        "all right": m["groups/all_right"],
        "all wrong": m["groups/all_wrong"] - cut,
        "all cut at the length limit and wrong": cut,
        "all equal": m["groups/all_equal"],
        "too few judged": m["groups/unjudged"],
    }
    return ", ".join(f"{count} {cause}" for cause, count in causes.items() if count)


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
    text = f"no signal: 0 of {m['groups/total']} groups carry any ({_why_silent(m)})"
    if m["groups/replaced"]:
        text += f", although {m['groups/replaced']} others had been replaced before"
    if m["updates/done"]:
        return Verdict("no_signal", f"{text}; the updates made follow the KL term or the batch baseline alone")
    text += "; no update was made"
    if m["groups/steps_without_signal"] < PATIENCE:
        return Verdict("no_signal", text)
    return Verdict(
        "no_signal", f"{text}, for {m['groups/steps_without_signal']} steps in a row: {_what_then(m)}", warning=True
    )


def _what_then(m: Mapping[str, Any]) -> str:
    """What it means that no group has carried signal for a while, as far as the last step tells."""
    if m["groups/all_right"] == m["groups/total"]:
        return "the task is solved. Only harder prompts have something left to learn from"
    return (
        "the task is solved, too hard, or the reward never differs. Change the difficulty of the prompts, raise group_size, or look at "
        "rollouts/ to see what the reward reads"
    )


def _put_back(m: Mapping[str, Any]) -> Verdict | None:
    """What the updates did is gone, so that nothing is said of it."""
    if m.get("guard/action") not in ("rollback", "stop"):
        return None
    return Verdict(
        "put_back", f"the guard puts the weights back (rule {m['guard/rule']}); {_with_signal(m)}", warning=True
    )


def _left_out(m: Mapping[str, Any]) -> Verdict | None:
    if m["updates/done"]:
        return None
    return Verdict(
        "left_out",
        f"no update was made although {_with_signal(m)}: algorithm.mask_truncated leaves out answers "
        f"that were cut, and {m['truncated/share']:.0%} were. Raise {_limit(m)}",
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
    limit, length = _limit(m), f"={m['max_new_tokens']}" if _limit(m) == _REPLY else ""
    return Verdict(
        "truncated",
        f"{m['truncated/share']:.0%} of the answers were cut, most of them at {limit}{length}, and cannot show what they would have reached: "
        f"raise {limit}, unless shorter answers are what the policy is to learn",
        warning=True,
    )


def _limit(m: Mapping[str, Any]) -> str:
    """The key of the limit that cut most answers; older journals name none, and had one."""
    return str(m.get("truncated/limit") or _REPLY)


def _with_signal(m: Mapping[str, Any]) -> str:
    if not _by_critic(m):
        return f"{m['groups/signal']} of {m['groups/total']} groups carry signal"
    explained = m["value/explained_variance"]
    said = "" if explained is None else f", and the critic knew {explained:z.0%} of how their rewards differ"
    return f"{m['rollouts/judged']} of {m['rollouts/total']} answers were judged{said}"


def _updates(m: Mapping[str, Any]) -> str:
    return f"{m['updates/done']} update{'s' * (m['updates/done'] != 1)}"


def _unmoved(m: Mapping[str, Any]) -> Verdict | None:
    if m.get("weights/changed", 1.0) or not m["updates/done"]:
        return None
    return Verdict(
        "unmoved",
        f"{_updates(m)} changed no trainable weight: either no gradient reaches the trainable weights "
        f"(gradient norm {m.get('grad_norm') or 0.0:.2g}), or the learning rate, {m.get('learning_rate') or 0.0:.1e}, is too small for their precision",
        warning=True,
    )


def _apart(m: Mapping[str, Any]) -> Verdict | None:
    parity = m.get("parity/mean")
    if parity is None or parity <= ROUNDED:
        return None
    return Verdict(
        "apart",
        f"engine and trainer give the sampled tokens log-probabilities that differ by {parity:.2g} on average, more than rounding does: "
        "they do not compute the same model. Set engine.weights=same, top_p=1 and top_k=0, or look for what else differs",
        warning=True,
    )


def _repeating(m: Mapping[str, Any]) -> Verdict | None:
    share = m.get("repetition/share")
    if share is None or share <= REPEATED:
        return None
    return Verdict(
        "repeating",
        f"{share:.0%} of the answers go round in a loop (more than half of their runs of tokens stood in them before): "
        "lower optimizer.learning_rate, or see in rollouts/ whether the reward pays for it",
        warning=True,
    )


def _clipped(m: Mapping[str, Any]) -> tuple[float, str]:
    """The share that the gate took, of what this algorithm's ratio belongs to."""
    return (m["clip/rows"], "answers") if m["ratio"].startswith("sequence") else (m["clip/tokens"], "tokens")


def _silenced(m: Mapping[str, Any]) -> Verdict | None:
    share, unit = _clipped(m)
    if m["clip/band"] is None or share <= SILENCED:
        return None
    spread = m.get("ratio/std_over_band")
    wide = f"; the log ratios spread over {spread:.0f} times the band" if spread else ""
    return Verdict(
        "silenced",
        f"{share:.0%} of the {unit} lost their gradient to the clip, so hardly anything is learned{wide}: lower optimizer.learning_rate, "
        "make fewer updates a step, or widen algorithm.clip_low and algorithm.clip_high",
        warning=True,
    )


def _stale(m: Mapping[str, Any]) -> Verdict | None:
    age = m.get("staleness/max")
    if age is None or age <= STALE:
        return None
    return Verdict(
        "stale",
        f"the oldest answers were written {age} versions of the weights ago: lower max_staleness, or let algorithm.correction weigh the lag",
        warning=True,
    )


def _learning(m: Mapping[str, Any]) -> Verdict:
    why = _why_silent(m)
    text = _with_signal(m) + (f" ({why})" if why and not _by_critic(m) else "")
    text += f"; weights moved by {m['weights/relative']:.1e} in {_updates(m)}"
    loss, gradient = m.get("loss"), m.get("grad_norm")
    if loss is not None and gradient and abs(loss) < NOTHING:
        text += (
            f"; the loss is 0 on policy, where advantages add up to nothing, and its gradient ({gradient:.2g}) is not"
        )
    if m["clip/band"] is not None and m["updates/done"] >= 2:
        share, unit = _clipped(m)
        # Said where it may look like a fault.
        by_design = ", which for a sequence ratio is by design far more than for a token ratio" if share >= 0.05 else ""
        text += (
            f"; {share:.0%} of the answers clipped{by_design}"
            if unit == "answers"
            else f"; {share:.1%} of the tokens clipped"
        )
    if m.get("entropy") is not None:
        text += f"; entropy {m['entropy']:.2g} nats a token"
    if m.get("length/mean") is not None:
        text += f"; {m['length/mean']:.0f} tokens an answer, {m['truncated/share']:.0%} of them cut"
    if m.get("staleness/max"):
        text += f"; answers up to {m['staleness/max']} versions old"
    return Verdict("learning", text)
