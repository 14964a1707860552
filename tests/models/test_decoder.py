"""The engine's short way through a model gives the model's own logits, and is taken only where every module is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compiled import needs_kernels
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from gspo import config
from gspo.models import lora, native
from gspo.models.attention import ATTENTION
from gspo.models.cache import TreeCache
from gspo.models.decoder import Decoder
from gspo.models.heads import install_head

_SHAPE: dict[str, Any] = dict(
    vocab_size=80,
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    initializer_range=0.1,
)


def made(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model = model.to(torch.bfloat16).to(dtype)  # the same weights in each
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    return model


def is_known(model: Any) -> bool:
    """Whether its layers are computed kernel by kernel."""
    return Decoder(model, native.kernels())._layers is not None


def steps(model: Any, kernels: native.Kernels | None) -> Tensor:
    """Logits of four tokens behind two prompts of unlike lengths, three answers to one and one to the other."""
    decoder, cache = Decoder(model, kernels), TreeCache(8, kernels)
    lengths = [9, 70]
    tokens = torch.arange(sum(lengths)) * 7 % 80
    places = np.concatenate([np.arange(n) for n in lengths])
    found = [
        decoder.logits(
            tokens, torch.from_numpy(places), cache.prefill("ab", lengths, "cpu"), torch.tensor(lengths).cumsum(0) - 1
        )
    ]
    cache.add("abaa")
    for i in range(4):
        ids = torch.tensor([3, 11, 30, 3]) + i
        at = torch.tensor([lengths[0], lengths[1], lengths[0], lengths[0]]) + i
        found.append(decoder.logits(ids, at, cache.step("cpu"), torch.arange(4)))
    return torch.cat(found)


@needs_kernels
@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
def test_logits_are_the_models_own(family: Callable[..., Any]) -> None:
    """Rounding to bfloat16 at the same places: as near to float64 as transformers' own code, whichever way they go."""
    config = family(**_SHAPE)
    exact = steps(made(config, torch.float64), None)
    torchs, ours = steps(made(config), None), steps(made(config), native.kernels())
    gap, own_gap = (float((x - exact).square().mean().sqrt()) for x in (ours, torchs))
    assert float(exact.std()) > 10 * gap
    assert gap < 1.2 * own_gap
    assert ours.dtype == torch.float32
    assert is_known(made(config)) == (family is LlamaConfig)


@needs_kernels
def test_weights_are_read_as_they_are_now() -> None:
    model = made(LlamaConfig(**_SHAPE))
    before = steps(model, native.kernels())
    model.model.layers[1].mlp.down_proj.weight.neg_()
    assert not torch.equal(steps(model, native.kernels()), before)


@needs_kernels
def test_an_adapter_is_merged_and_goes_the_same_way() -> None:
    plain = made(LlamaConfig(**_SHAPE))
    model = copy.deepcopy(plain)
    adapter = lora.adapt(
        model, lora.Asked(config.Model(name="llama"), None, config.Lora(rank=4)), base="llama", sha256="", seed=0
    )
    assert adapter is not None
    with torch.no_grad():
        for name, layer in lora.adapted_layers(model):
            layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(1))
            plain.get_submodule(name).weight.copy_(lora.merged_weight(layer))
    assert is_known(model)
    assert torch.equal(steps(model, native.kernels()), steps(plain, native.kernels()))
    model.model.layers[0].self_attn.k_proj.base_layer.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.bfloat16))
    assert not is_known(model)


def _hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _biased(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.bfloat16))


class _Odd(torch.nn.Linear):
    pass


def _strange(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = _Odd(96, 64, bias=False, dtype=torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("change", [_hooked, _biased, _strange])
def test_what_is_not_known_exactly_goes_through_transformers(change: Callable[[Any], None]) -> None:
    model = made(LlamaConfig(**_SHAPE))
    assert is_known(model)
    change(model)
    assert not is_known(model)


@needs_kernels
@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**_SHAPE, sliding_window=4),
        LlamaConfig(**{**_SHAPE, "head_dim": 16}),
        LlamaConfig(**{**_SHAPE, "intermediate_size": 40}),
        LlamaConfig(**_SHAPE, hidden_act="gelu"),
        LlamaConfig(**_SHAPE, attention_bias=True),
    ],
)
def test_other_layers_and_shapes_go_through_transformers(config: Any) -> None:
    model = made(config)
    assert not is_known(model)
    exact = steps(made(config, torch.float64), None)
    assert float((steps(model, native.kernels()) - exact).std()) < 0.1 * float(exact.std())


def test_without_kernels_nothing_is_asked_of_the_layers() -> None:
    decoder = Decoder(made(LlamaConfig(**_SHAPE), torch.float32), None)
    assert decoder._layers is None
