"""A packed row gives what each sequence gives alone, in value and gradient, for every family that packs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import families
import pytest
import torch
from families import one_by_one, packed, relative_gap, sequences
from torch import Tensor

from gspo import InputError
from gspo.models import attention
from gspo.models.attention import ATTENTION, Packed
from gspo.models.heads import install_head, trained_logprobs

GRADIENT_GAP = {"gemma3": 1e-6}  # its norms compute in float32, whatever the model's type
LENGTHS, ANSWERS = [9, 4, 14, 2], [5, 1, 8, 1]


def ours(model: Any) -> Any:
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    return model


def run(model: Any, tokens: list[Tensor], answers: list[int], temperature: float = 0.7) -> tuple[Tensor, Tensor]:
    layout = Packed([len(ids) for ids in tokens])
    return trained_logprobs(model, layout=layout, temperature=temperature, **packed(tokens, answers))


@pytest.mark.parametrize("plain_length", [512, 0], ids=["plain", "fused"])
@pytest.mark.parametrize("family", families.CONFIGS)
def test_a_packed_row_is_its_sequences_one_at_a_time(
    family: str, plain_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_PLAIN_LENGTH", plain_length)
    stock = families.make(family)
    model = ours(deepcopy(stock))
    tokens = sequences(LENGTHS)
    expected, found = one_by_one(stock, tokens, ANSWERS, 0.7), run(model, tokens, ANSWERS)
    weights = torch.linspace(-1, 1, len(expected[0]), dtype=torch.float64)
    for logprob, entropy in (expected, found):
        ((weights * logprob).sum() + (weights.flip(0) * entropy).sum()).backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    stock_gradients = {name: p.grad for name, p in stock.named_parameters()}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        n for n, g in stock_gradients.items() if g is not None
    }
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert relative_gap(p.grad, stock_gradients[name]) < GRADIENT_GAP.get(family, 1e-10), name


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_float32_agrees_with_both_stock_attentions(implementation: str) -> None:
    stock = families.make("llama", torch.float32)
    model = ours(deepcopy(stock))
    stock.set_attn_implementation(implementation)
    tokens = sequences(LENGTHS)
    expected, found = one_by_one(stock, tokens, ANSWERS, 1.0), run(model, tokens, ANSWERS, 1.0)
    expected[0].sum().backward()
    found[0].sum().backward()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert relative_gap(a.grad, b.grad) < 1e-5, name


@pytest.mark.parametrize("family", families.CONFIGS)
def test_a_sequence_does_not_see_its_neighbours(family: str) -> None:
    model = ours(families.make(family))
    tokens = sequences(LENGTHS)
    before, _ = run(model, tokens, ANSWERS)
    tokens[1] = (tokens[1] + 7) % families.VOCABULARY
    after, _ = run(model, tokens, ANSWERS)
    own = slice(ANSWERS[0], ANSWERS[0] + ANSWERS[1])
    assert not torch.allclose(before[own], after[own], rtol=1e-3)
    others = torch.ones(len(before), dtype=torch.bool)
    others[own] = False
    torch.testing.assert_close(after[others], before[others], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", families.CONFIGS)
def test_bfloat16_gives_the_same_bits_with_and_without_gradients(family: str) -> None:
    """An unchanged policy then has an importance ratio of exactly 1, whatever the precision."""
    model = ours(families.make(family, torch.float32).bfloat16())
    tokens = sequences([40, 7, 23, 40])
    answers = [30, 6, 12, 1]
    with_gradients, _ = run(model, tokens, answers)
    with torch.no_grad():
        without, _ = run(model, tokens, answers)
    assert with_gradients.requires_grad
    assert torch.equal(with_gradients, without)


def test_recomputed_activations_change_nothing() -> None:
    stock = families.make("qwen3")
    model = ours(deepcopy(stock))
    from gspo.models.load import _checkpoint_activations

    _checkpoint_activations(model, "qwen3")
    tokens = sequences(LENGTHS)
    run(ours(stock), tokens, ANSWERS)[0].sum().backward()
    held: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x):
        loss = run(model, tokens, ANSWERS)[0].sum()
    loss.backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(-x.numel()) or x, lambda x: x):
        run(stock, tokens, ANSWERS)
    assert sum(held) < 0, "as much was kept for the backward pass as without recomputation"
    for (name, a), b in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize(
    ("extra", "word"),
    [({"softcap": 50.0}, "soft-capped"), ({"s_aux": torch.zeros(2)}, "sinks"), ({"dropout": 0.1}, "dropout")],
)
def test_what_the_attention_cannot_do_is_refused_by_name(extra: dict[str, Any], word: str) -> None:
    module = families.make("llama").model.layers[0].self_attn
    x = torch.zeros(1, 4, 3, 8)
    with pytest.raises(InputError, match=f"LlamaAttention.*{word}"):
        attention._attention(module, x, x, x, None, layout=Packed([3]), **extra)


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Packed([3, 0])
