"""Weights in the order in which the processor multiplies them, for as long as they stay the same.

In: a model whose weights stand still. Out: a context in which its linear layers read re-ordered copies. The local
engine makes one for a round of sampling, opens it around each forward, and drops it with the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class PackedWeights:
    """Copies of the weights of all plain linear layers in bfloat16 on a CPU; of no layers if torch cannot.

    oneDNN re-orders a bfloat16 weight at each product; with the few rows of a decoding step that takes as long as the
    product. The sums are those of the plain layer. Parameters, state dict and gradients are untouched, and so is a
    forward outside the context.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if type(m) is nn.Linear and _reordered(m.weight)]
        with torch.no_grad():
            # Not by assignment later on, which nn.Module makes slow.
            self._forwards = [(layer.__dict__, _forward(layer)) for layer in layers] if layers and _works() else []
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [attributes.get("forward") for attributes, _ in self._forwards]
        for attributes, forward in self._forwards:
            attributes["forward"] = forward

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (attributes, _), before in zip(self._forwards, self._before, strict=True):
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before


def _reordered(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return partial(_multiply, weight=torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()), bias=layer.bias)


def _multiply(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@cache
def _works() -> bool:
    """Whether torch has the two operations (private ones, which its compiler uses), and they compute a linear layer."""
    operations = torch.ops.mkldnn
    if not (hasattr(operations, "_reorder_linear_weight") and hasattr(operations, "_linear_pointwise")):
        return False
    layer = nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.linspace(-1, 1, 3 * 64, dtype=torch.bfloat16).view(1, 3, 64)
    try:
        found = _forward(layer)(x)
    except (RuntimeError, TypeError):  # no bfloat16 in this processor's oneDNN, or other arguments
        return False
    return torch.allclose(found, layer(x), rtol=2**-6, atol=2**-6)
