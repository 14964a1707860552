"""What is legal but worth knowing of a run before it starts.

In: its configuration and inputs. Out: sentences. `build` says them once, `check` shows them.
"""

from __future__ import annotations

from gspo import presets
from gspo.config import Run
from gspo.errors import InputError
from gspo.inputs import FROM_PYTHON, Inputs


def advice(run: Run, inputs: Inputs) -> list[str]:
    """What is legal but worth knowing, each in a sentence to be said once at the start."""
    return [
        *presets.advice(run.algorithm),
        *_repeats_advice(run, inputs),
        *_sampling_advice(run),
        *_staleness_advice(run),
        *_replay_advice(run),
        *_evaluation_advice(run, inputs),
        *_guard_advice(run, inputs),
    ]


def _guard_advice(run: Run, inputs: Inputs) -> list[str]:
    """What the guard cannot see where prompts are chosen."""
    if run.guard == "off" or run.data.difficulty is None or (inputs.held_out and run.eval.every):
        return []
    return [
        "data.difficulty passes prompts over, so the reward of a step is that of the prompts that are left, and the guard does not compare it. Without "
        f"evaluations it sees a collapse only where no answer is right any more or a number is not finite: give {_held_out(run)} and eval.every"
    ]


def _staleness_advice(run: Run) -> list[str]:
    """Which policy the ratio is taken to when that which wrote the answers is an older one."""
    lag, row = run.max_staleness, run.algorithm
    if not lag:
        return []
    said = f"max_staleness={lag}: a step trains on answers written by the weights of {lag} steps before, the first {lag + 1} steps on those of the start. "
    if row.anchor == "rollout":
        return [
            said
            + "anchor=rollout: the ratio is to the policy that wrote the answers, so the clip band bounds the lag as well as the step."
        ]
    weighed = (
        f"correction={row.correction} weighs the lag"
        if row.correction != "none"
        else "the weight of the gate has the lag in it"
        if row.gate == "minirl"
        else "nothing weighs the lag; algorithm.correction does, or algorithm.anchor=rollout takes it into the ratio"
    )
    return [said + f"anchor=old: the ratio is to the policy before the step, recomputed by the trainer, and {weighed}."]


def _replay_advice(run: Run) -> list[str]:
    """That the old policy's experts, which were asked for, are never replayed. A row that replays by default says nothing of it."""
    row = run.algorithm
    asked = row.routing == "old" and (row.name not in presets.PRESETS or presets.PRESETS[row.name].routing != "old")
    if not asked or row.updates_per_step * row.epochs > 1:
        return []
    return [
        "algorithm.routing=old replays nothing with one update a step, whose own forward is the old policy: "
        "algorithm.routing=rollout replays the engine's experts, algorithm.updates_per_step or algorithm.epochs of 2 and more give updates to replay in."
    ]


def _repeats_advice(run: Run, inputs: Inputs) -> list[str]:
    """That a step draws a prompt several times, each time with a group of its own."""
    rows = len(inputs.prompts)
    if run.prompts_per_step <= rows:
        return []
    return [
        f"prompts_per_step={run.prompts_per_step} is more than the {rows} row{'s' if rows > 1 else ''} to train on: a step goes through all of "
        f"them and begins again, so that a prompt has several groups of {run.group_size} answers in one step, each with a baseline of its own"
    ]


def _sampling_advice(run: Run) -> list[str]:
    s = run.sampling
    if s.top_p == 1 and s.top_k == 0:
        return []
    return [
        f"top_p={s.top_p:g}, top_k={s.top_k}: answers are sampled from a truncated distribution and trained on the full one, so engine and trainer "
        "differ by the mass cut off (see parity/signed). top_p=1 top_k=0 has no such gap."
    ]


def _evaluation_advice(run: Run, inputs: Inputs) -> list[str]:
    if inputs.held_out or not run.eval.every:
        return []
    if run.eval.patience is not None:
        raise InputError(
            f"eval.patience={run.eval.patience}: there are no held-out prompts to evaluate on: give {_held_out(run)}"
        )
    return [
        f"there are no held-out prompts, so nothing is evaluated and no checkpoint is the best: give {_held_out(run)}"
    ]


def _held_out(run: Run) -> str:
    """How held-out prompts are given."""
    return "eval_data=rows" if run.data.source == FROM_PYTHON else "eval.source=FILE"
