"""vLLM loads what `gspo export` wrote and computes the same model: greedy answers and log-probabilities as transformers gives them.

Runs where vLLM is: `make peers`, or GSPO_VLLM=PYTHON, an interpreter that has it. Else it is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import gspo
from gspo.export import export
from gspo.models.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("GSPO_VLLM") or ROOT / ".peers" / "vllm" / "bin" / "python")
pytestmark = pytest.mark.skipif(
    not PYTHON.is_file(), reason="LEFT OUT: vLLM is not here (`make peers`, or GSPO_VLLM=PYTHON)"
)
NEW = 12
SHAPE: dict[str, Any] = dict(
    hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=2,
    max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
"""vLLM's attention for CPUs has no heads as small as those of the built-in models."""
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": LlamaConfig(vocab_size=64, intermediate_size=256, **SHAPE),
    "moe": Qwen3MoeConfig(
        vocab_size=64, intermediate_size=256, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **SHAPE,
    ),
}  # fmt: skip


def trained(kind: str, folder: Path) -> Path:
    """A run of two steps from random weights; its last checkpoint, exported."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")

    def varied(completion: str) -> float:
        return float(sum(map(ord, completion)) % 3)

    run = gspo.train(
        "tiny", model={"name": str(folder / "model"), "dtype": "float32"}, dir=folder / "run", steps=2, threads=1,
        prompts_per_step=4, group_size=4, reward=varied, eval={"every": 0}, optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    export(run.folder, folder / "out")
    return folder / "out"


def by_vllm(folder: Path, texts: list[list[int]]) -> dict[str, Any]:
    script = ROOT / "benchmarks" / "peers" / "vllm_reads.py"
    words = json.dumps({"model": str(folder), "texts": texts, "new_tokens": NEW})
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(PYTHON), str(script), words], capture_output=True, text=True, timeout=600, env=env, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def by_transformers(folder: Path, texts: list[list[int]]) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    greedy, logprobs = [], []
    for ids in texts:
        given = torch.tensor([ids])
        with torch.no_grad():
            logprob = model(given).logits[0].float().log_softmax(-1)
            answer = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW)
        logprobs.append(logprob[:-1].gather(-1, given[0, 1:, None])[:, 0].tolist())
        greedy.append(answer[0, len(ids) :].tolist())
    return {"greedy": greedy, "logprobs": logprobs}


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_vllm_computes_the_exported_model(kind: str, tmp_path: Path) -> None:
    folder = trained(kind, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "what is 3 + 4?"}]
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
        tokenizer("the seven letters are d, b, a and c in that order; 12 - 7 = 5")["input_ids"],
    ]
    found, expected = by_vllm(folder, texts), by_transformers(folder, texts)
    assert found["dtype"] == "torch.float32"
    for mine, theirs in zip(expected["logprobs"], found["logprobs"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-3)
    assert found["greedy"] == expected["greedy"]
