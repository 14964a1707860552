"""One token for each row: logits and a uniform number in, the token and its log-probability out.

Called by engines that hold the logits. Letters: B rows, V vocabulary, K blocks of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.config import Sampling
from gspo.models.native import Kernels

_BLOCK = 256  # tokens; two searches, over blocks and in one block, read far less than one over the vocabulary
_LIKELY = 1024  # candidates for top-p before the whole vocabulary is sorted


def sample(
    logits_BV: Tensor, uniform_B: Tensor, greedy_B: Tensor, sampling: Sampling, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    """Inverse CDF, in token order, of softmax(logits / temperature) cut to top-k and then top-p.

    `logits_BV` float32 or float64, used up; `uniform_B` float64 in [0, 1); `greedy_B` bool: the likeliest token, and
    its log-probability at `temperature` without truncation. Returns (token_B int64, logprob_B float64): the
    log-probability under the distribution that was sampled; not finite where the logits are not. `kernels` draw where
    they can: then weights are not kept, but made again where the sum ends.
    """
    z = logits_BV if sampling.temperature == 1 else logits_BV.div_(sampling.temperature)
    likeliest_B = z.argmax(1) if bool(greedy_B.any()) else None  # slower than the maximum alone
    if sampling.top_k or sampling.top_p < 1:
        cutoff_B = _cutoff(z, sampling.top_k, sampling.top_p).masked_fill(greedy_B, float("-inf"))
        z.masked_fill_(z < cutoff_B[:, None], float("-inf"))
    if kernels is not None and likeliest_B is None and kernels.draws(z):
        return kernels.sample(z, uniform_B)
    weight_BV = torch.softmax(z, 1)  # one pass over the memory; the sum is made again below, in float64
    token_B, total_B = _draw(weight_BV, uniform_B)
    if likeliest_B is not None:
        token_B = torch.where(greedy_B, likeliest_B, token_B)
    return token_B, weight_BV.gather(1, token_B[:, None])[:, 0].double().log() - total_B.log()


def _draw(weight_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulated weight exceeds uniform * total, and the total [B] float64.

    Exceeds, not reaches: so the weight of the token found is above 0.
    """
    whole = weight_BV.shape[1] // _BLOCK * _BLOCK
    blocks_BK = weight_BV[:, :whole].view(len(weight_BV), -1, _BLOCK).sum(-1).double()
    blocks_BK = torch.cat([blocks_BK, weight_BV[:, whole:].sum(-1, keepdim=True).double()], 1)
    until_BK = blocks_BK.cumsum(1)
    total_B = until_BK[:, -1]
    goal_B = uniform_B * total_B  # below the total, in float64, for every number below 1
    block_B = _first_above(until_BK, goal_B)
    before_B = torch.nn.functional.pad(until_BK, (1, 0)).gather(1, block_B[:, None])[:, 0]
    token = block_B[:, None] * _BLOCK + torch.arange(_BLOCK, device=block_B.device)
    inside = token < weight_BV.shape[1]
    weight = weight_BV.gather(1, token.clamp_max(weight_BV.shape[1] - 1)).double().masked_fill_(~inside, 0.0)
    until = weight.cumsum(1)
    # The block was summed up in another order or precision: its end may lie a rounding error before the goal.
    end_B = torch.nextafter(until[:, -1], torch.zeros_like(total_B))
    place_B = _first_above(until, torch.minimum(goal_B - before_B, end_B))
    # The two clamps matter only where a weight is not a number.
    return token.gather(1, place_B[:, None])[:, 0].clamp_max(weight_BV.shape[1] - 1), total_B


def _first_above(until_BK: Tensor, goal_B: Tensor) -> Tensor:
    found = torch.searchsorted(until_BK, goal_B[:, None], right=True)[:, 0]
    return found.clamp_max(until_BK.shape[1] - 1)


def _cutoff(z: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B] the smallest logit that is kept. Equal logits are kept or cut together, so their order does not matter."""
    cutoff_B = z.new_full((len(z),), float("-inf"))
    if 0 < top_k < z.shape[1]:
        cutoff_B = z.topk(top_k, 1).values[:, -1]
    if top_p == 1:
        return cutoff_B
    kept = z.masked_fill(z < cutoff_B[:, None], float("-inf")) if top_k else z
    total_B = kept.double().logsumexp(1)
    for candidates in (min(_LIKELY, z.shape[1]), z.shape[1]):
        top_BK = kept.topk(candidates, 1).values
        mass_BK = (top_BK.double() - total_B[:, None]).exp_()
        until_BK = mass_BK.cumsum(1)
        if candidates == z.shape[1] or bool((until_BK[:, -1] >= top_p).all()):
            break
    # A token is kept while the likelier ones together have less than top_p.
    last_B = ((until_BK - mass_BK) < top_p).sum(1).clamp_min(1) - 1
    return top_BK.gather(1, last_B[:, None])[:, 0]
