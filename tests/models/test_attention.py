"""A packed row of trees gives what each sequence gives alone, in value and gradient, for every family that packs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import families
import pytest
import torch
from compiled import needs_kernels
from families import one_by_one, packed, relative_gap, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo import InputError
from gspo.models import attention, native
from gspo.models.attention import ATTENTION, Packed
from gspo.models.flex import FlexTrees
from gspo.models.heads import install_head, trained_logprobs

GAP = {"qwen3_moe": 1e-6}  # its router takes the softmax in float32, whatever the model's type
LENGTHS, ANSWERS = [9, 4, 14, 2], [5, 1, 8, 1]


def ours(model: Any) -> Any:
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    return model


def run(model: Any, tokens: list[Tensor], answers: list[int], temperature: float = 0.7) -> tuple[Tensor, Tensor]:
    layout = Packed([len(ids) for ids in tokens])
    return trained_logprobs(model, layout=layout, temperature=temperature, **packed(tokens, answers))


def check(stock: Any, model: Any, forest: families.Tree, gap: float) -> None:
    """Value and gradient of the packed trees against the model's own, one sequence at a time."""
    layout = Packed([len(ids) for ids in forest.tokens], parents=forest.parents)
    found = trained_logprobs(model, layout=layout, temperature=0.7, **forest.rows())
    expected = forest.one_by_one(stock, 0.7)
    weights = torch.linspace(-1, 1, len(expected[0]), dtype=expected[0].dtype)
    for logprob, entropy in (expected, found):
        ((weights * logprob).sum() + (weights.flip(0) * entropy).sum()).backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=min(gap, 1e-5), atol=min(gap, 1e-5))
    stock_gradients = {name: p.grad for name, p in stock.named_parameters()}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        n for n, g in stock_gradients.items() if g is not None
    }
    # A query that sees one key has a gradient of zero but for rounding: hence the share of the whole gradient.
    floor = 1e-3 * float(torch.stack([g.norm() for g in stock_gradients.values() if g is not None]).norm())
    for name, p in model.named_parameters():
        if p.grad is not None:
            expected_gradient = stock_gradients[name]
            assert (p.grad - expected_gradient).norm() < gap * max(expected_gradient.norm(), floor), name


# Groups of different prompts and sizes, answers of one token, and a branch that shares more than the prompt.
FOREST: tuple[list[int], list[int | None]] = (
    [9, 5, 1, 3, 14, 8, 2, 6, 4, 1, 3, 7],
    [None, 0, 0, 0, None, 4, 4, 4, 6, 8, 6, None],
)


@pytest.mark.parametrize(("piece", "scores"), [(512, 2**19), (3, 2**19), (512, 1), (4, 100)])
@pytest.mark.parametrize("family", families.CONFIGS)
def test_packed_trees_are_their_sequences_one_at_a_time(
    family: str, piece: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_PIECE", piece)
    monkeypatch.setattr(attention, "_SCORES", scores)
    stock = families.make(family)
    model = ours(deepcopy(stock))
    check(stock, model, families.tree(*FOREST), GAP.get(family, 1e-10))


@pytest.mark.parametrize("family", families.CONFIGS)
def test_packed_trees_agree_in_float32(family: str) -> None:
    stock = families.make(family, torch.float32)
    check(stock, ours(deepcopy(stock)), families.tree(*FOREST), 1e-5)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int | None]]:
    parents: list[int | None] = [None]
    for i in range(1, draw(st.integers(2, 12))):
        parents.append(draw(st.sampled_from([None, *range(i)])))
    if all(parent is None for parent in parents):
        parents[-1] = 0
    return [draw(st.integers(1, 9)) for _ in parents], parents


@settings(max_examples=20, deadline=None)
@given(
    shape=forests(),
    piece=st.integers(1, 10),
    scores=st.sampled_from([1, 60, 2**19]),
    family=st.sampled_from(["llama", "mistral"]),
)
def test_any_tree_is_its_sequences_one_at_a_time(
    shape: tuple[list[int], list[int | None]], piece: int, scores: int, family: str
) -> None:
    stock = families.make(family)
    model = ours(deepcopy(stock))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_PIECE", piece)
        patch.setattr(attention, "_SCORES", scores)
        check(stock, model, families.tree(*shape), 1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_masks_for_gpus_see_the_same_tokens(window: int | None) -> None:
    """FlexAttention's reference on the CPU; its kernel needs CUDA."""
    lengths, parents = FOREST
    q, k, v = (
        torch.randn(1, heads, sum(lengths), 16, dtype=torch.float32, generator=torch.Generator().manual_seed(heads))
        for heads in (6, 2, 2)
    )
    expected = Packed(lengths, parents=parents).attend(0, q, k, v, scaling=0.2, window=window)
    trees = FlexTrees(lengths, parents, torch.device("cpu"))
    found = trees.attend(q, k, v, scaling=0.2, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("scores", [2**19, 100])
def test_kernels_share_out_the_same_scores(window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, parents = FOREST
    monkeypatch.setattr(attention, "_SCORES", scores)
    found = []
    for kernels in (None, native.kernels()):
        q, k, v = (
            torch.randn(1, heads, sum(lengths), 32, generator=torch.Generator().manual_seed(heads))
            .bfloat16()
            .requires_grad_()
            for heads in (6, 2, 4)
        )
        v = v[:, 2:]
        v.retain_grad()
        out = Packed(lengths, parents=parents, kernels=kernels).attend(0, q, k, v, scaling=0.2, window=window)
        (out.float() * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for a, b in zip(*found, strict=True):
        assert (a - b).double().norm() <= 2**-7 * b.double().norm()


def test_a_prompt_goes_through_the_model_once_for_all_its_answers() -> None:
    """Tokens that meet each layer: 7 + 3 + 2 + 4, not 3 x 7 + 9."""
    model = ours(families.make("llama"))
    forest = families.tree([7, 3, 2, 4], [None, 0, 0, 0])
    seen: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    trained_logprobs(model, layout=Packed([7, 3, 2, 4], parents=forest.parents), temperature=1.0, **forest.rows())
    assert seen == [16, 16]


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
    from gspo.models.install import checkpoint_activations

    checkpoint_activations(model, "qwen3")
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
        attention.attention(module, x, x, x, None, layout=Packed([3]), **extra)


def test_a_segment_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Packed([3, 0])


@pytest.mark.parametrize("parent", [1, 2, -1])
def test_a_segment_that_hangs_on_a_later_one_is_refused(parent: int) -> None:
    with pytest.raises(ValueError, match="segment 1 hangs on"):
        Packed([3, 2, 2], parents=[None, parent, None])
