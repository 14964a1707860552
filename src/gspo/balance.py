"""The load-balancing loss of a mixture-of-experts model, over a whole update whatever its micro-batches are.

In: the experts that an update's tokens use, known before its first forward, and the router logits of each. Out: a term
of the loss that adds up over micro-batches. The learner calls both if `algorithm.load_balance` is set.

Letters: T tokens the model sees (packed), L layers with experts, K experts chosen for a token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.batch import Batch, Microbatch
from gspo.models.routing import Routers, Routing
from gspo.presets import Algorithm
from gspo.replay import given


def load(routers: Routers | None, row: Algorithm, batch: Batch) -> Tensor | None:
    """[L, E] the share of the update's tokens that use each expert, float32; a layer's add up to K. None if it is not asked for.

    Of the experts that the update replays, else of the old policy's: the update's own are not known before its last
    forward. A packed row has no padding, and a prompt that stands in several micro-batches counts once.
    """
    if routers is None or not row.load_balance:
        return None
    replayed_TLK = given(row, batch)
    routes_TLK = batch.old_routes_TLK if replayed_TLK is None else replayed_TLK
    assert routes_TLK is not None, "the old pass comes first"
    weight_T = batch.copies().reciprocal()
    load_LE = weight_T.new_zeros(routers.layers, routers.experts)
    weight_LTK = weight_T[None, :, None].expand(routers.layers, -1, routers.chosen)
    load_LE.scatter_add_(1, routes_TLK.long().transpose(0, 1).flatten(1), weight_LTK.flatten(1))
    return load_LE / weight_T.sum()


def imbalance(routing: Routing, load_LE: Tensor, batch: Batch, micro: Microbatch) -> Tensor:
    """This micro-batch's part of E sum_e f_e P_e (arXiv 2101.03961 eq. 4-6), the mean over layers; a scalar.

    f is `load_LE`, in which no gradient stands, and P the mean over the update's tokens of softmax(router logits). Evenly
    spread over the experts, it is K. Layers are balanced one by one; transformers multiplies means over all of them.
    """
    weight_T = batch.copies().reciprocal()
    share_T = weight_T[micro.token] / weight_T.sum()
    logits = routing.logits()
    parts = [
        (share_T @ torch.softmax(logits_TE.float(), -1)) @ load_E
        for logits_TE, load_E in zip(logits, load_LE, strict=True)
    ]
    return load_LE.shape[1] * torch.stack(parts).mean()
