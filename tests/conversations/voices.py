"""Tokenizers with chat templates of several kinds, on one small vocabulary in which `ab` is one token, or two."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo.conversations.transcript import Voice

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\ntools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    + CHATML.replace(
        "m['role'] + '\n' + m['content']", "(m['role'] if m['role'] != 'tool' else 'user') + '\n' + m['content']"
    )
)
THOUGHTLESS = CHATML.replace(
    "m['content'] +",
    "(m['content'].split('</think>')[-1] | trim if m['role'] == 'assistant' and not loop.last else m['content']) +",
)
"""Keeps thoughts in no turn but the last."""
OPENING = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
"""Opens the think tag, and keeps thoughts."""
OPENING_THOUGHTLESS = THOUGHTLESS.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
LAST_ONLY = (
    "{{ '<|im_start|>user\n' + messages[-1]['content'] + '<|im_end|>\n' }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
END = "<|im_end|>"


def tokenizer(template: str | None) -> Any:
    """One token a byte, but for the special ones and `ab`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", END, "<|im_start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, "ab"])}
    core = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def voice(template: str | None, **keys: Any) -> Voice:
    return Voice(tokenizer(template), template is not None, **keys)
