"""Experts recorded and replayed in the models of transformers, held against formulas and hooks of our own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import families
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from gspo import RunError
from gspo.models.attention import ATTENTION, Packed
from gspo.models.heads import install_head, trained_logprobs
from gspo.models.routing import Routed, Routers, Routing, _blocks, _chosen, install_routing, routers_of, unknown_router

SHAPE: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    initializer_range=0.3,
    num_experts_per_tok=2,
    eos_token_id=2,
    pad_token_id=2,
    bos_token_id=1,
)
LATENT: dict[str, Any] = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
DEEPSEEK: dict[str, Any] = dict(
    n_routed_experts=8, n_group=4, topk_group=2, moe_intermediate_size=24, routed_scaling_factor=2.5
)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True)),
    "qwen3_moe_plain": ("Qwen3Moe", dict(num_experts=4, moe_intermediate_size=24, head_dim=8, norm_topk_prob=False)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, head_dim=8)),
    "olmoe": ("Olmoe", dict(num_experts=4)),
    "glm4_moe": ("Glm4Moe", dict(DEEPSEEK, first_k_dense_replace=1, head_dim=8)),
    "deepseek_v3": ("DeepseekV3", dict(DEEPSEEK, **LATENT, first_k_dense_replace=1, head_dim=8)),
    "gpt_oss": ("GptOss", dict(num_local_experts=4, head_dim=8)),
    "minimax_m2": ("MiniMaxM2", dict(num_local_experts=4, head_dim=8)),
    "phimoe": ("Phimoe", dict(num_local_experts=4)),
}
PACKED = ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3"]


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of transformers, as it comes but for weights that make every router choose, and its corrections felt."""
    name, keys = CONFIGS[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **keys})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product has no float64
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "gate.weight" in name or "router" in name or "correction_bias" in name:
            torch.nn.init.normal_(tensor, std=0.4)
    return model


def router(model: Any) -> Any:
    block = next(block for _, block in _blocks(model))
    return getattr(block, "gate", None) or block.router


# ------------------------------------------------------------------------------ gates and their gradient


def softmax_gates(model: Any, logits: Tensor, experts_TK: Tensor, normalised: bool) -> Tensor:
    gate = (logits.exp() / logits.exp().sum(1, keepdim=True)).gather(1, experts_TK)
    return gate / gate.sum(1, keepdim=True) if normalised else gate


def sigmoid_gates(model: Any, logits: Tensor, experts_TK: Tensor) -> Tensor:
    """arXiv 2412.19437 eq. 12-16: the correction bias chooses and is no part of the gate."""
    gate = (1 / (1 + (-logits).exp())).gather(1, experts_TK)
    return 2.5 * gate / gate.sum(1, keepdim=True)


def chosen_softmax_gates(model: Any, logits: Tensor, experts_TK: Tensor) -> Tensor:
    e = (logits + router(model).bias.double()).gather(1, experts_TK).exp()
    return e / e.sum(1, keepdim=True)


GATES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "qwen3_moe": lambda m, x, e: softmax_gates(m, x, e, True),
    "qwen3_moe_plain": lambda m, x, e: softmax_gates(m, x, e, False),
    "mixtral": lambda m, x, e: softmax_gates(m, x, e, True),
    "olmoe": lambda m, x, e: softmax_gates(m, x, e, False),
    "glm4_moe": sigmoid_gates,
    "deepseek_v3": sigmoid_gates,
    "gpt_oss": chosen_softmax_gates,
}


@pytest.mark.parametrize("family", GATES)
def test_replayed_gates_and_their_gradient_are_the_formulas(family: str) -> None:
    """Megatron-LM fork #79: gates gathered behind the router's own choice are 0, and so is their gradient."""
    model = build(family)
    gate_module = router(model)
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = gate_module(hidden)[2].clone()
    given[2:] = (given[2:] + 1) % gate_module.num_experts
    weigh = torch.randn(7, 2, dtype=torch.float64)
    routing = Routing(Routers(1, 2, gate_module.num_experts), given[:, None])
    _, gates, experts = _chosen(gate_module.forward, (hidden,), routing, 0)
    (weigh * gates).sum().backward()
    assert torch.equal(experts, given)

    weight = gate_module.weight.detach().double().requires_grad_()
    again = hidden.detach().requires_grad_()
    expected = GATES[family](model, again @ weight.T, given)
    (weigh * expected).sum().backward()
    assert families.relative_gap(gates.detach().double(), expected.detach()) < 1e-6
    assert families.relative_gap(gate_module.weight.grad.double(), weight.grad) < 1e-5
    assert families.relative_gap(hidden.grad, again.grad) < 1e-5


# ------------------------------------------------------------------------------ whole models, packed


def forced(model: Any, routes: dict[int, Tensor]) -> Any:
    """The same model, whose routers give the experts of `routes` [tokens, K] a layer, with gates by the formula."""
    copy = deepcopy(model)
    copy.set_attn_implementation("sdpa")
    blocks = [block for _, block in _blocks(copy)]
    for i, block in enumerate(blocks):
        module = block.gate

        def forward(hidden: Tensor, i: int = i, module: Any = module) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, 32).double() @ module.weight.double().T
            return logits, GATES[copy.family](copy, logits, routes[i]).to(hidden.dtype), routes[i]

        module.forward = forward
    return copy


def packable(family: str) -> Any:
    model = build(family)
    model.family = family
    return model


def as_ours(model: Any) -> Any:
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    install_routing(model)
    return model


@pytest.mark.parametrize("family", PACKED)
def test_experts_recorded_in_a_tree_are_those_of_each_sequence_alone(family: str) -> None:
    """inclusionAI/AReno#524: routes lost in batching. Two prompts, one with three answers; no padding is routed."""
    tree = families.tree([5, 3, 1, 4, 6, 2], [None, 0, 0, 0, None, 4])
    model = packable(family)
    expected = {i: own_experts(model, torch.cat([tree.above(i), tree.tokens[i]])) for i in range(6)}
    model = as_ours(model)
    routers = routers_of(model)
    assert routers is not None
    routing = Routing(routers)
    lengths = [len(ids) for ids in tree.tokens]
    trained_logprobs(model, **tree.rows(), layout=Routed(Packed(lengths, parents=tree.parents), routing), temperature=1)
    found = routing.chosen()
    assert found.shape == (sum(lengths), routers.layers, 2)
    assert found.dtype == torch.uint8
    for i, part in enumerate(found.long().split(lengths)):
        assert torch.equal(part.sort(-1).values, expected[i][-lengths[i] :].sort(-1).values)


def own_experts(model: Any, ids: Tensor) -> Tensor:
    """[tokens, L, K] by hooks on the model's own routers."""
    seen: list[Tensor] = []
    gates = [block.gate for _, block in _blocks(model)]
    handles = [gate.register_forward_hook(lambda _m, _i, output: seen.append(output[2])) for gate in gates]
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1)


@pytest.mark.parametrize("family", PACKED)
def test_a_replayed_tree_is_each_sequence_with_its_experts_forced(family: str) -> None:
    """Values and gradients: of the routers, too."""
    tree = families.tree([5, 3, 4], [None, 0, 0])
    plain = packable(family)
    model = as_ours(deepcopy(plain))
    routers = routers_of(model)
    assert routers is not None
    generator = torch.Generator().manual_seed(1)
    given = torch.rand(12, routers.layers, routers.experts, generator=generator).topk(2).indices.to(torch.uint8)
    layout = Routed(Packed([5, 3, 4], parents=tree.parents), Routing(routers, given))
    found, _ = trained_logprobs(model, **tree.rows(), layout=layout, temperature=1)
    found.sum().backward()

    expected, grads = [], {}
    for rows in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8, 9, 10, 11]):
        ids = tree.rows()["tokens_T"][torch.tensor(rows)]
        copy = forced(plain, {i: given[torch.tensor(rows), i].long() for i in range(routers.layers)})
        logp, _ = families.one_by_one(copy, [ids], [len(rows) - 5], 1.0)
        logp.sum().backward()
        expected.append(logp.detach())
        for name, p in copy.named_parameters():
            grads[name] = grads.get(name, 0) + (0 if p.grad is None else p.grad)
    torch.testing.assert_close(found.detach(), torch.cat(expected), rtol=0, atol=2e-5)  # softmax and norms in float32
    for name, p in model.named_parameters():
        if "experts" not in name or p.grad is not None:
            assert families.relative_gap(p.grad, grads[name]) < 2e-4, name


def test_replaying_its_own_experts_changes_no_bit() -> None:
    model = as_ours(packable("qwen3_moe"))
    routers, rows = routers_of(model), families.packed(families.sequences([7, 4]), [3, 2])
    assert routers is not None
    recorded = Routing(routers)
    first, _ = trained_logprobs(model, **rows, layout=Routed(Packed([7, 4]), recorded), temperature=1)
    again, _ = trained_logprobs(
        model, **rows, layout=Routed(Packed([7, 4]), Routing(routers, recorded.chosen())), temperature=1
    )
    plain, _ = trained_logprobs(model, **rows, layout=Packed([7, 4]), temperature=1)
    assert torch.equal(first, again)
    assert torch.equal(first, plain)


def test_nothing_is_kept_for_the_next_forward() -> None:
    model = as_ours(packable("qwen3_moe"))
    routers, rows = routers_of(model), families.packed(families.sequences([7, 4]), [3, 2])
    assert routers is not None
    plain, _ = trained_logprobs(model, **rows, layout=Packed([7, 4]), temperature=1)
    other = (Routing(routers, torch.tensor([[[0, 1]] * 2] * 11)), Routing(routers, torch.tensor([[[0, 1]] * 2] * 9)))
    replayed, _ = trained_logprobs(model, **rows, layout=Routed(Packed([7, 4]), other[0]), temperature=1)
    assert not torch.equal(plain, replayed)
    with pytest.raises(RunError, match=r"routes of 9 tokens were given for a forward of 11 \(layer 0"):
        trained_logprobs(model, **rows, layout=Routed(Packed([7, 4]), other[1]), temperature=1)
    again, _ = trained_logprobs(model, **rows, layout=Packed([7, 4]), temperature=1)
    assert torch.equal(plain, again)


def test_what_a_forward_recorded_goes_with_it() -> None:
    """Else a micro-batch that did not fit would keep its memory while smaller ones are tried."""
    model = as_ours(packable("qwen3_moe"))
    routers, rows = routers_of(model), families.packed(families.sequences([7, 4]), [3, 2])
    assert routers is not None
    routing = Routing(routers, with_logits=True)
    logp, _ = trained_logprobs(model, **rows, layout=Routed(Packed([7, 4]), routing), temperature=1)
    assert routing.logits()[0].requires_grad
    gone = ref(routing)
    del routing, logp
    assert gone() is None


def test_activations_computed_again_use_the_same_experts() -> None:
    """The layers run a second time in the backward pass, after another forward with other routes."""
    plain = as_ours(packable("qwen3_moe"))
    saving = deepcopy(plain)
    enable = getattr(saving, "activation_checkpointing_enable", None) or saving.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    saving.train()
    routers, rows = routers_of(plain), families.packed(families.sequences([7, 4]), [3, 2])
    assert routers is not None
    given = torch.rand(11, 2, 4, generator=torch.Generator().manual_seed(2)).topk(2).indices
    ran = []
    for model in (plain, saving):
        gate = router(model)
        counted = gate.forward
        gate.forward = lambda *x, counted=counted: (ran.append(1), counted(*x))[1]
        logp, _ = trained_logprobs(model, **rows, layout=Routed(Packed([7, 4]), Routing(routers, given)), temperature=1)
        with torch.no_grad():
            trained_logprobs(model, **rows, layout=Routed(Packed([7, 4]), Routing(routers)), temperature=1)
            trained_logprobs(model, **rows, layout=Packed([7, 4]), temperature=1)
        logp.sum().backward()
    assert len(ran) == 3 + 4, "the first layer was not computed again"
    for (name, p), q in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-14, msg=name)


# ------------------------------------------------------------------------------ what is known, and what is refused


@pytest.mark.parametrize("family", [f for f in CONFIGS if f != "phimoe"])
def test_routers_are_known_by_what_they_do(family: str) -> None:
    model = build(family, torch.float32)
    before = deepcopy(model)(input_ids=torch.arange(9)[None], use_cache=False).logits
    install_routing(model)
    layers = 1 if "first_k_dense_replace" in CONFIGS[family][1] else 2
    experts = 8 if "n_routed_experts" in CONFIGS[family][1] else 4
    assert routers_of(model) == Routers(layers, 2, experts)
    assert unknown_router(model) is None
    assert torch.equal(model(input_ids=torch.arange(9)[None], use_cache=False).logits, before)


def test_a_router_that_chooses_otherwise_is_named() -> None:
    """Phi-MoE takes the largest twice, with a mask between, and no topk."""
    model = build("phimoe", torch.float32)
    install_routing(model)
    assert routers_of(model) is None
    assert unknown_router(model) == "PhimoeSparseMoeBlock"


def test_a_dense_model_has_no_routers() -> None:
    model = families.make("llama")
    install_routing(model)
    assert (routers_of(model), unknown_router(model)) == (None, None)


def test_routes_of_another_model_are_refused() -> None:
    routers = Routers(layers=2, chosen=2, experts=4)
    routers.check(torch.zeros(3, 2, 2))
    with pytest.raises(
        RunError, match=r"routes of 3 layers and 2 experts a token .* 2 layers of experts and 2 for each"
    ):
        routers.check(torch.zeros(3, 3, 2))
    with pytest.raises(RunError, match="expert 4 is in the routes, and the model has 4"):
        routers.check(torch.full((1, 2, 2), 4))
    assert Routers(2, 2, 256).dtype == torch.uint8
    assert Routers(2, 2, 257).dtype == torch.int16


def test_a_layer_that_says_nothing_is_an_error() -> None:
    with pytest.raises(RunError, match="0 of 2 layers"):
        Routing(Routers(2, 2, 4)).chosen()
