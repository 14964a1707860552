"""transformers' own generation of sampled answers with their log-probabilities.

In: a `Work` as JSON. Out: one JSON line. `race.py` starts it with the interpreter of .peers/trl.
Variants: plain and static (generate, output_logits, log-softmax of each step), batch (generate_batch).
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from work import Work, emit, read, rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def sampling(work: Work, tokenizer: Any, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=work.new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        # Without an end token no answer can end early.
        eos_token_id=None if work.forced else tokenizer.eos_token_id,
        **more,
    )


def generate(work: Work, model: Any, tokenizer: Any, prompts: list[list[int]], **more: Any) -> tuple[int, int]:
    config = sampling(work, tokenizer, return_dict_in_generate=True, output_scores=True, **more)
    padded = tokenizer.pad({"input_ids": [p for p in prompts for _ in range(work.group)]}, return_tensors="pt")
    found = model.generate(**padded.to(DEVICE), generation_config=config)
    tokens = found.sequences[:, padded["input_ids"].shape[1] :]
    logprobs = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    if not bool(torch.isfinite(logprobs).all()) or logprobs.shape != tokens.shape:
        sys.exit("a log-probability is missing")
    return len(tokens), tokens.numel() if work.forced else int((tokens != tokenizer.pad_token_id).sum())


def generate_batch(work: Work, model: Any, tokenizer: Any, prompts: list[list[int]]) -> tuple[int, int]:
    found = model.generate_batch(
        [p for p in prompts for _ in range(work.group)],
        generation_config=sampling(work, tokenizer),
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True,
            max_memory_percent=0.1,  # of what is free: the default would fill the machine with a cache of nothing
        ),
    )
    answers = list(found.values())
    if any(len(a.logprobs) < len(a.generated_tokens) for a in answers):
        sys.exit("a log-probability is missing")
    return len(answers), sum(len(a.generated_tokens) for a in answers)


VARIANTS = {
    "plain": generate,
    "static": lambda *given: generate(*given, cache_implementation="static"),
    "batch": generate_batch,
}


@torch.no_grad()
def main() -> None:
    work = read()
    if work.kind != "rollout" or work.variant not in VARIANTS:
        sys.exit(f"generate.py measures the kind rollout in the variants {', '.join(VARIANTS)}, not {work}")
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)).to(DEVICE).eval()
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for row in rows(work)
    ]
    call = VARIANTS[work.variant]
    for _ in range(work.warmup):
        call(work, model, tokenizer, prompts)
    start = now()
    done = [call(work, model, tokenizer, prompts) for _ in range(work.steps)]
    seconds = now() - start
    answers, tokens = (sum(column) / work.steps for column in zip(*done, strict=True))
    if answers != work.prompts * work.group or (work.forced and tokens != answers * work.new_tokens):
        sys.exit(f"{answers} answers with {tokens} tokens are not what was asked for")
    emit(
        seconds=seconds / work.steps,
        tokens_per_second=tokens * work.steps / seconds,
        answer_tokens=tokens,
        prompt_tokens=sum(map(len, prompts)) / len(prompts),
        versions={name: version(name) for name in ("torch", "transformers")},
    )


if __name__ == "__main__":
    main()
