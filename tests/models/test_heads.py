"""The head computes the plain formula, keeps the model's names, and needs little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from compiled import needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gspo.models import heads, native
from gspo.models.attention import ATTENTION, Packed
from gspo.models.heads import PolicyHead, install_head, next_logits


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def ours(*inputs: Any) -> Any:
    *rest, temperature = inputs
    return heads._Logprob.apply(*rest, heads.Softmax(temperature))


@given(
    rows=st.integers(0, 9),
    vocabulary=st.integers(1, 23),
    temperature=st.sampled_from([0.25, 1.0, 1.7]),
    with_bias=st.booleans(),
    uses=st.sampled_from([(1, 0), (0, 1), (1, 1)]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
def test_blocks_give_the_plain_value_and_gradient(
    rows: int, vocabulary: int, temperature: float, with_bias: bool, uses: tuple[int, int], seed: int
) -> None:
    """With blocks of 4 rows and 5 columns, so that every kind of edge occurs."""
    g = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(rows, 6, dtype=torch.float64, generator=g)
    weight = torch.randn(vocabulary, 6, dtype=torch.float64, generator=g)
    bias = torch.randn(vocabulary, dtype=torch.float64, generator=g) if with_bias else None
    target = torch.randint(0, vocabulary, (rows,), generator=g)
    by_logprob, by_entropy = (use * torch.randn(rows, dtype=torch.float64, generator=g) for use in uses)
    results = []
    for compute in (plain, ours):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heads, "_ROWS_REORDERED", 4)
            patch.setattr(heads, "_COLUMNS", 5)
            logprob, entropy = compute(leaves[0], leaves[1], leaves[2] if with_bias else None, target, temperature)
            terms = [
                x
                for use, x in zip(uses, ((by_logprob * logprob).sum(), (by_entropy * entropy).sum()), strict=True)
                if use
            ]
            sum(terms).backward()
        results.append([logprob, entropy, *(leaf.grad for leaf in leaves)])
    for a, b in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_temperature_divides_the_logits() -> None:
    """huggingface/trl#4159: logits [2, 0], token 0, T = 0.5 give -0.018150; raw is -0.126928, divided afterwards -0.253856."""
    weight = torch.tensor([[2.0], [0.0]])
    logprob, _ = ours(torch.ones(1, 1), weight, None, torch.tensor([0]), 0.5)
    assert float(logprob) == pytest.approx(-0.018150, abs=1e-6)


def test_bfloat16_results_are_not_rounded_to_bfloat16() -> None:
    """The factors are bfloat16, but products are summed and kept in float32: a bfloat16 logit near 20 has steps of 0.125."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(70, 64, generator=g).bfloat16(), torch.randn(300, 64, generator=g).bfloat16()
    target = torch.randint(0, 300, (70,), generator=g)
    hidden.requires_grad_()
    before = torch.backends.mkldnn.matmul.fp32_precision
    found = ours(hidden, weight, None, target, 1.0)
    found[0].sum().backward()
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    exact = hidden.detach().double().requires_grad_()
    expected = plain(exact, weight.double(), None, target, 1.0)
    expected[0].sum().backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)
    assert hidden.grad is not None
    assert families.relative_gap(hidden.grad.double(), exact.grad) < 5e-3


@needs_kernels
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_give_the_same_values_and_gradients(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are the same sums, rounded nowhere; in blocks of other sizes."""
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(304, 64, generator=g).bfloat16(), torch.randn(304, generator=g).bfloat16()
    target, found = torch.randint(0, 304, (70,), generator=g), []
    monkeypatch.setattr(heads, "_COLUMNS", 64)
    monkeypatch.setattr(heads, "_ROWS", 32)
    for kernels in (None, native.kernels()):
        hidden = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        head = weight.clone().requires_grad_()
        softmax = heads.Softmax(temperature, kernels=kernels)
        logprob, entropy = heads._Logprob.apply(hidden, head, bias, target, softmax)
        (logprob.sum() + 0.3 * entropy.sum()).backward()
        found.append((logprob.detach(), entropy.detach(), hidden.grad, head.grad))
    for a, b in zip(*found, strict=True):
        assert families.relative_gap(a.double(), b.double()) < (1e-6 if a.dtype == torch.float32 else 2**-8)


def test_values_that_are_not_finite_are_not_hidden() -> None:
    weight = torch.tensor([[1.0], [float("nan")], [2.0]])
    logprob, _ = ours(torch.ones(1, 1), weight, None, torch.tensor([0]), 1.0)
    assert not torch.isfinite(logprob).any()


def test_next_logits_are_the_models_own() -> None:
    stock = families.make("llama")
    ids = families.sequences([9])[0]
    expected = stock(input_ids=ids[None], use_cache=False).logits[0]
    stock.set_attn_implementation(ATTENTION)
    install_head(stock)
    found = next_logits(
        stock, tokens_T=ids, position_T=torch.arange(9), layout=Packed([9]), source_N=torch.tensor([8, 2])
    )
    assert not found.requires_grad
    torch.testing.assert_close(found, expected[[8, 2]], rtol=1e-10, atol=1e-10)
    assert torch.equal(
        stock.lm_head(torch.ones(1, 1, 32, dtype=torch.float64)),
        nn.functional.linear(torch.ones(1, 1, 32, dtype=torch.float64), stock.lm_head.weight),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])  # llama's head is tied to its embedding
def test_names_tying_and_saving_are_those_of_the_stock_model(family: str, tmp_path: Path) -> None:
    model = families.make(family, torch.float32)
    names = list(model.state_dict())
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    head = install_head(model)
    assert install_head(model) is head
    assert isinstance(head, PolicyHead)
    assert list(model.state_dict()) == names
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (family == "llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again.lm_head) is nn.Linear
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


_PEAK = """
import re, torch
from transformers import LlamaConfig, LlamaForCausalLM
from gspo.models.attention import ATTENTION, Packed
from gspo.models.heads import install_head, trained_logprobs
torch.set_num_threads(1)
shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50_000, **shape)).eval()
model.set_attn_implementation(ATTENTION)
install_head(model)
tokens = torch.randint(0, 50_000, (8, 512))
source = torch.cat([torch.arange(447, 511) + 512 * i for i in range(8)])
def step(n):
    logprob, entropy = trained_logprobs(
        model, tokens_T=tokens[:n].flatten(), position_T=torch.arange(512).repeat(n), layout=Packed([512] * n),
        source_N=source[: 64 * n], target_N=tokens.flatten()[source[: 64 * n] + 1], temperature=1.0)
    (logprob + 0.1 * entropy).sum().backward()
peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024
model(input_ids=tokens[:1, :2], position_ids=torch.arange(2)[None], layout=Packed([2]), use_cache=False)
before = peak()
step(8)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_far_below_one_tensor_of_logits() -> None:
    """huggingface/trl#3678: 8 rows of 512 tokens over 50 000 words are 781 MB of float32 logits; 64 of each are trained."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 150, done.stdout
