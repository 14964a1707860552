"""vLLM's sampled answers with their log-probabilities, in one process.

In: a `Work` as JSON. Out: one JSON line. `race.py` starts it with the interpreter of .peers/vllm.
Variants: eager, compiled (logprobs=1), and eager-logprobs0 (logprobs=0: the sampled token's alone).
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import emit, read, rows

VARIANTS = {"eager": (True, 1), "eager-logprobs0": (True, 0), "compiled": (False, 1)}
"""Variant: enforce_eager, logprobs."""


def prepare() -> None:
    """One process, on the cores that this one was given."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def version_of(*names: str) -> str:
    """Of the first of these packages that is installed: vLLM's build for CPUs has a name of its own."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> None:
    work = read()
    if work.kind != "rollout" or work.variant not in VARIANTS:
        sys.exit(f"vllm_rollout.py measures the kind rollout in the variants {', '.join(VARIANTS)}, not {work}")
    prepare()
    from vllm import LLM, SamplingParams

    eager, logprobs = VARIANTS[work.variant]
    llm = LLM(
        work.model,
        dtype=work.dtype,
        enforce_eager=eager,
        max_model_len=2048,
        max_num_seqs=work.prompts * work.group,
        enable_prefix_caching=True,
        seed=0,
        generation_config="vllm",
    )
    prompts = [row["prompt"] for row in rows(work)]
    sampling = SamplingParams(
        n=work.group,
        temperature=1.0,
        max_tokens=work.new_tokens,
        ignore_eos=work.forced,
        logprobs=logprobs,
        detokenize=True,
    )

    def once() -> tuple[int, int, float]:
        # What earlier weights computed is gone in training, too: only prefixes of this very call are shared.
        llm.reset_prefix_cache()
        found = llm.chat(prompts, sampling, use_tqdm=False)
        answers = [answer for request in found for answer in request.outputs]
        if any(len(a.logprobs) != len(a.token_ids) for a in answers):
            sys.exit("a log-probability is missing")
        return len(answers), sum(len(a.token_ids) for a in answers), sum(len(r.prompt_token_ids) for r in found)

    for _ in range(work.warmup):
        once()
    start = time.perf_counter()
    done = [once() for _ in range(work.steps)]
    seconds = time.perf_counter() - start
    answers, tokens, prompt_tokens = (sum(column) / work.steps for column in zip(*done, strict=True))
    if answers != work.prompts * work.group or (work.forced and tokens != answers * work.new_tokens):
        sys.exit(f"{answers} answers with {tokens} tokens are not what was asked for")
    emit(
        seconds=seconds / work.steps,
        tokens_per_second=tokens * work.steps / seconds,
        answer_tokens=tokens,
        prompt_tokens=prompt_tokens / work.prompts,
        versions={"vllm": version_of("vllm-cpu", "vllm"), "torch": version("torch")},
    )


if __name__ == "__main__":
    main()
