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

from gspo.models.heads import Formulas, PolicyHead
from gspo.models.linear import ALL, Collect, transposed_product
from gspo.models.native import Kernels

_BLOCK = 2**24
"""Numbers of gradients that lie together in memory."""


class Gradients:
    """Hooks on `model`, whose parameters stand under the same names as their `masters`; `kernels` multiply what suits them."""

    def __init__(self, model: Any, masters: Mapping[str, nn.Parameter], kernels: Kernels | None = None) -> None:
        self._room: dict[nn.Parameter, Tensor] = {}
        self._masters, self._kernels = list(masters.values()), kernels
        of_weight = {id(p): masters[name] for name, p in model.named_parameters() if name in masters}
        for name, p in model.named_parameters():
            if name in masters:
                p.register_post_accumulate_grad_hook(self._add_to(masters[name]))
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) in of_weight:
                module.collect = self._collector(of_weight[id(module.weight)])  # type: ignore[assignment]
        rows, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        if _is_plain(rows) and id(rows.weight) in of_weight:
            rows.register_forward_hook(self._add_rows_to(of_weight[id(rows.weight)]))

    def make_room(self) -> None:
        """For all that have none yet, before any activation: among those they would leave gaps that fit nothing.

        In a few large blocks, which the next update finds again even if something small lies between them by then.
        """
        block: list[nn.Parameter] = []
        for master in self._masters:
            if master.grad is None and master not in self._room:
                if block and sum(m.numel() for m in block) + master.numel() > _BLOCK:
                    self._make_block(block)
                    block = []
                block.append(master)
        self._make_block(block)

    def _make_block(self, masters: list[nn.Parameter]) -> None:
        sizes = [m.numel() for m in masters]
        if sizes:
            parts = torch.split(masters[0].detach().new_empty(sum(sizes)), sizes)
            self._room.update((m, part.view_as(m)) for m, part in zip(masters, parts, strict=True))

    def leave_room(self) -> None:
        """Give back what no gradient came for. On a CPU the rest is kept for the next update: pages that the system has to
        find again cost it a tenth of an update; elsewhere torch keeps memory by itself."""
        self._room = {m: room for m, room in self._room.items() if m.grad is not None and m.device.type == "cpu"}

    def _empty(self, master: nn.Parameter) -> Tensor:
        return self._room[master] if master in self._room else torch.empty_like(master, requires_grad=False)

    def _add(self, total: Tensor, part: Tensor) -> None:
        formulas = self._head.formulas if isinstance(self._head, PolicyHead) else Formulas()
        formulas.accumulate(total.view(-1), part.reshape(-1))

    def _total(self, master: nn.Parameter) -> Tensor:
        if master.grad is None:
            master.grad = self._empty(master).zero_()
        return master.grad

    def _add_to(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            # Micro-batches add up in the master's precision: a sum in bfloat16 would depend on how the batch is cut.
            if parameter.grad is None:  # a collector has it
                return
            if master.grad is None:
                master.grad = self._empty(master).copy_(parameter.grad)
            else:
                self._add(master.grad, parameter.grad)
            parameter.grad = None

        return hook

    def _collector(self, master: nn.Parameter) -> Collect:
        """Multiplies straight into the total, so that nothing is rounded between: see `linear`."""

        def collect(by_output_TM: Tensor, inputs_TN: Tensor, rows: slice = ALL) -> None:
            fresh = master.grad is None and rows == ALL
            if fresh:
                master.grad = self._empty(master)
            total = self._total(master)[rows]
            if self._kernels is not None and self._kernels.weighs(by_output_TM, inputs_TN, total):
                self._kernels.weigh(by_output_TM, inputs_TN, total, fresh=fresh)
            elif fresh:
                total.copy_(transposed_product(by_output_TM, inputs_TN))
            else:
                self._add(total, transposed_product(by_output_TM, inputs_TN))

        return collect

    def _add_rows_to(self, master: nn.Parameter) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        """The few rows of the embedding that were read, in the place of a gradient as large as the vocabulary."""

        def forward_hook(rows: nn.Module, given: Any, embedded: Tensor) -> Tensor | None:
            if not embedded.requires_grad:
                return None
            leaf = embedded.detach().requires_grad_()
            leaf.register_hook(lambda grad: add(given[0], rows.padding_idx, grad))  # type: ignore[no-untyped-call]
            return leaf

        def add(ids: Tensor, padding: Any, grad: Tensor) -> None:
            ids_T, grad_TD = ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(master.dtype)
            if padding is not None:  # as the embedding itself has it: that row is not trained by being read
                grad_TD = grad_TD.masked_fill((ids_T == padding)[:, None], 0)
            self._total(master).index_add_(0, ids_T, grad_TD)

        return forward_hook


def _is_plain(rows: Any) -> bool:
    """On a CPU: elsewhere the order of the sum is not fixed."""
    usual = type(rows) is nn.Embedding and not (rows.sparse or rows.scale_grad_by_freq or rows.max_norm)
    return usual and rows.weight.device.type == "cpu"
