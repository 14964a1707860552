"""A model with one output: made of a language model or of a classifier, scored in a packed row as transformers does alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from gspo.config import Model
from gspo.errors import InputError
from gspo.models.attention import Packed
from gspo.models.load import Policy, load_policy
from gspo.models.scorer import load_scorer, trained_scores


def score(policy: Policy, sequences: list[list[int]]) -> torch.Tensor:
    """Of the last token of each, in one packed row."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    return trained_scores(
        policy.model,
        tokens_T=torch.tensor([i for ids in sequences for i in ids]),
        position_T=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        layout=Packed(lengths.tolist()),
        source_N=lengths.cumsum(0) - 1,
    ).detach()


SEQUENCES = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]


@pytest.mark.parametrize("name", ["random-dense", "random-moe", "tiny-dense"])
def test_a_language_model_scores_nothing_at_first_then_as_transformers_loads_it(name: str, tmp_path: Path) -> None:
    policy = load_scorer(Model(name=name, dtype="float32"))
    assert not score(policy, SEQUENCES).any()
    with torch.no_grad():
        policy.model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    found = score(policy, SEQUENCES)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        alone = torch.stack([theirs(input_ids=torch.tensor([ids])).logits[0, 0] for ids in SEQUENCES])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    again = load_scorer(Model(name=str(tmp_path), dtype="float32"))
    torch.testing.assert_close(score(again, SEQUENCES), found, rtol=0, atol=0)
    assert again.source.sha256 != load_scorer(Model(name=name, dtype="float32")).source.sha256, "the score counts too"


def test_scores_are_float32_whatever_the_model_computes_in() -> None:
    policy = load_scorer(Model(name="random-dense", dtype="bfloat16"))
    policy.model.bfloat16()
    with torch.no_grad():
        policy.model.score.weight.fill_(1.0)
    found = score(policy, SEQUENCES)
    assert found.dtype == torch.float32
    assert (found != found.bfloat16()).any()


def test_classes_and_folders_that_lack_weights_are_refused(tmp_path: Path) -> None:
    tokenizer = load_policy(Model(name="random-dense")).tokenizer
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )  # fmt: skip
    LlamaForSequenceClassification(settings).save_pretrained(tmp_path / "classes")
    tokenizer.save_pretrained(tmp_path / "classes")
    with pytest.raises(InputError, match="a classifier of 3 classes"):
        load_scorer(Model(name=str(tmp_path / "classes")))
    with pytest.raises(InputError, match="no such folder"):
        load_scorer(Model(name=str(tmp_path / "none.gguf")))
