"""Which experts a mixture-of-experts model uses: recorded in any forward, and replayed in a later one.

In: a model whose routers are top-k modules of transformers, and a `Routed` layout in the place of the plain one. Out:
the experts that each router chose, and gates recomputed from its present logits over those that it was given. `load`
installs it; the learner and the engine pass routes, which are an input of the forward: nothing is kept between two.

Letters: T tokens of the packed row, L layers with experts, K experts chosen for a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import RunError
from gspo.models.attention import Layout


@dataclass(frozen=True)
class Routers:
    """The routers of a model."""

    layers: int
    """L: those with experts, in the order of the forward."""
    chosen: int
    """K."""
    experts: int
    """E."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds an expert's number."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    def check(self, routes_TLK: Tensor) -> None:
        """Raise RunError for routes that cannot be of this model."""
        if routes_TLK.shape[1:] != (self.layers, self.chosen):
            layers, chosen = routes_TLK.shape[1:]
            raise RunError(
                f"routes of {layers} layers and {chosen} experts a token were given to a model with {self.layers} layers of experts "
                f"and {self.chosen} for each token: they were recorded from another model"
            )
        if len(routes_TLK) and int(routes_TLK.max()) >= self.experts:
            raise RunError(
                f"expert {int(routes_TLK.max())} is in the routes, and the model has {self.experts}, numbered from 0: "
                "they were recorded from another model"
            )


class Routing:
    """The experts of one forward: those that it has to use, if they are given, and those that its routers chose.

    `with_logits`: keep the routers' logits of a forward with gradients, too.
    """

    def __init__(self, routers: Routers, given_TLK: Tensor | None = None, *, with_logits: bool = False) -> None:
        self.routers, self.given_TLK, self._with_logits = routers, given_TLK, with_logits
        self._own: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}

    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        """The experts to use, [T, K] int64. The router's own choice is kept: a layer that is computed again for the
        backward pass makes the same one. Raises RunError for routes of another length."""
        self._own[layer] = own_TK.to(self.routers.dtype)
        if self.given_TLK is None:
            return own_TK
        if len(self.given_TLK) != len(own_TK):
            raise RunError(
                f"routes of {len(self.given_TLK)} tokens were given for a forward of {len(own_TK)} (layer {layer} of those with experts)"
            )
        return self.given_TLK[:, layer].long()

    def chosen(self) -> Tensor:
        """[T, L, K] what the routers chose, or with given routes would have chosen, in the smallest type that holds it."""
        if len(self._own) != self.routers.layers:
            raise RunError(
                f"{len(self._own)} of {self.routers.layers} layers with experts said which they chose: this model computes them in "
                "another way than its parts show; set algorithm.routing=off"
            )
        return torch.stack([self._own[layer] for layer in range(self.routers.layers)], 1)

    def keep(self, layer: int, logits_TE: Tensor) -> None:
        if self._with_logits and torch.is_grad_enabled():
            self._logits[layer] = logits_TE

    def logits(self) -> list[Tensor]:
        """[T, E] what each router made its choice from, with its gradient."""
        return [self._logits[layer] for layer in range(self.routers.layers)]


@dataclass(frozen=True)
class Routed:
    """A layout whose forward records, and replays, experts: it goes to each layer with the layout."""

    layout: Layout
    routing: Routing

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        return self.layout.attend(layer, query, key, value, scaling=scaling, window=window)


# ------------------------------------------------------------------------------ finding the routers


def install_routing(model: Any) -> None:
    """Make the routers of `model` heed `Routed` layouts. A dense model, or one with other routers, stays as it is."""
    blocks = list(_blocks(model))
    found = [_router(block, model.config.get_text_config().hidden_size) for _, block in blocks]
    attentions = [_attention(layer) for layer, _ in blocks]
    sizes = {(router.top_k, router.num_experts) for router in found if router is not None}
    if None in found or None in attentions or len(sizes) != 1:
        return
    ((chosen, experts),) = sizes
    for i, (router, attention) in enumerate(zip(found, attentions, strict=True)):
        router.forward = partial(_route, router.forward, attention, i)
    model.gspo_routers = Routers(len(blocks), chosen, experts)


def routers_of(model: Any) -> Routers | None:
    """What `install_routing` found; None for a dense model, and for one whose routers it does not know."""
    found: Routers | None = getattr(model, "gspo_routers", None)
    return found


def unknown_router(model: Any) -> str | None:
    """What chooses the experts of a model whose routers are not known: the class that holds them; None if there is no such."""
    if routers_of(model) is not None:
        return None
    block = next((block for _, block in _blocks(model)), None)
    if block is not None:
        return type(block).__name__
    config = model.config.get_text_config()
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return type(model).__name__ if any((getattr(config, name, None) or 0) > 1 for name in counts) else None


def _blocks(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every decoder layer with a module that has experts, and that module."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            yield from ((layer, m) for m in layer.modules() if isinstance(getattr(m, "experts", None), nn.Module))


def _attention(layer: nn.Module) -> Any:
    return next((m for m in layer.modules() if m is not layer and hasattr(m, "layer_idx")), None)


def _router(block: nn.Module, width: int) -> Any:
    """The part of `block` that is a top-k router, or None: it is known by what it does to a few made-up tokens."""
    parts = [m for m in block.children() if m is not block.experts]
    counted = [m for m in parts if isinstance(getattr(m, "top_k", None), int) and hasattr(m, "num_experts")]
    return counted[0] if len(counted) == 1 and _replays(block, counted[0], width) else None


@torch.no_grad()
def _replays(block: nn.Module, router: Any, width: int) -> bool:
    """Whether `block` asks the router for (logits, gates, experts), and one `topk` in that chooses the experts."""
    p = next(block.parameters())
    hidden = torch.linspace(-9, 9, 3 * width, dtype=torch.float64).sin().view(1, 3, width).to(p)
    asked: list[tuple[Any, ...]] = []
    handle = router.register_forward_pre_hook(lambda _module, inputs: asked.append(inputs))
    routers = Routers(1, router.top_k, router.num_experts)

    def run(experts_TK: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        routing = Routing(routers, None if experts_TK is None else experts_TK[:, None])
        _, gate_TK, used_TK = _chosen(router.forward, asked[0], routing, 0)
        return gate_TK, used_TK, routing.chosen()[:, 0].long()

    try:
        block(hidden)
        gate_TK, expert_TK, own_TK = run(None)
        same_TK, _, _ = run(expert_TK.flip(-1))
        _, used_TK, _ = run((expert_TK + 1) % router.num_experts)
        return (
            torch.equal(own_TK, expert_TK)
            and torch.allclose(same_TK.flip(-1).float(), gate_TK.float(), rtol=1e-2)
            and torch.equal(used_TK, (expert_TK + 1) % router.num_experts)
        )
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError, RunError):
        return False  # another kind of block, whatever it stumbled over
    finally:
        handle.remove()


# ------------------------------------------------------------------------------ inside the forward


def _route(forward: Any, attention: Any, layer: int, *inputs: Any) -> Any:
    """A router's forward. Its routing is that of the attention before it in the same layer, which gets the layout: that
    holds, too, when the layer alone is computed again for the backward pass."""
    passed = attention.__dict__.get("gspo_routing")
    routing = None if passed is None else passed()  # None, too, once that forward is over
    return forward(*inputs) if routing is None else _chosen(forward, inputs, routing, layer)


def _chosen(forward: Any, inputs: tuple[Any, ...], routing: Routing, layer: int) -> Any:
    with _Choice(routing, layer):
        output = forward(*inputs)
    routing.keep(layer, output[0])
    return output


class _Choice(TorchFunctionMode):
    """Inside it, the `topk` that chooses the experts gives those that `routing` says, with their scores.

    So the gates are the model's own formula (softmax before or after, sigmoid, renormalised, scaled), applied to its
    present logits at the replayed experts, with gradient. The scores that it reads are those of all experts, unless the
    choice is limited to groups: there it takes the numbers alone.
    """

    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, routers = args[0], self._routing.routers
        # Groups of experts are chosen by `topk`, too, from other shapes.
        if (scores.shape[1:], result.indices.shape[-1]) != ((routers.experts,), routers.chosen):
            return result
        used = self._routing.choose(self._layer, result.indices)
        return result if used is result.indices else torch.return_types.topk((scores.gather(-1, used), used))
