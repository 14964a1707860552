"""The numbers of a step, by the keys of the journal.

In: a `StepOutcome`, or an evaluation. Out: flat `Metrics`. `journal` writes them; `stages` take the evaluation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from gspo.algorithms.losses import Tally
from gspo.batch import Batch, has_baseline, has_signal
from gspo.credit import answer_kl
from gspo.evaluate import Evaluation
from gspo.presets import Algorithm
from gspo.stats import Parity, RouteChanges, UpdateStats, WeightChange, value_fit
from gspo.types import Group, Reward, Rollout, Status, Stop

FORMAT = 1
"""Version of the lines of journal.jsonl."""
REPEATED_RUN = 8
"""Tokens of a run that is looked for again in the same answer: long enough that no list or proof repeats half of its own."""

Metrics = dict[str, Any]
"""One line of the journal."""


@dataclass(frozen=True)
class StepOutcome:
    """All that a step produced."""

    step: int
    row: Algorithm
    """With the band that was used; auto if no update was made."""
    groups: Sequence[Group]
    """Those that were trained on."""
    batches: Sequence[Batch]
    skipped: int
    updates: Sequence[UpdateStats]
    change: WeightChange
    evaluations: Mapping[str, Evaluation]
    """By prefix of their keys: `eval`, `eval/start`, `eval/greedy`."""
    kl_start: float | None
    """Nats a token between the starting policy and this one; None if it was not measured."""
    seconds: Mapping[str, float]
    """By phase."""
    replaced: Sequence[Group] = ()
    """Groups without signal that were drawn before others took their places."""
    passed_over: int = 0
    """Turns of prompts that were skipped for their difficulty."""

    @property
    def drawn(self) -> list[Group]:
        """All groups that were sampled for the step."""
        return [*self.groups, *self.replaced]


def step_metrics(outcome: StepOutcome) -> Metrics:
    """The numbers of a step under their journal keys; None where there was nothing to measure."""
    metrics: Metrics = {"format": FORMAT, "step": outcome.step, "version": outcome.step}
    metrics |= _group_metrics(outcome.groups, outcome.row)
    metrics |= _drawing_metrics(outcome)
    # Of all answers: those of the groups that were kept alone would hide how much is solved.
    metrics |= _rollout_metrics([r for group in outcome.drawn for r in group.rollouts])
    metrics |= _update_metrics(outcome)
    metrics |= _clip_metrics(sum((u.tally for u in outcome.updates), Tally()), outcome.row)
    metrics |= _value_metrics(outcome)
    metrics |= _staleness_metrics(outcome)
    # Parity compares engine and trainer at the same weights: the trainer no longer has those of a stale answer.
    fresh = metrics["staleness/max"] == 0
    metrics |= _parity_metrics(sum((u.parity for u in outcome.updates if fresh), Parity()))
    metrics |= _routing_metrics(outcome.updates, outcome.row)
    for prefix, evaluation in outcome.evaluations.items():
        metrics |= evaluation_metrics(prefix, evaluation)
    if "eval" in outcome.evaluations:
        metrics["eval/kl_start"] = outcome.kl_start
    tokens = metrics["tokens/sampled"]
    total = sum(outcome.seconds.values())
    metrics |= {f"time/{phase}": seconds for phase, seconds in outcome.seconds.items()}
    metrics |= {"time/step": total, "time/tokens_per_second": tokens / total if total else None}
    return metrics


def _drawing_metrics(outcome: StepOutcome) -> Metrics:
    """How many groups were replaced, and why each had no signal; and how many prompts were never asked."""
    why = _group_metrics(outcome.replaced, outcome.row)
    reasons = ("all_right", "all_wrong", "all_equal", "unjudged")
    return {
        "groups/drawn": len(outcome.drawn),
        "groups/replaced": len(outcome.replaced),
        **{f"groups/replaced_{reason}": why[f"groups/{reason}"] for reason in reasons},
        # Their rewards differ, and every answer that counts was cut at the length limit.
        "groups/replaced_cut": why["groups/signal"],
        "prompts/skipped": outcome.passed_over,
    }


def _group_metrics(groups: Sequence[Group], row: Algorithm) -> Metrics:
    comparable = [g for g in groups if has_baseline(g, row)]
    silent = [g for g in comparable if not has_signal(g)]
    uniform = [_rewards(g.judged)[0] for g in silent]
    return {
        "groups/total": len(groups),
        "groups/signal": sum(has_signal(g) for g in comparable),
        # Rewards of a rule lie in [0, 1]: uniform groups at or beyond its ends are solved or hopeless.
        "groups/all_right": sum(value >= 1 - 1e-9 for value in uniform),
        "groups/all_wrong": sum(value <= 0 for value in uniform),
        # Of those that are all wrong: nobody knows what their answers would have come to.
        "groups/all_cut": sum(
            value <= 0 and all(r.stop is Stop.LENGTH for r in g.judged)
            for g, value in zip(silent, uniform, strict=True)
        ),
        "groups/all_equal": sum(0 < value < 1 - 1e-9 for value in uniform),
        "groups/unjudged": len(groups) - len(comparable),
    }


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [r.reward.value for r in rollouts if r.reward is not None and r.reward.value is not None]


def _rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    values = _rewards(rollouts)
    statuses = [status for r in rollouts if r.reward is not None for status in r.reward.status.values()]
    lengths = [r.policy_tokens for r in rollouts]
    return {
        **_function_metrics([r.reward for r in rollouts if r.reward is not None]),
        "reward/mean": fmean(values) if values else None,
        "reward/std": pstdev(values) if values else None,
        "rollouts/total": len(rollouts),
        "rollouts/judged": len(values),
        **{f"rollouts/{status.value}": statuses.count(status) for status in Status if status is not Status.OK},
        "length/mean": fmean(lengths),
        "length/max": max(lengths),
        "truncated/share": fmean(r.stop is Stop.LENGTH for r in rollouts),
        "truncated/limit": _most_cut_at(rollouts),
        "repetition/share": fmean(repeats(r) for r in rollouts),
        **_conversation_metrics([r for r in rollouts if r.messages]),
        "tokens/sampled": sum(lengths),
    }


def _most_cut_at(rollouts: Sequence[Rollout]) -> str | None:
    """The key of the limit that cut most of them; None if none was cut."""
    limits = [r.limit.value for r in rollouts if r.limit is not None]
    return max(dict.fromkeys(limits), key=limits.count, default=None)


def repeats(rollout: Rollout, run: int = REPEATED_RUN) -> bool:
    """Whether more than half of an answer's runs of `run` tokens stood in it before: it goes round in a loop."""
    ids = [int(i) for s in rollout.segments for i in s.token_ids[s.policy_mask]]
    runs = [tuple(ids[i : i + run]) for i in range(len(ids) - run + 1)]
    return len(set(runs)) < 0.5 * len(runs)


def _conversation_metrics(talks: Sequence[Rollout]) -> Metrics:
    """Of conversations: replies in each, tokens that were put between them, and how many failed."""
    if not talks:
        return {}
    return {
        "conversation/turns": fmean(sum(m["role"] == "assistant" for m in r.messages) for r in talks),
        "conversation/inserted": fmean(sum(int((~s.policy_mask).sum()) for s in r.segments) for r in talks),
        "conversation/branches": fmean(len(r.segments) - len({s.parent for s in r.segments}) for r in talks),
        "conversation/errors": sum(r.stop is Stop.ERROR for r in talks),
    }


def _function_metrics(rewards: Sequence[Reward]) -> Metrics:
    """Of each reward function: the mean of its verdicts, and the share of answers that it failed on."""
    metrics: Metrics = {}
    failed, judged = 0, 0
    for name in dict.fromkeys(name for reward in rewards for name in reward.status):
        values = [value for reward in rewards if (value := reward.parts.get(name)) is not None]
        states = [reward.status[name] for reward in rewards if name in reward.status]
        lost = sum(state in (Status.TIMEOUT, Status.CRASHED) for state in states)
        metrics |= {
            f"reward/{name}/mean": fmean(values) if values else None,
            f"reward/{name}/failed": lost / len(states),
            f"time/reward/{name}": fmean(reward.seconds.get(name, 0.0) for reward in rewards),
        }
        failed, judged = failed + lost, judged + len(states)
    return {**metrics, "reward/failed": failed / judged if judged else None}


def _update_metrics(outcome: StepOutcome) -> Metrics:
    updates = outcome.updates
    trained = sum(u.trained_tokens for u in updates)
    return {
        "updates/done": len(updates),
        "updates/skipped": outcome.skipped,
        "loss": sum(u.loss for u in updates) / len(updates) if updates else None,
        "loss/sequences": sum(u.sequences for u in updates),
        "loss/tokens": sum(u.tokens for u in updates),
        "tokens/trained": trained,
        "tokens/packed": sum(u.packed_tokens for u in updates),
        "grad_norm": fmean(u.grad_norm for u in updates) if updates else None,
        "grad_norm/max": max((u.grad_norm for u in updates), default=None),
        "learning_rate": updates[-1].learning_rate if updates else None,
        "entropy": sum(u.entropy * u.trained_tokens for u in updates) / trained if trained else None,
        "weights/changed": outcome.change.changed,
        "weights/relative": outcome.change.relative,
    }


def _clip_metrics(tally: Tally, row: Algorithm) -> Metrics:
    edges = [edge for edge in (row.clip_low, row.clip_high) if isinstance(edge, float)]
    band = min(edges, default=None)
    spread = tally.std_log_ratio_rows if row.ratio.startswith("sequence") else tally.std_log_ratio_tokens
    return {
        "ratio": row.ratio,
        "advantage": row.advantage,
        "anchor": row.anchor,
        "clip/rows": tally.clip_rows,
        "clip/tokens": tally.clip_tokens,
        "clip/rows_counted": tally.rows,
        "clip/tokens_counted": tally.tokens,
        "clip/rows_upper_positive": tally.rows_upper_positive,
        "clip/rows_lower_negative": tally.rows_lower_negative,
        "clip/rows_upper_negative": tally.rows_upper_negative,
        "clip/tokens_upper_positive": tally.tokens_upper_positive,
        "clip/tokens_lower_negative": tally.tokens_lower_negative,
        "clip/tokens_upper_negative": tally.tokens_upper_negative,
        "clip/band": band,
        "ratio/std_rows": tally.std_log_ratio_rows,
        "ratio/std_tokens": tally.std_log_ratio_tokens,
        "ratio/std_over_band": spread / band if band else None,
        "kl/mean": tally.kl if tally.kl_tokens else None,
        "kl/coefficient": row.kl_coefficient if row.needs_reference else None,
        "correction/dropped": tally.tokens_dropped,
    }


def _value_metrics(outcome: StepOutcome) -> Metrics:
    """What a critic said, against what came of it, and how it was updated; None without one. And the KL of the reward."""
    fit, updates = value_fit(outcome.batches), outcome.updates
    kl = [value for b in outcome.batches if (kl_S := answer_kl(b, outcome.row)) is not None for value in kl_S.tolist()]
    own = [u.critic for u in updates if u.critic is not None]
    tally = sum((u.tally for u in (*updates, *own)), Tally())
    return {
        # Summed over an answer, before the step: what stands in the rewards, and what a steered coefficient follows.
        "kl/answer": fmean(kl) if kl else None,
        "value/loss": tally.value_loss / len(updates) if tally.values else None,
        "value/clipped": tally.clip_values,
        "value/mean": fit.value if fit else None,
        "value/outcome": fit.outcome if fit else None,
        "value/explained_variance": fit.explained if fit else None,
        "value/grad_norm": fmean(u.grad_norm for u in own) if own else None,
        "value/learning_rate": own[-1].learning_rate if own else None,
    }


def _staleness_metrics(outcome: StepOutcome) -> Metrics:
    """By how many versions the weights that a step starts from are ahead of those that wrote its answers."""
    ages = [outcome.step - 1 - r.versions[0] for group in outcome.groups for r in group.rollouts]
    return {"staleness/mean": fmean(ages), "staleness/max": max(ages)}


def _parity_metrics(parity: Parity) -> Metrics:
    measured = parity.tokens > 0
    return {
        "parity/mean": parity.total / parity.tokens if measured else None,
        "parity/max": parity.largest if measured else None,
        "parity/signed": parity.signed / parity.sequences if measured else None,
        "parity/tokens": parity.tokens,
    }


def _routing_metrics(updates: Sequence[UpdateStats], row: Algorithm) -> Metrics:
    """Shares of (token, layer) pairs whose set of experts differs; None for a model without experts."""
    routes = sum((u.routes for u in updates), RouteChanges())
    missed = routes.replayed.share
    return {
        "routing": row.routing,
        "routing/changed_rollout_old": routes.rollout_old.share,
        "routing/changed_rollout_old_layers": routes.rollout_old.by_layer,
        "routing/changed_old_new": routes.old_new.share,
        "routing/changed_old_new_layers": routes.old_new.by_layer,
        "routing/replay_hits": None if missed is None else 1 - missed,
        "routing/replayed_tokens": round(routes.replayed.tokens),
        "routing/imbalance": fmean(u.imbalance for u in updates) if updates and row.load_balance else None,
    }


def evaluation_metrics(prefix: str, evaluation: Evaluation) -> Metrics:
    """The keys of one evaluation: `<prefix>/reward` is avg@k over the rows."""
    k = evaluation.samples
    return {
        f"{prefix}/reward": evaluation.reward.value,
        f"{prefix}/reward_low": evaluation.reward.low,
        f"{prefix}/reward_high": evaluation.reward.high,
        f"{prefix}/pass@{k}": evaluation.pass_at_k.value,
        f"{prefix}/pass@{k}_low": evaluation.pass_at_k.low,
        f"{prefix}/pass@{k}_high": evaluation.pass_at_k.high,
        f"{prefix}/rows": evaluation.rows,
        f"{prefix}/unjudged": evaluation.unjudged,
        f"{prefix}/length": evaluation.length,
    }
