"""Faster products for the few rows of a decoding step: `weight @ x.T` in the place of `x @ weight.T`.

In: a model. Out: a context in which its linear layers multiply that way. The local engine opens it around a forward.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn


class WeightsFirst:
    """While open, linear layers in bfloat16 on a CPU put their weight first.

    oneDNN re-orders the right factor of a bfloat16 product at each call; with 64 rows that takes as long as the
    product. Nothing is copied, so that nothing can be left over from older weights. The sums are those of the plain
    layer, in another order. Other layers are left alone, and so is a layer's forward that somebody else has replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if type(m) is nn.Linear and _is_slow(m.weight)]

    def __enter__(self) -> None:
        for layer in self._layers:
            # Not by assignment, which nn.Module makes ten times slower.
            layer.__dict__["forward"] = partial(_forward, layer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in self._layers:
            del layer.__dict__["forward"]


def _is_slow(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    out = torch.mm(layer.weight, x.reshape(-1, x.shape[-1]).T)
    if layer.bias is not None:
        out.add_(layer.bias[:, None])
    # What a widening layer gives goes through elementwise functions into a narrowing one, which wants it as it lies.
    wide = layer.out_features > layer.in_features
    return (out.T if wide else out.T.contiguous()).view(*x.shape[:-1], -1)
