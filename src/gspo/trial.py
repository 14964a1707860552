"""One real piece of a step at the largest lengths that the configuration allows, measured; nothing is written.

In: a run and its checked inputs. Out: a `Trial`: seconds and peak memory, and what the whole run comes to by them.
`gspo check` calls it. Answers are not let end before the limit, and every group carries signal, so that no step of the
run is larger.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, replace

import torch

from gspo.batch import Batch, Batches, make_batches
from gspo.build import engine_of, learner_of
from gspo.config import Run
from gspo.console import Console
from gspo.critic import open_critic
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.errors import OutOfMemoryError
from gspo.inputs import Inputs
from gspo.learner import Learner
from gspo.models.load import Policy
from gspo.objectives import policy_objective
from gspo.rollout import rollout
from gspo.types import Group, Prompt, Reward
from gspo.updates import too_large


@dataclass(frozen=True)
class Trial:
    """What was measured."""

    parameters: int
    prompt_tokens: int
    """Of the longest prompt."""
    answers: int
    """Answered at once, each of `sampling.max_new_tokens`."""
    rollout_seconds: float
    """For them, judged."""
    trained: int
    """Answers that the measured update trained."""
    update_seconds: float
    """For them: the old pass, forward, backward and the optimizer."""
    peak_bytes: int
    """Of the process, or of the GPU's memory."""
    budget: int
    """`max_tokens_per_microbatch` that fitted."""
    on_gpu: bool

    def step_seconds(self, run: Run) -> float:
        """At most, for a step of the run."""
        total = run.prompts_per_step * run.group_size
        return (
            total / self.answers * self.rollout_seconds
            + total / self.trained * self.update_seconds * run.algorithm.epochs
        )

    def run_seconds(self, run: Run, held_out: int) -> float:
        """At most, for the whole run with its evaluations."""
        every = run.eval.every
        evaluations = 1 + math.ceil(run.steps / every) if every and held_out else 0
        asked = held_out * (run.eval.samples + run.eval.greedy)
        return run.steps * self.step_seconds(run) + evaluations * asked / self.answers * self.rollout_seconds


def trial(run: Run, policy: Policy, inputs: Inputs, console: Console) -> Trial:
    """Sample the answers of a step, or as many as are decoded at once; train on one update of them, or a micro-batch of it.

    Raises RunError, which says what to do, if a single answer does not fit.
    """
    run = _whole_conversations(run)
    critic = open_critic(run, policy, None)
    learner = learner_of(run, policy, critic)
    # Without stop ids no answer ends before the limit.
    engine = engine_of(run, replace(policy, stop_ids=()), console)
    groups, seconds = _sampled(run, engine, inputs)
    batches, budget = _fitting(run, groups, learner)
    update, trained = _trained(run, learner, batches)
    on_gpu = policy.device.type == "cuda"
    return Trial(
        parameters=sum(p.numel() for p in learner.masters.values()),
        prompt_tokens=len(inputs.longest.token_ids),
        answers=sum(len(group.rollouts) for group in groups),
        rollout_seconds=seconds,
        trained=trained,
        update_seconds=update,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else peak_of_process(),
        budget=budget,
        on_gpu=on_gpu,
    )


def _whole_conversations(run: Run) -> Run:
    """With answers as long as all that may come after a prompt: of a conversation, all of its turns."""
    return run.model_copy(update={"sampling": run.sampling.model_copy(update={"max_new_tokens": run.longest})})


def peak_of_process() -> int:
    """Bytes of memory that this process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _sampled(run: Run, engine: LocalEngine, inputs: Inputs) -> tuple[list[Group], float]:
    longest: Prompt = inputs.longest
    at_once = max(1, min(run.prompts_per_step, run.sampling.max_rows // run.group_size))
    list(_warm(engine, longest))
    start = time.perf_counter()
    requests = [Request(prompt=longest, ordinal=i, count=run.group_size) for i in range(at_once)]
    # Of conversations there are no turns here, so that a function which wants them may fail.
    reward = inputs.reward if run.talk is None else replace(inputs.reward, max_failed=1.0)
    groups = rollout(engine, requests, reward)
    seconds = time.perf_counter() - start
    # Rewards that differ: a group without signal would not be trained.
    return [group.with_rewards([Reward(float(i % 2)) for i in range(run.group_size)]) for group in groups], seconds


def _warm(engine: LocalEngine, prompt: Prompt) -> list[Group]:
    """What is paid once: pages, compiled kernels."""
    short = replace(prompt, token_ids=prompt.token_ids[:2])
    engine.submit(Request(prompt=short, ordinal=0, count=1))
    return list(engine.collect())


def _fitting(run: Run, groups: list[Group], learner: Learner) -> tuple[Batches, int]:
    """The largest update that is measured, under the largest token budget up to the configured one that fits into memory."""
    budget = run.max_tokens_per_microbatch
    row = run.algorithm.model_copy(update={"updates_per_step": 1})
    of_update = math.ceil(run.prompts_per_step / run.algorithm.updates_per_step)
    tokens = sum(r.policy_tokens for r in groups[0].rollouts) + len(groups[0].prompt.token_ids)
    some = groups[: max(1, min(of_update, math.ceil(budget / tokens)))]
    while True:
        batches = make_batches(some, row, budget)
        try:
            _update(run, learner, batches)  # the first one pays for compiled kernels
            return batches, budget
        except OutOfMemoryError as error:
            if not batches.divisible:
                raise too_large(batches, str(error)) from error
            budget = max(1, min(budget, batches.largest) // 2)


def _update(run: Run, learner: Learner, batches: Batches) -> Batch:
    batch: Batch = learner.annotate(batches)[0]
    learner.update(batch, policy_objective(run.algorithm))
    list(learner.weights())
    return batch


def _trained(run: Run, learner: Learner, batches: Batches) -> tuple[float, int]:
    """Seconds of an update, with its share of the old pass, and the answers in it."""
    start = time.perf_counter()
    batch = _update(run, learner, batches)
    seconds = time.perf_counter() - start
    if batch.old_logprob_N is None and run.algorithm.updates_per_step * run.algorithm.epochs > 1:
        start = time.perf_counter()
        learner.logprobs(learner.model, batch)
        seconds += time.perf_counter() - start
    return seconds, len(batch.length_S)
