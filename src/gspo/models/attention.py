"""Attention over a packed row of trees: a layout says which tokens see which, and the model only hands over q, k, v.

In: a transformers model whose attention is set to `ATTENTION`, called with `layout=`. Out: attention output without
padding outside this file. `heads` passes layouts through; the learner makes `Packed`, the engine those of `cache`.

Letters: T tokens of the packed row, S pieces of a block, C queries of a piece, K keys of a piece, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from transformers import AttentionInterface

from gspo.errors import InputError
from gspo.models.flex import FlexTrees
from gspo.models.native import Kernels

ATTENTION = "gspo"

_PIECE = 512
"""Longer segments are cut into pieces, each of which hangs on the one before: scores then grow with the length only."""
_SCORES = 2**19
"""Queries times keys of a block, for one head: more are computed in several blocks, so that scores stay in the cache."""
_WASTE = 1.25
"""Largest ratio of a block's scores to those that its pieces would have without padding."""
_LANES = 32
"""Keys of a block are padded to a multiple of it: a row of bfloat16 scores is then whole vectors, whose softmax takes
half the time of one with a rest."""


class Layout(Protocol):
    """What `model(..., layout=...)` takes."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

        A token sees the earlier tokens of its own sequence, the last `window` of them (itself among them) if set.
        """
        ...


class Packed:
    """Segments laid end to end, each hanging on an earlier one or on nothing: a row of trees.

    `lengths` in tokens; `parents` gives for each segment the index of the one that it continues, None for the start
    of a sequence (all of them, by default). A token sees its own segment up to itself, and every token of the segments
    above; two answers to one prompt share the prompt and do not see each other. `kernels` are used where they suit.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        parents: Sequence[int | None] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        if len(lengths) == 0 or min(lengths) < 1:
            raise ValueError(f"a packed row needs segments of at least one token, found lengths {list(lengths)}")
        self.tokens = sum(lengths)
        self._lengths, self._parents = lengths, [None] * len(lengths) if parents is None else parents
        pieces = _pieces(self._lengths, self._parents)
        self._blocks = [_Block(block, self.tokens, torch.device(device)) for block in _blocks(pieces)]
        self._flex: FlexTrees | None = None
        self._kernels = kernels

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
            self._flex = self._flex or FlexTrees(self._lengths, self._parents, query.device)
            return self._flex.attend(query, key, value, scaling=scaling, window=window)
        products = _Products(self._blocks, (query.shape[1], key.shape[1]), scaling, window, self._kernels)
        out: Tensor = _Attend.apply(_rows(query), _rows(key), _rows(value), products)  # type: ignore[no-untyped-call]
        return out.view(1, self.tokens, query.shape[1], -1)


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T * H, D]."""
    return x[0].transpose(0, 1).reshape(-1, x.shape[-1])


# ------------------------------------------------------------------------------ from trees to blocks of products


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens of one segment, computed together."""

    start: int
    """Index into T of its first token."""
    length: int
    context: np.ndarray
    """Index into T of every token above it, from the start of its sequence."""


def _pieces(lengths: Sequence[int], parents: Sequence[int | None]) -> Iterator[_Piece]:
    starts = np.cumsum([0, *lengths])
    paths: list[np.ndarray] = []
    """Of each segment: index into T of its own tokens and of those above."""
    for i, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if parent is not None and not 0 <= parent < i:
            raise ValueError(f"segment {i} hangs on segment {parent}, which does not stand before it")
        above = np.empty(0, dtype=np.int64) if parent is None else paths[parent]
        paths.append(np.concatenate([above, np.arange(starts[i], starts[i + 1])]))
        for offset in range(0, length, _PIECE):
            yield _Piece(int(starts[i]) + offset, min(_PIECE, length - offset), paths[i][: len(above) + offset])


def _blocks(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of like size together: inside a block they are padded to the largest."""
    block: list[_Piece] = []
    longest, deepest, scores = 0, 0, 0
    for piece in sorted(pieces, key=lambda p: (-p.length, -len(p.context))):
        length, depth = max(longest, piece.length), max(deepest, len(piece.context))
        own = piece.length * (len(piece.context) + piece.length)
        padded = (len(block) + 1) * length * (depth + length)
        if block and (padded > _SCORES or padded > _WASTE * (scores + own)):
            yield block
            block, scores, length, depth = [], 0, piece.length, len(piece.context)
        block.append(piece)
        longest, deepest, scores = length, depth, scores + own
    yield block


class _Block:
    """Pieces that are computed as one batch of matrices: queries padded on the right, keys [above | own] on both sides.

    The tokens above are aligned at their end, so that query i and key j lie equally far apart in every piece.
    """

    def __init__(self, pieces: list[_Piece], tokens: int, device: torch.device) -> None:
        self.queries = max(p.length for p in pieces)
        self.above = max(len(p.context) for p in pieces)
        self.pieces, self.keys = len(pieces), -(-(self.above + self.queries) // _LANES) * _LANES
        self._tokens, self._device = tokens, device
        query_SC = np.zeros((self.pieces, self.queries), dtype=np.int64)
        key_SK = np.zeros((self.pieces, self.keys), dtype=np.int64)
        self._real_SC, self._real_SK = np.zeros_like(query_SC, dtype=bool), np.zeros_like(key_SK, dtype=bool)
        for s, piece in enumerate(pieces):
            own = np.arange(piece.start, piece.start + piece.length)
            query_SC[s, : piece.length], self._real_SC[s, : piece.length] = own, True
            seen = slice(self.above - len(piece.context), self.above + piece.length)
            key_SK[s, seen], self._real_SK[s, seen] = np.concatenate([piece.context, own]), True
        self._query_SC, self._key_SK = query_SC, key_SK
        self._indices: dict[tuple[int, int], _Index] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def index(self, heads: int, key_heads: int) -> _Index:
        """Where the rows of this block's matrices lie in [T * H, D] and [T * Hkv, D]."""
        if (heads, key_heads) not in self._indices:
            self._indices[heads, key_heads] = self._make_index(heads, key_heads)
        return self._indices[heads, key_heads]

    def _make_index(self, heads: int, key_heads: int) -> _Index:
        shared = heads // key_heads
        head = np.arange(heads).reshape(key_heads, 1, shared, 1)
        query = (self._query_SC[None, :, None] * heads + head).reshape(-1)
        real = np.broadcast_to(self._real_SC[None, :, None], (key_heads, self.pieces, shared, self.queries)).reshape(-1)
        key = (self._key_SK[None] * key_heads + np.arange(key_heads)[:, None, None]).reshape(-1)
        seen = np.flatnonzero(np.broadcast_to(self._real_SK[None], (key_heads, *self._real_SK.shape)).reshape(-1))
        place = seen[np.argsort(key[seen], kind="stable")]
        bag = np.searchsorted(key[place], np.arange(self._tokens * key_heads))
        padded = _Uneven(
            padding=self._tensor(np.flatnonzero(~real)),
            real=self._tensor(np.flatnonzero(real)),
            written=self._tensor(query[real]),
        )
        return _Index(
            query=self._tensor(query),
            uneven=None if real.all() else padded,
            key=self._tensor(key),
            place=self._tensor(place),
            bag=self._tensor(bag),
        )

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self._device)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[S or 1, C, K] what is added to the scores: 0, and -inf where the key is not seen."""
        if (window, dtype) not in self._masks:
            behind = np.arange(self.queries)[:, None] + self.above - np.arange(self.keys)[None]
            unseen = (behind < 0) if window is None else (behind < 0) | (behind >= window)
            absent_SK = ~self._real_SK
            absent_SK[:, self.above :] = False  # beside the piece's own queries: causality hides it from all real ones
            unseen_SCK = unseen[None] | absent_SK[:, None] if absent_SK.any() else unseen[None]
            mask = np.where(unseen_SCK, np.float32(-np.inf), np.float32(0))
            self._masks[window, dtype] = self._tensor(mask).to(dtype)
        return self._masks[window, dtype]


@dataclass(frozen=True)
class _Index:
    """Rows of packed queries [T * H, D] and keys [T * Hkv, D], in the order of a block's matrices."""

    query: Tensor
    """[Hkv * S * H/Hkv * C]."""
    uneven: _Uneven | None
    """Where padding is among them; None: there is none."""
    key: Tensor
    """[Hkv * S * K]."""
    place: Tensor
    """Places in `key` that are no padding, sorted by the row that they hold; `bag` [T * Hkv]: where each row begins."""
    bag: Tensor


@dataclass(frozen=True)
class _Uneven:
    """Padding among the queries of a block."""

    padding: Tensor
    """Its places in `_Index.query`."""
    real: Tensor
    """The other places, and the rows that they hold: `written`."""
    written: Tensor


# ------------------------------------------------------------------------------ the products


class _Products:
    """The blocks of a packed row, as the heads, the scale and the window of a layer have them computed."""

    def __init__(
        self,
        blocks: list[_Block],
        heads: tuple[int, int],
        scaling: float,
        window: int | None,
        kernels: Kernels | None,
    ) -> None:
        self._blocks, self._heads, self._scaling, self._window, self._kernels = blocks, heads, scaling, window, kernels

    def __iter__(self) -> Iterator[tuple[_Block, _Index]]:
        return ((block, block.index(*self._heads)) for block in self._blocks)

    def factors(self, block: _Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries [Hkv * S, H/Hkv * C, D], keys and values [Hkv * S, K, D] of a block."""
        index = block.index(*self._heads)
        k, v = (x.index_select(0, index.key).view(-1, block.keys, x.shape[1]) for x in (key, value))
        q = self._scaled(query.index_select(0, index.query)).view(len(k), -1, query.shape[1])
        return q, k, v

    def share(self, block: _Block, q: Tensor, k: Tensor) -> Tensor:
        """What each query takes of each key: softmax of their products over the keys that it sees."""
        score, mask = torch.bmm(q, k.transpose(1, 2)), block.mask(self._window, q.dtype)
        if self._kernels is not None and self._kernels.shares(score):
            self._kernels.share(score.view(len(score), -1, block.queries, block.keys), mask)
            return score
        score.view(-1, block.pieces, q.shape[1] // block.queries, block.queries, block.keys).add_(mask[:, None])
        return torch.softmax(score, -1)

    def grad_query(self, grad_score: Tensor, k: Tensor) -> Tensor:
        return self._scaled(torch.bmm(grad_score, k))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._scaling == 1 else x.mul_(self._scaling)


class _Attend(torch.autograd.Function):
    """Softmax attention, block by block; the scores are made again in the backward pass, so none are kept.

    Queries that share a key head form one matrix, so no key is repeated for them. Gradients of a key are summed over
    all that see it in float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, products: _Products) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.products = products
        out = query.new_empty(len(query), value.shape[1])
        for block, index in products:
            q, k, v = products.factors(block, query, key, value)
            _put_back(torch.bmm(products.share(block, q, k), v), out, index)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        products: _Products = ctx.products
        grad_query = torch.empty_like(query)
        grad_key, grad_value = _Sum(key), _Sum(value)
        for block, index in products:
            q, k, v = products.factors(block, query, key, value)
            share = products.share(block, q, k)
            grad = grad_out.index_select(0, index.query)
            if index.uneven is not None:
                grad.index_fill_(0, index.uneven.padding, 0)
            grad = grad.view(*q.shape[:2], -1)
            grad_value.add(torch.bmm(share.transpose(1, 2), grad), index)
            grad_share = torch.bmm(grad, v.transpose(1, 2))
            grad_score = torch.ops.aten._softmax_backward_data(grad_share, share, -1, share.dtype)
            grad_key.add(torch.bmm(grad_score.transpose(1, 2), q), index)
            _put_back(products.grad_query(grad_score, k), grad_query, index)
        return grad_query, grad_key.total, grad_value.total, None


def _put_back(rows: Tensor, packed: Tensor, index: _Index) -> None:
    """Write a block's rows to their places in [T * H, D]."""
    flat = rows.view(-1, rows.shape[-1])
    if index.uneven is None:
        packed.index_copy_(0, index.query, flat)
    else:
        packed.index_copy_(0, index.uneven.written, flat.index_select(0, index.uneven.real))


class _Sum:
    """Gradients of the rows of keys (or values), added up over the blocks."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._total: Tensor | None = None

    def add(self, grad: Tensor, index: _Index) -> None:
        flat = grad.view(-1, grad.shape[-1])
        part = embedding_bag(index.place, flat, index.bag, mode="sum")
        wide = torch.promote_types(part.dtype, torch.float32)
        self._total = part if self._total is None else self._total.to(wide).add_(part)

    @property
    def total(self) -> Tensor:
        assert self._total is not None
        return self._total.to(self._rows.dtype)


# ------------------------------------------------------------------------------ what transformers calls


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer. Raises InputError for what it cannot do."""
    extras = {
        "soft-capped attention scores": softcap is not None,
        "attention sinks": s_aux is not None,
        "dropout": dropout > 0,
        "an attention mask": attention_mask is not None,
        "attention that is not causal": not getattr(module, "is_causal", True),
    }
    asked = [name for name, present in extras.items() if present]
    if asked:
        raise InputError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which the packed attention does not have: use another model"
        )
    if layout is None:
        raise ValueError(f"{type(module).__name__}: a model with attention {ATTENTION!r} is called with layout=...")
    # For the router of the same layer, which is not given the layout. Weak: nothing of a forward may outlive it.
    routing = getattr(layout, "routing", None)
    module.__dict__["gspo_routing"] = None if routing is None else ref(routing)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module.layer_idx, query, key, value, scaling=scale, window=sliding_window), None


# No mask function goes with it: transformers then makes no mask, which in a packed row would be [T, T].
AttentionInterface.register(ATTENTION, attention)
