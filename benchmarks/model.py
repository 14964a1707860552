"""The folder that every side loads: float32 weights and a tokenizer, made once.

In: a built-in model's name, or `--random-qwen3 0.6b`. Out: the folder. `race.py` and `scaling.py` call `folder_of`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

QWEN3 = {"0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                      num_key_value_heads=8, head_dim=128, vocab_size=151936)}  # fmt: skip


def folder_of(name: str, random_qwen3: str | None = None) -> str:
    """The folder itself if `name` is one; else that of the built-in model, made at the first call."""
    if random_qwen3 is None and Path(name).is_dir():
        return str(Path(name).resolve())
    wanted = f"random-qwen3-{random_qwen3}" if random_qwen3 else name
    cache = Path(os.environ.get("GSPO_CACHE") or Path.home() / ".cache" / "gspo")
    folder = cache / "benchmarks" / wanted
    if not (folder / "config.json").is_file():
        # In a process of its own, so that torch and the weights do not stay in this one.
        subprocess.run([sys.executable, __file__, wanted, str(folder)], check=True)
    return str(folder)


def _make(wanted: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from gspo.models.builtin import BUILTIN
    from gspo.models.load import without_progress_bars

    size = wanted.removeprefix("random-qwen3-")
    if size in QWEN3:
        torch.manual_seed(0)
        tokenizer = BUILTIN["smollm2-135m-q4"].tokenizer()
        config = Qwen3Config(
            **QWEN3[size],
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    elif wanted in BUILTIN:
        model, tokenizer = BUILTIN[wanted].model(), BUILTIN[wanted].tokenizer()
    else:
        sys.exit(f"--model {wanted}: neither a folder nor one of {', '.join(BUILTIN)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    with without_progress_bars():
        model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)  # another process was faster, with the same weights
        if not (folder / "config.json").is_file():
            raise


if __name__ == "__main__":
    _make(sys.argv[1], Path(sys.argv[2]))
