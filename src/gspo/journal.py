"""What happened, one JSON line a step and one a rollout: the source of truth for curves, viewers and trackers.

`job` calls `record` at the end of a step. Keys are flat; wall-clock figures stand only under `time/`.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from gspo.algorithms.health import verdict
from gspo.algorithms.losses import Tally
from gspo.batch import Batch, has_baseline, has_signal
from gspo.credit import answer_kl
from gspo.errors import InputError, RunError
from gspo.evaluate import Evaluation
from gspo.presets import Algorithm
from gspo.stats import Parity, RouteChanges, UpdateStats, WeightChange, value_fit
from gspo.types import Group, Reward, Rollout, Status, Stop

FORMAT = 1
"""Version of the lines of journal.jsonl and rollouts/*.jsonl.gz."""

Metrics = dict[str, Any]
"""One line of the journal."""


@dataclass(frozen=True)
class StepOutcome:
    """All that a step produced."""

    step: int
    row: Algorithm
    """With the band that was used; auto if no update was made."""
    groups: Sequence[Group]
    batches: Sequence[Batch]
    skipped: int
    updates: Sequence[UpdateStats]
    change: WeightChange
    evaluations: Mapping[str, Evaluation]
    """By prefix of their keys: `eval`, `eval/start`, `eval/greedy`."""
    seconds: Mapping[str, float]
    """By phase."""


class Lines:
    """`journal.jsonl` in the folder of a run."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """Go on after step `after`: later lines and rollouts, from a run that was cut off, are set aside, never deleted."""
        self._path, self._rollouts = folder / "journal.jsonl", folder / "rollouts"
        self._set_aside(after)

    def read(self) -> list[Metrics]:
        """The lines so far."""
        return read(self._path)

    def append(self, metrics: Metrics) -> None:
        """Write the line of a step, and see it on the disk. Raises RunError if the disk refuses."""
        with writing(self._path, metrics["step"]), self._path.open("a") as file:
            file.write(_line(metrics))
            file.flush()
            os.fsync(file.fileno())

    def _set_aside(self, after: int) -> None:
        lines = read(self._path)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):  # a line that was cut off goes
            self._keep(lines)
        late = [line for line in lines if line["step"] > after]
        files = [f for f in sorted(self._rollouts.glob("[0-9]" * 8 + ".jsonl.gz")) if int(f.name[:8]) > after]
        if not late and not files:
            return
        numbers = [int(old.name.split("-")[-1]) for old in self._path.parent.glob("set-aside-[0-9]*")]
        aside = self._path.parent / f"set-aside-{1 + max(numbers, default=0)}"
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)
        (aside / "journal.jsonl").write_text("".join(_line(line) for line in late))
        self._keep([line for line in lines if line["step"] <= after])

    def _keep(self, lines: Sequence[Metrics]) -> None:
        kept = self._path.with_suffix(".tmp")
        kept.write_text("".join(_line(line) for line in lines), encoding="utf-8")
        kept.replace(self._path)


@contextmanager
def writing(path: Path, step: int) -> Iterator[None]:
    """Raises RunError if the disk refuses."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: step {step} could not be written: {error}") from error


class Journal:
    """Writer of `journal.jsonl` and `rollouts/` in the folder of a run."""

    def __init__(self, folder: Path, max_new_tokens: int, *, after: int = 0) -> None:
        """Go on after step `after`: later lines and files, from a run that was cut off, are set aside, never deleted."""
        self._lines = Lines(folder, after=after)
        self._rollouts = folder / "rollouts"
        self._rollouts.mkdir(parents=True, exist_ok=True)
        self._max_new_tokens = max_new_tokens
        lines = self._lines.read()
        self._without_signal = lines[-1]["groups/steps_without_signal"] if lines else 0

    def record(self, outcome: StepOutcome) -> Metrics:
        """Write the step's line and its rollouts, and give back the line. Raises RunError if the disk refuses."""
        metrics = step_metrics(outcome)
        self._without_signal = 0 if metrics["groups/signal"] else self._without_signal + 1
        metrics["groups/steps_without_signal"] = self._without_signal
        metrics["max_new_tokens"] = self._max_new_tokens
        said = verdict(metrics)
        metrics |= {"verdict": said.text, "verdict/kind": said.kind, "verdict/warning": said.warning}
        with writing(self._rollouts, outcome.step):
            self._write_rollouts(outcome)
        self._lines.append(metrics)
        return metrics

    def _write_rollouts(self, outcome: StepOutcome) -> None:
        advantages = {
            key[:2]: float(a)
            for batch in outcome.batches
            if batch.advantage_R is not None
            for key, a in zip(batch.key_R, batch.advantage_R, strict=True)
        }
        path = self._rollouts / f"{outcome.step:08d}.jsonl.gz"
        with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
            for group in outcome.groups:
                for r in group.rollouts:
                    file.write(
                        _line(_rollout(outcome.step, group, r, advantages.get((group.ordinal, r.index), 0.0))).encode()
                    )


def read(path: Path) -> list[Metrics]:
    """The lines of a journal; a last line that was cut off while it was written is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path}: a line of it is damaged ({error}): mend or remove that line") from error


def step_metrics(outcome: StepOutcome) -> Metrics:
    """The numbers of a step under their journal keys; None where there was nothing to measure."""
    metrics: Metrics = {"format": FORMAT, "step": outcome.step, "version": outcome.step}
    metrics |= _group_metrics(outcome.groups, outcome.row)
    metrics |= _rollout_metrics([r for group in outcome.groups for r in group.rollouts])
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
    tokens = metrics["tokens/sampled"]
    total = sum(outcome.seconds.values())
    metrics |= {f"time/{phase}": seconds for phase, seconds in outcome.seconds.items()}
    metrics |= {"time/step": total, "time/tokens_per_second": tokens / total if total else None}
    return metrics


def _group_metrics(groups: Sequence[Group], row: Algorithm) -> Metrics:
    comparable = [g for g in groups if has_baseline(g, row)]
    uniform = [_rewards(g.judged)[0] for g in comparable if not has_signal(g)]
    return {
        "groups/total": len(groups),
        "groups/signal": sum(has_signal(g) for g in comparable),
        # Rewards of a rule lie in [0, 1]: uniform groups at or beyond its ends are solved or hopeless.
        "groups/all_right": sum(value >= 1 - 1e-9 for value in uniform),
        "groups/all_wrong": sum(value <= 0 for value in uniform),
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
        "tokens/sampled": sum(lengths),
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


def _rollout(step: int, group: Group, r: Rollout, advantage: float | None) -> Metrics:
    reward = r.reward
    return {
        "format": FORMAT,
        "step": step,
        "row": group.prompt.row,
        "ordinal": group.ordinal,
        "index": r.index,
        "prompt": group.prompt.text,
        "columns": {
            key: value for key, value in group.prompt.columns.items() if isinstance(value, str | int | float | bool)
        },
        "text": r.text,
        "prompt_ids": group.prompt.token_ids.tolist(),
        "ids": [i for s in r.segments for i in s.token_ids.tolist()],
        "mask": [int(m) for s in r.segments for m in s.policy_mask],
        # float32 to the shortest decimal that reads back as the same float32
        "logprobs": [float(str(p)) for s in r.segments for p in s.logprobs],
        "stop": r.stop.value,
        "versions": list(r.versions),
        "reward": reward.value if reward else None,
        "reward_parts": dict(reward.parts) if reward else {},
        "reward_status": {k: v.value for k, v in reward.status.items()} if reward else {},
        "reward_error": reward.error if reward else None,
        "advantage": advantage,
    }


def _line(value: Metrics) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
