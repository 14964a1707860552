"""Norms of a float64 model in float64, so that two ways to compute the same thing agree to the last digits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def in_float64(model: Any) -> None:
    """transformers takes norms in float32 whatever the model's type: a rounding error then becomes 1e-7."""
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if epsilon is not None:
            offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
            module.forward = partial(_norm, module, epsilon, offset)


def _norm(module: Any, epsilon: float, offset: float, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * (module.weight + offset)
