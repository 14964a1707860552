"""Our side of the race: one measurement of gspo in a process of its own.

In: a `Work` as JSON. Out: one JSON line. `race.py` and `scaling.py` start it; only public calls of gspo are used.
Memory and time of one step are those of the product's loop, its journal line included, without checkpoints.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from work import Work, emit, is_right, read, rows

from gspo import machine

machine.prepare()  # before torch is imported, as in the command line

import torch  # noqa: E402
from meter import Clock, now, traced  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from gspo import settings  # noqa: E402
from gspo.batch import make_batches  # noqa: E402
from gspo.build import build  # noqa: E402
from gspo.config import Run  # noqa: E402
from gspo.engines.engine import Request  # noqa: E402
from gspo.engines.local import LocalEngine  # noqa: E402
from gspo.inputs import FROM_PYTHON, read_inputs  # noqa: E402
from gspo.job import Job  # noqa: E402
from gspo.learner import cast  # noqa: E402
from gspo.models.load import load_policy  # noqa: E402
from gspo.types import Group  # noqa: E402

# ------------------------------------------------------------------------------ a step


@dataclass(frozen=True)
class Step:
    """One step that was done: seconds of each phase, and its size."""

    phases: dict[str, float]
    answers: int
    answer_tokens: int
    trained_tokens: int
    prompt_tokens: int
    """Of each prompt once."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def run_of(work: Work, folder: Path) -> Run:
    """The run that `work` describes, with the product's defaults wherever it says nothing."""
    turn = count()

    def distinct(completion: str, answer: str) -> float:
        """A reward that differs within every group, so that every answer is trained on."""
        is_right(completion, answer)
        return float(next(turn) % work.group)

    keys: dict[str, Any] = {
        "dir": str(folder),
        "steps": work.warmup + work.steps + work.after,
        "threads": work.threads,
        "prompts_per_step": work.prompts,
        "group_size": work.group,
        "model.name": work.model,
        "model.dtype": work.dtype,
        "algorithm.name": "gspo",
        "algorithm.updates_per_step": work.updates,
        "data": FROM_PYTHON,
        "reward": is_right if work.real_reward else distinct,
        "sampling.max_new_tokens": work.new_tokens,
        "optimizer.learning_rate": 1e-5,
        "eval.every": 0,
    }
    return settings.load(None, list(work.settings), keys)


def make_job(work: Work, folder: Path) -> Job:
    job = build(run_of(work, folder), rows=rows(work))
    if work.forced:
        job.engine = LocalEngine(replace(job.policy, stop_ids=()), job.run.sampling, job.run.seed)
        job.engine.load(job.learner.weights(), version=0)
    return job


def do_step(job: Job, number: int, work: Work) -> Step:
    """The body of gspo's loop with a clock between its lines, and in `learn` around the learner's two passes."""
    clock = Clock()
    groups = job.rollout()
    clock.lap("rollout")
    with clock.around(job.learner, rest="batches", annotate="old log-probabilities", update="update"):
        batches, updates = job.learn(groups)
    job.publish(number)
    clock.lap("publish")
    job.record(number, groups, batches, updates)
    clock.lap("journal")
    answers, answer_tokens = _sizes(groups)
    step = Step(
        clock.phases,
        answers,
        answer_tokens,
        trained_tokens=sum(u.trained_tokens for u in updates),
        prompt_tokens=sum(len(g.prompt.token_ids) for g in groups),
    )
    _require_honest(step, work)
    return step


def _sizes(groups: list[Group]) -> tuple[int, int]:
    rollouts = [r for g in groups for r in g.rollouts]
    return len(rollouts), sum(r.policy_tokens for r in rollouts)


def _require_honest(step: Step, work: Work) -> None:
    """Stop if less was done than the row says."""
    answers = work.prompts * work.group
    if step.answers != answers or (work.forced and step.answer_tokens != answers * work.new_tokens):
        raise SystemExit(f"asked for {answers} answers of {work.new_tokens} tokens, got {step}")
    if not work.real_reward and step.trained_tokens != step.answer_tokens:
        raise SystemExit(f"{step.answer_tokens} tokens were sampled and {step.trained_tokens} trained on")


def measure_step(work: Work) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(work, Path(folder) / "run")
        numbers = job.steps()
        for _ in range(work.warmup):
            do_step(job, next(numbers), work)
        with traced(work) as trace:
            done = [do_step(job, next(numbers), work) for _ in range(work.steps)]
        for _ in range(work.after):
            do_step(job, next(numbers), work)
    mean = statistics.mean
    return {
        "seconds": mean(s.seconds for s in done),
        "each": [s.seconds for s in done],
        "phases": {name: mean(s.phases[name] for s in done) for name in done[0].phases},
        "answer_tokens": mean(s.answer_tokens for s in done),
        "trained_tokens": mean(s.trained_tokens for s in done),
        "prompt_tokens": done[0].prompt_tokens / work.prompts,
        "profile": trace(),
    }


# ------------------------------------------------------------------------------ a rollout


def measure_rollout(work: Work) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(work, Path(folder) / "run")
        machine.set_threads(run.threads)
        prompts = read_inputs(run, rows=rows(work)).prompts
    policy = load_policy(run.model)
    cast(policy.model, policy.compute_dtype)
    stop_ids = () if work.forced else policy.stop_ids
    engine = LocalEngine(replace(policy, stop_ids=stop_ids), run.sampling, run.seed)

    def once(number: int) -> tuple[float, int]:
        start = now()
        engine.load(((name, p.detach()) for name, p in policy.model.named_parameters()), version=number)
        for i, prompt in enumerate(prompts):
            engine.submit(Request(prompt, ordinal=number * len(prompts) + i, count=work.group))
        groups = list(engine.collect())
        seconds = now() - start
        answers, tokens = _sizes(groups)
        if answers != work.prompts * work.group or (work.forced and tokens != answers * work.new_tokens):
            raise SystemExit(f"asked for {work.prompts * work.group} answers, got {answers} with {tokens} tokens")
        return seconds, tokens

    for number in range(work.warmup):
        once(number)
    with traced(work) as trace:
        done = [once(work.warmup + number) for number in range(work.steps)]
    seconds, tokens = sum(s for s, _ in done), sum(t for _, t in done)
    return {
        "seconds": seconds / work.steps,
        "tokens_per_second": tokens / seconds,
        "each": [s for s, _ in done],
        "answer_tokens": tokens / work.steps,
        "prompt_tokens": statistics.mean(len(p.token_ids) for p in prompts),
        "profile": trace(),
    }


# ------------------------------------------------------------------------------ share of the ceiling


def product_rate() -> float:
    """Rate of the faster of two bf16 matrix products now, in FLOP/s."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    best = 0.0
    for m, k, n in ((4096, 576, 1536), (2048, 2048, 2048)):
        a, b = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (k, n)))
        torch.mm(a, b)
        start, done = now(), 0
        while now() - start < 0.3:
            torch.mm(a, b)
            done += 1
        best = max(best, 2 * m * k * n * done / (now() - start))
    return best


def _share(flops: float, update: Callable[[], Any]) -> dict[str, float]:
    """One update between two measurements of the ceiling."""
    before = product_rate()
    start = now()
    update()
    seconds = now() - start
    ceiling = max(before, product_rate())
    return {"seconds": seconds, "ceiling": ceiling, "share": flops / seconds / ceiling}


def _shares(done: list[dict[str, float]]) -> dict[str, Any]:
    middle = {key: statistics.median(d[key] for d in done) for key in done[0]}
    return {**middle, "each": [d["share"] for d in done], "ceiling_gflops": middle.pop("ceiling") / 1e9}


def measure_ceiling(work: Work) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(work, Path(folder) / "run")
        numbers = job.steps()
        for _ in range(work.warmup):
            do_step(job, next(numbers), work)
        done = []
        parameters = sum(p.numel() for p in job.policy.model.parameters())
        with traced(work) as trace:
            for _ in range(work.steps):
                groups = job.rollout()
                tree = sum(len(g.prompt.token_ids) for g in groups) + _sizes(groups)[1]
                batches = make_batches(groups, job.run.algorithm, job.run.max_tokens_per_microbatch)
                (batch,) = job.learner.annotate(batches)
                update = partial(job.learner.update, batch, job.updates.objective)
                done.append(_share(6 * parameters * tree, update))
                job.publish(next(numbers))
    return {**_shares(done), "tree_tokens": tree, "parameters": parameters, "profile": trace()}


def measure_plain(work: Work) -> dict[str, Any]:
    """The update as a short script would write it: padded sequences, all logits, bf16 weights and AdamW."""
    machine.set_threads(work.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        prompts = read_inputs(run_of(work, Path(folder) / "run"), rows=rows(work)).prompts
    length = max(len(p.token_ids) for p in prompts)
    tokens = torch.randint(4, 50, (work.prompts * work.group, length + work.new_tokens), device=device)
    tree = sum(len(p.token_ids) for p in prompts) + work.prompts * work.group * work.new_tokens

    def update() -> None:
        for part in tokens.split(work.micro):
            logits = model(input_ids=part).logits[:, length - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(-1, part[:, length:, None])
            (-chosen.mean() * len(part) / len(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(work.warmup):
        update()
    parameters = sum(p.numel() for p in model.parameters())
    done = [_share(6 * parameters * tree, update) for _ in range(work.steps)]
    return {**_shares(done), "tree_tokens": tree, "parameters": parameters}


# ------------------------------------------------------------------------------ memory of the log-probabilities


def measure_logprob_memory(work: Work) -> dict[str, Any]:
    from logprob_memory import growth

    return growth(work)


# ------------------------------------------------------------------------------ running it


KINDS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "step": measure_step,
    "rollout": measure_rollout,
    "ceiling": measure_ceiling,
    "plain": measure_plain,
    "logprob_memory": measure_logprob_memory,
}


def main() -> None:
    work = read()
    if work.kind not in KINDS:
        sys.exit(f"kind {work.kind!r}: ours.py measures {', '.join(KINDS)}")
    result = KINDS[work.kind](work)
    if torch.cuda.is_available():
        result["cuda_gb"] = torch.cuda.max_memory_allocated() / 1e9
    emit(**result, versions={name: version(name) for name in ("gspo", "torch", "transformers")})


if __name__ == "__main__":
    main()
