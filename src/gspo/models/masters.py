"""Where the gradients of a working copy in a narrow type add up: in the masters, in their type, one weight at a time.

In: a model that has been rounded, and its masters by name. Out: after each backward pass the gradients are in
`master.grad`, and none is left with the model. The learner makes one `Gradients`.

Letters: T tokens of the packed row, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 2**17
"""Numbers that are added at once: their wide copy stays in the cache."""


class Gradients:
    """Hooks on `model`, whose parameters stand under the same names as their `masters`."""

    def __init__(self, model: Any, masters: Mapping[str, nn.Parameter]) -> None:
        self._room: dict[nn.Parameter, Tensor] = {}
        self._masters = list(masters.values())
        for name, p in model.named_parameters():
            if name in masters:
                p.register_post_accumulate_grad_hook(self._add_to(masters[name]))
        rows = model.get_input_embeddings()
        owner = {id(p): name for name, p in model.named_parameters()}
        if _is_plain(rows) and owner[id(rows.weight)] in masters:
            rows.register_forward_hook(self._add_rows_to(masters[owner[id(rows.weight)]]))

    def make_room(self) -> None:
        """One block for all that have none yet, before any activation: among those they would leave gaps that fit nothing."""
        missing = [m for m in self._masters if m.grad is None and m not in self._room]
        if missing:
            block = missing[0].new_empty(sum(m.numel() for m in missing), requires_grad=False)
            parts = torch.split(block, [m.numel() for m in missing])
            self._room = {m: part.view_as(m) for m, part in zip(missing, parts, strict=True)}

    def leave_room(self) -> None:
        """Give back what no gradient came for."""
        self._room.clear()

    def _empty(self, master: nn.Parameter) -> Tensor:
        return self._room.pop(master) if master in self._room else torch.empty_like(master, requires_grad=False)

    def _add_to(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            # Micro-batches add up in the master's precision: a sum in bfloat16 would depend on how the batch is cut.
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = self._empty(master).copy_(parameter.grad)
            else:
                pieces = (torch.split(x.reshape(-1), _PIECE) for x in (master.grad, parameter.grad))
                for total, part in zip(*pieces, strict=True):
                    total.add_(part)
            parameter.grad = None

        return hook

    def _add_rows_to(self, master: nn.Parameter) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        """The few rows of the embedding that were read, in the place of a gradient as large as the vocabulary."""

        def forward_hook(rows: nn.Module, given: Any, embedded: Tensor) -> Tensor | None:
            if not embedded.requires_grad:
                return None
            leaf = embedded.detach().requires_grad_()
            leaf.register_hook(lambda grad: add(given[0], rows.padding_idx, grad))  # type: ignore[no-untyped-call]
            return leaf

        def add(ids: Tensor, padding: Any, grad: Tensor) -> None:
            if master.grad is None:
                master.grad = self._empty(master).zero_()
            ids_T, grad_TD = ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(master.dtype)
            if padding is not None:  # as the embedding itself has it: that row is not trained by being read
                grad_TD = grad_TD.masked_fill((ids_T == padding)[:, None], 0)
            master.grad.index_add_(0, ids_T, grad_TD)

        return forward_hook


def _is_plain(rows: Any) -> bool:
    """On a CPU: elsewhere the order of the sum is not fixed."""
    usual = type(rows) is nn.Embedding and not (rows.sparse or rows.scale_grad_by_freq or rows.max_norm)
    return usual and rows.weight.device.type == "cpu"
