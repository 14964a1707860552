"""Written-out norms and gates are the model's own, in value and gradient, and keep less for the backward pass."""

from __future__ import annotations

import shutil
from copy import deepcopy
from itertools import product
from typing import Any

import families
import pytest
import torch
from kept import kept_bytes
from torch import Tensor

from gspo import InputError, config
from gspo.models import fused, heads, install, load
from gspo.models.attention import Packed


def module(family: str, kind: str, dtype: torch.dtype) -> Any:
    layer = families.make(family, torch.float32).model.layers[0].to(dtype)
    made = layer.input_layernorm if kind == "norm" else layer.mlp
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    return made


def passes(module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    found = {"input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    module.zero_grad()
    return y.detach(), found


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", ["norm", "mlp"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_formulas_are_the_models_own(family: str, kind: str, dtype: torch.dtype, gap: float) -> None:
    stock = module(family, kind, dtype)
    ours = deepcopy(stock)
    fused.install(ours, fused.Kernels())
    assert ours.forward.__class__ is not stock.forward.__class__, "nothing was installed"
    x = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(2)).to(dtype) * 3
    (expected, stock_gradients), (found, gradients) = passes(stock, x), passes(ours, x)
    assert families.relative_gap(found.double(), expected.double()) < gap
    for name, gradient in stock_gradients.items():
        assert families.relative_gap(gradients[name].double(), gradient.double()) < gap, name


def test_the_gradients_are_those_of_the_formulas() -> None:
    """By finite differences, in float64."""
    kernels = fused.Kernels()
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: fused._Norm.apply(x, w, 1e-5, kernels), (x, weight))
    gate, up, down = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3, 5), (4, 5)))
    assert torch.autograd.gradcheck(lambda a, b, c: fused._GatedDown.apply(a, b, c, kernels, None), (gate, up, down))


def test_gemmas_norms_and_other_activations_stay_as_they_are() -> None:
    model = families.make("gemma3", torch.float32)
    before = {name: m.forward.__func__ for name, m in model.named_modules() if hasattr(m.forward, "__func__")}
    fused.install(model, fused.Kernels())
    for name, m in model.named_modules():
        assert m.forward.__func__ is before[name], name


def test_less_is_kept_for_the_backward_pass() -> None:
    def kept(model: Any) -> int:
        return kept_bytes(model, lambda: model(input_ids=torch.arange(60)[None], use_cache=False))

    stock = families.make("llama", torch.float32).bfloat16()
    ours = deepcopy(stock)
    fused.install(ours, fused.Kernels())
    assert kept(ours) < 0.8 * kept(stock)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_formulas_are_the_same() -> None:
    plain, made = fused.Kernels(), fused.compiled()
    gate, up, grad = (torch.randn(7, 24, generator=torch.Generator().manual_seed(i)) for i in range(3))
    torch.testing.assert_close(made.gate(gate, up), plain.gate(gate, up))
    for a, b in zip(made.norm(gate, up[0], 1e-5), plain.norm(gate, up[0], 1e-5), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(made.gate_backward(grad, gate, up), plain.gate_backward(grad, gate, up), strict=True):
        torch.testing.assert_close(a, b)


def test_a_policy_its_reference_and_its_critic_share_the_compiled_formulas() -> None:
    """Each rank, and each set of arguments that want gradients, is a version of its own: more than torch's limit of 8."""
    made, versions = fused.compiled(), 0
    for rank in (1, 2, 3):
        for x_learns, weight_learns in product((False, True), repeat=2):
            x = torch.ones(*(4,) * rank, 8, requires_grad=x_learns)
            weight = torch.full((8,), 2.0, requires_grad=weight_learns)
            torch.testing.assert_close(made.norm(x, weight, 0.0)[0], 2 * torch.ones_like(x))
            versions += 1
    assert versions > 8


def test_a_machine_that_cannot_compile_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(fused, "compiled", lambda: fused.Kernels(gate=broken))
    with pytest.raises(InputError, match=r"model\.compile=true.*no C\+\+ compiler found.*model\.compile=false"):
        load.load_policy(config.Model(name="random-dense", compile=True, dtype="float32"))
    monkeypatch.setattr(install, "_WORTH_COMPILING", 1000)
    policy = load.load_policy(config.Model(name="random-dense", dtype="float32"))
    assert "not compiled: no C++ compiler found" in policy.announcement


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_large_models_are_compiled_and_small_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same log-probabilities and gradients either way."""
    plain = load.load_policy(config.Model(name="random-dense", dtype="float32"))
    assert "compiled" not in plain.announcement
    monkeypatch.setattr(install, "_WORTH_COMPILING", 1000)
    made = load.load_policy(config.Model(name="random-dense", dtype="float32"))
    assert "log-probabilities compiled" in made.announcement
    found = []
    for policy in (plain, made):
        ids = torch.arange(20) % 7 + 4
        logprob_N, entropy_N = heads.trained_logprobs(
            policy.model,
            tokens_T=ids,
            position_T=torch.arange(20),
            layout=Packed([20]),
            source_N=torch.arange(19),
            target_N=ids[1:],
            temperature=0.7,
        )
        (logprob_N.sum() + 0.1 * entropy_N.sum()).backward()
        found.append([logprob_N, entropy_N, *(p.grad for p in policy.model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
