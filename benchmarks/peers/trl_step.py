"""TRL's GRPOTrainer on the work of our step, with GSPO's settings.

In: a `Work` as JSON. Out: one JSON line. `race.py` starts it with the interpreter of .peers/trl.
Variants: plain; eager (plain attention, faster than SDPA for short rows on CPUs); static (static cache);
batch (transformers' continuous batching).
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import Work, emit, is_right, read, rows

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "eager": ({"attn_implementation": "eager"}, {}),
    "static": ({}, {"cache_implementation": "static"}),
    "batch": ({}, {"use_transformers_continuous_batching": True}),
}
"""Variant: what is given to the model, and what to the trainer."""


class Clock(TrainerCallback):
    """When training began and when each optimizer update was complete."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *args: Any, **keys: Any) -> None:
        self.marks.append(now())

    def on_step_end(self, *args: Any, **keys: Any) -> None:
        self.marks.append(now())


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(method: str, spans: dict[str, list[tuple[float, float]]]) -> None:
    """Note the (start, seconds) of each call of a trainer's method."""
    call = getattr(GRPOTrainer, method)

    def wrapped(*args: Any, **keys: Any) -> Any:
        start = now()
        result = call(*args, **keys)
        spans.setdefault(method, []).append((start, now() - start))
        return result

    setattr(GRPOTrainer, method, wrapped)


def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [is_right(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


def trainer_of(work: Work, folder: str) -> GRPOTrainer:
    to_model, to_trainer = VARIANTS[work.variant]
    parts = work.prompts * work.group // work.micro
    cuda = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=not cuda,
        bf16=False,
        per_device_train_batch_size=work.micro,
        gradient_accumulation_steps=parts // work.updates,
        steps_per_generation=parts,
        num_generations=work.group,
        max_completion_length=work.new_tokens,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=(work.warmup + work.steps + work.after) * work.updates,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        temperature=1.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
        generation_kwargs={"min_new_tokens": work.new_tokens} if work.forced else None,
        **to_trainer,
    )
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype), **to_model)
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows(work) * (work.warmup + work.steps + work.after)),
        processing_class=AutoTokenizer.from_pretrained(work.model),
    )


def main() -> None:
    work = read()
    if work.kind != "step" or work.variant not in VARIANTS:
        sys.exit(f"trl_step.py measures the kind step in the variants {', '.join(VARIANTS)}, not {work}")
    torch.set_num_threads(work.threads)
    spans: dict[str, list[tuple[float, float]]] = {}
    names = {"_generate": "rollout", "_generate_and_score_completions": "scored", "training_step": "training"}
    for method in names:
        timed(method, spans)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(work, folder)
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    marks = clock.marks[:: work.updates]
    begin, end = marks[work.warmup], marks[work.warmup + work.steps]
    total = {name: sum(s for t, s in spans[method] if begin <= t < end) / work.steps for method, name in names.items()}
    seconds = (end - begin) / work.steps
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    measured = logs[work.warmup : work.warmup + work.steps]  # it says the lengths once a step, whatever the updates
    length = sum(entry["completions/mean_length"] for entry in measured) / len(measured)
    if work.forced and length != work.new_tokens:
        sys.exit(f"answers of exactly {work.new_tokens} tokens were asked for; their mean length is {length}")
    emit(
        seconds=seconds,
        each=[b - a for a, b in zip(marks[work.warmup :], marks[work.warmup + 1 :], strict=False)][: work.steps],
        phases={
            "rollout": total["rollout"],
            "old log-probabilities, reward": total["scored"] - total["rollout"],
            "update": total["training"] - total["scored"],
            "optimizer and other": seconds - total["training"],
        },
        answer_tokens=length * work.prompts * work.group,
        cuda_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        versions={name: version(name) for name in ("trl", "torch", "transformers")},
    )


if __name__ == "__main__":
    main()
