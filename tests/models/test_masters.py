"""Gradients of a rounded working copy add up in the masters: the same sums as autograd's, and less memory for them."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from compiled import needs_kernels
from torch import Tensor, nn

from gspo.learner import cast
from gspo.models import fused, heads, layers, linear, native
from gspo.models.attention import ATTENTION, Packed
from gspo.models.heads import install_head, trained_logprobs
from gspo.models.masters import Gradients

TREE = families.tree([9, 5, 1, 7, 4], [None, 0, 0, None, 3])


def model_of(family: str) -> Any:
    model = families.make(family, torch.float32)
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    return model


def collected(model: Any) -> dict[str, nn.Parameter]:
    """Masters of a model that is rounded now, with gradients of what `backward` is called on."""
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    cast(model, torch.bfloat16)
    return masters


def backward(model: Any, factor: float = 1.0) -> None:
    layout = Packed([len(ids) for ids in TREE.tokens], parents=TREE.parents)
    logprob_N, entropy_N = trained_logprobs(model, layout=layout, temperature=0.7, **TREE.rows())  # type: ignore[arg-type]
    weight_N = factor * torch.linspace(-1, 2, len(logprob_N), dtype=logprob_N.dtype)
    (logprob_N @ weight_N + 0.3 * (entropy_N @ weight_N)).backward()


def by_autograd(family: str) -> dict[str, Tensor]:
    model = model_of(family)
    cast(model, torch.bfloat16)
    backward(model)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])  # tied; not tied; embeddings of another class
def test_they_are_autograds_own(family: str) -> None:
    model = model_of(family)
    masters = collected(model)
    gradients = Gradients(model, masters)
    gradients.make_room()
    backward(model)
    gradients.leave_room()
    for name, expected in by_autograd(family).items():
        found = masters[name].grad
        assert found is not None
        assert found.dtype == torch.float32
        # autograd rounds a tied weight's two gradients before it adds them
        assert families.relative_gap(found.double(), expected.double()) < 2**-7, name
    assert all(p.grad is None for p in model.parameters())


def test_the_row_of_the_padding_is_not_trained_by_being_read() -> None:
    model = families.make("qwen3", torch.float32)
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    masters = collected(model)
    Gradients(model, masters)
    ids = TREE.tokens[0]
    ids[3] = model.get_input_embeddings().padding_idx
    backward(model)
    grad = masters["model.embed_tokens.weight"].grad
    assert grad is not None
    assert not grad[ids[3]].any()
    assert grad[ids[2]].any()


def test_micro_batches_add_up_without_rounding() -> None:
    """A sum in bfloat16 would lose the small one."""
    model = model_of("llama")
    masters = collected(model)
    Gradients(model, masters)
    backward(model)
    one = {name: m.grad.clone() for name, m in masters.items() if m.grad is not None}
    backward(model, 2.0**-12)
    for name, master in masters.items():
        assert master.grad is not None
        torch.testing.assert_close(master.grad, one[name] * (1 + 2.0**-12), rtol=1e-6, atol=0)


def test_room_is_made_once_and_goes_to_the_gradients() -> None:
    model = model_of("llama")
    masters = collected(model)
    gradients = Gradients(model, masters)
    gradients.make_room()
    places = {x.untyped_storage().data_ptr() for x in gradients._room.values()}
    backward(model)
    assert {m.grad.untyped_storage().data_ptr() for m in masters.values() if m.grad is not None} == places
    assert len(places) == 1


def test_a_weight_that_no_gradient_reaches_has_none() -> None:
    """AdamW would decay it."""
    model = model_of("llama")
    model.unused = nn.Parameter(torch.ones(3))
    masters = collected(model)
    gradients = Gradients(model, masters)
    gradients.make_room()
    backward(model)
    gradients.leave_room()
    assert masters["unused"].grad is None
    assert masters["unused"] not in gradients._room


def test_the_next_update_finds_the_room_of_the_last_and_nothing_of_what_was_in_it() -> None:
    model = model_of("llama")
    masters = collected(model)
    gradients = Gradients(model, masters)
    found = []
    for factor in (1.0, -3.0):
        gradients.make_room()
        backward(model, factor)
        gradients.leave_room()
        found.append({name: (m.grad.data_ptr(), m.grad.clone()) for name, m in masters.items() if m.grad is not None})
        for master in masters.values():
            master.grad = None
    for name, (place, grad) in found[0].items():
        again, other = found[1][name]
        assert again == place
        assert families.relative_gap(other.double(), -3 * grad.double()) < 2**-6, name


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_kernels_add_up_what_autograd_would(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight into float32, from layers that multiply for themselves, and from the head block by block."""
    expected, model = by_autograd(family), model_of(family)
    monkeypatch.setattr(heads, "_COLUMNS", 32)
    fused.install(model, fused.Kernels())
    layers.install(model, layers.Kernels())
    linear.install(model)
    masters = collected(model)
    gradients = Gradients(model, masters, native.kernels())
    for passes in (1, 2):  # the first writes, the second adds
        gradients.make_room()
        backward(model)
        gradients.leave_room()
        for name, grad in expected.items():
            found = masters[name].grad
            assert found is not None
            # the layers' own formulas round elsewhere than the modules do
            assert families.relative_gap(found.double(), passes * grad.double()) < 2**-5, name


@needs_kernels
def test_layers_whose_weights_are_trained_elsewhere_give_nothing_to_autograd() -> None:
    model = model_of("llama")
    linear.install(model)
    masters = collected(model)
    Gradients(model, masters, native.kernels())
    layer = model.model.layers[0].self_attn.o_proj
    seen = []
    handle = layer.weight.register_hook(seen.append)
    backward(model)
    handle.remove()
    assert not [grad for grad in seen if grad is not None]
    assert masters["model.layers.0.self_attn.o_proj.weight"].grad is not None
