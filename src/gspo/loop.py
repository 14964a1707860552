"""The loop.

prompts -> engine -> rollouts -> rewards -> advantages -> batch -> loss -> optimizer -> engine (new weights)
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gspo.job import Job


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    """The run folder: run.yaml, journal.jsonl, rollouts/, checkpoints/."""
    step: int
    """Last step done."""
    start_reward: float | None
    """Held-out reward before the first step; None without held-out prompts."""
    last_reward: float | None
    """Held-out reward at the last evaluation."""
    best_reward: float | None
    binary: bool
    """Every answer that was evaluated is worth 0 or 1, so that these rewards are shares of right answers."""
    ended: str | None
    """Why the run was over before its last step; None if it was not, or a signal ended it."""
    signal: int | None
    """Number of the signal that ended the run early, after saving."""

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else 0


def train(job: Job) -> Result:
    """Run `job` to its last step, or to the first signal."""
    with closing(job), job.stopping_on_signals():
        job.measure_start()
        for step in job.steps():
            groups = job.rollout()
            batches, updates = job.learn(groups)
            job.publish(step)
            metrics = job.record(step, groups, batches, updates)
            job.act()
            job.save_if_due(metrics)
        job.save_if_stopped()
        job.write_report()
    return Result(
        folder=job.folder,
        step=job.progress.step,
        start_reward=job.progress.start_reward,
        last_reward=job.progress.last_reward,
        best_reward=job.progress.best_reward,
        binary=job.binary,
        ended=job.ended,
        signal=job.stopped_by.value if job.stopped_by is not None else None,
    )
