"""Weights as sampling wants them, for as long as they stay the same: adapters merged, and in the order in which the
processor multiplies them.

In: a model whose weights stand still. Out: a context in which its linear layers read such copies. The local
engine makes one for a round of sampling, opens it around each forward, and drops it with the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gspo.models.lora import adapted_layers, merged_weight, parameter_of
from gspo.models.native import Kernels

_FEW = 256
"""Tokens up to which the kernels, which re-order nothing, are faster than torch's product."""


class PackedWeights:
    """Copies of the weights of adapted layers, merged, and of all plain linear layers in bfloat16 on a CPU if torch can.

    With `kernels` layers without bias need no copies: those read a weight as it lies. Else, oneDNN re-orders a bfloat16
    weight at each product; with the few rows of a decoding step that takes as long as the product. The sums are those of
    the plain layer. Parameters, state dict and gradients are untouched, and so is a forward outside the context. Without
    kernels, a merged weight in bfloat16 costs nothing more, since a plain one is copied, too.
    """

    def __init__(self, model: nn.Module, kernels: Kernels | None = None) -> None:
        adapted = [layer for _, layer in adapted_layers(model)]
        inside = {id(m) for layer in adapted for m in layer.modules()}
        with torch.no_grad():
            # Not by assignment later on, which nn.Module makes slow.
            self._stand_ins = [
                (m.__dict__, "forward", forward)
                for m in model.modules()
                if type(m) is nn.Linear and id(m) not in inside and (forward := _fast(m.weight, m.bias, kernels))
            ]
            self._merged = {id(layer): merged_weight(layer) for layer in adapted}
            for layer in adapted:
                self._stand_ins += _stand_ins(layer, self._merged[id(layer)], kernels)
        self._before: list[Any] = []

    def of(self, layer: Any) -> Tensor | None:
        """The weight of a linear layer as it is multiplied with, merged if it is adapted; None where a bias is added."""
        base = layer.get_base_layer() if id(layer) in self._merged else layer
        if type(base) is not nn.Linear or base.bias is not None:
            return None
        return self._merged.get(id(layer), base.weight.detach())

    def __enter__(self) -> None:
        self._before = [attributes.get(name) for attributes, name, _ in self._stand_ins]
        for attributes, name, stand_in in self._stand_ins:
            attributes[name] = stand_in

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (attributes, name, _), before in zip(self._stand_ins, self._before, strict=True):
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before


def _stand_ins(layer: Any, weight: Tensor, kernels: Kernels | None) -> list[tuple[dict[str, Any], str, Any]]:
    """What stands in for an adapted layer: the layer under it, with its merged weight."""
    base = layer.get_base_layer()
    if not isinstance(base, nn.Linear):  # stacked experts: an attribute of theirs is found before the parameter
        return [(base.__dict__, parameter_of(layer), weight), (layer.__dict__, "forward", base.__call__)]
    plain = partial(linear, weight=weight, bias=base.bias)
    return [(layer.__dict__, "forward", _fast(weight, base.bias, kernels) or plain)]


def _fast(weight: Tensor, bias: Tensor | None, kernels: Kernels | None) -> Callable[[Tensor], Tensor] | None:
    if kernels is not None and bias is None and kernels.multiplies(weight):
        return partial(_read_as_it_lies, weight=weight.detach(), kernels=kernels)
    return _forward(weight, bias) if _reordered(weight) and _works() else None


def _read_as_it_lies(x: Tensor, *, weight: Tensor, kernels: Kernels) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > _FEW:
        return linear(x, weight)
    return kernels.product(rows, weight).view(*x.shape[:-1], -1)


def _reordered(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return partial(_multiply, weight=torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias=bias)


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
        found = _forward(layer.weight, layer.bias)(x)
    except (RuntimeError, TypeError):  # no bfloat16 in this processor's oneDNN, or other arguments
        return False
    return torch.allclose(found, layer(x), rtol=2**-6, atol=2**-6)
