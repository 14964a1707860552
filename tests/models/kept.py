"""How much a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def kept_bytes(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes of all that autograd saves in `forward()`, the parameters of `model` aside."""
    seen: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = forward()  # alive until all is counted: a freed block would be counted once for two
    total = sum(seen.values())
    del result
    return total
